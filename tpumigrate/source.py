"""A Python file as bytes, as text and as positions, so that what is not edited stays as it was, byte for byte."""

from __future__ import annotations

import ast
import bisect
import io
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from typing import NamedTuple

BOM = b"\xef\xbb\xbf"
_LINE = re.compile(r"\r\n|\r|\n")
# Python's tokens, as far as edits need them: what is a comment, what is a string, where brackets are.
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\r\n]*)
      | (?P<string>[a-zA-Z]{0,2}(?:\"\"\"(?:\\.|[^\\])*?\"\"\"|'''(?:\\.|[^\\])*?'''
                   |"(?:\\(?:\r\n|.)|[^"\\\r\n])*"|'(?:\\(?:\r\n|.)|[^'\\\r\n])*'))
      | (?P<name>[^\W\d]\w*)
      | (?P<number>\d[\w.]*)
      | (?P<newline>\r\n|\r|\n)
      | (?P<space>[ \t\f]+|\\(?:\r\n|\r|\n))
      | (?P<op>:=|->|\*\*|//|[<>=!+\-*/%&|^@]=|.)""",
    re.VERBOSE | re.DOTALL,
)


# From Python 3.12 on, an f-string may hold its own quotes, and comments, inside its braces.
_NESTED_QUOTES = sys.version_info >= (3, 12)
_OPENING = re.compile(r"(?P<prefix>[fFtT][rR]?|[rR][fFtT])(?P<quote>\"\"\"|'''|\"|')")


def _string_end(text: str, opening: re.Match[str], end: int) -> int:
    """Offset after an f-string, found as Python 3.12 reads it."""
    position, quote, is_raw = opening.end(), opening["quote"], "r" in opening["prefix"].lower()
    while position < end:
        if text.startswith(quote, position):
            return position + len(quote)
        if text[position] == "\\" and not is_raw and text[position + 1 : position + 2] not in ("{", "}"):
            named = text.startswith("N{", position + 1)
            position = text.find("}", position) + 1 or end if named else position + 2
        elif text[position] == "{" and not text.startswith("{{", position):
            position = _field_end(text, position + 1, end)
        else:
            position += 2 if text.startswith("{{", position) else 1
    return end


def _field_end(text: str, position: int, end: int) -> int:
    """Offset after the closing brace of a replacement field, its format included."""
    depth = 0
    while position < end:
        opening = _OPENING.match(text, position, end)
        match = _TOKEN.match(text, position, end)
        char = text[position]
        if not depth and char == "}":
            return position + 1
        if not depth and char == ":":
            while position < end and text[position] != "}":
                position = _field_end(text, position + 1, end) if text[position] == "{" else position + 1
            return position + 1
        depth += (char in "([{") - (char in ")]}")
        position = _string_end(text, opening, end) if opening else match.end() if match else position + 1
    return end


def split_lines(text: str) -> list[str]:
    """Lines as Python's grammar counts them, without their ends (`str.splitlines` knows more line ends)."""
    return _LINE.split(text)


class Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


