"""XLA104: device loaders, without which batches are moved where they are used."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from tpumigrate.edits import Edit, Fix
from tpumigrate.model import callable_around, loops, parent, parents
from tpumigrate.rule import Context, Report, rule

from ._distributed import calls_of, function_called
from ._xla_batches import moves
from ._xla_whole import PL, Use, handles, settled

_LOADER = f"{PL}.MpDeviceLoader"
_PARALLEL = f"{PL}.ParallelLoader"
_WRAPPERS = frozenset({"tqdm", "enumerate"})
# Arguments that only say how far to read ahead.
_PREFETCH = frozenset(
    {"loader", "device", "loader_prefetch_size", "device_prefetch_size", "host_to_device_transfer_threads",
     "batches_per_execution", "batchdim"}
)  # fmt: skip
_MESSAGE = "torch_tpu has no device loader: iterate over the loader itself and move each batch"
_BY_HAND = 'iterate over the DataLoader and write `.to("tpu")` for the tensors of each batch'


@dataclass
class _Moved:
    """What takes the place of one device loader."""

    edits: list[Edit] = field(default_factory=list)
    loops: list[ast.For] = field(default_factory=list)
    deletes: list[ast.stmt] = field(default_factory=list)


@rule("XLA104", "xla-device-loader", anchors=("torch_xla",), targets=("torch_tpu",), keeps_cuda=True)
def xla_device_loader(node: ast.Module, ctx: Context) -> Iterator[Report]:
    """Batches come from `MpDeviceLoader` or `ParallelLoader`, which move them to the device.

    ## What it does
    Iterates over the loader inside and moves each batch at the head of the loop, where all loops over it are in the
    file and take tuples of tensors apart (`for data, target in loader:`, also behind `enumerate` and `tqdm`, and in
    functions of the file that get the loader). Reports the rest.

    ## Why it matters on a TPU
    TorchTPU has no device loader. A batch that stays on the CPU raises "expected tensor to be on tpu, got cpu".

    ## Example
    ```python
    import torch
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl

    def train(model, loader, opt):
        for step, (data, target) in enumerate(loader):
            loss = torch.nn.functional.nll_loss(model(data), target)
            loss.backward()
            opt.step()

    def main(model, dataset, opt):
        device = torch_xla.device()
        loader = torch.utils.data.DataLoader(dataset)
        device_loader = pl.MpDeviceLoader(loader, device)
        train(model, device_loader, opt)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def train(model, loader, opt):
        for step, (data, target) in enumerate(loader):
            data, target = data.to("tpu"), target.to("tpu")
            loss = torch.nn.functional.nll_loss(model(data), target)
            loss.backward()
            opt.step()

    def main(model, dataset, opt):
        device = torch.device("tpu")
        loader = torch.utils.data.DataLoader(dataset)
        device_loader = loader
        train(model, device_loader, opt)
    ```

    ## Example: in place of the loader, and in the loop
    ```python
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl
    from tqdm import tqdm

    def main(model, train_loader, test_loader):
        train_loader = pl.MpDeviceLoader(train_loader, xm.xla_device(), loader_prefetch_size=8)
        for images, _ in tqdm(train_loader, total=len(train_loader)):
            model(images)
        for images, labels in pl.ParallelLoader(test_loader, [xm.xla_device()]).per_device_loader(xm.xla_device()):
            yield model(images).eq(labels)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    from tqdm import tqdm

    def main(model, train_loader, test_loader):
        for images, _ in tqdm(train_loader, total=len(train_loader)):
            images = images.to("tpu")
            model(images)
        for images, labels in test_loader:
            images, labels = images.to("tpu"), labels.to("tpu")
            yield model(images).eq(labels)
    ```

    ## Example: a batch of one tensor
    ```python
    import torch
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl

    def main(model, loader):
        for batch in pl.MpDeviceLoader(loader, torch_xla.device()):
            tokens, mask = batch
            model(tokens.view(-1), mask)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def main(model, loader):
        for batch in loader:
            tokens, mask = batch
            tokens, mask = tokens.to("tpu"), mask.to("tpu")
            model(tokens.view(-1), mask)
    ```

    ## Example: what a batch is made of does not show
    ```python
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl

    def main(model, loader):
        for batch in pl.MpDeviceLoader(loader, torch_xla.device()):
            model(**batch)
        for images, paths in pl.MpDeviceLoader(loader, torch_xla.device()):
            model.save(paths[0].split("/"), model(images))
        return pl.MpDeviceLoader(loader, torch_xla.device())
    ```

    ## Not flagged
    ```python
    from torch.utils.data import DataLoader

    for x, y in DataLoader([]):
        print(x, y)
    ```
    ```python
    from accelerate.data_loader import MpDeviceLoaderWrapper

    loader = MpDeviceLoaderWrapper([], None)
    ```
    ```python
    def loop(pl, loader, device):
        return pl.MpDeviceLoader(loader, device)
    ```

    ## Fix safety
    Safe: names of a batch that may be no tensors are not moved but reported. Unsafe with a `collate_fn`, which may
    make something else than tensors.

    ## References
    torch_xla.distributed.parallel_loader of torch_xla 2.9.
    """
    yield from settled(ctx, "XLA104")


@handles("XLA104", _LOADER, _PARALLEL)
def _loader(use: Use, ctx: Context) -> Report:
    if isinstance(use, ast.Call):
        return _found(ctx)[use]
    return Report(use, _MESSAGE, unfixed=_BY_HAND)


@functools.lru_cache(maxsize=1)
def _found(ctx: Context) -> dict[ast.Call, Report]:
    """The report on every device loader of a file; a loop that gets several of them is changed once."""
    done: set[ast.For] = set()
    calls = ctx.model.nodes(ast.Call)
    return {call: _report(call, done, ctx) for call in calls if ctx.qualname(call.func) in (_LOADER, _PARALLEL)}


def _report(call: ast.Call, done: set[ast.For], ctx: Context) -> Report:
    whole = _whole(call, ctx)
    moved = _moved(whole, call, ctx) if whole is not None else None
    if moved is None or whole is None:
        return Report(call, _MESSAGE, unfixed=_BY_HAND)
    edits = list(moved.edits)
    for loop in moved.loops:
        text = moves(loop, ctx)
        if text is None:
            return Report(call, _MESSAGE, unfixed=f"not all of a batch is known to be tensors: {_BY_HAND}")
        if loop not in done:
            done.add(loop)
            edits.extend(text)
    collated = any(keyword.arg == "collate_fn" for keyword in ctx.model.nodes(ast.keyword))  # into lists, perhaps
    return Report(whole, _MESSAGE, Fix(tuple(edits), deletes=tuple(moved.deletes), safe=not collated))


def _whole(call: ast.Call, ctx: Context) -> ast.Call | None:
    """The expression that is iterated over: with `.per_device_loader(device)` for a ParallelLoader."""
    loader = ctx.arg(call, "loader", 0)
    keywords = {keyword.arg for keyword in call.keywords}
    if loader is None or len(call.args) > 2 or not keywords <= _PREFETCH:
        return None
    if not isinstance(loader, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return None
    if ctx.qualname(call.func) == _LOADER:
        return call
    method = parent(call)
    outer = parent(method) if method is not None else None
    if isinstance(method, ast.Attribute) and method.attr == "per_device_loader" and isinstance(outer, ast.Call):
        return outer if outer.func is method else None
    return None


def _moved(whole: ast.Call, call: ast.Call, ctx: Context) -> _Moved | None:
    """What has to change for a device loader; None when it goes where the file does not show."""
    loader = ctx.arg(call, "loader", 0)
    assert loader is not None
    start, end = ctx.source.span(whole)
    first, last = ctx.source.span(loader)
    if any(token.kind == "comment" for part in ((start, first), (last, end)) for token in ctx.source.tokens(*part)):
        return None
    moved = _Moved([Edit(start, first, ""), Edit(last, end, "")])
    stmt = parent(whole)
    if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Name):
        target = stmt.targets[0]
        if ctx.text(target) == ctx.text(loader):
            moved.edits, moved.deletes = [], [stmt]
        if loops(stmt) or _is_conditional(stmt) or not _follow_name(target, stmt, moved, ctx):
            return None
        return moved
    return moved if _follow(whole, moved, ctx, set()) else None


def _follow_name(target: ast.Name, stmt: ast.stmt, moved: _Moved, ctx: Context) -> bool:
    """Follow every reading of a variable after the statement that makes it a device loader."""
    owner = callable_around(stmt)
    end = ctx.source.span(stmt)[1]
    bindings = ctx.model.bindings(target)
    later = [item for item in bindings if ctx.source.span(item.node)[0] > end]
    if later or any(item.kind not in ("assign", "param") for item in bindings):
        return False
    uses = ctx.model.uses(target.id, bindings)
    uses = [use for use in uses if ctx.source.span(use)[0] > end or callable_around(use) is not owner]
    return all(_follow(use, moved, ctx, set()) for use in uses)


def _follow(use: ast.expr, moved: _Moved, ctx: Context, seen: set[ast.arg]) -> bool:
    """Follow a device loader from one place where it is used; False when it is not clear what happens there."""
    above = parent(use)
    if isinstance(above, ast.For) and above.iter is use:
        moved.loops.append(above)
        return True
    if not isinstance(above, ast.Call) or use not in [*above.args, *(item.value for item in above.keywords)]:
        if isinstance(above, ast.keyword) and isinstance(parent(above), ast.Call):
            return _follow_argument(use, parent(above), moved, ctx, seen)  # type: ignore[arg-type]
        return False
    return _follow_argument(use, above, moved, ctx, seen)


def _follow_argument(use: ast.expr, call: ast.Call, moved: _Moved, ctx: Context, seen: set[ast.arg]) -> bool:
    func = call.func
    last = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    if last == "len" and not ctx.model.qualnames(func):
        return True
    if last == "enumerate" and (not isinstance(func, ast.Name) or ctx.model.bindings(func)):
        return False
    if last in _WRAPPERS and call.args and call.args[0] is use and function_called(call, ctx) is None:
        return _follow(call, moved, ctx, seen)
    called = function_called(call, ctx)
    parameter = _parameter(use, call, called) if called is not None else None
    if called is None or parameter is None:
        return False
    if parameter in seen:
        return True
    seen.add(parameter)
    if not _only_device_loaders(called, parameter, ctx, {parameter}):
        return False
    scope = ctx.model.scopes[called].bindings.get(parameter.arg, [])
    if len(scope) != 1:
        return False
    return all(_follow(item, moved, ctx, seen) for item in ctx.model.uses(parameter.arg, scope))


def _parameter(use: ast.expr, call: ast.Call, called: ast.FunctionDef) -> ast.arg | None:
    """The parameter that gets an argument."""
    for keyword in call.keywords:
        if keyword.value is use:
            return next((arg for arg in [*called.args.args, *called.args.kwonlyargs] if arg.arg == keyword.arg), None)
    if any(isinstance(item, ast.Starred) for item in call.args) or use not in call.args:
        return None
    place = call.args.index(use)
    return called.args.args[place] if place < len(called.args.args) else None


def _only_device_loaders(called: ast.FunctionDef, parameter: ast.arg, ctx: Context, asked: set[ast.arg]) -> bool:
    """Whether every use of a function is a call that passes a device loader for a parameter."""
    calls = list(calls_of(called, ctx))
    if len(calls) != len(ctx.model.uses(called.name)):
        return False
    place = called.args.args.index(parameter) if parameter in called.args.args else None
    passed = [ctx.arg(call, parameter.arg, place) for call in calls]
    return all(item is not None and _is_device_loader(item, ctx, asked) for item in passed)


def _is_device_loader(node: ast.expr, ctx: Context, asked: set[ast.arg]) -> bool:
    """Whether an argument is a device loader, as its last assignment before the call shows."""
    if isinstance(node, ast.Name):
        start = ctx.source.span(node)[0]
        before = [item for item in ctx.model.bindings(node) if ctx.source.span(item.node)[0] < start]
        if not before:
            return False
        last = max(before, key=lambda item: ctx.source.span(item.node)[0])
        if last.kind == "param" and isinstance(last.node, ast.arg):
            if last.node in asked:
                return True  # a function that calls itself, or is called by what it calls
            owner = next((above for above in parents(last.node) if isinstance(above, ast.FunctionDef)), None)
            return owner is not None and _only_device_loaders(owner, last.node, ctx, asked | {last.node})
        return last.value is not None and _is_device_loader(last.value, ctx, asked)
    return ctx.kind(node) == "device_loader"


def _is_conditional(stmt: ast.stmt) -> bool:
    """Whether a statement may not run, apart from the guard of a program's main part."""
    return any(
        isinstance(above, ast.Try | ast.If)
        and not any(
            isinstance(item, ast.Name) and item.id == "__name__" for item in ast.walk(getattr(above, "test", above))
        )
        for above in parents(stmt)
    )
