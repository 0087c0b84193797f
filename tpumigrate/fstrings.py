"""True positions inside f-strings on Python 3.11, whose `ast` guesses them.

From Python 3.12 on the tokenizer reads f-strings itself and `ast` is right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpumigrate.source import Source

_PREFIX = re.compile(r"([a-zA-Z]{0,2})(\"\"\"|'''|\"|')")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


def fix_positions(source: Source, joined: ast.JoinedStr) -> None:
    """Replace each interpolated expression by one parsed from its own text, with spans set."""
    values = [value for value in joined.values if isinstance(value, ast.FormattedValue)]
    pieces = list(_expressions(source, *source.span(joined)))
    if len(pieces) != len(values):
        return
    for value, (start, end) in zip(values, pieces, strict=True):
        new = _parse_at(source, start, end)
        if new is not None and ast.dump(new) == ast.dump(value.value):
            value.value = new


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


def _expressions(source: Source, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans of the expressions of all f-strings between two offsets (there may be several, concatenated)."""
    for token in source.tokens(start, end):
        if token.kind != "string":
            continue
        match = _PREFIX.match(token.text)
        if match and "f" in match[1].lower():
            yield from _fields(source.text, token.start + match.end(), token.end - len(match[2]))


def _fields(text: str, position: int, end: int) -> Iterator[tuple[int, int]]:
    while position < end:
        if text.startswith(("{{", "}}"), position):
            position += 2
        elif text[position] == "{":
            stop = _expression_end(text, position + 1, end)
            yield position + 1, _strip_debug(text, position + 1, stop)
            position = _field_end(text, stop, end)
        else:
            position += 1


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


def _field_end(text: str, position: int, end: int) -> int:
    """Offset after the closing brace of a field whose conversion or format starts at `position`."""
    depth = 1
    while position < end:
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        position += 1
        if depth == 0:
            return position
    return end
