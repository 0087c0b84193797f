"""Removing statements so that what is left is still a program."""

from __future__ import annotations

import ast

from tpumigrate.edits import Edit
from tpumigrate.model import Model, block, parent
from tpumigrate.source import Source

# Comments to a tool about the line that goes; any other comment stays.
_PRAGMAS = ("# noqa", "#noqa", "# type:", "# pylint", "# pragma", "# fmt:", "# pyright")
# Conditions whose evaluation does nothing, so that an `if` without a body can go.
_PURE_CALLS = frozenset({"torch.cuda.is_available", "torch.accelerator.is_available"})
_PURE = (ast.Name, ast.Attribute, ast.Constant, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Call)


def delete_statements(model: Model, statements: list[ast.stmt]) -> list[Edit]:
    """Edits that remove `statements`.

    An `if` that has nothing else goes with them when its condition is free of effects; any other block that
    would be left empty gets `pass`.
    """
    gone = {id(stmt): stmt for stmt in statements}
    pending = list(statements)
    while pending:
        guard = parent(pending.pop())
        if id(guard) not in gone and isinstance(guard, ast.If) and _can_go(model, guard, gone):
            gone[id(guard)] = guard
            pending.append(guard)
    edits: list[Edit] = []
    for stmt in sorted(gone.values(), key=lambda item: (model.source.span(item)[0], -model.source.span(item)[1])):
        start, end = model.source.span(stmt)
        if edits and start < edits[-1].end:
            continue  # inside a statement that goes as a whole
        siblings = block(stmt)
        emptied = all(id(item) in gone for item in siblings) and not isinstance(parent(stmt), ast.Module)
        if emptied and stmt is siblings[-1] and not _is_elif(model.source, stmt):
            edits.append(Edit(start, end, "pass"))
        else:
            edits.append(_deletion(model.source, stmt, start, end))
    return edits


def _can_go(model: Model, guard: ast.If, gone: dict[int, ast.stmt]) -> bool:
    start, end = model.source.span(guard)
    return (
        not guard.orelse
        and all(id(item) in gone for item in guard.body)
        and all(_is_pure(model, node) for node in ast.walk(guard.test))
        and not any(token.kind == "comment" for token in model.source.tokens(start, end))
    )


def _is_pure(model: Model, node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return model.qualname(node.func) in _PURE_CALLS
    return isinstance(node, (*_PURE, ast.boolop, ast.unaryop, ast.cmpop, ast.expr_context))


def _is_elif(source: Source, stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.If) and source.text.startswith("elif", source.span(stmt)[0])


def _deletion(source: Source, stmt: ast.stmt, start: int, end: int) -> Edit:
    line_start, line_end = source.line_start(start), source.line_end(end)
    before = source.text[line_start:start].rstrip()
    rest = [token for token in source.tokens(end, line_end) if token.kind not in ("space", "newline")]
    if rest and rest[0].text == ";":
        end = rest[0].end
        rest = rest[1:]
        if rest and rest[0].kind != "comment":  # another statement follows on the line
            return Edit(start, rest[0].start, "")
    if before.strip().endswith(";"):
        return Edit(line_start + len(before.removesuffix(";").rstrip()), end, "")
    if before.strip():
        return Edit(start, end, "pass")
    if rest and not rest[0].text.lower().startswith(_PRAGMAS):
        return Edit(start, rest[0].start, "")  # the comment stays, on a line of its own
    return Edit(line_start, line_end, "")
