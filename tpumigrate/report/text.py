"""`concise`: a line a finding.  `full`: findings with the code they speak of and the fix that would be made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from tpumigrate.finding import FileResult, Finding, TextEdit
from tpumigrate.source import split_lines

_SEVERITY_STYLE = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
_FIX_WORDS = {"safe": "[*]", "unsafe": "[unsafe]", "advice": ""}


def concise(results: Iterable[FileResult], console: Console) -> None:
    for result in results:
        for finding in result.findings:
            console.print(_line(finding), soft_wrap=True)


def full(results: Iterable[FileResult], console: Console) -> None:
    for result in results:
        lines = split_lines(result.before)
        for finding in result.findings:
            _full(finding, lines, console)


def _line(finding: Finding) -> Text:
    where = f"{finding.path}:{finding.line}:{finding.column}: "
    mark = _FIX_WORDS[finding.safety]
    text = Text(where)
    text.append(finding.code, style=_SEVERITY_STYLE.get(finding.severity, "bold"))
    return text.append(f" {mark} {finding.message}" if mark else f" {finding.message}")


def _full(finding: Finding, lines: Sequence[str], console: Console) -> None:
    console.print(_line(finding), soft_wrap=True)
    if finding.fix:
        for row in _diff(finding, lines):
            style = "green" if row.startswith("+") else "red" if row.startswith("-") else "dim"
            console.print(Text(f"    {row}", style=style), soft_wrap=True)
    elif 0 < finding.line <= len(lines):
        row = lines[finding.line - 1]
        console.print(Text(f"    {finding.line:>4} | {row}", style="dim"), soft_wrap=True)
        width = (finding.end_column if finding.end_line == finding.line else len(row) + 1) - finding.column
        carets = " " * (finding.column - 1) + "^" * max(width, 1)
        console.print(Text(f"         | {carets}", style="red"), soft_wrap=True)
    if finding.unfixed:
        console.print(Text(f"    = no fix: {finding.unfixed}", style="dim"), soft_wrap=True)
    console.print()


def _diff(finding: Finding, lines: Sequence[str]) -> list[str]:
    """The lines that the fix takes away and puts there, without context."""
    rows: list[str] = []
    for edits in _touching(finding.fix):
        first, last = edits[0].line, max(edit.end_line for edit in edits)
        old = list(lines[first - 1 : last])
        starts = [0]
        for line in old:
            starts.append(starts[-1] + len(line) + 1)
        text, parts, position = "\n".join(old), [], 0
        for edit in edits:
            parts.append(text[position : starts[edit.line - first] + edit.column - 1] + edit.text)
            position = starts[edit.end_line - first] + edit.end_column - 1
        new = split_lines("".join(parts) + text[position:])
        while old and new and old[-1] == new[-1]:
            old.pop()
            new.pop()
        while old and new and old[0] == new[0]:
            del old[0], new[0]
        rows.extend([*(f"-{line}" for line in old), *(f"+{line}" for line in new)])
    return rows


def _touching(edits: Sequence[TextEdit]) -> Iterator[list[TextEdit]]:
    """Edits in groups that share lines."""
    group: list[TextEdit] = []
    for edit in edits:
        if group and edit.line > max(item.end_line for item in group):
            yield group
            group = []
        group.append(edit)
    if group:
        yield group


def statistics(results: Iterable[FileResult], console: Console) -> None:
    """A line a rule: how often it was found, with a mark where fixes exist."""
    counts: Counter[tuple[str, str]] = Counter()
    fixable: Counter[str] = Counter()
    for result in results:
        for finding in result.findings:
            counts[finding.code, finding.name] += 1
            fixable[finding.code] += finding.fixable
    for (code, name), count in counts.most_common():
        console.print(f"{count:>6}  {code}  {name}  ({fixable[code]} fixable)", highlight=False, soft_wrap=True)


def summary(results: Sequence[FileResult], *, unsafe: bool) -> str:
    """The last lines: how much was found, how much of it can be fixed by itself."""
    findings = [finding for result in results for finding in result.findings]
    if not findings:
        return f"No findings in {len(results)} file{'s' * (len(results) != 1)}."
    safe = sum(finding.safety == "safe" for finding in findings)
    risky = sum(finding.safety == "unsafe" for finding in findings)
    text = f"Found {len(findings)} in {sum(bool(result.findings) for result in results)} of {len(results)} files."
    if safe or (unsafe and risky):
        text += f" [*] {safe + (risky if unsafe else 0)} fixable with `tpumigrate fix --apply`"
        if risky and not unsafe:
            text += f" ({risky} more with --unsafe, which may change numerics or checkpoints)"
        text += "."
    elif risky:
        text += f" {risky} fixable with `tpumigrate fix --apply --unsafe`."
    return text
