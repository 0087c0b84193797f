"""Analysis of one text: model, one dispatch over its nodes, findings.  Reads and prints nothing."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpumigrate.accelerators import bound_to_cuda, named_after_cuda
from tpumigrate.compose import compose
from tpumigrate.edits import Edit
from tpumigrate.finding import Finding, TextEdit
from tpumigrate.model import Model
from tpumigrate.project import Project
from tpumigrate.rule import Context, Report, Rule
from tpumigrate.source import Source
from tpumigrate.suppress import Suppressions


@dataclass(frozen=True, slots=True)
class Found:
    """A report with the rule that made it, before it becomes data."""

    rule: Rule
    report: Report
    start: int
    end: int


@dataclass(frozen=True)
class Analysis:
    model: Model
    found: list[Found]


def analyse(source: Source, rules: Sequence[Rule], target: str, project: Project) -> Analysis:
    """All reports of `rules` on a text, in order of place.  Raises CannotRead."""
    model = Model(source)
    ctx = Context(model, target, project)
    found: list[Found] = []
    for rule in rules:
        if not any(anchor in source.text for anchor in rule.anchors):
            continue
        for node_type in rule.node_types:
            for node in model.by_type.get(node_type, []):
                for report in rule.function(node, ctx):
                    report = _beside_others(rule, report, ctx)
                    start, end = (0, 0) if isinstance(report.node, ast.Module) else source.span(report.node)
                    found.append(Found(rule, report, start, end))
    found.sort(key=lambda item: (item.start, -item.end, item.rule.code))
    found = _without_subsumed(source, found)
    suppressions = Suppressions(source)
    return Analysis(model, [item for item in found if not suppressions.cover(item.rule.code, item.report.node)])


def _beside_others(rule: Rule, report: Report, ctx: Context) -> Report:
    """The report without its fix where CUDA must keep its place: among other accelerators, or with a CUDA package."""
    if rule.keeps_cuda or report.fix is None or report.fix.adds:
        return report
    if ctx.several_accelerators:
        why = "this file tells several accelerators apart: the TPU wants an arm of its own beside CUDA's"
        return replace(report, fix=None, unfixed=why)
    owner = named_after_cuda(report.node)
    if owner:
        return replace(report, fix=None, unfixed=f"{owner} is about CUDA by its name: give the TPU its own")
    package = bound_to_cuda(ctx.model, report.node)
    if package:
        why = f"the code around it uses {package} and can't leave CUDA piece by piece"
        return replace(report, fix=None, unfixed=why)
    return report


def _without_subsumed(source: Source, found: list[Found]) -> list[Found]:
    """Leave out what another report speaks for: inside a node it claims, or in text that its fix takes away."""
    covers: list[tuple[int, int, int]] = []
    for index, item in enumerate(found):
        fix = item.report.fix
        claimed = [*item.report.claims, *(fix.deletes if fix else ())]
        covers.extend((*source.span(node), index) for node in claimed)
        if fix:
            covers.extend((edit.start, edit.end, index) for edit in fix.edits if edit.end > edit.start)
    covers.sort()
    kept: list[Found] = []
    gone: set[int] = set()
    near: list[tuple[int, int, int]] = []  # covers that begin before and end after the place looked at
    following = 0
    for index, item in enumerate(found):
        while following < len(covers) and covers[following][0] <= item.start:
            near.append(covers[following])
            following += 1
        near = [cover for cover in near if cover[1] >= item.start]
        for start, end, by in near:
            if by == index or by in gone or not (start <= item.start and item.end <= end):
                continue
            other = found[by]
            same = (item.start, item.end) == (other.start, other.end)
            if same and by > index:
                continue  # the first of two that cover each other speaks
            gone.add(index)
            break
        else:
            if not item.report.silent:
                kept.append(item)
    return kept


def as_finding(analysis: Analysis, item: Found, path: str) -> Finding:
    """One report as data, its fix resolved as if it were made alone."""
    model, report = analysis.model, item.report
    line, column = model.source.position(item.start)
    end_line, end_column = model.source.position(item.end)
    edits: list[Edit] = []
    unfixed = report.unfixed
    if report.fix is not None:
        composed = compose(model, [report.fix])
        edits = composed.edits
        unfixed = composed.refused.get(0, "")
    safety = "advice" if not edits else "safe" if report.fix and report.fix.safe else "unsafe"
    return Finding(
        code=item.rule.code,
        name=item.rule.name,
        path=path,
        line=line,
        column=column,
        end_line=end_line,
        end_column=end_column,
        message=report.message,
        severity=report.severity,
        safety=safety,
        unfixed=unfixed,
        fix=tuple(_text_edit(model.source, edit) for edit in edits),
    )


def _text_edit(source: Source, edit: Edit) -> TextEdit:
    return TextEdit(*source.position(edit.start), *source.position(edit.end), edit.text)
