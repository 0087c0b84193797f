"""True positions inside f-strings on Python 3.11, whose `ast` guesses them.

From Python 3.12 on the tokenizer reads f-strings itself and `ast` is right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from tpumigrate.source import Source

_PREFIX = re.compile(r"([a-zA-Z]{0,2})(\"\"\"|'''|\"|')")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class _Field(NamedTuple):
    """Offsets of one replacement field: its expression, its format (-1 without one), its closing brace."""

    start: int
    stop: int
    format: int
    end: int


def fix_positions(source: Source, joined: ast.JoinedStr) -> None:
    """Replace each interpolated expression by one parsed from its own text, with spans set.

    An expression that can't be found again becomes a constant: better unseen than edited in the wrong place.
    """
    if not joined.__dict__.get("_is_format"):  # formats are seen to with the string around them
        _assign(source, joined, list(_all_fields(source, *source.span(joined))))


def _assign(source: Source, joined: ast.JoinedStr, fields: list[_Field]) -> None:
    values = [value for value in joined.values if isinstance(value, ast.FormattedValue)]
    found = len(fields) == len(values)
    for index, value in enumerate(values):
        new = _parse_at(source, fields[index].start, fields[index].stop) if found else None
        if new is not None and ast.dump(new) == ast.dump(value.value):
            value.value = new
        else:
            value.value = ast.copy_location(ast.Constant(value=None), joined)
        if isinstance(value.format_spec, ast.JoinedStr):
            inner = fields[index] if found else None
            spec = value.format_spec
            spec._is_format = True  # type: ignore[attr-defined]
            spec._span = (inner.format, inner.end) if inner else source.span(joined)  # type: ignore[attr-defined]
            _assign(source, spec, list(_fields(source.text, *spec._span, in_format=True)) if inner else [])  # type: ignore[attr-defined]


def _parse_at(source: Source, start: int, end: int) -> ast.expr | None:
    inner = Source("(" + source.text[start:end] + "\n)")
    try:
        tree = ast.parse(inner.text, mode="eval").body
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.keyword, ast.arg)):
            first, last = inner.span(node)
            node._span = (start + first - 1, start + last - 1)  # type: ignore[union-attr]
            line, _ = source.position(start + first - 1)
            node.lineno, node.end_lineno = line, source.position(start + last - 1)[0]
    return tree


def _all_fields(source: Source, start: int, end: int) -> Iterator[_Field]:
    """Fields of all f-strings between two offsets (there may be several, concatenated)."""
    for token in source.tokens(start, end):
        if token.kind != "string":
            continue
        match = _PREFIX.match(token.text)
        if match and "f" in match[1].lower():
            first, last = token.start + match.end(), token.end - len(match[2])
            yield from _fields(source.text, first, last, is_raw="r" in match[1].lower())


def _fields(text: str, position: int, end: int, *, is_raw: bool = False, in_format: bool = False) -> Iterator[_Field]:
    """Fields between two offsets; braces are doubled only outside of formats."""
    while position < end:
        if text[position] == "\\" and not is_raw and text[position + 1] not in "{}":
            named = text.startswith("N{", position + 1)
            position = text.index("}", position) + 1 if named else position + 2
        elif not in_format and text.startswith(("{{", "}}"), position):
            position += 2
        elif text[position] == "{":
            field = _field(text, position + 1, end)
            yield field
            position = field.end + 1
        else:
            position += 1


def _field(text: str, start: int, end: int) -> _Field:
    stop = position = _expression_end(text, start, end)
    while position < end and text[position] not in ":}":  # a conversion
        position += 1
    if position >= end or text[position] == "}":
        return _Field(start, _strip_debug(text, start, stop), -1, position)
    closing = position + 1
    while closing < end and text[closing] != "}":
        closing = _field(text, closing + 1, end).end + 1 if text[closing] == "{" else closing + 1
    return _Field(start, _strip_debug(text, start, stop), position + 1, closing)


def _strip_debug(text: str, start: int, stop: int) -> int:
    """`stop` without the `=` of a self-documenting field."""
    body = text[start:stop].rstrip()
    if body.endswith("=") and not body.endswith(("==", "!=", "<=", ">=")):
        return start + len(body) - 1
    return stop


def _expression_end(text: str, position: int, end: int) -> int:
    closers: list[str] = []
    while position < end:
        char = text[position]
        if char in "\"'":
            quote = text[position : position + 3] if text.startswith(char * 3, position) else char
            position = text.find(quote, position + len(quote)) + len(quote)
            continue
        if closers and char == closers[-1]:
            closers.pop()
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
        elif not closers and (char in "}:" or (char == "!" and text[position + 1] != "=")):
            return position
        position += 1
    return end
