"""XLA1xx: code written for PyTorch/XLA: names that are gone in 2.9, and all of it for torch_tpu."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import replace as replace_report

from tpumigrate.edits import Edit, Fix, name, remove_arguments, replace
from tpumigrate.model import packages, parents
from tpumigrate.rule import Context, Report, rule

from ._precision import is_constant
from ._table import message_of, table_reports

_SPAWN = "torch_xla.distributed.xla_multiprocessing.spawn"
_OTHERS_SPEAK = frozenset({"torch_xla.amp.autocast", "torch_xla.amp.GradScaler"})
_BARRIERS = frozenset({"torch_xla.sync", "torch_xla.core.xla_model.mark_step"})
_DEVICES = frozenset({"torch_xla.device", "torch_xla.core.xla_model.xla_device"})
_PARALLEL_LOADER = "torch_xla.distributed.parallel_loader.ParallelLoader"


@rule("XLA101", "stale-torch-xla", anchors=("torch_xla",), targets=("torch_xla",), keeps_cuda=True)
def stale_torch_xla(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Uses a name of PyTorch/XLA that is gone or deprecated in 2.9.

    ## What it does
    Writes today's names: `xm.xla_device()` -> `torch_xla.device()`, `xm.mark_step()` -> `torch_xla.sync()`,
    `xm.xrt_world_size()` -> `xr.world_size()`, `xmp.spawn(f, nprocs=8)` -> `torch_xla.launch(f)`,
    `ParallelLoader(...).per_device_loader(d)` -> `MpDeviceLoader(...)`.

    ## Why it matters on a TPU
    `xm.xrt_world_size` and `xm.get_ordinal` raise AttributeError since 2.7, `nprocs=8` is refused.

    ## Example
    ```python
    import torch_xla.core.xla_model as xm

    device = xm.xla_device()
    rank = xm.get_ordinal()
    xm.mark_step()
    xm.master_print(rank)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    device = torch_xla.device()
    rank = xr.global_ordinal()
    torch_xla.sync()
    xm.master_print(rank)
    ```

    ## Example: launch and loader
    ```python
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.distributed.xla_multiprocessing as xmp

    def run(index, data, device):
        for batch in pl.ParallelLoader(data, [device]).per_device_loader(device):
            print(index, batch)

    xmp.spawn(run, args=([], None), nprocs=8, start_method="fork")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl

    def run(index, data, device):
        for batch in pl.MpDeviceLoader(data, device):
            print(index, batch)

    torch_xla.launch(run, args=([], None), start_method="fork")
    ```

    ## Not flagged
    ```python
    import torch_xla

    torch_xla.sync()
    ```
    ```python
    import torch_xla.core.xla_model as xm

    xm.master_print("done")
    ```
    ```python
    class Profiler:
        def mark_step(self):
            return 1

    Profiler().mark_step()
    ```

    ## Fix safety
    Safe.

    ## References
    Release notes of PyTorch/XLA 2.7 to 2.9.
    """
    if isinstance(node, ast.Call):
        called = ctx.qualname(node.func)
        if called == _SPAWN:
            yield _launch(node, ctx)
            return
        loader = node.func.value if isinstance(node.func, ast.Attribute) else None
        if (
            isinstance(loader, ast.Call)
            and ctx.qualname(loader.func) == _PARALLEL_LOADER
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "per_device_loader"
        ):
            yield from _device_loader(node, loader, ctx)
            return
    yield from table_reports(node, ctx, "XLA101")


def _launch(node: ast.Call, ctx: Context) -> Report:
    message = "xmp.spawn takes no number of processes any more; torch_xla.launch starts one for each device"
    gone = [keyword for keyword in node.keywords if keyword.arg in ("nprocs", "join", "daemon")]
    if len(node.args) > 2 or any(keyword.arg is None for keyword in node.keywords):
        return Report(node, message, unfixed="its arguments are passed by position: write torch_xla.launch by hand")
    edits = [replace(ctx.source, node.func, f"{name('torch_xla')}.launch")]
    if gone:
        edits += remove_arguments(ctx.source, node, list(gone))
    return Report(node, message, Fix(tuple(edits)))


def _device_loader(node: ast.Call, loader: ast.Call, ctx: Context) -> Iterator[Report]:
    message = "ParallelLoader's per-device iterator is MpDeviceLoader now, which also makes the step barrier"
    if len(loader.args) != 2 or loader.keywords or len(node.args) != 1:
        yield Report(node, message, unfixed="write MpDeviceLoader(loader, device) by hand")
        return
    devices = ctx.source.span(loader.args[1])
    edits = (
        replace(ctx.source, loader.func, f"{name('torch_xla.distributed.parallel_loader')}.MpDeviceLoader"),
        Edit(*devices, ctx.text(node.args[0])),
        Edit(ctx.source.span(loader)[1], ctx.source.span(node)[1], ""),
    )
    yield Report(node, message, Fix(edits))


