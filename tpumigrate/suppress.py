"""Comments by which a user says that a finding is wanted.

`# tpumigrate: ignore[TPU101]` or `# tpumigrate: ignore` at the end of a line, or on a line of its own above it or
above the statement;
`# noqa: TPU101` at the end of a line; `# tpumigrate: ignore-file[TPU101]` anywhere for the whole file.
"""

from __future__ import annotations

import ast
import re

from tpumigrate.model import statement
from tpumigrate.source import Source

_COMMENT = re.compile(
    r"#\s*tpumigrate:\s*(?P<what>ignore-file|ignore)\s*(?:\[(?P<codes>[^\]\r\n]*)\])?"
    r"|#\s*noqa:\s*(?P<noqa>[A-Z]+\d+(?:[,\s]+[A-Z]+\d+)*)",
    re.IGNORECASE,
)


class Suppressions:
    """The suppression comments of one file."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lines: dict[int, list[tuple[str, ...]]] = {}  # by the line that a comment ends
        self._above: dict[int, list[tuple[str, ...]]] = {}  # by the line below a comment
        self._file: list[tuple[str, ...]] = []
        if "tpumigrate:" not in source.text and "noqa" not in source.text.lower():
            return
        for token in source.tokens(0, len(source.text)):
            if token.kind == "comment":
                for match in _COMMENT.finditer(token.text):
                    self._add(match, token.start)

    def _add(self, match: re.Match[str], start: int) -> None:
        listed = match["noqa"] or match["codes"]
        codes = tuple(code.upper() for code in re.split(r"[,\s]+", listed or "") if code)
        if listed is not None and not codes:
            return  # `ignore[]` names nothing
        if match["what"] == "ignore-file":
            self._file.append(codes)
            return
        line = self._source.position(start)[0]
        alone = not self._source.text[self._source.line_start(start) : start].strip()
        lines = self._lines
        if alone and not match["noqa"]:
            lines = self._above
            line += 1
            while line <= len(self._source.line_starts) and self._source.line_text(line).lstrip().startswith("#"):
                line += 1
        lines.setdefault(line, []).append(codes)

    def cover(self, code: str, node: ast.AST) -> bool:
        """Whether a finding of `code` on a node is suppressed: where it begins or ends, or for its statement.

        A comment above a block, or at the end of its last line, speaks for the line that opens the block only.
        """
        if not self._lines and not self._above and not self._file:
            return False
        found = [*self._file]
        if not isinstance(node, ast.Module):
            owner = statement(node)
            is_block = hasattr(owner, "body")
            first, last = (self._source.position(offset)[0] for offset in self._source.span(node))
            last = first if node is owner and is_block else last
            ends = {first, last} if is_block else {first, last, self._source.position(self._source.span(owner)[1])[0]}
            starts = {first, last, self._source.position(self._source.start(owner))[0]}
            found.extend(codes for line in ends for codes in self._lines.get(line, []))
            found.extend(codes for line in starts for codes in self._above.get(line, []))
        return any(not codes or any(code.startswith(prefix) for prefix in codes) for codes in found)
