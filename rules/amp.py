"""TPU201: autocast for the TPU, with its dtype spelled."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from tpumigrate.edits import Edit, Fix, add_argument, argument_span, name, rename_method
from tpumigrate.model import call_of, has_stars, parent
from tpumigrate.rule import Context, Report, rule

from ._common import device_string
from ._devices import device_text, quote
from ._precision import (
    ANY_AUTOCAST,
    AUTOCAST,
    CUDA_AUTOCAST,
    XLA_AUTOCAST,
    before_arguments,
    halves_to_bfloat16,
    in_handler,
    is_constant,
    values,
)
from ._xla_whole import STAYS, stays_on_xla

_DTYPE = "dtype=" + name("torch") + ".bfloat16"
_CUDA = "autocast for CUDA does nothing on the TPU"


@rule("TPU201", "autocast", anchors=("autocast",))
def autocast(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Autocast is meant for CUDA, or casts to float16.

    ## What it does
    Finds `torch.cuda.amp.autocast()`, `torch.autocast("cuda")`, `torch.amp.autocast("cuda")` and the
    retired `torch_xla.amp.autocast()`, and writes autocast for the TPU with `dtype=torch.bfloat16`. The
    first positional argument of the old form is `enabled`, of the new one `device_type`: positional
    arguments become keywords. Regions that switch autocast off only change their device.

    ## Why it matters on a TPU
    Autocast for "cuda" silently does nothing to tensors on a TPU. `torch.autocast("tpu")` without a dtype
    casts to float16, for which the matrix unit has no fast path and which overflows without loss scaling.
    bfloat16 has the range of float32.

    ## Example
    ```python
    import torch
    from torch.cuda.amp import autocast

    def loss(model, x, amp):
        with autocast():
            a = model(x)
        with torch.cuda.amp.autocast(amp, torch.float16):
            b = model(x)
        with torch.autocast(device_type='cuda', dtype=torch.float16, enabled=amp):
            c = model(x)
        return a + b + c
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    def loss(model, x, amp):
        with torch.autocast("xla", dtype=torch.bfloat16):
            a = model(x)
        with torch.autocast("xla", enabled=amp, dtype=torch.bfloat16):
            b = model(x)
        with torch.autocast(device_type='xla', dtype=torch.bfloat16, enabled=amp):
            c = model(x)
        return a + b + c
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def loss(model, x, amp):
        with torch.autocast("tpu", dtype=torch.bfloat16):
            a = model(x)
        with torch.autocast("tpu", enabled=amp, dtype=torch.bfloat16):
            b = model(x)
        with torch.autocast(device_type='tpu', dtype=torch.bfloat16, enabled=amp):
            c = model(x)
        return a + b + c
    ```

    ## Example: switched off, as a decorator, in a ternary, as a partial
    ```python
    from contextlib import nullcontext
    from functools import partial

    import torch as th
    from torch.cuda.amp import autocast

    @autocast(enabled=False)
    def norm(x):
        return x.float().norm()

    def context(amp):
        return th.amp.autocast("cuda") if amp else nullcontext()

    fast = partial(th.autocast, device_type="cuda", dtype=th.float16)
    ```

    ## Use instead (torch_xla)
    ```python
    from contextlib import nullcontext
    from functools import partial

    import torch as th
    import torch_xla  # noqa: F401  registers the device

    @th.autocast("xla", enabled=False)
    def norm(x):
        return x.float().norm()

    def context(amp):
        return th.amp.autocast("xla", dtype=th.bfloat16) if amp else nullcontext()

    fast = partial(th.autocast, device_type="xla", dtype=th.bfloat16)
    ```

    ## Use instead (torch_tpu)
    ```python
    from contextlib import nullcontext
    from functools import partial

    import torch as th

    @th.autocast("tpu", enabled=False)
    def norm(x):
        return x.float().norm()

    def context(amp):
        return th.amp.autocast("tpu", dtype=th.bfloat16) if amp else nullcontext()

    fast = partial(th.autocast, device_type="tpu", dtype=th.bfloat16)
    ```

    ## Example: a computed device type needs its dtype on torch_tpu (torch_tpu)
    ```python
    import torch

    def run(model, x):
        with torch.autocast(x.device.type):
            return model(x)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def run(model, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return model(x)
    ```

    ## Example: what autocast does on CUDA is asked
    ```python
    import torch

    def cast(x):
        return x.to(torch.get_autocast_gpu_dtype()) if torch.is_autocast_enabled() else x
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    def cast(x):
        return x.to(torch.get_autocast_dtype("xla")) if torch.is_autocast_enabled("xla") else x
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def cast(x):
        return x.to(torch.get_autocast_dtype("tpu")) if torch.is_autocast_enabled("tpu") else x
    ```

    ## Example: the class as a value
    ```python
    import torch

    amp_autocast = torch.cuda.amp.autocast
    ```

    ## Not flagged
    ```python
    import torch

    with torch.autocast("cpu"):
        pass

    def island(x):
        with torch.autocast(device_type=x.device.type, enabled=False):
            return x.float()
    ```
    ```python
    def autocast(enabled, device="cpu"):
        return enabled

    with autocast(True):
        pass
    ```
    ```python
    def step(accelerator, model, x):
        with accelerator.autocast():
            return model(x)
    ```

    ## Fix safety
    Safe: bfloat16 is the target's native low precision, as float16 is on CUDA.

    ## References
    torch.autocast; measured on torch_xla 2.9 and torch_tpu 0.2: `torch.get_autocast_dtype("tpu")` is float16.
    """
    if not isinstance(node, ast.Call):
        yield from _reference(node, ctx)
        return
    names = ctx.model.qualnames(node.func)
    if len(names) > 1:
        if set(names) <= ANY_AUTOCAST and not set(names) <= AUTOCAST:
            yield Report(
                node,
                _CUDA,
                unfixed="two imports give autocast its meaning, and their arguments differ",
            )
            return
        names = ("torch.autocast",) if set(names) <= AUTOCAST else ()
    called = names[0] if names else ctx.model.star_name(node.func)
    if called in CUDA_AUTOCAST and not names:
        yield Report(node, _CUDA, unfixed="it comes from a star import")
    elif called in CUDA_AUTOCAST:
        yield _cuda_style(node, ctx)
    elif called in XLA_AUTOCAST:
        report = _xla_style(node, ctx)
        yield replace(report, fix=None, unfixed=STAYS) if report.fix and stays_on_xla(ctx) else report
    elif called in AUTOCAST and names:
        yield from _new_style(node, ctx, 0)
    elif called == "functools.partial" and node.args and ctx.qualname(node.args[0]) in AUTOCAST:
        yield from _new_style(node, ctx, 1)
    elif called in ("torch.is_autocast_enabled", "torch.get_autocast_gpu_dtype"):
        yield from _question(node, called, ctx)


