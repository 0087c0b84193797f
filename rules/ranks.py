"""TPU310: what only some of the processes do."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.model import before, parent, parents
from tpumigrate.names import FUNCTIONS
from tpumigrate.rule import Context, Report, rule

from ._distributed import function_called, is_distributed, is_rank_test, rank_guard
from .saving import SAVES

_XM_SAVE = "torch_xla.core.xla_model.save"
_SYNCS = frozenset({"torch_xla.sync", "torch_xla.core.xla_model.mark_step", "torch_xla.core.xla_model.optimizer_step"})
_COLLECTIVES = frozenset(
    {
        *(
            f"torch.distributed.{name}"
            for name in (
                "all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter", "broadcast",
                "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter",
            )
        ),
        *(
            f"torch_xla.core.xla_model.{name}"
            for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "mesh_reduce")
        ),
    }
)  # fmt: skip
_COUNTERS = ("epoch", "step", "iter", "batch", "idx", "index", "count", "len", "size", "time", "num")


@rule("TPU310", "rank-dependent", anchors=("rank", "_process", "is_main", "is_master", "ordinal", ".save"))
def rank_dependent(node: ast.Call | ast.If, ctx: Context) -> Iterator[Report]:
    """Some processes run work for the device that the others do not run.

    ## What it does
    Looks into `if rank == 0:` and `if is_main_process():`, in projects that train with several processes, for
    what forces execution: `.item()`, collectives, and for PyTorch/XLA saving, there also behind conditions
    such as `if acc > best:` that may differ from process to process.

    ## Why it matters on a TPU
    On PyTorch/XLA the pending operations run when a value is read. They include the collectives, so the
    process that reads alone waits for the others for ever. `if rank == 0: xm.save(...)` is the classic wrong
    rewrite: `xm.save` has to be called by all, and itself lets one process write.

    ## Example
    ```python
    import torch.distributed as dist

    def report(loss):
        if dist.get_rank() == 0:
            print("loss", loss.item())
    ```

    ## Example: saving (torch_xla)
    ```python
    import torch
    import torch.distributed as dist

    def end_of_epoch(model, acc, best):
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "last.pt")
        if acc > best:
            torch.save(acc, "best.pt")
        dist.barrier()
    ```

    ## Example: a collective
    ```python
    import torch.distributed as dist

    def mean(t, args):
        if args.distributed and args.rank == 0:
            dist.all_reduce(t)
        return t
    ```

    ## Not flagged
    ```python
    import torch

    def report(loss, rank):
        if rank == 0:
            print(loss.item())
        if rank == 0 and rank > loss:
            torch.save(loss, "loss.pt")
    ```
    ```python
    import torch.distributed as dist

    def train(loader, opt, rank):
        for loss in loader:
            loss.backward()
            opt.step()
            if rank == 0:
                print(loss.item())
    ```
    ```python
    import torch.distributed as dist

    def share(t, rank, group):
        if rank == 0:
            dist.broadcast(t, 0)
            print("sent", t.shape)
        else:
            dist.broadcast(t, 0)
        if rank == 0:
            dist.all_reduce(t, group=group)
        dist.barrier()
    ```

    ## Fix safety
    There is no fix: what all processes need to do before the condition depends on the program.

    ## References
    pytorch/xla#2712, pytorch/xla#2224; docs/notebooks/distributed_training_101.py of TorchTPU.
    """
    if isinstance(node, ast.If):
        if ctx.xla:
            yield from _differs_by_value(node, ctx)
        return
    guard = rank_guard(node)
    if guard is None or not is_distributed(ctx):
        return
    if _is_item(node, ctx):
        yield from _value_read(node, guard, ctx)
    elif ctx.qualname(node.func) in _COLLECTIVES:
        if ctx.arg(node, "group") is None and not _other_arm_too(guard, ctx):
            message = "a collective that only some processes call makes them wait for the others for ever"
            yield Report(node, message, unfixed="call it outside of the condition, in every process")
    elif ctx.xla and (ctx.qualname(node.func) in SAVES | {_XM_SAVE} or _helper_saves(node, ctx)):
        message = "saving runs what is pending on this rank alone, which waits for ever if a collective is"
        why = "call `xm.save` on all ranks, outside of the condition: it lets one of them write"
        severity = "warning" if _after_step(guard, ctx) else "error"
        yield Report(node, message, unfixed=why, severity=severity)


def _is_item(node: ast.Call, ctx: Context) -> bool:
    func = node.func
    return (
        isinstance(func, ast.Attribute)
        and func.attr == "item"
        and not node.args
        and not node.keywords
        and ctx.kind(func.value) in ("tensor", "")
        and not ctx.model.qualnames(func)
        and not any(isinstance(item, ast.Attribute) and item.attr in ("cpu", "numpy") for item in ast.walk(func.value))
    )


def _value_read(node: ast.Call, guard: ast.If, ctx: Context) -> Iterator[Report]:
    if _after_step(guard, ctx):
        return
    if ctx.xla:
        message = "`.item()` runs what is pending on this rank alone, which waits for ever for a collective"
        why = "read the value on all ranks before the condition, after `torch_xla.sync()`"
        yield Report(node, message, unfixed=why)
    else:
        message = "ranks have to run the same operations; this one reads a value that the others do not read"
        yield Report(node, message, unfixed="read the value on all ranks, before the condition", severity="warning")


def _after_step(guard: ast.stmt, ctx: Context) -> bool:
    """Whether an optimizer step, after which all ranks run the graph, or a barrier comes before `guard`."""
    stmt: ast.AST = guard
    while isinstance(stmt, ast.stmt) and not isinstance(stmt, FUNCTIONS):
        for earlier in before(stmt):
            if any(_runs_graph(item, ctx) for item in ast.walk(earlier) if isinstance(item, ast.Call)):
                return True
        above = parent(stmt)
        stmt = above if above is not None else guard
        if isinstance(stmt, ast.Module):
            return False
    return False


def _runs_graph(call: ast.Call, ctx: Context) -> bool:
    if ctx.qualname(call.func) in _SYNCS:
        return True
    return isinstance(call.func, ast.Attribute) and call.func.attr == "step" and not ctx.model.qualnames(call.func)


def _other_arm_too(guard: ast.If, ctx: Context) -> bool:
    """Whether the other processes call a collective too, in the `else`."""
    return any(
        ctx.qualname(item.func) in _COLLECTIVES
        for stmt in guard.orelse
        for item in ast.walk(stmt)
        if isinstance(item, ast.Call)
    )


def _helper_saves(node: ast.Call, ctx: Context) -> bool:
    """Whether a call reaches a function of this file that saves."""
    called = function_called(node, ctx)
    return called is not None and any(
        ctx.qualname(item.func) in SAVES | {_XM_SAVE} for item in ast.walk(called) if isinstance(item, ast.Call)
    )


def _differs_by_value(node: ast.If, ctx: Context) -> Iterator[Report]:
    """`if acc > best: save()`: a comparison of computed values, which may differ between processes."""
    test = node.test
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Gt | ast.Lt | ast.GtE | ast.LtE):
        return
    if is_rank_test(test) or rank_guard(node) is not None or any(is_rank_test(above) for above in _tests(node)):
        return
    sides = [test.left, *test.comparators]
    if any(not isinstance(side, ast.Name | ast.Attribute | ast.Subscript) for side in sides):
        return
    if any(word in ctx.text(side).lower() for side in sides for word in _COUNTERS):
        return
    calls = [item for stmt in node.body for item in ast.walk(stmt) if isinstance(item, ast.Call)]
    if any(ctx.qualname(item.func) in SAVES | {_XM_SAVE} for item in calls) and is_distributed(ctx):
        message = "values decide whether this rank saves; where ranks differ, they wait for each other"
        why = "make sure that the values are the same on all ranks, for instance with `xm.mesh_reduce`"
        yield Report(test, message, unfixed=why, severity="warning")


def _tests(node: ast.AST) -> Iterator[ast.expr]:
    for above in parents(node):
        if isinstance(above, ast.If):
            yield above.test
