"""Changes of text: what a fix is made of, and how one is built from nodes.

An edit's text may hold markers for names that must be imported: `name("torch_xla.runtime") + ".world_size()"`.
They are spelled, and the imports added, when edits are put together (tpumigrate.compose), because how a module
is called depends on the whole file.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import NamedTuple

from tpumigrate.model import parent
from tpumigrate.precedence import binding_at, binding_of
from tpumigrate.source import Source

MARKER = re.compile("\0([\\w.!]+)\0")


class Edit(NamedTuple):
    """Put `text` in place of the characters from `start` to `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits that belong together: all of them or none.

    deletes: statements to remove; a block that would be left empty gets `pass`
    safe: same meaning on the target (numerics only as its native precision implies); unsafe fixes need --unsafe
    adds: everything that worked before works as before: an arm, an entry more
    """

    edits: tuple[Edit, ...] = ()
    deletes: tuple[ast.stmt, ...] = ()
    safe: bool = True
    adds: bool = False


def name(dotted: str) -> str:
    """A marker for the module `dotted`, imported and spelled as the file spells it."""
    return f"\0{dotted}\0"


def load(dotted: str) -> str:
    """A marker that leaves no text but has the module imported for its side effect."""
    return f"\0!{dotted}\0"


def template(text: str) -> str:
    """`{torch_xla}.sync()` as a text with markers; `{!torch_xla}` has it imported for its side effect."""
    return re.sub(r"\{(!?[A-Za-z_][\w.]*)\}", lambda match: name(match[1]), text)


# -- building edits ----------------------------------------------------------------------------------------


def replace(source: Source, node: ast.AST, text: str) -> Edit:
    """Replace an expression; parentheses are added where `text` would bind looser than its place."""
    start, end = source.span(node)
    parsed = _parsed(text)
    if parsed is None or _is_parenthesised(source, node, start, end):
        return Edit(start, end, text)
    place = parent(node)
    loose = binding_of(parsed, text) < binding_at(place, node)
    if isinstance(place, ast.Attribute) and isinstance(parsed, ast.Constant) and isinstance(parsed.value, int):
        loose = True  # `1.real` is no attribute
    if isinstance(place, ast.FormattedValue) and text.startswith("{"):
        loose = True
    return Edit(start, end, f"({text})" if loose else text)


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(MARKER.sub(lambda m: "" if m[1].startswith("!") else "m", text).strip(), mode="eval").body
    except SyntaxError:
        return None


def _is_parenthesised(source: Source, node: ast.AST, start: int, end: int) -> bool:
    """Whether parentheses of its own stand around an expression."""
    if isinstance(parent(node), ast.Call | ast.ClassDef | ast.keyword):
        return False
    before, after = source.text[:start].rstrip(" \t")[-1:], source.text[end : end + 20].lstrip(" \t")[:1]
    return (before, after) == ("(", ")")


def call_parentheses(source: Source, call: ast.Call) -> tuple[int, int]:
    """Offsets of the opening parenthesis of a call and of the one after its closing parenthesis."""
    _, func_end = source.span(call.func)
    _, end = source.span(call)
    for token in source.tokens(func_end, end):
        if token.text == "(":
            return token.start, end
    return func_end, end


def argument_span(source: Source, argument: ast.expr | ast.keyword) -> tuple[int, int]:
    """Span of an argument with its keyword, star and own parentheses."""
    above = argument if isinstance(argument, ast.keyword) else parent(argument)
    if isinstance(above, ast.keyword):
        argument = above
        above = parent(argument)
    if isinstance(argument, ast.keyword) and isinstance(parent(argument), ast.Call):
        above = parent(argument)
    assert isinstance(above, ast.Call)
    start, end = source.span(argument)
    if isinstance(argument, ast.keyword):  # its span begins with the name, or with the stars of **kwargs
        end = _past_parentheses(source, end, call_parentheses(source, above)[1] - 1)
    else:
        opening, closing = call_parentheses(source, above)
        end = _past_parentheses(source, end, closing - 1)
        depth_start = start
        before = list(source.tokens(opening + 1, start))
        while before and before[-1].kind in ("space", "newline", "comment"):
            before.pop()
        while before and before[-1].text == "(":
            depth_start = before.pop().start
            while before and before[-1].kind in ("space", "newline", "comment"):
                before.pop()
        start = depth_start
    return start, end


def _past_parentheses(source: Source, end: int, limit: int) -> int:
    """`end` moved over closing parentheses that belong to the expression itself."""
    for token in source.tokens(end, limit):
        if token.text == ")":
            end = token.end
        elif token.kind not in ("space", "newline", "comment"):
            break
    return end


def remove_arguments(source: Source, call: ast.Call, arguments: list[ast.expr | ast.keyword]) -> list[Edit]:
    """Take arguments out of a call with their commas; comments that stand on lines of their own stay."""
    opening, closing = call_parentheses(source, call)
    every: list[ast.expr | ast.keyword] = sorted([*call.args, *call.keywords], key=lambda item: source.span(item)[0])
    spans = [argument_span(source, item) for item in every]
    gone = {id(item) for item in arguments}
    if len(gone) == len(every):
        inner = list(source.tokens(opening + 1, closing - 1))
        if not any(token.kind == "comment" for token in inner):
            return [Edit(opening + 1, closing - 1, "")]
    edits = []
    kept_later = False
    for index in range(len(every) - 1, -1, -1):
        start, end = spans[index]
        if id(every[index]) not in gone:
            kept_later = True
            continue
        limit = spans[index + 1][0] if index + 1 < len(every) else closing - 1
        alone = source.text[source.line_start(start) : start].strip() == ""
        last = alone and index and not kept_later
        if last and _closes_line(source, spans[-1][1], closing, spans[index - 1][1], start):
            alone = False  # the parenthesis moves up with the last argument that stays
        if alone or kept_later or index == 0:
            end = _after_comma(source, end, limit, whole_line=alone)
            if alone and source.text[end - 1 : end] in ("\n", "\r"):
                start = source.line_start(start)  # the line held nothing else
            elif not alone and source.text[end : end + 1] in ("\n", "\r"):
                before = source.text[source.line_start(start) : start]
                start -= len(before) - len(before.rstrip(" \t"))  # no space is left at the line's end
        else:  # the last ones of a line: take the comma before
            start = spans[index - 1][1]
        edits.append(Edit(start, end, ""))
    return _merged(edits)


def _closes_line(source: Source, last: int, closing: int, before: int, start: int) -> bool:
    """Whether the closing parenthesis stands behind the last argument, and no comment before the one at `start`."""
    tail = source.text[last:closing]
    return not {"\n", "\r"} & set(tail) and not any(t.kind == "comment" for t in source.tokens(before, start))


def _after_comma(source: Source, end: int, limit: int, *, whole_line: bool) -> int:
    """Offset after the comma that follows an argument; with `whole_line`, after its line end if nothing follows."""
    comma = None
    for token in source.tokens(end, limit):
        if token.text == ",":
            comma = token.end
            break
        if token.kind not in ("space", "newline", "comment"):
            break
    if comma is None and not whole_line:
        return end
    stop = end if comma is None else comma
    for token in source.tokens(stop, limit):
        if token.kind == "space":
            stop = token.end
        elif token.kind == "newline":
            return token.end if whole_line else stop
        else:
            break
    return stop


def _merged(edits: list[Edit]) -> list[Edit]:
    """Deletions that touch or overlap, as one."""
    merged: list[Edit] = []
    for edit in sorted(edits):
        if merged and edit.start <= merged[-1].end:
            merged[-1] = Edit(merged[-1].start, max(merged[-1].end, edit.end), "")
        else:
            merged.append(edit)
    return merged


def add_argument(source: Source, call: ast.Call, text: str, gone: int = 0) -> Edit:
    """Append an argument to a call, in the layout that the call has.

    gone: how many of its arguments the same fix removes
    """
    _, closing = call_parentheses(source, call)
    every: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if len(every) <= gone:
        return Edit(closing - 1, closing - 1, text)
    last = max(every, key=lambda item: source.span(item)[1])
    _, end = argument_span(source, last)
    comma = any(token.text == "," for token in source.tokens(end, closing - 1))
    line = source.line_start(closing - 1)
    if source.text[line : closing - 1].strip() == "" and comma:  # one argument a line, trailing comma
        first, _ = argument_span(source, last)
        indent = source.indent(first)
        return Edit(line, line, f"{indent}{text},{source.newline}")
    if comma:
        return Edit(closing - 1, closing - 1, f" {text}" if source.text[closing - 2] == "," else text)
    return Edit(end, end, f", {text}")


def rename_method(source: Source, attribute: ast.Attribute, text: str) -> Edit:
    """Replace the last name of `receiver.name`."""
    _, end = source.span(attribute)
    return Edit(end - len(attribute.attr), end, text)


def unwrap_with(source: Source, with_: ast.With | ast.AsyncWith, items: list[ast.withitem]) -> list[Edit]:
    """Take items out of a `with`; when none is left its body is de-indented.  [] when that can't be done."""
    if len(items) == len(with_.items):
        return _dedent(source, with_)
    edits = []
    every = with_.items
    spans = [_item_span(source, with_, item) for item in every]
    gone = {id(item) for item in items}
    for index, item in enumerate(every):
        if id(item) in gone:
            start, end = spans[index]
            if index + 1 < len(every):
                end = spans[index + 1][0]
            else:
                start = spans[index - 1][1]
            edits.append(Edit(start, end, ""))
    return _merged(edits)


def _item_span(source: Source, with_: ast.With | ast.AsyncWith, item: ast.withitem) -> tuple[int, int]:
    """Span of an item with its own parentheses, without those around several items."""
    parts = [source.span(part) for part in (item.context_expr, item.optional_vars) if part is not None]
    others = [source.span(other.context_expr)[0] for other in with_.items if other is not item]
    start, end = parts[0][0], parts[-1][1]
    for opening, closing in _parentheses(source, source.span(with_)[0], source.start(with_.body[0])):
        around = any(opening < first and last < closing for first, last in parts)
        if around and not any(opening < other < closing for other in others):
            start, end = min(start, opening), max(end, closing)
    return start, end


def _parentheses(source: Source, start: int, end: int) -> list[tuple[int, int]]:
    """Pairs of parentheses between two offsets: that of the opening one, and after the closing one."""
    pairs, opened = [], []
    for token in source.tokens(start, end):
        if token.text == "(":
            opened.append(token.start)
        elif token.text == ")" and opened:
            pairs.append((opened.pop(), token.end))
    return pairs


def _dedent(source: Source, with_: ast.With | ast.AsyncWith) -> list[Edit]:
    start, end = source.span(with_)
    first = source.start(with_.body[0])
    header_line = source.line_start(start)
    outer = source.text[header_line:start]
    if outer.strip():
        return []  # `async with` after something, or a `;` line
    if source.line_start(first) == header_line or source.position(first)[0] == source.position(start)[0]:
        return [Edit(start, first, "")]  # `with x: y`
    inner = source.indent(first)
    if not inner.startswith(outer):
        return []
    extra = len(inner) - len(outer)
    inside = _inside_strings(source, with_)
    body_line = source.line_start(first)
    header_end = _header_end(source, with_)
    kept = _comments_between(source, header_end, body_line)
    edits = [Edit(header_line, body_line, "".join(outer + text + source.newline for text in kept))]
    line = source.position(body_line)[0]
    last = _last_comment(source, source.position(end)[0], inner)
    for number in range(line, last + 1):
        row = source.line_starts[number - 1]
        if number in inside:
            continue
        if source.text.startswith(inner, row):
            edits.append(Edit(row + len(outer), row + len(outer) + extra, ""))
    return edits


def _last_comment(source: Source, line: int, indent: str) -> int:
    """The line of the last of the comments that follow `line` and are indented by `indent`."""
    last = line
    while line < len(source.line_starts):
        line += 1
        text = source.line_text(line)
        if text.startswith(indent) and text.lstrip().startswith("#"):
            last = line
        elif text.strip():
            break
    return last


def _header_end(source: Source, with_: ast.With | ast.AsyncWith) -> int:
    """Offset after the colon of the header."""
    last = with_.items[-1]
    end = _item_span(source, with_, last)[1]
    for token in source.tokens(end, source.start(with_.body[0])):
        if token.text == ":":
            return token.end
    return end


def _comments_between(source: Source, start: int, end: int) -> list[str]:
    return [token.text for token in source.tokens(start, end) if token.kind == "comment"]


def _inside_strings(source: Source, node: ast.AST) -> set[int]:
    """Numbers of lines that begin inside a string, whose white space is text."""
    lines: set[int] = set()
    for token in source.tokens(*source.span(node)):
        if token.kind == "string" and ("\n" in token.text or "\r" in token.text):
            first, last = source.position(token.start)[0], source.position(token.end)[0]
            lines.update(range(first + 1, last + 1))
    return lines
