"""TPU202: loss scaling, which bfloat16 does not need and TPUs do not support."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, add_argument, call_parentheses, name, remove_arguments
from tpumigrate.model import call_of, has_stars, parent, statement
from tpumigrate.rule import Context, Report, rule

from ._devices import device_text, quote
from ._precision import before_arguments, is_constant
from ._scaler import ANY_SCALER, CUDA_SCALERS, SCALERS, XLA_SCALERS, Stays, removal
from ._xla_whole import STAYS, stays_on_xla

_COMMENT = "  # bf16 on TPU needs no loss scaling"


@rule("TPU202", "grad-scaler", anchors=("GradScaler",))
def grad_scaler(node: ast.Call | ast.ClassDef | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Loss scaling with a GradScaler.

    ## What it does
    Finds `GradScaler()` of torch.amp, torch.cuda.amp and torch_xla.amp. When everything that the file
    does with the scaler is understood, one fix takes all of it out: `scaler.scale(loss).backward()`
    becomes `loss.backward()`, `scaler.step(opt)` becomes `opt.step()`, `unscale_` and `update` go, and
    two branches that differ only in the scaler become one. Otherwise (it is part of the checkpoint,
    passed on, used by other classes) the object stays with `enabled=False`: all its methods then pass
    through, and checkpoints keep their entry.

    ## Why it matters on a TPU
    bfloat16 has the exponents of float32: nothing underflows, nothing is to be scaled. On torch_tpu an
    enabled scaler raises (`_amp_foreach_non_finite_check_and_unscale_` is not implemented); on torch_xla
    it fetches a value from the device in every step and cuts the step into two graphs.
    `torch_xla.amp.GradScaler` is gone since 2.9.

    ## Example
    ```python
    import torch
    from torch.cuda.amp import GradScaler

    def train(model, opt, batches, loss_fn, accumulate=2):
        scaler = GradScaler()
        for x, y in batches:
            loss = loss_fn(model(x), y)
            scaler.scale(loss / accumulate).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla

    def train(model, opt, batches, loss_fn, accumulate=2):
        for x, y in batches:
            loss = loss_fn(model(x), y)
            (loss / accumulate).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            torch_xla.sync()
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def train(model, opt, batches, loss_fn, accumulate=2):
        for x, y in batches:
            loss = loss_fn(model(x), y)
            (loss / accumulate).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
    ```

    ## Example: two branches that become one (torch_tpu)
    ```python
    import torch

    def train(model: torch.nn.Module, opt, batches, loss_fn, amp):
        scaler = torch.amp.GradScaler("cuda") if amp else None
        for x, y in batches:
            loss = loss_fn(model(x), y)
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
            else:
                loss.backward()
                opt.step()
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def train(model: torch.nn.Module, opt, batches, loss_fn, amp):
        for x, y in batches:
            loss = loss_fn(model(x), y)
            loss.backward()
            opt.step()
    ```

    ## Example: part of the checkpoint
    ```python
    import torch

    class Trainer:
        def __init__(self, amp):
            self.scaler = torch.cuda.amp.GradScaler(enabled=amp)

        def state(self):
            return {"scaler": self.scaler.state_dict()}
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    class Trainer:
        def __init__(self, amp):
            self.scaler = torch.amp.GradScaler("xla", enabled=False)  # bf16 on TPU needs no loss scaling

        def state(self):
            return {"scaler": self.scaler.state_dict()}
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    class Trainer:
        def __init__(self, amp):
            self.scaler = torch.amp.GradScaler("tpu", enabled=False)  # bf16 on TPU needs no loss scaling

        def state(self):
            return {"scaler": self.scaler.state_dict()}
    ```

    ## Example: passed on
    ```python
    from torch.amp import GradScaler

    def main(train, model):
        train(model, GradScaler('cuda'))
    ```

    ## Use instead (torch_xla)
    ```python
    from torch.amp import GradScaler

    def main(train, model):
        train(model, GradScaler('xla', enabled=False))
    ```

    ## Use instead (torch_tpu)
    ```python
    from torch.amp import GradScaler

    def main(train, model):
        train(model, GradScaler('tpu', enabled=False))
    ```

    ## Example: a class of its own
    ```python
    import torch

    class LoggingScaler(torch.amp.GradScaler):
        pass
    ```

    ## Not flagged
    ```python
    import torch

    scaler = torch.amp.GradScaler("cpu")
    other = torch.amp.GradScaler("cuda", enabled=False)
    ```
    ```python
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    scaler.scale([1.0])
    ```
    ```python
    import torch

    def step(scaler: torch.amp.GradScaler, loss, opt):
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    ```

    ## Fix safety
    Safe: gradients are the same as without scaling. Steps that float16 would have skipped, because a gradient
    overflowed, are made.

    ## References
    torch.amp.GradScaler; a disabled scaler was run on torch_xla 2.9 and torch_tpu 0.2, where it neither
    warns nor touches the device.
    """
    if isinstance(node, ast.Call):
        yield from _construction(node, ctx)
    elif isinstance(node, ast.ClassDef):
        for base in node.bases:
            if ctx.qualname(base) in ANY_SCALER:
                yield Report(
                    base,
                    _message(ctx),
                    unfixed="a class derives from it: make its instances with `enabled=False`",
                )
    elif isinstance(node.ctx, ast.Load) and ctx.qualname(node) in ANY_SCALER and _is_value(node):
        yield Report(
            node,
            _message(ctx),
            unfixed="the class is used as a value: see that it is made with `enabled=False`",
        )


