"""How tightly expressions bind: whether one may stand in a place without parentheses."""

from __future__ import annotations

import ast

# How tightly an expression binds; what is not listed is an atom.
_LAMBDA, _IF, _OR, _AND, _NOT, _COMPARE, _BIT_OR, _UNARY, _POWER, _ATOM = 1, 2, 3, 4, 5, 6, 7, 13, 14, 16
_OPERATORS: dict[type[ast.operator], int] = {
    ast.BitOr: _BIT_OR, ast.BitXor: 8, ast.BitAnd: 9, ast.LShift: 10, ast.RShift: 10, ast.Add: 11, ast.Sub: 11,
    ast.Mult: 12, ast.Div: 12, ast.FloorDiv: 12, ast.Mod: 12, ast.MatMult: 12, ast.Pow: _POWER,
}  # fmt: skip


def binding_of(node: ast.expr, text: str) -> int:
    """How tightly an expression binds that is written as `text`."""
    match node:
        case ast.NamedExpr() | ast.Yield() | ast.YieldFrom():
            return 0
        case ast.Tuple():
            return _ATOM if text.startswith("(") and (text == "()" or _is_expression(text[1:-1])) else 0
        case ast.Lambda():
            return _LAMBDA
        case ast.IfExp():
            return _IF
        case ast.BoolOp():
            return _OR if isinstance(node.op, ast.Or) else _AND
        case ast.Compare():
            return _COMPARE
        case ast.BinOp():
            return _OPERATORS[type(node.op)]
        case ast.UnaryOp():
            return _NOT if isinstance(node.op, ast.Not) else _UNARY
        case ast.Await():
            return _POWER + 1
    return _ATOM


def binding_at(place: ast.AST | None, node: ast.AST) -> int:
    """How tightly an expression must bind to stand where `node` stands below `place`."""
    match place:
        case ast.Attribute() | ast.Await():
            return _ATOM
        case ast.Call():
            return _ATOM if place.func is node else _LAMBDA
        case ast.Subscript():
            return _ATOM if place.value is node else _LAMBDA
        case ast.BinOp():
            level = _OPERATORS[type(place.op)]
            if isinstance(place.op, ast.Pow):
                return _POWER + 1 if place.left is node else _UNARY
            return level if place.left is node else level + 1
        case ast.UnaryOp():
            return _NOT if isinstance(place.op, ast.Not) else _UNARY
        case ast.Compare():
            return _BIT_OR
        case ast.BoolOp():
            return _OR if isinstance(place.op, ast.Or) else _AND
        case ast.IfExp():
            return _LAMBDA if place.orelse is node else _OR
        case ast.comprehension():
            return _OR
        case ast.Starred() | ast.Dict():
            return _BIT_OR
        case ast.FormattedValue():
            return _IF
        case ast.expr() | ast.keyword() | ast.withitem() | ast.Assert() | ast.Raise():
            return _LAMBDA
    return 0


def _is_expression(text: str) -> bool:
    try:
        ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return False
    return True
