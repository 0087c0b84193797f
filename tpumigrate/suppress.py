"""Comments by which a user says that a finding is wanted.

`# tpumigrate: ignore[TPU101]` or `# tpumigrate: ignore` at the end of a line, or on a line of its own above it;
`# noqa: TPU101` at the end of a line; `# tpumigrate: ignore-file[TPU101]` anywhere for the whole file.
"""

from __future__ import annotations

import re

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
        self._lines: dict[int, list[tuple[str, ...]]] = {}
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
        if match["what"] == "ignore-file":
            self._file.append(codes)
            return
        line = self._source.position(start)[0]
        alone = not self._source.text[self._source.line_start(start) : start].strip()
        if alone and not match["noqa"]:
            line += 1
            while line <= len(self._source.line_starts) and self._source.line_text(line).lstrip().startswith("#"):
                line += 1
        self._lines.setdefault(line, []).append(codes)

    def cover(self, code: str, start: int, end: int) -> bool:
        """Whether a finding of `code` between two offsets is suppressed."""
        if not self._lines and not self._file:
            return False
        first, last = self._source.position(start)[0], self._source.position(end)[0]
        found = [*self._file]
        for line in {first, last}:
            found.extend(self._lines.get(line, []))
        return any(not codes or any(code.startswith(prefix) for prefix in codes) for codes in found)