def _message(ctx: Context) -> str:
    if ctx.xla:
        return "loss scaling costs a transfer and a second graph in every step, and bfloat16 does not need it"
    return "an enabled GradScaler raises on the TPU, and bfloat16 does not need loss scaling"


def _is_value(node: ast.AST) -> bool:
    """Whether the class is passed or assigned, not called, tested or named in an annotation."""
    above = parent(node)
    if isinstance(above, ast.Call):
        return above.func is not node and getattr(above.func, "id", "") not in (
            "isinstance",
            "issubclass",
            "cast",
        )
    return isinstance(above, ast.Assign | ast.keyword | ast.Dict | ast.IfExp | ast.Return) and not call_of(node)


def _construction(call: ast.Call, ctx: Context) -> Iterator[Report]:
    names = set(ctx.model.qualnames(call.func))
    if not names and ctx.model.star_name(call.func) in ANY_SCALER:
        yield Report(call, _message(ctx), unfixed="it comes from a star import: pass `enabled=False`")
    if not names or not names <= ANY_SCALER:
        return
    old = bool(names & (CUDA_SCALERS | XLA_SCALERS)) and not names & SCALERS
    enabled = ctx.arg(call, "enabled", 4 if old else 5 if names <= SCALERS else None)
    if is_constant(enabled, False) and not names & XLA_SCALERS:
        return
    device = None if old else ctx.arg(call, "device", 0)
    if _is_elsewhere(device, ctx):
        return
    if has_stars(call):
        yield Report(call, _message(ctx), unfixed="its arguments are passed on by star: pass `enabled=False`")
        return
    if names & XLA_SCALERS and stays_on_xla(ctx):
        yield Report(call, _message(ctx), unfixed=STAYS)
        return
    try:
        yield Report(call, _message(ctx) + "; all of it goes", removal(call, ctx))
    except Stays as reason:
        fix = Fix(tuple(_disabling(call, enabled, device, ctx, old=old)))
        yield Report(call, f"{_message(ctx)}; it stays, switched off: {reason}", fix)


def _is_elsewhere(device: ast.expr | None, ctx: Context) -> bool:
    """Whether a scaler is for the CPU or another accelerator."""
    return (
        isinstance(device, ast.Constant)
        and isinstance(device.value, str)
        and device.value not in ("cuda", "xla", "tpu")
    )


def _disabling(
    call: ast.Call, enabled: ast.expr | None, device: ast.expr | None, ctx: Context, *, old: bool
) -> Iterator[Edit]:
    """Edits that switch a scaler off where it is made.

    The deprecated classes become torch.amp.GradScaler, whose parameters are the same after the device.
    """
    source = ctx.source
    stale = [item for item in call.keywords if item.arg == "use_zero_grad"]
    every = [item for item in [*call.args, *call.keywords] if item not in stale]
    opening, closing = call_parentheses(source, call)
    if old:
        yield ctx.edit(call.func, f"{name('torch')}.amp.GradScaler")
        first = f'"{ctx.device}"'
        if not every:
            yield Edit(opening + 1, closing - 1, f"{first}, enabled=False")
            yield from _comment(call, ctx)
            return
        yield before_arguments(call, first, "", ctx)
    elif device is not None and device_text(device, ctx) is not None:
        mark = quote(ctx.text(device))
        yield ctx.edit(device, f"{mark}{ctx.device}{mark}")
    if stale:
        yield from remove_arguments(source, call, [*stale])
    yield add_argument(source, call, "enabled=False") if enabled is None else ctx.edit(enabled, "False")
    yield from _comment(call, ctx)


def _comment(call: ast.Call, ctx: Context) -> Iterator[Edit]:
    """A comment at the end of a line that ends with the call and has room."""
    source = ctx.source
    end = source.span(call)[1]
    line = source.text[source.line_start(end) : source.line_end(end)].rstrip("\r\n")
    stop = source.line_start(end) + len(line)
    alone = not source.text[end:stop].strip() and source.span(statement(call))[1] == end
    if alone and source.line_start(source.span(call)[0]) == source.line_start(end) and len(line) < 90:
        yield Edit(end, end, _COMMENT)