def _quoted(ctx: Context) -> str:
    return f'"{ctx.device}"'


def _reference(node: ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """CUDA's autocast as a value, where the arguments it will get are not known."""
    if not isinstance(node.ctx, ast.Load) or call_of(node) or isinstance(parent(node), ast.Attribute | ast.Compare):
        return
    if ctx.qualname(node) not in CUDA_AUTOCAST | XLA_AUTOCAST:
        return
    above = parent(node)
    if isinstance(above, ast.Call) and getattr(above.func, "id", "") in ("isinstance", "issubclass"):
        return
    yield Report(
        node,
        f"{_CUDA}; write `functools.partial(torch.autocast, {_quoted(ctx)}, dtype=torch.bfloat16)`",
        unfixed="its first argument is `enabled`, that of torch.autocast is `device_type`, see its calls",
    )


def _cuda_style(call: ast.Call, ctx: Context) -> Report:
    """`torch.cuda.amp.autocast(enabled, dtype, cache_enabled)`."""
    message = f"{_CUDA}; it is `torch.autocast({_quoted(ctx)}, dtype=torch.bfloat16)`"
    if has_stars(call) or len(call.args) > 3:
        return Report(call, message, unfixed="its arguments are passed on by star: name them")
    edits = [ctx.edit(call.func, name("torch") + ".autocast")]
    if call.args or call.keywords:
        edits.append(before_arguments(call, device_string(ctx), "enabled=" if call.args else "", ctx))
        edits.extend(_keywords(call, 1, ("enabled", "dtype", "cache_enabled"), ctx))
        edits.extend(_dtype_edits(call, ctx, ctx.arg(call, "enabled", 0), ctx.arg(call, "dtype", 1), adds=True))
    else:
        edits.append(add_argument(ctx.source, call, f"{device_string(ctx)}, {_DTYPE}"))
    return Report(call, message, Fix(tuple(edits)))


def _keywords(call: ast.Call, start: int, parameters: tuple[str, ...], ctx: Context) -> Iterator[Edit]:
    """Make positional arguments from `start` on keywords."""
    for item, parameter in list(zip(call.args, parameters, strict=False))[start:]:
        begin, _ = argument_span(ctx.source, item)
        yield Edit(begin, begin, f"{parameter}=")


def _xla_style(call: ast.Call, ctx: Context) -> Report:
    """`torch_xla.amp.autocast(device, enabled, dtype, cache_enabled)`, which fails off the TPU."""
    message = f"`torch_xla.amp.autocast` is retired; it is `torch.autocast({_quoted(ctx)}, dtype=torch.bfloat16)`"
    device = ctx.arg(call, "device", 0)
    if has_stars(call) or device is None:
        return Report(call, message, unfixed="its arguments are passed on by star: name them")
    edits = [ctx.edit(call.func, name("torch") + ".autocast")]
    if call.args:
        edits.append(ctx.edit(device, device_string(ctx)))
    else:
        keyword = next(item for item in call.keywords if item.arg == "device")
        edits.append(Edit(*argument_span(ctx.source, keyword), f"device_type={device_string(ctx)}"))
    edits.extend(_keywords(call, 1, ("device", "enabled", "dtype", "cache_enabled"), ctx))
    edits.extend(_dtype_edits(call, ctx, ctx.arg(call, "enabled", 1), ctx.arg(call, "dtype", 2), adds=True))
    return Report(call, message, Fix(tuple(edits)), claims=(device,))


def _new_style(call: ast.Call, ctx: Context, shift: int) -> Iterator[Report]:
    """`torch.autocast(device_type, dtype, enabled, cache_enabled)`, or with `shift` 1 a partial of it."""
    if any(isinstance(item, ast.Starred) for item in call.args):
        return
    device = ctx.arg(call, "device_type", shift)
    if device is None:
        return
    foreign = [item for item in values(device) if device_text(item, ctx) is not None]
    if isinstance(device, ast.Constant) and not foreign and device.value != ctx.device:
        return  # autocast on the CPU or on another accelerator
    edits = [ctx.edit(item, device_string(ctx, quote(ctx.text(item)))) for item in foreign]
    adds = bool(foreign) or not ctx.xla  # autocast("xla") is bfloat16 by itself
    open_ = any(item.arg is None for item in call.keywords)
    dtype = ctx.arg(call, "dtype", 1 + shift)
    edits.extend(_dtype_edits(call, ctx, ctx.arg(call, "enabled", 2 + shift), dtype, adds=adds and not open_))
    if not edits:
        if open_ and adds and dtype is None and isinstance(device, ast.Constant):
            message = "autocast on the TPU casts to float16 unless told: pass `dtype=torch.bfloat16`"
            yield Report(call, message, unfixed="the dtype may be among the arguments passed on by star")
        return
    if foreign:
        message = f"{_CUDA}; the device type is {_quoted(ctx)}"
    elif dtype is None:
        message = "autocast on the TPU casts to float16 unless told: pass `dtype=torch.bfloat16`"
    else:
        message = "autocast to float16 overflows without loss scaling; the TPU's low precision is bfloat16"
    yield Report(call, message, Fix(tuple(edits)))


def _dtype_edits(
    call: ast.Call, ctx: Context, enabled: ast.expr | None, dtype: ast.expr | None, *, adds: bool
) -> list[Edit]:
    """What makes the dtype bfloat16: nothing where autocast is switched off or the dtype is computed."""
    if is_constant(enabled, False):
        return []
    if dtype is None:
        return [add_argument(ctx.source, call, _DTYPE)] if adds else []
    if is_constant(dtype, None):
        return [ctx.edit(dtype, name("torch") + ".bfloat16")] if adds else []
    return halves_to_bfloat16(dtype, ctx)


def _question(call: ast.Call, called: str, ctx: Context) -> Iterator[Report]:
    """`torch.is_autocast_enabled()` and `torch.get_autocast_gpu_dtype()` answer for CUDA."""
    if call.args or call.keywords or in_handler(call):
        return
    edits = [add_argument(ctx.source, call, device_string(ctx))]
    if called == "torch.get_autocast_gpu_dtype":
        if isinstance(call.func, ast.Attribute):
            edits.append(rename_method(ctx.source, call.func, "get_autocast_dtype"))
        else:
            edits.append(ctx.edit(call.func, name("torch") + ".get_autocast_dtype"))
    last = called.rpartition(".")[2]
    yield Report(call, f"`{last}()` answers for CUDA; ask for {_quoted(ctx)}", Fix(tuple(edits)))
