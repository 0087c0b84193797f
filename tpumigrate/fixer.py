"""Applies fixes to a text until none is left, and vouches for the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tpumigrate.annotate import todo_comments
from tpumigrate.compose import apply, compose
from tpumigrate.edits import Edit
from tpumigrate.engine import Analysis, Found, analyse
from tpumigrate.imports import drop_unused
from tpumigrate.project import Project
from tpumigrate.rule import Rule
from tpumigrate.source import CannotRead, Source

MAX_ROUNDS = 10


class FixFailed(Exception):
    """The fixes of a file do not come to rest, or their result is no program: nothing of them is used."""


@dataclass
class Fixed:
    """text: the result; applied: what was mended, with the analysis it was found in; left: the final analysis"""

    text: str
    left: Analysis
    applied: list[tuple[Analysis, Found]] = field(default_factory=list)


def fix(
    source: Source,
    rules: Sequence[Rule],
    target: str,
    project: Project,
    *,
    unsafe: bool,
    annotate: bool = False,
    is_package: bool = False,
) -> Fixed:
    """Apply every fix that may be applied.

    annotate: leave a comment where something is left to do
    is_package: the file is an __init__.py, whose imports are its interface

    Raises CannotRead when `source` is no program, FixFailed when the result of fixing is none or does not settle.
    """
    original = analyse(source, rules, target, project)
    analysis = original
    applied: list[tuple[Analysis, Found]] = []
    for _ in range(MAX_ROUNDS):
        usable = [item for item in analysis.found if item.report.fix is not None and (unsafe or item.report.fix.safe)]
        composed = compose(analysis.model, [item.report.fix for item in usable if item.report.fix is not None])
        if not composed.applied:
            break
        applied.extend((analysis, usable[index]) for index in composed.applied)
        analysis = _edited(analysis, composed.edits, rules, target, project)
    else:
        raise FixFailed(f"fixes did not come to rest after {MAX_ROUNDS} rounds")
    if applied:
        unused = drop_unused(original.model, analysis.model, is_package=is_package)
        analysis = _edited(analysis, sorted(unused), rules, target, project)
    if annotate:
        analysis = _edited(analysis, todo_comments(analysis, unsafe=unsafe), rules, target, project)
    return Fixed(analysis.model.source.text, analysis, applied)


def _edited(
    analysis: Analysis, edits: Sequence[Edit], rules: Sequence[Rule], target: str, project: Project
) -> Analysis:
    """The analysis of the text with `edits` made."""
    if not edits:
        return analysis
    source = analysis.model.source
    text = apply(source.text, edits)
    try:
        return analyse(Source(text, source.encoding, source.bom), rules, target, project)
    except CannotRead as error:
        raise FixFailed(f"a fix made the file unreadable ({error.message}, line {error.line})") from None
