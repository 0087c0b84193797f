"""TPU203, TPU204: float16 outside of autocast."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, call_parentheses, name
from tpumigrate.model import arguments, default_of, parent
from tpumigrate.rule import Context, Report, rule

from ._common import imports_torch
from ._precision import (
    ANY_AUTOCAST,
    CUSTOM_FORWARD_BACKWARD,
    float16_wanted,
    halves_to_bfloat16,
    is_float16,
    to_bfloat16,
)
from .precision_probe import is_probed

_DTYPE_NAME = re.compile(r"(?:^|_)d_?type(?:_|\d|$)", re.IGNORECASE)
_MOVES = frozenset({"to", "type", "to_empty", "new_tensor"})


@rule("TPU203", "float16-dtype", anchors=("float16", ".half", "import half"))
def float16_dtype(node: ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """A dtype is chosen to be float16.

    ## What it does
    Finds `torch.float16` and `torch.half` where they choose a dtype: `dtype=`, `torch_dtype=`,
    `param_dtype=`, `.to(torch.float16)`, variables and default arguments that end up there. Comparisons,
    membership tests, tables and dictionary keys stay: changing them would make checks vacuous.

    ## Why it matters on a TPU
    The matrix unit multiplies bfloat16; float16 works but has no fast path, leaves torch_tpu's flash
    attention, and overflows at 65504, with no loss scaling left to notice.

    ## Example
    ```python
    import torch

    amp_dtype = torch.float16

    def run(model, x, device_type, args):
        with torch.autocast(device_type, dtype=amp_dtype):
            model(x)
        chosen = {"bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
        return torch.autocast(device_type, dtype=chosen)
    ```

    ## Use instead
    ```python
    import torch

    amp_dtype = torch.bfloat16

    def run(model, x, device_type, args):
        with torch.autocast(device_type, dtype=amp_dtype):
            model(x)
        chosen = {"bfloat16": torch.bfloat16, "float16": torch.bfloat16}[args.dtype]
        return torch.autocast(device_type, dtype=chosen)
    ```

    ## Example: tensors and modules (unsafe)
    ```python
    import torch
    from torch import nn

    def build(model: nn.Module, n, fp16):
        model.to(torch.float16)
        dtype = torch.float16 if fp16 else torch.float32
        return torch.zeros(n, dtype=dtype), torch.ones(n, dtype=torch.half)

    def load(pipeline, name, torch_dtype=torch.float16):
        return pipeline.from_pretrained(name, torch_dtype=torch_dtype)
    ```

    ## Use instead
    ```python
    import torch
    from torch import nn

    def build(model: nn.Module, n, fp16):
        model.to(torch.bfloat16)
        dtype = torch.bfloat16 if fp16 else torch.float32
        return torch.zeros(n, dtype=dtype), torch.ones(n, dtype=torch.bfloat16)

    def load(pipeline, name, torch_dtype=torch.bfloat16):
        return pipeline.from_pretrained(name, torch_dtype=torch_dtype)
    ```

    ## Example: named by a setting
    ```python
    import torch

    def weights(precision):
        dtype = torch.float32
        if precision == "fp16":
            dtype = torch.float16
        return torch.zeros(2, dtype=dtype)
    ```

    ## Example: chosen from a table
    ```python
    import torch

    def dtype_of(args):
        dtype = {"fp32": torch.float32, "fp16": torch.float16}[args.dtype]
        return torch.zeros(2, dtype=dtype)
    ```

    ## Not flagged
    ```python
    import torch

    def check(x):
        if x.dtype == torch.float16:
            return x.float()
        assert x.dtype in (torch.float16, torch.bfloat16)
        return x
    ```
    ```python
    import numpy as np
    import torch

    PEAK = {torch.float16: 11.0, torch.bfloat16: 80.0}
    NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16}
    a = np.zeros(2, dtype=np.float16)
    bits = torch.zeros(2, dtype=torch.int16).view(torch.float16)
    tiny = torch.finfo(torch.float16).tiny
    ```
    ```python
    ckpt = {"precision": "fp16", "half_life": 0.5}
    ```

    ## Fix safety
    Unsafe: bfloat16 has 8 bits of mantissa, float16 has 11. Safe where the dtype is used by autocast
    alone, as bfloat16 is the target's native low precision.

    ## References
    torch.bfloat16; measured on torch_xla 2.9 and torch_tpu 0.2: float16 is accepted without a warning.
    """
    if not is_float16(node, ctx) or not isinstance(node.ctx, ast.Load):
        return
    place, above = _place(node)
    if _is_in_table(place, above):
        chosen = _chosen_from(above)
        if chosen is not None and _only_for_autocast(*_place(chosen), ctx):
            message = "autocast to float16 overflows without loss scaling; the TPU's low precision is bfloat16"
            yield Report(node, message, Fix((to_bfloat16(node, ctx),)))
        elif chosen is not None:
            yield Report(
                node,
                "the table offers float16, for which the TPU has no fast path: choose bfloat16",
                unfixed="which entry is taken is decided when the program runs",
                severity="info",
            )
        return
    if not _chooses(place, above, ctx) or is_probed(place, ctx):
        return
    if place is not node and node is not _first_half(place, ctx):
        return  # one report a ternary
    message = "float16 has no fast path on the TPU and overflows at 65504; its low precision is `torch.bfloat16`"
    reason = float16_wanted(node, ctx)
    if reason:
        yield Report(node, message, unfixed=reason, severity="warning")
        return
    edits = halves_to_bfloat16(place, ctx) if isinstance(place, ast.expr) else []
    safe = _only_for_autocast(place, above, ctx)
    yield Report(node, message, Fix(tuple(edits), safe=safe), severity="warning")


def _place(node: ast.AST) -> tuple[ast.AST, ast.AST | None]:
    """The whole expression of which `node` is a possible value, and what is around it."""
    place, above = node, parent(node)
    while (isinstance(above, ast.IfExp) and place is not above.test) or isinstance(above, ast.BoolOp):
        place, above = above, parent(above)
    return place, above


def _first_half(place: ast.AST, ctx: Context) -> ast.AST | None:
    return next((item for item in ast.walk(place) if is_float16(item, ctx) and _place(item)[0] is place), None)


def _is_in_table(place: ast.AST, above: ast.AST | None) -> bool:
    return isinstance(above, ast.Dict) and any(item is place for item in above.values)


def _chosen_from(table: ast.AST | None) -> ast.expr | None:
    """The expression that takes an entry of a dictionary where the dictionary is written: `{...}[key]`."""
    above = parent(table) if table is not None else None
    if isinstance(above, ast.Subscript) and above.value is table:
        return above
    call = parent(above) if isinstance(above, ast.Attribute) and above.attr == "get" else None
    return call if isinstance(call, ast.Call) and call.func is above else None


def _chooses(place: ast.AST, above: ast.AST | None, ctx: Context) -> bool:
    match above:
        case ast.keyword(arg=str(keyword)):
            return bool(_DTYPE_NAME.search(keyword)) and not _is_others(above, ctx)
        case ast.Call():
            return place is not above.func and _positional(place, above, ctx)
        case ast.Assign():
            return any(_is_dtype_target(target, ctx) for target in above.targets)
        case ast.AnnAssign() | ast.NamedExpr():
            return _is_dtype_target(above.target, ctx)
        case ast.arguments():
            owner = parent(above)
            return owner is not None and any(
                default_of(owner, arg) is place and _DTYPE_NAME.search(arg.arg) for arg in arguments(owner)
            )
    return False


def _is_others(keyword: ast.keyword, ctx: Context) -> bool:
    """Whether a call's dtype is looked after by another rule, or is no choice: a plain `dict(dtype=...)`."""
    call = parent(keyword)
    if not isinstance(call, ast.Call):
        return True
    called = set(ctx.model.qualnames(call.func))
    if "functools.partial" in called and call.args:
        called = {ctx.qualname(call.args[0])}
    return bool(called & (ANY_AUTOCAST | CUSTOM_FORWARD_BACKWARD)) or getattr(call.func, "id", "") == "dict"


