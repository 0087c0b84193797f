"""`fix --annotate`: a TODO comment above each statement that a person must look at, written once."""

from __future__ import annotations

import ast

from tpumigrate.deletion import same_line
from tpumigrate.edits import Edit
from tpumigrate.engine import Analysis
from tpumigrate.model import block, statement
from tpumigrate.source import Source

PREFIX = "# TODO(tpumigrate): "


def todo_comments(analysis: Analysis, *, unsafe: bool) -> list[Edit]:
    """Edits that add a comment for every finding whose fix would not be applied."""
    source = analysis.model.source
    notes: dict[int, dict[str, str]] = {}
    for item in analysis.found:
        fix = item.report.fix
        if isinstance(item.report.node, ast.Module) or (fix is not None and (unsafe or fix.safe)):
            continue
        start = source.line_start(_first_on_line(source, statement(item.report.node)))
        message = " ".join(item.report.message.split())
        notes.setdefault(start, {}).setdefault(item.rule.code, f"{item.rule.code} {message}")
    edits = []
    for start, texts in sorted(notes.items()):
        present = _comments_above(analysis, start)
        new = [text for code, text in texts.items() if f"{PREFIX}{code} " not in present]
        indent = source.indent(start)
        edits.append(Edit(start, start, "".join(f"{indent}{PREFIX}{text}{source.newline}" for text in new)))
    return [edit for edit in edits if edit.text]


def _first_on_line(source: Source, stmt: ast.stmt) -> int:
    """Offset of the first of the statements that share a logical line: its physical line begins outside of strings."""
    siblings = block(stmt)
    index = siblings.index(stmt)
    while index and same_line(source, siblings[index - 1], siblings[index]):
        index -= 1
    return source.start(siblings[index])


def _comments_above(analysis: Analysis, start: int) -> str:
    source = analysis.model.source
    line = source.position(start)[0] - 1
    rows = []
    while line >= 1 and source.line_text(line).lstrip().startswith("#"):
        rows.append(source.line_text(line))
        line -= 1
    return "\n".join(rows)
