"""TPU305: processes that are started with torch.multiprocessing.spawn."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, name, remove_arguments
from tpumigrate.model import block, callable_around, has_stars, parent, statement
from tpumigrate.rule import Context, Report, rule

from ._common import is_pure
from ._distributed import is_device_count, keyword_of
from ._worker import Move, counted_by, is_simple_line, moved

_SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")
_SET_ENV = "set_tpu_launch_env"
_LAUNCH = "torch_xla.launch"
_SEEDS = ("torch.cuda.manual_seed", "torch.cuda.manual_seed_all")
# What starts the runtime of torch_xla, which may only happen in the processes that it launches.
_TOUCHES = frozenset(
    {
        "torch_xla.device", "torch_xla.devices", "torch_xla.device_count", "torch_xla.real_devices",
        "torch_xla.manual_seed", "torch_xla.sync", "torch_xla.core.xla_model.xla_device",
        "torch_xla.core.xla_model.set_rng_state", "torch_xla.core.xla_model.get_memory_info",
        *(
            f"torch_xla.runtime.{item}"
            for item in (
                "world_size", "global_ordinal", "local_ordinal", "addressable_device_count", "device_count",
                "global_device_count", "global_runtime_device_count", "addressable_runtime_device_count",
                "local_device_count", "process_count", "process_index",
            )
        ),
    }
)  # fmt: skip


@rule("TPU305", "spawn", anchors=("spawn", "torch_xla.launch"))
def spawn(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Training processes are started with torch.multiprocessing.spawn.

    ## What it does
    PyTorch/XLA starts its replicas itself: `torch_xla.launch(fn, args=...)`. A number of processes that the
    parent takes from `device_count()` is asked for in the worker instead, because the parent must not touch
    the runtime. TorchTPU keeps `spawn`, after `set_tpu_launch_env` has laid out the processes.

    ## Why it matters on a TPU
    `nprocs=torch.cuda.device_count()` is 0 on a TPU host: spawn returns at once, with exit status 0 and
    nothing trained. torch_xla refuses any number of processes but one or all, and raises "Runtime is already
    initialized" if the parent has counted devices. TorchTPU aborts the first operation of workers without the
    launch environment.

    ## Example
    ```python
    import torch
    import torch.multiprocessing as mp

    def worker(rank, world_size, cfg):
        print("worker", rank, "of", world_size, cfg)

    def main():
        n = torch.cuda.device_count()
        mp.spawn(worker, args=(n, {"lr": 0.1}), nprocs=n, join=True)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    def worker(rank, world_size, cfg):
        world_size = xr.world_size()
        print("worker", rank, "of", world_size, cfg)

    def main():
        torch_xla.launch(worker, args=(None, {"lr": 0.1}))
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.multiprocessing as mp

    def worker(rank, world_size, cfg):
        print("worker", rank, "of", world_size, cfg)

    def main():
        n = torch.accelerator.device_count()
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=n)
        mp.spawn(worker, args=(n, {"lr": 0.1}), nprocs=n, join=True)
    ```

    ## Example: through a field of the options
    ```python
    import torch
    import torch.multiprocessing as mp

    def main(args):
        ngpus_per_node = torch.cuda.device_count()
        args.world_size = ngpus_per_node
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))

    def main_worker(gpu, ngpus_per_node, args):
        \"\"\"One process.\"\"\"
        print(gpu, ngpus_per_node, args.world_size)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    def main(args):
        torch_xla.launch(main_worker, args=(None, args))

    def main_worker(gpu, ngpus_per_node, args):
        \"\"\"One process.\"\"\"
        ngpus_per_node = xr.world_size()
        args.world_size = ngpus_per_node
        print(gpu, ngpus_per_node, args.world_size)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.multiprocessing as mp

    def main(args):
        ngpus_per_node = torch.accelerator.device_count()
        args.world_size = ngpus_per_node
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=ngpus_per_node)
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))

    def main_worker(gpu, ngpus_per_node, args):
        \"\"\"One process.\"\"\"
        print(gpu, ngpus_per_node, args.world_size)
    ```

    ## Example: a number that somebody chose (unsafe)
    ```python
    import torch
    import torch.multiprocessing as mp

    def worker(rank, lr):
        print(rank, lr)

    if __name__ == "__main__":
        torch.cuda.manual_seed_all(3)
        mp.spawn(worker, (0.1,), 4, start_method="spawn")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla

    def worker(rank, lr):
        print(rank, lr)

    if __name__ == "__main__":
        torch_xla.launch(worker, (0.1,), start_method="spawn")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.multiprocessing as mp

    def worker(rank, lr):
        print(rank, lr)

    if __name__ == "__main__":
        torch.tpu.manual_seed(3)
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=4)
        mp.spawn(worker, (0.1,), 4, start_method="spawn")
    ```

    ## Example: the number decides more than the processes (torch_xla)
    ```python
    import torch.multiprocessing as mp
    import mylib

    def main(n):
        context = mp.spawn(mylib.worker, args=(n,), nprocs=n, join=False)
        context.join()
    ```

    ## Example: the runtime is started too early (torch_xla)
    ```python
    import torch_xla
    import torch_xla.runtime as xr

    def main(fn):
        print(xr.world_size())
        torch_xla.launch(fn)
    ```

    ## Not flagged
    ```python
    import torch.multiprocessing as mp

    mp.set_start_method("spawn")
    process = mp.Process(target=print)
    ```
    ```python
    import subprocess
    from pool import spawn

    spawn(print, nprocs=2)
    ```
    ```python
    import torch_xla

    torch_xla.launch(print, args=())
    ```

    ## Fix safety
    Safe when the processes are as many as devices. With any other number the fix for torch_xla is unsafe,
    because all devices of the host take part.

    ## References
    torch_xla.launch, torch_xla.runtime.world_size; torch.tpu.distributed.set_tpu_launch_env.
    """
    called = ctx.qualname(node.func)
    if called == _LAUNCH and ctx.xla:
        yield from _touched_before(node, ctx)
    if called not in _SPAWN:
        return
    if ctx.xla:
        yield from _launched(node, ctx)
    else:
        yield from _laid_out(node, ctx)