def _positional(place: ast.AST, call: ast.Call, ctx: Context) -> bool:
    called = ctx.qualname(call.func)
    if called:
        return called == "torch.set_default_dtype"
    if isinstance(call.func, ast.Attribute):
        rounded = parent(call)  # `x.to(float16).float()`: to float16 and back, on purpose
        back = isinstance(rounded, ast.Attribute) and rounded.attr in ("float", "double")
        return call.func.attr in _MOVES and imports_torch(ctx) and not back
    if isinstance(call.func, ast.Name):
        for binding in ctx.model.bindings(call.func):
            if isinstance(binding.node, ast.FunctionDef):
                names = [arg.arg for arg in [*binding.node.args.posonlyargs, *binding.node.args.args]]
                index = next((i for i, item in enumerate(call.args) if item is place), len(names))
                return index < len(names) and bool(_DTYPE_NAME.search(names[index]))
    return False


def _is_dtype_target(target: ast.expr, ctx: Context) -> bool:
    match target:
        case ast.Name():
            return bool(_DTYPE_NAME.search(target.id)) or any(_is_dtype_use(use, ctx) for use in _uses(target, ctx))
        case ast.Attribute():
            return bool(_DTYPE_NAME.search(target.attr))
    return False


def _uses(target: ast.Name, ctx: Context) -> list[ast.Name]:
    return ctx.model.uses(target.id, ctx.model.bindings(target))


