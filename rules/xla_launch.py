"""XLA105: replicas that PyTorch/XLA starts."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, name
from tpumigrate.model import has_stars, parent
from tpumigrate.rule import Context, Report, rule

from ._common import is_pure
from ._distributed import function_named
from ._precision import is_constant
from ._worker import is_simple_line
from ._xla_whole import Use, handles, settled

_LAUNCH = ("torch_xla.launch", "torch_xla.distributed.xla_multiprocessing.spawn")
_COUNTS = ("processes", "nprocs")
_MESSAGE = "torch_tpu starts no replicas; torchrun does, or torch.multiprocessing.spawn"
_BY_HAND = (
    "run `python -m torch.tpu.distributed` for the launch environment and start the script with torchrun; or call "
    "`torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=n)`, then `torch.multiprocessing.spawn(fn, args, n)`, "
    'and `dist.init_process_group("tpu_dist", rank=index, world_size=n)` in the function'
)


@rule("XLA105", "xla-launch", anchors=("torch_xla",), targets=("torch_tpu",), keeps_cuda=True)
def xla_launch(node: ast.Module, ctx: Context) -> Iterator[Report]:
    """Starts replicas with `torch_xla.launch` or `xmp.spawn`.

    ## What it does
    Starts the processes of one host with `torch.multiprocessing.spawn`, after `set_tpu_launch_env` has laid them out,
    and opens the process group at the head of the launched function. Reports launches that it can't read.

    ## Why it matters on a TPU
    Without the launch environment the first operation of a worker aborts the process. PyTorch/XLA's collectives need
    no process group; those of torch.distributed do.

    ## Example (unsafe)
    ```python
    import torch_xla
    import torch_xla.runtime as xr

    def run(index, lr):
        print(index, xr.world_size(), lr)

    if __name__ == "__main__":
        torch_xla.launch(run, args=(0.1,))
    ```

    ## Use instead (torch_tpu)
    ```python
    import os
    import torch
    import torch.distributed as dist
    import torch.multiprocessing

    def run(index, lr):
        os.environ.update(RANK=str(index), LOCAL_RANK=str(index))
        dist.init_process_group("tpu_dist")
        print(index, dist.get_world_size(), lr)

    if __name__ == "__main__":
        processes = torch.accelerator.device_count()
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", WORLD_SIZE=str(processes))
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=processes)
        torch.multiprocessing.spawn(run, args=(0.1,), nprocs=processes)
    ```

    ## Example: a group is opened already (unsafe)
    ```python
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import torch_xla.distributed.xla_multiprocessing as xmp

    def run(rank, flags):
        \"\"\"One process.\"\"\"
        dist.init_process_group("xla", init_method="xla://")
        print(rank, flags)

    def main(flags):
        xmp.spawn(run, args=(flags,), nprocs=8, start_method="fork")
    ```

    ## Use instead (torch_tpu)
    ```python
    import os
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def run(rank, flags):
        \"\"\"One process.\"\"\"
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        dist.init_process_group("tpu_dist")
        print(rank, flags)

    def main(flags):
        processes = torch.accelerator.device_count()
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", WORLD_SIZE=str(processes))
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=processes)
        mp.spawn(run, args=(flags,), nprocs=processes)
    ```

    ## Example: the function is elsewhere, or the wrapped model
    ```python
    import torch_xla
    import torch_xla.distributed.xla_multiprocessing as xmp
    from training import run

    WRAPPED = xmp.MpModelWrapper(None)
    torch_xla.launch(run, args=(1,))
    context = xmp.spawn(lambda index: print(index), nprocs=1)
    ```

    ## Not flagged
    ```python
    import torch
    import torch.multiprocessing as mp

    def run(index):
        print(index)

    torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=4)
    mp.spawn(run, nprocs=4)
    ```
    ```python
    import subprocess as torch_xla

    torch_xla.launch(print)
    ```
    ```python
    from accelerate import notebook_launcher

    notebook_launcher(print, (1,))
    ```

    ## Fix safety
    Unsafe: processes are started on this host alone, and always by spawning, so that their arguments are pickled and
    what the parent set in the module is not seen.

    ## References
    torch_xla.launch; torch.tpu.distributed.set_tpu_launch_env, whose docstring shows `spawn`.
    """
    yield from settled(ctx, "XLA105")


@handles("XLA105", *_LAUNCH)
def _launch(use: Use, ctx: Context) -> Report:
    stmt = parent(use)
    if not isinstance(use, ast.Call) or not isinstance(stmt, ast.Expr) or not is_simple_line(stmt, ctx):
        return Report(use, _MESSAGE, unfixed=_BY_HAND)
    if isinstance(parent(stmt), ast.Module):
        why = f"spawned processes import this module: start them behind `if __name__ == '__main__':`; {_BY_HAND}"
        return Report(use, _MESSAGE, unfixed=why)
    called, args = ctx.arg(use, "fn", 0), ctx.arg(use, "args", 1)
    worker = function_named(called, ctx) if called is not None else None
    single = ctx.arg(use, "debug_single_process")
    if has_stars(use) or len(use.args) > 3 or is_constant(ctx.arg(use, "nprocs", 2), 1) or single is not None:
        return Report(use, _MESSAGE, unfixed=_BY_HAND)
    if worker is None or not isinstance(parent(worker), ast.Module) or len(ctx.model.uses(worker.name)) != 1:
        return Report(use, _MESSAGE, unfixed=_BY_HAND)
    head = _head(worker, ctx)
    count = next((word for word in _COUNTS if not ctx.model.binds(word)), "")
    if head is None or not count or (args is not None and not is_pure(args)):
        return Report(use, _MESSAGE, unfixed=_BY_HAND)
    source, torch, os = ctx.source, name("torch"), name("os")
    start, end = source.span(stmt)
    lines = [
        f"{count} = {torch}.accelerator.device_count()",
        f'{os}.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", WORLD_SIZE=str({count}))',
        f"{torch}.tpu.distributed.set_tpu_launch_env(nproc_per_node={count})",
    ]
    before = "".join(f"{line}{source.newline}{source.indent(start)}" for line in lines)
    passed = "" if args is None else f"args={ctx.text(args)}, "
    text = f"{name('torch.multiprocessing')}.spawn({worker.name}, {passed}nprocs={count})"
    if any(token.kind == "comment" for token in source.tokens(*source.span(use))):
        return Report(use, _MESSAGE, unfixed=_BY_HAND)
    return Report(use, _MESSAGE, Fix((head, Edit(start, end, before + text)), safe=False))


def _head(worker: ast.FunctionDef, ctx: Context) -> Edit | None:
    """The lines that begin the launched function; None where there is no place for them."""
    first = worker.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if is_docstring and len(worker.body) > 1:
        first = worker.body[1]
    if not worker.args.args or not is_simple_line(first, ctx):
        return None
    index = worker.args.args[0].arg
    if len(ctx.model.scopes[worker].bindings[index]) != 1:
        return None
    source = ctx.source
    start = source.start(first)
    lines = [f"{name('os')}.environ.update(RANK=str({index}), LOCAL_RANK=str({index}))"]
    if not ctx.project.process_group:
        lines.append(f'{name("torch.distributed")}.init_process_group("tpu_dist")')
    return Edit(start, start, "".join(f"{line}{source.newline}{source.indent(start)}" for line in lines))
