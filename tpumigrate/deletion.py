"""Removing statements so that what is left is still a program."""

from __future__ import annotations

import ast

from tpumigrate.edits import Edit
from tpumigrate.model import Model, block, parent, parents
from tpumigrate.source import Source

# Comments to a tool about the line that goes; any other comment stays.
_PRAGMAS = ("# noqa", "#noqa", "# type:", "# pylint", "# pragma", "# fmt:", "# pyright")
# Conditions whose evaluation does nothing, so that an `if` without a body can go.
_PURE_CALLS = frozenset({"torch.cuda.is_available", "torch.accelerator.is_available"})
_PURE = (ast.Name, ast.Attribute, ast.Constant, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Call)


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
    done: set[int] = set()
    for stmt in sorted(gone.values(), key=model.source.start):
        if id(stmt) in done or any(id(above) in gone for above in parents(stmt)):
            continue
        siblings = block(stmt)
        run = _run(model.source, siblings, stmt, gone)
        done.update(id(item) for item in run)
        emptied = all(id(item) in gone for item in siblings) and not isinstance(parent(stmt), ast.Module)
        if emptied and run[-1] is siblings[-1] and not _is_elif(model.source, stmt):
            edits.append(Edit(model.source.start(stmt), model.source.span(run[-1])[1], "pass"))
        else:
            edits.append(_deletion(model.source, siblings, run))
    return edits


def _run(source: Source, siblings: list[ast.stmt], stmt: ast.stmt, gone: dict[int, ast.stmt]) -> list[ast.stmt]:
    """`stmt` and the statements after it on its logical line that go too."""
    run = [stmt]
    for item in siblings[siblings.index(stmt) + 1 :]:
        if id(item) not in gone or not same_line(source, run[-1], item):
            break
        run.append(item)
    return run


def same_line(source: Source, one: ast.stmt, other: ast.stmt) -> bool:
    """Whether two neighbours are separated by a semicolon, not by a line end."""
    between = source.tokens(source.span(one)[1], source.start(other))
    return all(token.text == ";" or token.kind == "space" for token in between)


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
    return isinstance(node, (*_PURE, ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context))


def _is_elif(source: Source, stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.If) and source.text.startswith("elif", source.span(stmt)[0])


def _deletion(source: Source, siblings: list[ast.stmt], run: list[ast.stmt]) -> Edit:
    """The edit that removes neighbours of one logical line, and the line where nothing else is on it."""
    start, end = source.start(run[0]), source.span(run[-1])[1]
    first, after = siblings.index(run[0]), siblings.index(run[-1]) + 1
    if after < len(siblings) and same_line(source, run[-1], siblings[after]):
        return Edit(start, source.start(siblings[after]), "")
    rest = [token for token in source.tokens(end, source.line_end(end)) if token.kind not in ("space", "newline")]
    if rest and rest[0].text == ";":
        end = rest[0].end
        rest = rest[1:]
    if first and same_line(source, siblings[first - 1], run[0]):
        return Edit(source.span(siblings[first - 1])[1], end, "")
    if rest and not rest[0].text.lower().startswith(_PRAGMAS):
        return Edit(start, rest[0].start, "")  # the comment stays, on a line of its own
    return Edit(source.line_start(start), source.line_end(end), "")
