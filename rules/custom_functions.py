"""TPU205: autograd functions that follow autocast."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, add_argument, argument_span, name
from tpumigrate.model import call_of, has_stars, parent
from tpumigrate.rule import Context, Report, rule

from ._common import device_string
from ._devices import device_text, quote
from ._precision import CUSTOM_FORWARD_BACKWARD, halves_to_bfloat16


@rule("TPU205", "custom-autograd-amp", anchors=("custom_fwd", "custom_bwd"))
def custom_autograd_amp(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """`custom_fwd` and `custom_bwd` follow CUDA's autocast.

    ## What it does
    Finds `torch.cuda.amp.custom_fwd`, `torch.cuda.amp.custom_bwd` and
    `torch.amp.custom_fwd(device_type="cuda")` and writes the forms that name the device.
    `cast_inputs=torch.float16` becomes bfloat16.

    ## Why it matters on a TPU
    The old decorators look at CUDA's autocast and silently do nothing: inputs are not cast, and the
    backward runs with whatever autocast state it meets.

    ## Example
    ```python
    import torch
    from torch.cuda.amp import custom_bwd, custom_fwd

    class Scale(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @custom_bwd
        def backward(ctx, g):
            return g * 2
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    class Scale(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="xla")
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="xla")
        def backward(ctx, g):
            return g * 2
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    class Scale(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="tpu")
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="tpu")
        def backward(ctx, g):
            return g * 2
    ```

    ## Example: with a cast, with a device type
    ```python
    import functools

    import torch

    @torch.cuda.amp.custom_fwd(cast_inputs=torch.half)
    def forward(ctx, x):
        return x

    @torch.amp.custom_bwd(device_type='cuda')
    def backward(ctx, g):
        return g

    custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="cuda")
    ```

    ## Use instead (torch_xla)
    ```python
    import functools

    import torch
    import torch_xla  # noqa: F401  registers the device

    @torch.amp.custom_fwd(device_type="xla", cast_inputs=torch.bfloat16)
    def forward(ctx, x):
        return x

    @torch.amp.custom_bwd(device_type='xla')
    def backward(ctx, g):
        return g

    custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="xla")
    ```

    ## Use instead (torch_tpu)
    ```python
    import functools

    import torch

    @torch.amp.custom_fwd(device_type="tpu", cast_inputs=torch.bfloat16)
    def forward(ctx, x):
        return x

    @torch.amp.custom_bwd(device_type='tpu')
    def backward(ctx, g):
        return g

    custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="tpu")
    ```

    ## Example: as a value
    ```python
    import torch

    custom_bwd = torch.cuda.amp.custom_bwd
    ```

    ## Not flagged
    ```python
    import torch

    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return x
    ```
    ```python
    import torch

    def decorate(device, f):
        return torch.amp.custom_bwd(f, device_type=device.type)
    ```
    ```python
    from torch.cuda.amp import custom_fwd

    __all__ = ["custom_fwd"]
    ```

    ## Fix safety
    Safe: bfloat16 is the target's native low precision, as float16 is on CUDA.

    ## References
    torch.amp.custom_fwd, torch.amp.custom_bwd; run on torch_xla 2.9 and torch_tpu 0.2.
    """
    if isinstance(node, ast.Call):
        yield from _call(node, ctx)
    elif not call_of(node) and isinstance(node.ctx, ast.Load) and _old(ctx.qualname(node)):
        yield from _bare(node, ctx)


def _old(called: str) -> bool:
    return called in CUSTOM_FORWARD_BACKWARD and called.startswith("torch.cuda.")


def _message(called: str, ctx: Context) -> str:
    last = called.rpartition(".")[2]
    return f'`{last}` for CUDA does nothing on the TPU; it is `torch.amp.{last}(device_type="{ctx.device}")`'


def _bare(node: ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    called = ctx.qualname(node)
    above = parent(node)
    if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef) and node in above.decorator_list:
        text = f"{name('torch')}.amp.{called.rpartition('.')[2]}(device_type={device_string(ctx)})"
        yield Report(node, _message(called, ctx), ctx.replace(node, text))
    elif not isinstance(above, ast.Attribute | ast.Compare):
        yield Report(
            node,
            _message(called, ctx),
            unfixed="it is used as a value: pass `functools.partial` with a device_type",
        )


def _call(call: ast.Call, ctx: Context) -> Iterator[Report]:
    called = ctx.qualname(call.func)
    if called == "functools.partial" and call.args:
        called = ctx.qualname(call.args[0])
        if not _old(called):
            yield from _device(call, called, ctx)
    elif _old(called):
        if has_stars(call):
            yield Report(call, _message(called, ctx), unfixed="its arguments are passed on by star: name them")
            return
        edits = [ctx.edit(call.func, f"{name('torch')}.amp.{called.rpartition('.')[2]}")]
        text = f"device_type={device_string(ctx)}"
        if call.keywords:
            start, _ = argument_span(ctx.source, call.keywords[0])
            edits.append(Edit(start, start, text + ", "))
        else:
            edits.append(add_argument(ctx.source, call, text))
        yield Report(call, _message(called, ctx), Fix((*edits, *_cast(call, ctx))))
    else:
        yield from _device(call, called, ctx)


def _device(call: ast.Call, called: str, ctx: Context) -> Iterator[Report]:
    """The form that names its device."""
    device = ctx.arg(call, "device_type")
    if called not in CUSTOM_FORWARD_BACKWARD or device is None:
        return
    if device_text(device, ctx) is not None:
        edits = [ctx.edit(device, device_string(ctx, quote(ctx.text(device))))]
    elif isinstance(device, ast.Constant) and device.value != ctx.device:
        return
    else:
        edits = []
    edits.extend(_cast(call, ctx))
    if edits:
        yield Report(call, _message(called, ctx), Fix(tuple(edits)))


def _cast(call: ast.Call, ctx: Context) -> list[Edit]:
    cast = ctx.arg(call, "cast_inputs")
    return halves_to_bfloat16(cast, ctx) if cast is not None else []