class CannotRead(Exception):
    """The file can't be understood as Python source; `line` is 1-based or None."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


class Source:
    """The text of one file with its encoding; offsets are indices into `text`."""

    def __init__(self, text: str, encoding: str = "utf-8", bom: bool = False) -> None:
        self.text = text
        self.encoding = encoding
        self.bom = bom
        self.line_starts = [0, *(match.end() for match in _LINE.finditer(text))]
        self._ascii = text.isascii()

    @classmethod
    def decode(cls, data: bytes) -> Source:
        """Raises CannotRead when the bytes are not text in the encoding that they declare."""
        if b"\0" in data:
            line = data.count(b"\n", 0, data.index(b"\0")) + 1
            raise CannotRead("contains a NUL byte: not Python source", line)
        bom = data.startswith(BOM)
        encoding = _encoding(data)
        try:
            text = data.removeprefix(BOM).decode(encoding)
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start + (len(BOM) if bom else 0)) + 1
            raise CannotRead(f"not valid {encoding}: {error.reason}", line) from None
        except LookupError:
            raise CannotRead(f"{encoding} is no encoding of text", 1) from None
        return cls(text, encoding, bom)

    def encode(self, text: str) -> bytes:
        """`text` in this file's encoding, with its byte order mark.  Raises UnicodeEncodeError."""
        return (BOM if self.bom else b"") + text.encode(self.encoding)

    def parse(self) -> ast.Module:
        """The syntax tree with true positions everywhere.  Raises CannotRead."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(self.text)
        except SyntaxError as error:
            raise CannotRead(f"cannot parse: {error.msg}", error.lineno) from None
        except (ValueError, RecursionError, MemoryError) as error:
            reason = str(error) or "nested too deeply"
            raise CannotRead(f"cannot parse: {reason}") from None
        return tree

    @property
    def newline(self) -> str:
        """The line end used most in the file."""
        crlf = self.text.count("\r\n")
        others = {
            "\r\n": crlf,
            "\n": self.text.count("\n") - crlf,
            "\r": self.text.count("\r") - crlf,
        }
        best = max(others, key=lambda end: others[end])
        return best if others[best] else "\n"

    def offset(self, line: int, column: int) -> int:
        """Offset of `ast`'s position: 1-based line, column in UTF-8 bytes."""
        start = self.line_starts[line - 1]
        if self._ascii:
            return start + column
        end = self.line_starts[line] if line < len(self.line_starts) else len(self.text)
        row = self.text[start:end]
        return start + (column if row.isascii() else len(row.encode()[:column].decode(errors="ignore")))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Offsets of the first character of `node` and of the one after its last (parentheses around it excluded)."""
        known: tuple[int, int] | None = node.__dict__.get("_span")
        if known is None:
            known = (
                self.offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
                self.offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
            )
            node._span = known  # type: ignore[attr-defined]
        return known

    def start(self, stmt: ast.stmt) -> int:
        """Offset of a statement's first character, the `@` of its first decorator included."""
        decorators = getattr(stmt, "decorator_list", None)
        if decorators:
            return self.text.rindex("@", 0, self.span(decorators[0])[0])
        return self.span(stmt)[0]

    def segment(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def position(self, offset: int) -> tuple[int, int]:
        """1-based line and column, in characters."""
        line = bisect.bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def line_start(self, offset: int) -> int:
        return self.line_starts[bisect.bisect_right(self.line_starts, offset) - 1]

    def line_end(self, offset: int) -> int:
        """Offset after the line end of the line that holds `offset`."""
        line = bisect.bisect_right(self.line_starts, offset)
        return self.line_starts[line] if line < len(self.line_starts) else len(self.text)

    def line_text(self, line: int) -> str:
        """Line number `line` (1-based) without its line end."""
        start = self.line_starts[line - 1]
        end = self.line_starts[line] if line < len(self.line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def indent(self, offset: int) -> str:
        """White space at the start of the line that holds `offset`."""
        start = self.line_start(offset)
        match = re.compile(r"[ \t\f]*").match(self.text, start)
        return match.group() if match else ""

    def tokens(self, start: int, end: int) -> Iterator[Token]:
        """Tokens between two offsets, of which `start` must not lie inside a string or comment."""
        position = start
        while position < end:
            if _NESTED_QUOTES and self.text[position] in "fFrRtT":
                opening = _OPENING.match(self.text, position, end)
                if opening:
                    stop = _string_end(self.text, opening, end)
                    yield Token("string", self.text[position:stop], position, stop)
                    position = stop
                    continue
            match = _TOKEN.match(self.text, position, end)
            if match is None:
                return
            yield Token(str(match.lastgroup), match.group(), match.start(), match.end())
            position = match.end()


def _encoding(data: bytes) -> str:
    """The encoding that a file declares by its byte order mark or its first two lines."""
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError as error:
        if "invalid or missing" in str(error.msg):
            return "utf-8"  # nothing declared: decoding tells what is wrong, and where
        raise CannotRead(str(error.msg), 1) from None
    return "utf-8" if encoding == "utf-8-sig" else encoding