def _is_dtype_use(use: ast.Name, ctx: Context) -> bool:
    above = parent(use)
    if isinstance(above, ast.keyword):
        return above.arg is not None and bool(_DTYPE_NAME.search(above.arg))
    return isinstance(above, ast.Call) and use in above.args and _positional(use, above, ctx)


def _only_for_autocast(place: ast.AST, above: ast.AST | None, ctx: Context) -> bool:
    """Whether a variable is the dtype of autocast alone; comparisons and messages may read it."""
    if not isinstance(above, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        return False
    target = above.targets[0] if isinstance(above, ast.Assign) else above.target
    if not isinstance(target, ast.Name):
        return False
    found = False
    for use in _uses(target, ctx):
        around = parent(use)
        call = parent(around) if isinstance(around, ast.keyword) else around
        if isinstance(call, ast.Call) and set(ctx.model.qualnames(call.func)) & ANY_AUTOCAST:
            found = True
        elif not isinstance(around, ast.Compare | ast.FormattedValue):
            return False
    return found


@rule("TPU204", "half-method", anchors=(".half(",))
def half_method(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """`.half()` makes a module or a tensor float16.

    ## What it does
    Finds `.half()` on modules and tensors and writes `.to(torch.bfloat16)`.

    ## Why it matters on a TPU
    The matrix unit multiplies bfloat16; float16 works but has no fast path, leaves torch_tpu's flash
    attention, and overflows at 65504.

    ## Example
    ```python
    def prepare(path):
        import torch

        return torch.load(path).half()
    ```

    ## Example: tensors and modules (unsafe)
    ```python
    import torch

    model = torch.nn.Linear(4, 4).half()
    x = torch.ones(2, 4).half().contiguous()
    ```

    ## Use instead
    ```python
    import torch

    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    x = torch.ones(2, 4).to(torch.bfloat16).contiguous()
    ```

    ## Example: under a flag (unsafe)
    ```python
    from torch import nn

    def prepare(model: nn.Module, im, half):
        model.half() if half else model.float()
        return im.half() if half else im.float()
    ```

    ## Use instead
    ```python
    import torch
    from torch import nn

    def prepare(model: nn.Module, im, half):
        model.to(torch.bfloat16) if half else model.float()
        return im.to(torch.bfloat16) if half else im.float()
    ```

    ## Example: for a file, and to match a tensor
    ```python
    from copy import deepcopy

    import torch

    def save(path, model, x):
        model = model.half() if x.dtype == torch.float16 else model
        torch.save({"model": deepcopy(model).half()}, path)
    ```

    ## Example: of the parent class
    ```python
    import torch

    class Net(torch.nn.Module):
        def half(self):
            return super().half()
    ```

    ## Not flagged
    ```python
    import torch

    class Cake:
        def half(self):
            return 0.5

    print(Cake().half())
    ```
    ```python
    def cut(cake):
        return cake.half()  # no torch in this file
    ```
    ```python
    import fractions
    import torch

    x = fractions.half()
    fn = torch.Tensor.half
    rounded = torch.ones(2).half().float()
    ```

    ## Fix safety
    Unsafe: bfloat16 has 8 bits of mantissa, float16 has 11; checkpoints that are written get the other dtype.

    ## References
    torch.Tensor.half, torch.nn.Module.half.
    """
    func = node.func
    if not isinstance(func, ast.Attribute) or func.attr != "half" or node.args or node.keywords:
        return
    message = "float16 has no fast path on the TPU and overflows at 65504; write `.to(torch.bfloat16)`"
    receiver = func.value
    if isinstance(receiver, ast.Call) and getattr(receiver.func, "id", "") == "super":
        if imports_torch(ctx):
            yield Report(node, message, unfixed="it passes on to the parent class's `half()`", severity="warning")
        return
    kind = ctx.kind(receiver)
    if kind not in ("tensor", "module") and (kind or ctx.model.qualnames(receiver) or not imports_torch(ctx)):
        return
    if isinstance(parent(node), ast.Attribute) and getattr(parent(node), "attr", "") in ("float", "double"):
        return  # rounded to float16 and back, on purpose
    reason = float16_wanted(node, ctx) or _for_storage(node)
    if reason:
        yield Report(node, message, unfixed=reason, severity="warning")
        return
    _, end = ctx.source.span(func)
    edit = Edit(end - len("half"), call_parentheses(ctx.source, node)[1], f"to({name('torch')}.bfloat16)")
    yield Report(node, message, Fix((edit,), safe=False), severity="warning")


def _for_storage(call: ast.Call) -> str:
    """Why a half is likely made to be stored: a copy, or an entry of a dictionary such as a checkpoint."""
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    copied = isinstance(receiver, ast.Call) and "deepcopy" in (
        getattr(receiver.func, "id", ""),
        getattr(receiver.func, "attr", ""),
    )
    if copied or isinstance(parent(call), ast.Dict):
        return "it seems to be made for a file, where float16 is fine: see who reads it"
    return ""