# -- torch_tpu ---------------------------------------------------------------------------------------------


def _laid_out(call: ast.Call, ctx: Context) -> Iterator[Report]:
    if any(item.attr == _SET_ENV for item in ctx.model.nodes(ast.Attribute)) or ctx.model.binds(_SET_ENV):
        return
    message = "before processes are spawned, the parent has to lay them out with `set_tpu_launch_env`"
    count = ctx.arg(call, "nprocs", 2)
    stmt = statement(call)
    simple = isinstance(stmt, ast.Expr | ast.Assign | ast.Return) and is_simple_line(stmt, ctx)
    if has_stars(call) or (count is not None and not is_pure(count)) or not simple:
        why = "call `torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=...)` before it"
        yield Report(call, message, unfixed=why)
        return
    text = _count_text(count, ctx)
    start = ctx.source.span(stmt)[0]
    line = f"{name('torch')}.tpu.distributed.{_SET_ENV}(nproc_per_node={text}){ctx.source.newline}"
    yield Report(call, message, Fix((Edit(start, start, line + ctx.source.indent(start)),)))


def _count_text(count: ast.expr | None, ctx: Context) -> str:
    if count is None:
        return "1"
    if is_device_count(count, ctx):
        return f"{name('torch')}.accelerator.device_count()"
    return ctx.text(count)


# -- torch_xla ---------------------------------------------------------------------------------------------


def _launched(call: ast.Call, ctx: Context) -> Iterator[Report]:
    message = "torch_xla starts one process per device itself, with `torch_xla.launch`"
    count = ctx.arg(call, "nprocs", 2)
    join = ctx.arg(call, "join", 3)
    if has_stars(call) or len(call.args) > 4:
        yield Report(call, message, unfixed="its arguments are passed on: write `torch_xla.launch(fn, args=...)`")
        return
    if (isinstance(join, ast.Constant) and not join.value) or not isinstance(parent(call), ast.Expr):
        yield Report(call, message, unfixed="`torch_xla.launch` waits for its processes and returns nothing")
        return
    move = moved(call, count, ctx) if count is not None else Move()
    counted = counted_by(count, ctx) if count is not None else None
    if move is None:
        why = "the parent must not count devices before `torch_xla.launch`: ask `xr.world_size()` in the worker"
        yield Report(call, message, unfixed=why, claims=() if counted is None else (counted,))
        return
    gone = [
        keyword_of(call, item)
        for key, place in (("nprocs", 2), ("join", 3), ("daemon", 4))
        if (item := ctx.arg(call, key, place)) is not None
    ]
    edits = [ctx.edit(call.func, name("torch_xla") + ".launch"), *move.edits]
    if gone:
        edits.extend(remove_arguments(ctx.source, call, gone))
    deletes = (*move.deletes, *_seeds_before(call, ctx))
    yield Report(call, message, Fix(tuple(edits), deletes=deletes, safe=counted is not None))


def _seeds_before(call: ast.Call, ctx: Context) -> Iterator[ast.stmt]:
    """Seeds of the parent's GPU in the block that spawns: new processes do not inherit them."""
    stmt = statement(call)
    for item in block(stmt):
        if item is stmt:
            return
        value = item.value if isinstance(item, ast.Expr) else None
        if isinstance(value, ast.Call) and ctx.qualname(value.func) in _SEEDS and _has_pure_arguments(value):
            yield item


def _has_pure_arguments(call: ast.Call) -> bool:
    return all(is_pure(item) for item in [*call.args, *(keyword.value for keyword in call.keywords)])


def _touched_before(call: ast.Call, ctx: Context) -> Iterator[Report]:
    """The first thing that starts the runtime before processes are launched."""
    end = ctx.source.span(call)[0]
    for item in ctx.model.nodes(ast.Call):
        if ctx.source.span(item)[0] >= end:
            return
        if ctx.qualname(item.func) in _TOUCHES and callable_around(item) in (callable_around(call), None):
            message = '`torch_xla.launch` raises "Runtime is already initialized" if this has run before it'
            yield Report(item, message, unfixed="do it in the launched function")
            return
