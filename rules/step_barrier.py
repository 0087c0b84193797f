"""TPU501: the step barrier, without which torch_xla only records work and never runs it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, name
from tpumigrate.model import LOOPS, block, parent, parents, statement
from tpumigrate.rule import Context, Report, rule

from ._common import imports_torch
from ._hot import in_optimizer

_OPTIMIZER_NAME = re.compile(r"(?:^|[._])(?:\w*opt(?:im(?:izer)?)?s?(?:_\w+)?|optimizer\w*)(?:\[.*\])?$", re.IGNORECASE)
_LOADER_NAME = re.compile(r"loader|batches|dataset|data_iter|dl\b", re.IGNORECASE)
_BARRIERS = frozenset(
    """torch_xla.sync torch_xla.step torch_xla.compile torch_xla.core.xla_model.mark_step
    torch_xla.debug.profiler.StepTrace""".split()
)
_XLA_STEP = "torch_xla.core.xla_model.optimizer_step"
_READS = frozenset({"item", "tolist", "cpu", "numpy"})
# Frameworks whose own loops cut the graph.
_FRAMEWORKS = ("accelerate", "pytorch_lightning", "lightning", "ignite", "transformers.Trainer")

Region = ast.For | ast.AsyncFor | ast.While | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


@rule("TPU501", "step-barrier", anchors=(".step(", "no_grad", "inference_mode"), targets=("torch_xla",))
def step_barrier(node: ast.Module, ctx: Context) -> Iterator[Report]:
    """Trains or infers without a step barrier.

    ## What it does
    Finds the place where an optimizer step ends, one per loop (or per function that makes one step), and puts
    `torch_xla.sync()` there: after the last of several optimizers, inside the condition of gradient accumulation,
    after a step with a closure. Inference loops that read nothing back get one at the end of their body. Loops that
    have a barrier, iterate over `MpDeviceLoader`, or belong to a framework stay.

    ## Why it matters on a TPU
    torch_xla records operators and runs them at a barrier. Without one nothing runs until a value is read, and the
    graph grows: five steps without a barrier make one graph of five steps, reading the loss every second step
    compiles anew each time.

    ## Example
    ```python
    import torch

    def train(model, loader, opt):
        for x, y in loader:
            opt.zero_grad()
            loss = model(x).sub(y).square().mean()
            loss.backward()
            opt.step()
            print(loss.item())
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla

    def train(model, loader, opt):
        for x, y in loader:
            opt.zero_grad()
            loss = model(x).sub(y).square().mean()
            loss.backward()
            opt.step()
            torch_xla.sync()
            print(loss.item())
    ```

    ## Example: two optimizers, gradient accumulation
    ```python
    import torch

    def train(loader, opt_d, opt_g, d, g, n):
        for i, x in enumerate(loader):
            d(x).mean().backward()
            opt_d.step()
            if i % 2 == 0:
                g(x).mean().backward()
                opt_g.step()
        for i, x in enumerate(loader):
            (d(x).mean() / n).backward()
            if (i + 1) % n == 0:
                opt_d.step()
                opt_d.zero_grad()
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla

    def train(loader, opt_d, opt_g, d, g, n):
        for i, x in enumerate(loader):
            d(x).mean().backward()
            opt_d.step()
            if i % 2 == 0:
                g(x).mean().backward()
                opt_g.step()
            torch_xla.sync()
        for i, x in enumerate(loader):
            (d(x).mean() / n).backward()
            if (i + 1) % n == 0:
                opt_d.step()
                torch_xla.sync()
                opt_d.zero_grad()
    ```

    ## Example: a loop over optimizers, a closure, a line of two statements
    ```python
    import torch

    def train(loader, optimizers, optimizer, closure, loss):
        for x in loader:
            for o in optimizers:
                o.step()
        for x in loader:
            optimizer.step(closure)
        for x in loader:
            loss(x).backward(); optimizer.step()
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla

    def train(loader, optimizers, optimizer, closure, loss):
        for x in loader:
            for o in optimizers:
                o.step()
            torch_xla.sync()
        for x in loader:
            optimizer.step(closure)
            torch_xla.sync()
        for x in loader:
            loss(x).backward(); optimizer.step(); torch_xla.sync()
    ```

    ## Example: inference
    ```python
    import torch

    @torch.no_grad()
    def predict(model, loader):
        outputs = []
        for x in loader:
            outputs.append(model(x))
        return outputs
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla

    @torch.no_grad()
    def predict(model, loader):
        outputs = []
        for x in loader:
            outputs.append(model(x))
            torch_xla.sync()
        return outputs
    ```

    ## Not flagged
    ```python
    import torch
    import torch_xla

    def train(model, loader, opt):
        for x in loader:
            model(x).sum().backward()
            opt.step()
            torch_xla.sync()
    ```
    ```python
    import torch

    def schedule(scheduler, env, n):
        for _ in range(n):
            scheduler.step()
            env.step(1)
    ```
    ```python
    import torch
    import torch_xla.distributed.parallel_loader as pl

    def train(model, loader, opt, device):
        batches = pl.MpDeviceLoader(loader, device)
        for x in batches:
            model(x).sum().backward()
            opt.step()
    ```
    ```python
    import torch

    def evaluate(model, loader):
        correct = 0
        with torch.no_grad():
            for x, y in loader:
                correct += (model(x).argmax(1) == y).sum().item()
        return correct
    ```

    ## Fix safety
    Safe: a barrier changes no value. Several processes that reduce gradients without DDP need
    `xm.optimizer_step(optimizer)` instead of `optimizer.step()`.

    ## References
    torch_xla.sync; `xm.optimizer_step` has no barrier of its own unless `barrier=True`.
    """
    if not imports_torch(ctx) or _uses_framework(ctx):
        return
    regions: dict[Region, list[ast.Call]] = {}
    for call in ctx.model.nodes(ast.Call):
        if _is_step(call, ctx):
            regions.setdefault(_region(call), []).append(call)
    for region, steps in regions.items():
        if not _has_barrier(region, ctx) and not _called_beside_barrier(region, ctx):
            yield _missing(region, steps, ctx)
    for loop in ctx.model.nodes(ast.For):
        if loop not in regions and _is_inference(loop, ctx):
            yield from _inference(loop, ctx)


# -- training ----------------------------------------------------------------------------------------------


def _uses_framework(ctx: Context) -> bool:
    return any(
        binding.qualname.startswith(_FRAMEWORKS)
        for scope in ctx.model.scopes.values()
        for bindings in scope.bindings.values()
        for binding in bindings
        if binding.kind == "import"
    )


def _is_step(call: ast.Call, ctx: Context) -> bool:
    """Whether a call makes an optimizer step: `opt.step()`, `scaler.step(opt)`, `xm.optimizer_step(opt)`."""
    if ctx.qualname(call.func) == _XLA_STEP:
        return True
    func = call.func
    if not isinstance(func, ast.Attribute) or func.attr != "step" or ctx.model.qualnames(func):
        return False
    if not isinstance(parent(call), ast.Expr | ast.Assign) or in_optimizer(call):
        return False
    kind = ctx.kind(func.value)
    if kind == "scaler" or ("scaler" in ctx.text(func.value).lower() and len(call.args) == 1):
        return True
    if kind:
        return kind == "optimizer"
    return bool(_OPTIMIZER_NAME.search(ctx.text(func.value))) or _is_of_optimizers(func.value)


def _is_of_optimizers(node: ast.expr) -> bool:
    """Whether a name is the variable of a loop over optimizers."""
    return isinstance(node, ast.Name) and any(
        isinstance(above, ast.For) and _target_is(above, node.id) and "optim" in ast.unparse(above.iter).lower()
        for above in parents(node)
    )


def _target_is(loop: ast.For, variable: str) -> bool:
    return isinstance(loop.target, ast.Name) and loop.target.id == variable


def _region(call: ast.Call) -> Region:
    """What repeats the step: the innermost loop that is not over optimizers, else the function, else the module."""
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    child: ast.AST = call
    for above in parents(call):
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            return above
        if isinstance(above, LOOPS) and child is not getattr(above, "iter", None):
            over_optimizers = (
                isinstance(above, ast.For) and isinstance(receiver, ast.Name) and _target_is(above, receiver.id)
            )
            if not over_optimizers:
                return above
        child = above
    raise AssertionError("the module is above everything")


def _has_barrier(region: ast.AST, ctx: Context) -> bool:
    if isinstance(region, ast.For) and _iterates_device_loader(region.iter, ctx):
        return True
    if isinstance(region, ast.FunctionDef) and any(
        ctx.qualname(item.func if isinstance(item, ast.Call) else item) in _BARRIERS for item in region.decorator_list
    ):
        return True
    return any(_is_barrier(item, ctx) for item in ast.walk(region) if isinstance(item, ast.Call))


def _is_barrier(call: ast.Call, ctx: Context) -> bool:
    called = ctx.qualname(call.func)
    if called == _XLA_STEP:
        barrier = ctx.arg(call, "barrier", 1)
        return isinstance(barrier, ast.Constant) and barrier.value is True
    return called in _BARRIERS


def _iterates_device_loader(node: ast.expr, ctx: Context) -> bool:
    """Whether a loop is over MpDeviceLoader, by itself or inside `enumerate` and progress bars."""
    if ctx.kind(node) == "device_loader":
        return True
    return isinstance(node, ast.Call) and bool(node.args) and _iterates_device_loader(node.args[0], ctx)


def _called_beside_barrier(region: ast.AST, ctx: Context) -> bool:
    """Whether a function that makes a step is called from a loop or function that has the barrier."""
    if not isinstance(region, ast.FunctionDef):
        return False
    uses: list[ast.Name | ast.Attribute] = [*ctx.model.nodes(ast.Name), *ctx.model.nodes(ast.Attribute)]
    for use in uses:
        named = use.id if isinstance(use, ast.Name) else use.attr
        above = parent(use)
        if named == region.name and isinstance(above, ast.Call):
            if ctx.qualname(above.func) in _BARRIERS or ctx.qualname(above.func) == "torch_xla.compile":
                return True
            around = next((item for item in parents(above) if isinstance(item, (*LOOPS, ast.FunctionDef))), None)
            if around is not None and around is not region and _has_barrier(around, ctx):
                return True
    return False


def _missing(region: Region, steps: list[ast.Call], ctx: Context) -> Report:
    last = max(steps, key=lambda call: ctx.source.span(call)[0])
    stmt = _place(region, steps, ctx)
    message = "torch_xla runs nothing before a step barrier: the graph grows each step until a value is read"
    return Report(last, message, Fix((_after(stmt, ctx),)))


def _place(region: Region, steps: list[ast.Call], ctx: Context) -> ast.stmt:
    """The statement after which all steps of the region have been made."""
    chains = [_chain(region, step) for step in steps]
    last = max(range(len(steps)), key=lambda index: ctx.source.span(steps[index])[0])
    for stmt in chains[last]:  # from the inside out
        siblings = block(stmt)
        if all(any(other in siblings for other in chain) for chain in chains):
            return _past_update(stmt, siblings, ctx)
    return chains[last][-1]


def _chain(region: Region, step: ast.Call) -> list[ast.stmt]:
    """Statements around a step inside its region, innermost first; loops over optimizers count as one statement."""
    chain: list[ast.stmt] = [statement(step)]
    for above in parents(chain[0]):
        if above is region:
            break
        if isinstance(above, ast.stmt):
            if isinstance(above, LOOPS):
                chain.clear()
            chain.append(above)
    return chain


def _past_update(stmt: ast.stmt, siblings: list[ast.stmt], ctx: Context) -> ast.stmt:
    """The `scaler.update()` that follows `scaler.step(opt)`, else the statement itself."""
    for following in siblings[siblings.index(stmt) + 1 :][:1]:
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Call):
            func = following.value.func
            if isinstance(func, ast.Attribute) and func.attr == "update" and "scaler" in ctx.text(func.value).lower():
                return following
    return stmt


def _after(stmt: ast.stmt, ctx: Context) -> Edit:
    """An edit that puts the barrier behind a statement."""
    source = ctx.source
    start, end = source.span(stmt)
    line_start, line_end = source.line_start(start), source.line_end(end)
    barrier = f"{name('torch_xla')}.sync()"
    if source.text[line_start:start].strip() and not isinstance(
        stmt, ast.For | ast.If | ast.With | ast.While | ast.Try
    ):
        return Edit(end, end, f"; {barrier}")
    rest = [token for token in source.tokens(end, line_end) if token.kind not in ("space", "newline", "comment")]
    if rest:
        return Edit(end, end, f"; {barrier}")
    text = f"{source.indent(start)}{barrier}"
    if source.text[:line_end].endswith(("\n", "\r")):
        return Edit(line_end, line_end, text + source.newline)
    return Edit(line_end, line_end, source.newline + text)


# -- inference ---------------------------------------------------------------------------------------------


def _is_inference(loop: ast.For, ctx: Context) -> bool:
    """Whether a loop runs a model without gradients over batches or steps and reads nothing back in each round."""
    if not _without_gradients(loop, ctx):
        return False
    iterates = ctx.kind(loop.iter) == "loader" or bool(_LOADER_NAME.search(ctx.text(loop.iter)))
    calls = [item for item in ast.walk(loop) if isinstance(item, ast.Call)]
    runs = any(_runs_model(call, ctx) for call in calls if call is not loop.iter)
    return runs and (iterates or "range(" in ctx.text(loop.iter)) and not _reads_each_round(loop)


def _without_gradients(loop: ast.For, ctx: Context) -> bool:
    off = ("torch.no_grad", "torch.inference_mode")

    def is_off(node: ast.expr) -> bool:
        return ctx.qualname(node.func if isinstance(node, ast.Call) else node) in off

    for above in parents(loop):
        if isinstance(above, ast.With) and any(is_off(item.context_expr) for item in above.items):
            return True
        if isinstance(above, ast.FunctionDef):
            return any(is_off(item) for item in above.decorator_list)
    inside = [stmt for stmt in loop.body if isinstance(stmt, ast.With)]
    return any(is_off(item.context_expr) for stmt in inside for item in stmt.items)


def _runs_model(call: ast.Call, ctx: Context) -> bool:
    if ctx.kind(call.func) == "module":
        return True
    return isinstance(call.func, ast.Name) and call.func.id in ("model", "net", "network", "encoder", "decoder", "unet")


def _reads_each_round(loop: ast.For) -> bool:
    """Whether every round reads a value on the host, which runs the graph as a barrier would."""
    for item in ast.walk(loop):
        reads = isinstance(item, ast.Call) and (
            (isinstance(item.func, ast.Attribute) and item.func.attr in _READS)
            or (isinstance(item.func, ast.Name) and item.func.id in ("print", "float", "int"))
        )
        if reads and not any(isinstance(above, ast.If) for above in _between(item, loop)):
            return True
    return False


def _between(node: ast.AST, loop: ast.AST) -> Iterator[ast.AST]:
    for above in parents(node):
        if above is loop:
            return
        yield above


def _inference(loop: ast.For, ctx: Context) -> Iterator[Report]:
    if _has_barrier(loop, ctx) or any(
        isinstance(above, ast.For) and _is_inference(above, ctx) for above in parents(loop)
    ):
        return
    last = loop.body[-1]
    if isinstance(last, ast.Return | ast.Continue | ast.Break | ast.Raise):
        return
    message = "this loop reads nothing back, so torch_xla records all its rounds as one graph"
    yield Report(loop.iter, message, Fix((_after(last, ctx),)), severity="warning")
