"""TPU309 and TPU311: samplers and gradients of replicas that torch_xla starts."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, add_argument, name
from tpumigrate.model import block, has_stars, parent
from tpumigrate.rule import Context, Report, rule

_SAMPLERS = frozenset({"torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler"})
_STEP = "torch_xla.core.xla_model.optimizer_step"
_REDUCE = "torch_xla.core.xla_model.reduce_gradients"
_CLIPS = frozenset(
    f"torch.nn.utils.{part}{kind}"
    for part in ("", "clip_grad.")
    for kind in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
)


@rule("TPU309", "distributed-sampler", anchors=("DistributedSampler",), targets=("torch_xla",))
def distributed_sampler(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """A sampler asks the default process group for its shard, and there is none.

    ## What it does
    Finds `DistributedSampler` without `num_replicas` and `rank` in a project that starts replicas (with
    `torch_xla.launch` or `mp.spawn`) and never calls `init_process_group`, and passes what the runtime
    answers.

    ## Why it matters on a TPU
    Replicas of PyTorch/XLA need no process group, and the sampler raises "Default process group has not been
    initialized". Without a sampler every replica gets all of the data: MpDeviceLoader does not shard.

    ## Example
    ```python
    import torch_xla
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    def worker(rank, ds):
        sampler = DistributedSampler(ds, shuffle=True)
        return DataLoader(ds, 32, sampler=sampler)

    torch_xla.launch(worker, args=(data(),))
    ```

    ## Use instead
    ```python
    import torch_xla
    import torch_xla.runtime as xr
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    def worker(rank, ds):
        sampler = DistributedSampler(ds, shuffle=True, num_replicas=xr.world_size(), rank=xr.global_ordinal())
        return DataLoader(ds, 32, sampler=sampler)

    torch_xla.launch(worker, args=(data(),))
    ```

    ## Not flagged
    ```python
    import torch.distributed as dist
    import torch_xla
    from torch.utils.data.distributed import DistributedSampler

    def worker(rank, ds):
        dist.init_process_group("xla", init_method="xla://")
        return DistributedSampler(ds)

    torch_xla.launch(worker, args=(data(),))
    ```
    ```python
    import torch_xla
    from torch.utils.data import DistributedSampler

    def worker(rank, ds, size):
        return DistributedSampler(ds, num_replicas=size, rank=rank)

    torch_xla.launch(worker, args=(data(), 4))
    ```
    ```python
    from torch.utils.data.distributed import DistributedSampler

    def sampler(ds):
        return DistributedSampler(ds)
    ```

    ## Fix safety
    Safe.

    ## References
    pytorch/xla#7904; torch_xla.runtime; ran on torch_xla 2.9.
    """
    if ctx.qualname(node.func) not in _SAMPLERS or not ctx.project.launch or ctx.project.process_group:
        return
    if ctx.arg(node, "num_replicas", 1) is not None or ctx.arg(node, "rank", 2) is not None or has_stars(node):
        return
    runtime = name("torch_xla.runtime")
    text = f"num_replicas={runtime}.world_size(), rank={runtime}.global_ordinal()"
    message = "no process group tells this sampler its shard; the runtime of torch_xla does"
    yield Report(node, message, Fix((add_argument(ctx.source, node, text),)))


@rule("TPU311", "clip-before-reduction", anchors=("optimizer_step",), targets=("torch_xla",))
def clip_before_reduction(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Gradients are clipped before `xm.optimizer_step` averages them.

    ## What it does
    Finds a clipping of gradients that is followed by `xm.optimizer_step` in the same block, and takes the
    step apart: reduction, clipping, step of the optimizer.

    ## Why it matters on a TPU
    `xm.optimizer_step` averages the gradients of all replicas and then steps. If they were clipped before,
    each replica has clipped its own, and the average is another one than that of a clipped sum: training
    differs with the number of devices, without any error. With DDP the reduction is part of `backward()`, and
    the order is right.

    ## Example
    ```python
    import torch_xla.core.xla_model as xm
    from torch.nn.utils import clip_grad_norm_

    def step(model, opt, loss):
        opt.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        xm.optimizer_step(opt)
    ```

    ## Use instead
    ```python
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch.nn.utils import clip_grad_norm_

    def step(model, opt, loss):
        opt.zero_grad()
        loss.backward()
        xm.reduce_gradients(opt)
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        opt.step()
        torch_xla.sync()
    ```

    ## Example: with the barrier
    ```python
    import torch
    import torch_xla.core.xla_model as xm

    def step(model, opt, loss):
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        xm.optimizer_step(opt, barrier=True)
        return norm
    ```

    ## Not flagged
    ```python
    import torch

    def step(model, opt, loss):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()  # optimizer_step
    ```
    ```python
    import torch
    import torch_xla.core.xla_model as xm

    def step(model, opt, loss):
        loss.backward()
        xm.reduce_gradients(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

    def plain(opt):
        xm.optimizer_step(opt)
    ```

    ## Fix safety
    Safe: in one process reduction does nothing. A step with further arguments is reported only.

    ## References
    pytorch/xla#1708; torch_xla.core.xla_model.optimizer_step, reduce_gradients.
    """
    stmt = parent(node)
    if ctx.qualname(node.func) not in _CLIPS or not isinstance(stmt, ast.Expr | ast.Assign):
        return
    siblings = block(stmt)
    place = siblings.index(stmt)
    if any(_calls(item, _REDUCE, ctx) for item in siblings[:place]):
        return
    step = next((call for item in siblings[place + 1 :] for call in _calls(item, _STEP, ctx)), None)
    if step is None:
        return
    message = "`xm.optimizer_step` averages gradients that are clipped already: each replica has clipped its own"
    start = ctx.source.span(stmt)[0]
    at_line_start = not ctx.source.text[ctx.source.line_start(start) : start].strip()
    if len(step.args) != 1 or step.keywords or not isinstance(parent(step), ast.Expr) or not at_line_start:
        why = "call `xm.reduce_gradients(optimizer)`, clip, `optimizer.step()`, and `torch_xla.sync()`"
        yield Report(node, message, unfixed=why)
        return
    optimizer = ctx.text(step.args[0])
    reduction = f"{name('torch_xla.core.xla_model')}.reduce_gradients({optimizer}){ctx.source.newline}"
    edits = (
        Edit(start, start, reduction + ctx.source.indent(start)),
        ctx.edit(step, f"{optimizer}.step()"),
    )
    yield Report(node, message, Fix(edits))


def _calls(stmt: ast.stmt, qualname: str, ctx: Context) -> list[ast.Call]:
    """Calls of a function that are statements of their own."""
    call = stmt.value if isinstance(stmt, ast.Expr | ast.Assign) else None
    return [call] if isinstance(call, ast.Call) and ctx.qualname(call.func) == qualname else []
