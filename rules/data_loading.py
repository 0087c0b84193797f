"""TPU701: pinned host memory, which a TPU neither needs nor has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, remove_arguments
from tpumigrate.model import parent
from tpumigrate.rule import Context, Report, rule

from ._common import imports_torch, is_pure


@rule("TPU701", "pin-memory", anchors=("pin_memory",))
def pin_memory(node: ast.Call | ast.Dict, ctx: Context) -> Iterator[Report]:
    """Pins host memory for copies to a GPU.

    ## What it does
    Takes `pin_memory=` and `pin_memory_device=` out of DataLoader and tensor factories, and `.pin_memory()` off
    tensors.

    ## Why it matters on a TPU
    `x.pin_memory()` and `pin_memory=True` in a factory raise on both targets. In a DataLoader torch_xla ignores it
    with a warning; on torch_tpu 0.2 it raised "host memory allocator is not implemented for this client".

    ## Example
    ```python
    import torch
    from torch.utils.data import DataLoader

    def load(ds):
        loader = DataLoader(ds, batch_size=4, pin_memory=True, num_workers=2)
        buf = torch.empty(4, pin_memory=True)
        return loader, buf, torch.ones(2).pin_memory()
    ```

    ## Use instead
    ```python
    import torch
    from torch.utils.data import DataLoader

    def load(ds):
        loader = DataLoader(ds, batch_size=4, num_workers=2)
        buf = torch.empty(4)
        return loader, buf, torch.ones(2)
    ```

    ## Example: one argument a line
    ```python
    from torch.utils.data import DataLoader

    def load(ds, args):
        return DataLoader(
            ds,
            batch_size=args.batch_size,
            # copies overlap
            pin_memory=args.pin,
        )
    ```

    ## Use instead
    ```python
    from torch.utils.data import DataLoader

    def load(ds, args):
        return DataLoader(
            ds,
            batch_size=args.batch_size,
            # copies overlap
        )
    ```

    ## Example: arguments in a dictionary
    ```python
    from torch.utils.data import DataLoader

    def load(ds, use_cuda):
        kwargs = {"num_workers": 1, "pin_memory": True} if use_cuda else {}
        return DataLoader(ds, batch_size=4, **kwargs)
    ```

    ## Use instead
    ```python
    from torch.utils.data import DataLoader

    def load(ds, use_cuda):
        kwargs = {"num_workers": 1, "pin_memory": False} if use_cuda else {}
        return DataLoader(ds, batch_size=4, **kwargs)
    ```

    ## Not flagged
    ```python
    from torch.utils.data import DataLoader

    loader = DataLoader([1, 2], pin_memory=False)
    ```
    ```python
    def build(pin_memory=True):
        return dict(pin_memory=pin_memory)
    ```
    ```python
    import torch

    class Arena:
        def pin_memory(self):
            return 1

    Arena().pin_memory()
    ```

    ## Fix safety
    Safe.

    ## References
    torch.utils.data.DataLoader.
    """
    if isinstance(node, ast.Dict):
        yield from _loader_arguments(node, ctx)
        return
    called = ctx.qualname(node.func)
    if called == "torch.utils.data.DataLoader" or (called.startswith("torch.") and called.count(".") == 1):
        gone = [
            keyword
            for keyword in node.keywords
            if keyword.arg in ("pin_memory", "pin_memory_device")
            and not _is_off(keyword.value)
            and is_pure(keyword.value)
        ]
        if gone:
            message = "a TPU host has no pinned memory: this is refused, or ignored with a warning"
            yield Report(gone[0], message, Fix(tuple(remove_arguments(ctx.source, node, list(gone)))))
        return
    func = node.func
    if not isinstance(func, ast.Attribute) or func.attr != "pin_memory" or called or node.keywords:
        return
    kind = ctx.kind(func.value)
    message = "pinning a tensor raises on a TPU host"
    if kind == "tensor" and all(is_pure(arg) for arg in node.args):
        start = ctx.source.span(node)[1]
        dot = _dot(func, ctx)
        above = parent(node)
        if isinstance(above, ast.Expr):
            yield Report(node, message, Fix(deletes=(above,)))
        else:
            yield Report(node, message, Fix((Edit(dot, start, ""),)))
    elif not kind and not node.args and imports_torch(ctx) and _looks_pinned(node):
        yield Report(node, message, Fix((Edit(_dot(func, ctx), ctx.source.span(node)[1], ""),)))
    elif not kind and imports_torch(ctx):
        yield Report(node, message, unfixed="it may be a tensor or an object of the project's own", severity="warning")


def _loader_arguments(node: ast.Dict, ctx: Context) -> Iterator[Report]:
    """`{"pin_memory": True}` in a file that hands dictionaries to DataLoader."""
    splatted = any(
        ctx.qualname(call.func) == "torch.utils.data.DataLoader" and any(item.arg is None for item in call.keywords)
        for call in ctx.model.nodes(ast.Call)
    )
    for key, value in zip(node.keys, node.values, strict=True):
        named = isinstance(key, ast.Constant) and key.value == "pin_memory"
        if named and splatted and isinstance(value, ast.Constant) and value.value is True and key is not None:
            message = "a TPU host has no pinned memory: a loader with these arguments is refused, or warns"
            yield Report(key, message, Fix((Edit(*ctx.source.span(value), "False"),)))


def _is_off(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (False, None, "")


def _looks_pinned(node: ast.Call) -> bool:
    """Whether the pinned thing is moved at once: only tensors are `x.pin_memory().to(...)` or `.cuda(...)`."""
    above = parent(node)
    return isinstance(above, ast.Attribute) and above.attr in ("to", "cuda") and isinstance(parent(above), ast.Call)


def _dot(func: ast.Attribute, ctx: Context) -> int:
    """Offset of the dot before the method's name."""
    end = ctx.source.span(func)[1] - len(func.attr)
    return ctx.source.text.rindex(".", ctx.source.span(func.value)[1], end)
