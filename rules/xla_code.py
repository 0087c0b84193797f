"""XLA1xx: code written for PyTorch/XLA: names that are gone in 2.9, and all of it for torch_tpu."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, name, remove_arguments, replace
from tpumigrate.model import packages, parent, parents
from tpumigrate.rule import Context, Report, rule

from ._precision import is_constant
from ._table import message_of, table_reports
from ._xla_whole import XM, Use, deleted, finds, handles, processes, settled

_SPAWN = "torch_xla.distributed.xla_multiprocessing.spawn"
_LOADING = frozenset({"importlib.import_module", "importlib.util.find_spec"})
_BARRIERS = frozenset({"torch_xla.sync", "torch_xla.core.xla_model.mark_step"})
_WORLD = (
    "torch_xla.runtime.world_size",
    f"{XM}.xrt_world_size",
    "torch_xla.runtime.process_count",
    "torch_xla.runtime.global_device_count",
    "torch_xla.runtime.global_runtime_device_count",
)
_RANKS = (
    "torch_xla.runtime.global_ordinal",
    f"{XM}.get_ordinal",
    "torch_xla.runtime.process_index",
    "torch_xla.runtime.local_ordinal",
    f"{XM}.get_local_ordinal",
)
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
    Maps each name of torch_xla to torch's own: devices, ranks, barriers, collectives. Step barriers go. Questions
    about ranks are answered in a program of one process. Names without counterpart are reported. A file is migrated
    as a whole or not at all, together with what the other rules of this family find.

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

    ## Example: one process
    ```python
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    if __name__ == "__main__":
        print("replicas", xr.world_size())
        if xm.is_master_ordinal():
            print("rank", xr.global_ordinal())
        xm.rendezvous("end")
    ```

    ## Use instead (torch_tpu)
    ```python

    if __name__ == "__main__":
        print("replicas", 1)
        if True:
            print("rank", 0)
    ```

    ## Example: names that nobody knows, and names in odd places
    ```python
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.experimental.assume_pure import PureModule

    def traced(module: PureModule):
        torch_xla.sync()
        return getattr(xm, "mark_step")
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

    ## Example: looked for by a string
    ```python
    import importlib.util

    HAS_XLA = importlib.util.find_spec("torch_xla") is not None
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
    yield from settled(ctx, "XLA102")


@handles("XLA102", *_BARRIERS)
def _barrier(use: Use, ctx: Context) -> Report | None:
    """A barrier that waits for the device; one that does not is the table's."""
    if not isinstance(use, ast.Call) or not _waits(use, ctx):
        return None
    message = message_of(ctx.table[ctx.qualname(use.func)])
    return Report(use, message, Fix((ctx.edit(use, f"{name('torch')}.accelerator.synchronize()"),)))


def _waits(call: ast.Call, ctx: Context) -> bool:
    """Whether a barrier also waits for the device; nothing else in the call may do anything."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return is_constant(ctx.arg(call, "wait", 0), True) and all(isinstance(item, ast.Constant) for item in values)


@handles("XLA102", "torch_xla.device", f"{XM}.xla_device")
def _index_of_device(use: Use, ctx: Context) -> Report | None:
    """`torch_xla.device().index`; the device alone is the table's."""
    above = parent(use)
    if not isinstance(use, ast.Call) or not isinstance(above, ast.Attribute) or above.attr != "index":
        return None
    if use.args or use.keywords:
        return None
    message = 'the index of torch.device("tpu") is None; torch.accelerator knows the one in use'
    fix = Fix((ctx.edit(above, f"{name('torch')}.accelerator.current_device_index()"),))
    return Report(above, message, fix, claims=(use,))


@handles("XLA102", *_WORLD, *_RANKS, f"{XM}.is_master_ordinal")
def _rank(use: Use, ctx: Context) -> Report | None:
    """Questions about ranks, which need no process group where there is one process."""
    if not isinstance(use, ast.Call) or processes(ctx) != "one":
        return None
    called = ctx.qualname(use.func)
    answer = "1" if called in _WORLD else "0" if called in _RANKS else "True"
    return Report(use, f"`{called}`: this program has one process", Fix((ctx.edit(use, answer),)))


@handles("XLA102", f"{XM}.rendezvous")
def _rendezvous(use: Use, ctx: Context) -> Report | None:
    """A meeting point, which one process does not need."""
    stmt = parent(use)
    if not isinstance(use, ast.Call) or processes(ctx) != "one" or not isinstance(stmt, ast.Expr):
        return None
    if not all(isinstance(item, ast.Constant) for item in use.args) or use.keywords:
        return None
    return Report(use, "this program has one process, which waits for no other", deleted(stmt))


@finds("XLA102")
def _by_string(ctx: Context) -> Iterator[Report]:
    """Modules that are loaded, or looked for, by a string."""
    for call in ctx.model.nodes(ast.Call):
        module = call.args[0] if call.args else None
        if ctx.qualname(call.func) not in _LOADING or not isinstance(module, ast.Constant):
            continue
        if isinstance(module.value, str) and module.value.partition(".")[0] == "torch_xla":
            message = "torch_xla can't be installed beside torch_tpu: it is not found there"
            yield Report(call, message, unfixed="decide what this does with torch_tpu", severity="warning")


@finds("XLA102")
def _imports(ctx: Context) -> Iterator[Report]:
    """Imports of torch_xla that leave nothing to report: unused, or of everything."""
    for node in ctx.model.imports():
        if packages(node) != {"torch_xla"}:
            continue
        plain = isinstance(node, ast.Import)
        bound = [alias.asname or (alias.name.partition(".")[0] if plain else alias.name) for alias in node.names]
        message = "torch_xla can't be installed beside torch_tpu"
        if "*" in bound:
            yield Report(node, message, unfixed="which names are torch_xla's is not clear: import them by name")
        elif any(ctx.model.uses(item) for item in bound):
            continue
        elif any(isinstance(above, ast.Try | ast.If) for above in parents(node)):
            why = "the import is guarded: decide what the other arm is for"
            yield Report(node, message, unfixed=why, severity="info")
        else:
            yield Report(node, message, deleted(node))
