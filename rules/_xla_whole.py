"""One decision for all that a file has from PyTorch/XLA: for torch_tpu it is migrated whole or not at all.

Rules of the family XLA1xx hand in what they know of a name (`handles`) or of a file (`finds`) and yield what
`settled` leaves of it: without fixes when any part of the file needs a person, because torch_xla and torch_tpu can't be
installed side by side.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tpumigrate.edits import Fix
from tpumigrate.model import call_of, has_stars, packages, parent, parents
from tpumigrate.rule import Context, Report

from ._distributed import DDP, function_named
from ._table import call_report, reference_report

Use = ast.Call | ast.Attribute | ast.Name
Handler = Callable[[Use, Context], Report | None]
Finder = Callable[[Context], Iterator[Report]]
XM = "torch_xla.core.xla_model"
PL = "torch_xla.distributed.parallel_loader"
STAYS = "other uses of torch_xla in this file need a person, and a file migrated by half does not import"
# Rules about mixed precision speak of these.
_OTHERS_SPEAK = frozenset({"torch_xla.amp.autocast", "torch_xla.amp.GradScaler"})
_STARTS = re.compile(r"launch|spawn|start|run|main|submit|Process", re.IGNORECASE)
_HANDLERS: dict[str, tuple[str, Handler]] = {}
_FINDERS: list[tuple[str, Finder]] = []


def handles(code: str, *names: str) -> Callable[[Handler], Handler]:
    """Have a function speak for names of torch_xla; where it returns None, their rows of the table do."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, (code, handler)))
        return handler

    return register


def finds(code: str) -> Callable[[Finder], Finder]:
    """Have a function look through a whole file for what is no name of torch_xla."""

    def register(finder: Finder) -> Finder:
        _FINDERS.append((code, finder))
        return finder

    return register


def settled(ctx: Context, code: str) -> Iterator[Report]:
    """What the rule `code` says of a file, with the fixes that may be made."""
    reports = _reports(ctx)
    why = ""
    if _is_optional(ctx):
        why = "torch_xla is optional here: what it is imported for goes with its condition"
    elif stays_on_xla(ctx):
        why = STAYS
    safe = all(report.fix is None or report.fix.safe for _, report in reports)
    for owner, report in reports:
        if owner != code:
            continue
        if _is_optional(ctx):
            yield replace(report, fix=None, unfixed=why, severity="info")
        elif why:
            yield replace(report, fix=None, unfixed=report.unfixed or why)
        else:
            yield report if safe or report.fix is None else replace(report, fix=replace(report.fix, safe=False))


@functools.lru_cache(maxsize=1)
def stays_on_xla(ctx: Context) -> bool:
    """For torch_tpu: whether a file uses torch_xla in a way that only a person can migrate."""
    if ctx.xla or not imports_xla(ctx):
        return False
    return _is_optional(ctx) or any(report.fix is None for _, report in _reports(ctx))


def imports_xla(ctx: Context) -> bool:
    """Whether a file imports torch_xla anywhere."""
    return any("torch_xla" in packages(node) for node in ctx.model.imports())


def _is_optional(ctx: Context) -> bool:
    """Whether the file imports torch_xla only under a condition."""
    found = [node for node in ctx.model.imports() if "torch_xla" in packages(node)]
    return bool(found) and all(any(isinstance(above, ast.Try | ast.If) for above in parents(node)) for node in found)


@functools.lru_cache(maxsize=1)
def _reports(ctx: Context) -> list[tuple[str, Report]]:
    """Every report on a file, with its rule."""
    found: list[tuple[str, Report]] = []
    for use, name in _uses(ctx):
        found.extend(_about(use, name, ctx))
    for code, finder in _FINDERS:
        found.extend((code, report) for report in finder(ctx))
    return found


def _uses(ctx: Context) -> Iterator[tuple[Use, str]]:
    """Each use of a name of torch_xla, whole: the call, or the longest name that is not called."""
    if not imports_xla(ctx):
        return
    nodes: list[ast.Attribute | ast.Name] = [*ctx.model.nodes(ast.Attribute), *ctx.model.nodes(ast.Name)]
    for node in nodes:
        names = [name for name in ctx.model.qualnames(node) if name.split(".")[0] == "torch_xla"]
        above = parent(node)
        if not names or (isinstance(above, ast.Attribute) and ctx.model.qualnames(above)):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            continue  # a binding, of `except ImportError: xm = None`
        name = names[0] if len(ctx.model.qualnames(node)) == 1 else ""
        yield call_of(node) or node, name


def _about(use: Use, name: str, ctx: Context) -> Iterator[tuple[str, Report]]:
    if not name:
        yield "XLA102", Report(use, "two imports give this name its meaning", unfixed="write what torch_tpu has for it")
        return
    if name in _OTHERS_SPEAK:
        if not isinstance(use, ast.Call) or has_stars(use):  # they leave it to a person
            yield "XLA102", Report(use, "", unfixed="see what is said of it", silent=True)
        return
    row = ctx.table.get(name)
    if isinstance(use, ast.Attribute) and not isinstance(use.ctx, ast.Load):
        yield "XLA102", Report(use, f"`{name}` is replaced here", unfixed="torch_tpu has no such name: remove it")
        return
    code, handler = _HANDLERS.get(name, ("", None))
    report = handler(use, ctx) if handler is not None else None
    if report is not None:
        yield code, report
    elif row is None or not row.rule:
        message = f"`{name}` has no known counterpart in torch_tpu"
        yield "XLA102", Report(use, message, unfixed="look for what it is used for, and write that by hand")
    elif isinstance(use, ast.Call):
        yield row.rule, call_report(use, row, ctx)
    else:
        yield row.rule, reference_report(use, row, ctx)


# -- the program -------------------------------------------------------------------------------------------


def processes(ctx: Context) -> str:
    """How many processes the program has: "one", "many", or "" where the file does not show it."""
    project = ctx.project
    if project.launch or project.process_group or project.ddp:
        return "many"
    if any(ctx.qualname(call.func).startswith("torch.distributed.") for call in ctx.model.nodes(ast.Call)):
        return "many"
    return "one" if _is_script(ctx) and not project.replicated and not _hands_over(ctx) else ""


def _hands_over(ctx: Context) -> bool:
    """Whether a function of the file is given to something that may run it in several processes."""
    for call in ctx.model.nodes(ast.Call):
        last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = [*call.args[:1], *(item.value for item in call.keywords if item.arg in ("target", "fn", "function"))]
        if _STARTS.search(last) and any(function_named(item, ctx) is not None for item in given):
            return True
    return False


def _is_script(ctx: Context) -> bool:
    """Whether a file is a program, not a module of one."""
    for stmt in ctx.model.tree.body:
        if isinstance(stmt, ast.For | ast.While):
            return True
        if isinstance(stmt, ast.If) and any(
            isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(stmt.test)
        ):
            return True
    return False


def wraps_model(ctx: Context) -> bool:
    """Whether this file wraps a model in DistributedDataParallel, which averages gradients itself."""
    return any(ctx.qualname(call.func) == DDP for call in ctx.model.nodes(ast.Call))


def deleted(stmt: ast.stmt) -> Fix:
    return Fix(deletes=(stmt,))
