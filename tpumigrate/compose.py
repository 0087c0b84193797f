"""Fixes of one file put together: which go in one round, and the text that comes out."""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tpumigrate.deletion import delete_statements
from tpumigrate.edits import Edit, Fix
from tpumigrate.imports import CannotImport, Importer
from tpumigrate.model import Model, parent


class CannotQuote(Exception):
    """An edit inside an f-string needs a quote that may not stand there."""


@dataclass(frozen=True)
class Composed:
    """edits: final, sorted and without overlap; applied: indices of the fixes that are in; refused: index to reason"""

    edits: list[Edit]
    applied: list[int]
    refused: dict[int, str]


def compose(model: Model, fixes: Sequence[Fix]) -> Composed:
    """Choose, in order, the fixes that do not overlap, and resolve their deletions and imports."""
    taken: list[Edit] = []
    occupied = _Occupied()
    applied: list[int] = []
    refused: dict[int, str] = {}
    deletes: list[ast.stmt] = []
    for index, fix in enumerate(fixes):
        spans = [*fix.edits, *(Edit(*model.source.span(stmt), "") for stmt in fix.deletes)]
        if any(occupied.overlap(edit) for edit in spans):
            continue
        try:
            _expanded(model, Importer(model), fix.edits)
        except (CannotImport, CannotQuote) as error:
            refused[index] = str(error)
            continue
        taken.extend(fix.edits)
        for edit in spans:
            occupied.add(edit)
        deletes.extend(fix.deletes)
        applied.append(index)
    removed = delete_statements(model, deletes)
    importer = Importer(model)  # only for what stays: an edit in text that goes needs no import
    staying = [edit for edit in taken if not any(_inside(edit, gone) for gone in removed)]
    edits = _expanded(model, importer, staying)
    return Composed(sorted([*edits, *removed, *importer.edits()]), applied, refused)


def _expanded(model: Model, importer: Importer, edits: Iterable[Edit]) -> list[Edit]:
    """Edits with their markers spelled.  Raises CannotImport and CannotQuote."""
    return [_requoted(model, importer.expand(edit)) for edit in edits]


def apply(text: str, edits: Iterable[Edit]) -> str:
    """`text` with sorted, non-overlapping edits made."""
    parts = []
    position = 0
    for edit in edits:
        parts.append(text[position : edit.start])
        parts.append(edit.text)
        position = max(position, edit.end)
    parts.append(text[position:])
    return "".join(parts)


def _requoted(model: Model, edit: Edit) -> Edit:
    """The edit with quotes that may stand inside the f-strings around it (before Python 3.12 no quote may repeat).

    Raises CannotQuote when no kind of quote is left.
    """
    used = set(edit.text) & {'"', "'"}
    taken = _quotes_around(model, edit) if used or "\\" in edit.text else set()
    if not taken or not (used & taken or "\\" in edit.text):
        return edit
    free = {'"', "'"} - taken
    if len(used) != 1 or not free or "\\" in edit.text:
        raise CannotQuote("no quote is left inside this f-string: assign the value to a name before it")
    return edit._replace(text=edit.text.replace(used.pop(), free.pop()))


def _quotes_around(model: Model, edit: Edit) -> set[str]:
    """Delimiters of the single-quoted f-strings that an edit lies in."""
    source = model.source
    found: set[str] = set()
    for node in model.nodes(ast.JoinedStr):
        start, end = source.span(node)
        above = parent(node)
        is_format = isinstance(above, ast.FormattedValue) and above.format_spec is node
        if is_format or not (start < edit.start and edit.end < end):
            continue
        for token in source.tokens(start, end):
            if token.kind == "string" and token.start < edit.start and edit.end < token.end:
                outer = re.match(r"[a-zA-Z]*(\"\"\"|'''|\"|')", token.text)
                found.add(outer[1] if outer else '"')
    return {quote for quote in found if len(quote) == 1}


class _Occupied:
    """Places of the text that are already to be changed."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # of the same stretches, which do not overlap
        self._insertions: list[int] = []

    def add(self, edit: Edit) -> None:
        if edit.start == edit.end:
            bisect.insort(self._insertions, edit.start)
            return
        start, end, _ = edit
        index = bisect.bisect_left(self._starts, start)
        if index and self._ends[index - 1] > start:
            index -= 1
            start = self._starts[index]
        while index < len(self._starts) and self._starts[index] < end:
            end = max(end, self._ends[index])
            del self._starts[index], self._ends[index]
        self._starts.insert(index, start)
        self._ends.insert(index, end)

    def overlap(self, edit: Edit) -> bool:
        """Whether an edit touches what is taken; two insertions in one place do not disturb each other."""
        index = bisect.bisect_left(self._starts, max(edit.end, edit.start))
        if index and self._ends[index - 1] > edit.start:
            return True
        inner = bisect.bisect(self._insertions, edit.start)
        return inner < len(self._insertions) and self._insertions[inner] < edit.end


def _inside(edit: Edit, gone: Edit) -> bool:
    """Whether an edit changes only text that goes anyway; an insertion at its edge does not."""
    if edit.start == edit.end:
        return gone.start < edit.start < gone.end
    return gone.start <= edit.start and edit.end <= gone.end
