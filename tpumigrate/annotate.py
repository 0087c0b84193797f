"""`fix --annotate`: a TODO comment above each statement that a person must look at, written once."""

from __future__ import annotations

import ast

from tpumigrate.edits import Edit
from tpumigrate.engine import Analysis
from tpumigrate.model import statement

PREFIX = "# TODO(tpumigrate): "


def annotations(analysis: Analysis, *, unsafe: bool) -> list[Edit]:
    """Edits that add a comment for every finding whose fix would not be applied."""
    source = analysis.model.source
    notes: dict[int, dict[str, str]] = {}
    for item in analysis.found:
        fix = item.report.fix
        if isinstance(item.report.node, ast.Module) or (fix is not None and (unsafe or fix.safe)):
            continue
        start = source.line_start(source.span(statement(item.report.node))[0])
        message = " ".join(item.report.message.split())
        notes.setdefault(start, {}).setdefault(item.rule.code, f"{item.rule.code} {message}")
    edits = []
    for start, texts in sorted(notes.items()):
        present = _comments_above(analysis, start)
        new = [text for code, text in texts.items() if f"{PREFIX}{code} " not in present]
        indent = source.indent(start)
        edits.append(Edit(start, start, "".join(f"{indent}{PREFIX}{text}{source.newline}" for text in new)))
    return [edit for edit in edits if edit.text]


def _comments_above(analysis: Analysis, start: int) -> str:
    source = analysis.model.source
    line = source.position(start)[0] - 1
    rows = []
    while line >= 1 and source.line_text(line).lstrip().startswith("#"):
        rows.append(source.line_text(line))
        line -= 1
    return "\n".join(rows)