@rule("XLA102", "torch-xla-code", anchors=("torch_xla",), targets=("torch_tpu",), keeps_cuda=True)
def torch_xla_code(node: ast.Module, ctx: Context) -> Iterator[Report]:
    """Uses PyTorch/XLA, which TorchTPU replaces.

    ## What it does
    Maps each name of torch_xla to torch's own: devices, ranks, barriers, collectives. Step barriers go. What changes
    the program's structure (launching, SPMD sharding, `xm.optimizer_step`, which also averages gradients) is
    reported with what to write. A file is migrated as a whole or not at all.

    ## Why it matters on a TPU
    torch_xla pins its own torch and can't be installed beside torch_tpu; a half migrated program does not import.

    ## Example
    ```python
    import torch
    import torch_xla

    def step(opt, loss):
        loss.backward()
        opt.step()
        torch_xla.sync()

    y = torch.ones(2).to("xla")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def step(opt, loss):
        loss.backward()
        opt.step()

    y = torch.ones(2).to("tpu")
    ```

    ## Example: the device
    ```python
    import torch
    import torch_xla.core.xla_model as xm

    device = xm.xla_device()
    x = torch.ones(2, device=device)
    xm.mark_step()
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    device = torch.device("tpu")
    x = torch.ones(2, device=device)
    ```

    ## Example: an import for its side effect
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    x = torch.ones(2)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    x = torch.ones(2)
    ```

    ## Example: waiting, and the index
    ```python
    import time
    import torch_xla

    torch_xla.sync(wait=True)
    start = time.perf_counter()
    print(torch_xla.device().index)
    ```

    ## Use instead (torch_tpu)
    ```python
    import time
    import torch

    torch.accelerator.synchronize()
    start = time.perf_counter()
    print(torch.accelerator.current_device_index())
    ```

    ## Example: gradients are averaged here
    ```python
    import torch_xla.core.xla_model as xm

    def step(opt):
        xm.optimizer_step(opt)
    ```

    ## Example: torch_xla is optional
    ```python
    import torch

    try:
        import torch_xla.core.xla_model as xm
    except ImportError:
        xm = None

    def step(opt):
        opt.step()
        if xm is not None:
            xm.mark_step()
    ```

    ## Not flagged
    ```python
    import torch

    torch.accelerator.synchronize()
    ```
    ```python
    class torch_xla:
        @staticmethod
        def sync():
            return 1

    torch_xla.sync()
    ```
    ```python
    TEXT = "import torch_xla"
    ```

    ## Fix safety
    Safe.

    ## References
    rules/targets/torch_tpu.toml.
    """
    reports = list(_uses(ctx))
    if _is_optional(ctx):
        why = "torch_xla is optional here: what it is imported for goes with its condition"
        reports = [replace_report(report, fix=None, unfixed=why, severity="info") for report in reports]
    elif any(report.fix is None for report in reports):
        why = "other uses of torch_xla in this file need a person, and a file migrated by half does not import"
        reports = [replace_report(report, fix=None, unfixed=report.unfixed or why) for report in reports]
    elif not all(report.fix is not None and report.fix.safe for report in reports):
        reports = [replace_report(report, fix=_unsafe(report.fix)) for report in reports]
    yield from reports


def _is_optional(ctx: Context) -> bool:
    """Whether the file imports torch_xla only under a condition."""
    found = [node for node in ctx.model.imports() if "torch_xla" in packages(node)]
    return bool(found) and all(any(isinstance(above, ast.Try | ast.If) for above in parents(node)) for node in found)


def _unsafe(fix: Fix | None) -> Fix | None:
    return None if fix is None else replace_report(fix, safe=False)


def _uses(ctx: Context) -> Iterator[Report]:
    """A report for each use of torch_xla in the file."""
    uses: list[ast.Call | ast.Attribute | ast.Name] = [
        *ctx.model.nodes(ast.Call),
        *ctx.model.nodes(ast.Attribute),
        *ctx.model.nodes(ast.Name),
    ]
    for node in uses:
        if ctx.qualname(node.func if isinstance(node, ast.Call) else node) not in _OTHERS_SPEAK:
            special = _special(node, ctx)
            yield from [special] if special else table_reports(node, ctx, "XLA102")
    for statement in ctx.model.imports():
        yield from _unused_import(statement, ctx)


def _special(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Report | None:
    """Uses that mean something else than their name alone: a barrier that waits, the index of the device."""
    if isinstance(node, ast.Call) and ctx.qualname(node.func) in _BARRIERS and _waits(node, ctx):
        message = message_of(ctx.table[ctx.qualname(node.func)])
        return Report(node, message, Fix((ctx.edit(node, f"{name('torch')}.accelerator.synchronize()"),)))
    match node:
        case ast.Attribute(value=ast.Call(func=func, args=[], keywords=[]), attr="index") if (
            ctx.qualname(func) in _DEVICES
        ):
            message = 'the index of torch.device("tpu") is None; torch.accelerator knows the one in use'
            fix = Fix((ctx.edit(node, f"{name('torch')}.accelerator.current_device_index()"),))
            return Report(node, message, fix, claims=(node.value,))
    return None


def _waits(call: ast.Call, ctx: Context) -> bool:
    """Whether a barrier also waits for the device; nothing else in the call may do anything."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return is_constant(ctx.arg(call, "wait", 0), True) and all(isinstance(item, ast.Constant) for item in values)


@functools.lru_cache(maxsize=1)
def stays_on_xla(ctx: Context) -> bool:
    """For torch_tpu: whether a file uses torch_xla in a way that only a person can migrate."""
    return not ctx.xla and (_is_optional(ctx) or any(report.fix is None for report in _uses(ctx)))


def _unused_import(node: ast.Import | ast.ImportFrom, ctx: Context) -> Iterator[Report]:
    """An import of torch_xla of which no name is used: it was there to register the device."""
    if packages(node) != {"torch_xla"}:
        return
    plain = isinstance(node, ast.Import)
    bound = [alias.asname or (alias.name.partition(".")[0] if plain else alias.name) for alias in node.names]
    if any(ctx.model.uses(item) for item in bound) or "*" in bound:
        return
    message = "torch_xla can't be installed beside torch_tpu"
    if any(isinstance(above, ast.Try | ast.If) for above in parents(node)):
        yield Report(node, message, unfixed="the import is guarded: decide what the other arm is for", severity="info")
    else:
        yield Report(node, message, Fix(deletes=(node,)))
