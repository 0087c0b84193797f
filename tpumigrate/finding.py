"""Findings as data: what leaves the analysis of a file and travels between processes and into reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TextEdit:
    """Put `text` in place of what stands between two positions (1-based lines and columns, end exclusive)."""

    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rule found.

    fix: the edits that mend it, imports included; empty when nothing can be done by itself
    safety: safe, unsafe or advice (no edit)
    unfixed: why there is no fix
    """

    code: str
    name: str
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    message: str
    severity: str = "error"
    safety: str = "advice"
    unfixed: str = ""
    fix: tuple[TextEdit, ...] = ()

    @property
    def fixable(self) -> bool:
        return bool(self.fix)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Problem:
    """What kept a file from being processed: one sentence, with the line where there is one."""

    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{where}: error: {self.message}"


@dataclass(slots=True)
class FileResult:
    """All that comes out of one file.

    before, after: its text for `fix`, equal when nothing changed
    applied: findings that the fix mended
    """

    path: str
    findings: list[Finding] = field(default_factory=list)
    problem: Problem | None = None
    before: str = ""
    after: str = ""
    applied: list[Finding] = field(default_factory=list)
    written: bool = False
