"""XLA103: steps of PyTorch/XLA's optimizers, which average gradients on the way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, name
from tpumigrate.model import parent
from tpumigrate.rule import Context, Report, rule

from ._worker import is_simple_line
from ._xla_whole import XM, Use, deleted, handles, processes, settled, wraps_model

_STEP = f"{XM}.optimizer_step"
_REDUCE = f"{XM}.reduce_gradients"
_MESSAGE = "`xm.{}` averages gradients over the replicas, and torch_tpu does that where it is told to"
_ITEMS = ("parameter", "trained")
_BY_HAND = (
    "write `opt.step()` if DistributedDataParallel or fully_shard averages the gradients; otherwise average "
    "them first, with `torch.distributed.all_reduce(p.grad, op=torch.distributed.ReduceOp.AVG)` for each parameter"
)


@rule("XLA103", "xla-optimizer-step", anchors=("torch_xla",), targets=("torch_tpu",), keeps_cuda=True)
def xla_optimizer_step(node: ast.Module, ctx: Context) -> Iterator[Report]:
    """Steps an optimizer with `xm.optimizer_step`, which averages gradients first.

    ## What it does
    Writes `opt.step()` where the program has one process, or where DistributedDataParallel averages the gradients. In
    any other program of several processes a loop before the step averages them. Barriers go.

    ## Why it matters on a TPU
    `opt.step()` alone in several processes trains replicas that drift apart, without any error.

    ## Example: one process
    ```python
    import torch_xla.core.xla_model as xm

    def train(opt, loss):
        loss.backward()
        xm.reduce_gradients(opt)
        xm.optimizer_step(opt, barrier=True)

    if __name__ == "__main__":
        train(None, None)
    ```

    ## Use instead (torch_tpu)
    ```python

    def train(opt, loss):
        loss.backward()
        opt.step()

    if __name__ == "__main__":
        train(None, None)
    ```

    ## Example: several processes
    ```python
    import torch
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm

    dist.init_process_group("xla", init_method="xla://")

    class Trainer:
        def step(self):
            if self.ready:
                xm.optimizer_step(self.opt)  # averages
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.distributed as dist

    dist.init_process_group("tpu_dist")

    class Trainer:
        def step(self):
            if self.ready:
                for parameter in [p for group in self.opt.param_groups for p in group["params"] if p.grad is not None]:
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
                self.opt.step()  # averages
    ```

    ## Example: averaged by DistributedDataParallel
    ```python
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(model, make, x):
        dist.init_process_group("xla", init_method="xla://")
        model = DDP(model)
        opt = make(model.parameters())
        model(x).sum().backward()
        xm.optimizer_step(opt)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(model, make, x):
        dist.init_process_group("tpu_dist")
        model = DDP(model)
        opt = make(model.parameters())
        model(x).sum().backward()
        opt.step()
    ```

    ## Example: a module of an unknown program
    ```python
    import torch_xla.core.xla_model as xm

    def step(opt):
        xm.optimizer_step(opt)
    ```

    ## Example: groups of replicas, closures
    ```python
    import torch_xla.core.xla_model as xm

    if __name__ == "__main__":
        xm.optimizer_step(None, groups=[[0, 1]])
        xm.optimizer_step(None, optimizer_args={"closure": print})
    ```

    ## Not flagged
    ```python
    import torch

    def step(opt):
        opt.step()
    ```
    ```python
    class xm:
        @staticmethod
        def optimizer_step(opt):
            return opt

    xm.optimizer_step(None)
    ```
    ```python
    def step(accelerator, opt):
        accelerator.optimizer_step(opt)
    ```

    ## Fix safety
    Safe: gradients are averaged as before.

    ## References
    xm.optimizer_step and xm.reduce_gradients of torch_xla 2.9 (sum over replicas, scaled by 1 / world size);
    torch.distributed.ReduceOp.AVG was run on torch_tpu 0.2's tpu_dist.
    """
    yield from settled(ctx, "XLA103")


@handles("XLA103", _STEP)
def _optimizer_step(use: Use, ctx: Context) -> Report:
    message = _MESSAGE.format("optimizer_step")
    if not isinstance(use, ast.Call):
        return Report(use, message, unfixed=_BY_HAND)
    optimizer = _optimizer(use, ctx)
    if optimizer is None or set(_keywords(use)) - {"optimizer", "barrier", "pin_layout"} or len(use.args) > 2:
        return Report(use, message, unfixed=f"it is called with more than an optimizer: {_BY_HAND}")
    edit = ctx.edit(use, f"{ctx.text(optimizer)}.step()")
    if processes(ctx) == "one" or wraps_model(ctx):
        return Report(use, message, Fix((edit,)))
    return _averaged(use, optimizer, (edit,), message, ctx)


@handles("XLA103", _REDUCE)
def _reduce_gradients(use: Use, ctx: Context) -> Report:
    message = _MESSAGE.format("reduce_gradients")
    stmt = parent(use)
    if not isinstance(use, ast.Call) or not isinstance(stmt, ast.Expr):
        return Report(use, message, unfixed=_BY_HAND)
    optimizer = _optimizer(use, ctx)
    if optimizer is None or set(_keywords(use)) - {"optimizer", "pin_layout"} or len(use.args) > 1:
        return Report(use, message, unfixed=f"it is called with more than an optimizer: {_BY_HAND}")
    if processes(ctx) == "one" or wraps_model(ctx):
        return Report(use, message, deleted(stmt))
    return _averaged(use, optimizer, (), message, ctx)


def _keywords(call: ast.Call) -> Iterator[str]:
    return (keyword.arg or "**" for keyword in call.keywords)


def _optimizer(call: ast.Call, ctx: Context) -> ast.expr | None:
    """The optimizer of a call, when it is a plain expression that may be written twice."""
    found = ctx.arg(call, "optimizer", 0)
    plain = found is not None and all(
        isinstance(item, ast.Name | ast.Attribute | ast.Subscript | ast.Constant | ast.expr_context)
        for item in ast.walk(found)
    )
    return found if plain else None


def _averaged(call: ast.Call, optimizer: ast.expr, edits: tuple[Edit, ...], message: str, ctx: Context) -> Report:
    """The report on a call before which, or in whose place, gradients are averaged."""
    stmt = parent(call)
    taken = all(ctx.model.binds(word) for word in _ITEMS)
    if (
        processes(ctx) != "many"
        or ctx.project.ddp
        or taken
        or not isinstance(stmt, ast.Expr)
        or not is_simple_line(stmt, ctx)
    ):
        return Report(call, message, unfixed=_BY_HAND)
    start, end = ctx.source.span(stmt)
    indent, newline, dist = ctx.source.indent(start), ctx.source.newline, name("torch.distributed")
    gradients = f'[p for group in {ctx.text(optimizer)}.param_groups for p in group["params"] if p.grad is not None]'
    inner = "\t" if indent.endswith("\t") else "    "
    item = next(word for word in _ITEMS if not ctx.model.binds(word))
    reduction = f"{dist}.all_reduce({item}.grad, op={dist}.ReduceOp.AVG)"
    loop = f"for {item} in {gradients}:{newline}{indent}{inner}{reduction}"
    if edits:
        return Report(call, message, Fix((Edit(start, start, f"{loop}{newline}{indent}"), *edits)))
    return Report(call, message, Fix((Edit(start, end, loop),)))
