"""TPU207, TPU209: how precise float32 products are, and code that asks the GPU which dtypes it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, name
from tpumigrate.model import parent
from tpumigrate.rule import Context, Report, rule

from ._precision import BFLOAT16, in_handler, is_float16, looks_only

_SUPPORTED = "torch.cuda.is_bf16_supported"
_AVAILABLE = "torch.cuda.is_available"
_CAPABILITY = "torch.cuda.get_device_capability"


@rule("TPU207", "float32-matmul-precision", anchors=("set_float32_matmul_precision",))
def matmul_precision(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """`torch.set_float32_matmul_precision` means something else on a TPU.

    ## What it does
    Finds `torch.set_float32_matmul_precision(...)`. The settings "high" and "medium", which allow faster
    products on a GPU, go; "highest" stays on torch_tpu and becomes
    `torch_xla.backends.set_mat_mul_precision` on torch_xla.

    ## Why it matters on a TPU
    A TPU multiplies float32 in one bfloat16 pass unless told otherwise: its default is already the fast
    setting. On torch_tpu "high" means three passes, which is slower; on torch_xla the call has no effect
    at all.

    ## Example
    ```python
    import torch

    torch.set_float32_matmul_precision("high")
    model = torch.nn.Linear(4, 4)
    ```

    ## Use instead
    ```python
    import torch

    model = torch.nn.Linear(4, 4)
    ```

    ## Example: full precision (torch_xla)
    ```python
    import torch

    torch.set_float32_matmul_precision("highest")
    model = torch.nn.Linear(4, 4)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla.backends

    torch_xla.backends.set_mat_mul_precision("highest")
    model = torch.nn.Linear(4, 4)
    ```

    ## Example: a setting that is not known here
    ```python
    import torch

    def setup(precision):
        torch.set_float32_matmul_precision(precision)
    ```

    ## Not flagged
    ```python
    import torch

    print(torch.get_float32_matmul_precision())
    ```
    ```python
    def set_float32_matmul_precision(value):
        return value

    set_float32_matmul_precision("high")
    ```
    ```python
    class Settings:
        def set_float32_matmul_precision(self, value): ...

    Settings().set_float32_matmul_precision("high")
    ```

    ## Fix safety
    Safe: products get the target's native precision.

    ## References
    torch.set_float32_matmul_precision, torch_xla.backends.set_mat_mul_precision.
    """
    if ctx.qualname(node.func) != "torch.set_float32_matmul_precision":
        return
    setting = ctx.arg(node, "precision", 0)
    message = (
        "has no effect on torch_xla, whose default is one bfloat16 pass"
        if ctx.xla
        else "is slower than the TPU's default, one bfloat16 pass"
    )
    value = setting.value if isinstance(setting, ast.Constant) else None
    statement = parent(node)
    if value == "highest":
        if ctx.xla:
            fix = ctx.replace(node.func, name("torch_xla.backends") + ".set_mat_mul_precision")
            yield Report(node, f"the setting {message}", fix, severity="warning")
    elif value in ("high", "medium") and isinstance(statement, ast.Expr):
        yield Report(node, f'"{value}" {message}', Fix(deletes=(statement,)), severity="warning")
    else:
        unfixed = 'which setting is passed is not known: pass none but "highest"'
        yield Report(node, f"the setting {message}", unfixed=unfixed, severity="info")


@rule("TPU209", "bfloat16-probe", anchors=("is_bf16_supported", "is_available", "get_device_capability"))
def bfloat16_probe(node: ast.Call | ast.IfExp | ast.If, ctx: Context) -> Iterator[Report]:
    """The GPU is asked whether it has bfloat16, and the TPU gets float16 or float32.

    ## What it does
    Finds `torch.cuda.is_bf16_supported()`, ternaries and `if`s that choose between bfloat16 and another
    dtype by it or by the compute capability, and `torch.float16 if torch.cuda.is_available() else
    torch.float32`. Every TPU has bfloat16.

    ## Why it matters on a TPU
    `is_bf16_supported()` answers False without an exception, so that the wrong half is taken silently;
    `get_device_capability()` raises.

    ## Example
    ```python
    import torch

    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    other = torch.float16 if not torch.cuda.is_bf16_supported() else torch.bfloat16
    third = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16
    bf16 = torch.cuda.is_bf16_supported()
    word = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
    ```

    ## Use instead
    ```python
    import torch

    dtype = torch.bfloat16
    other = torch.bfloat16
    third = torch.bfloat16
    bf16 = True
    word = "bfloat16"
    ```

    ## Example: as statements
    ```python
    import torch

    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        dtype = torch.bfloat16
    else:
        dtype = torch.float16
    ```

    ## Use instead
    ```python
    import torch

    dtype = torch.bfloat16
    ```

    ## Example: half precision on the GPU (unsafe)
    ```python
    import torch

    weights = torch.float16 if torch.cuda.is_available() else torch.float32
    ```

    ## Use instead
    ```python
    import torch

    weights = torch.bfloat16
    ```

    ## Not flagged
    ```python
    import torch

    dtype = torch.bfloat16 if torch.backends.mps.is_available() else torch.float16
    ```
    ```python
    import torch

    def choose(fp16):
        return torch.float16 if fp16 else torch.float32
    ```
    ```python
    def is_bf16_supported():
        return True

    bf16 = is_bf16_supported()
    ```

    ## Fix safety
    Safe where the code itself prefers bfloat16; unsafe where float16 becomes bfloat16.

    ## References
    torch.cuda.is_bf16_supported; measured on torch_xla 2.9 and torch_tpu 0.2: it is False on both.
    """
    if isinstance(node, ast.Call):
        if ctx.qualname(node.func) == _SUPPORTED and not in_handler(node):
            message = "`is_bf16_supported()` is False without a GPU; every TPU has bfloat16"
            yield Report(node, message, ctx.replace(node, "True"))
    elif isinstance(node, ast.IfExp):
        yield from _ternary(node, ctx)
    elif _is_choice_by_statement(node, ctx):
        chosen = node.body[0] if _asks(node.test, ctx) == "bf16" else node.orelse[0]
        start, end = ctx.source.span(node)
        first, last = ctx.source.span(chosen)
        message = "the GPU's generation decides the dtype; every TPU has bfloat16"
        yield Report(node.test, message, Fix((Edit(start, first, ""), Edit(last, end, ""))), claims=(node,))


def _asks(test: ast.expr, ctx: Context) -> str:
    """What a condition asks: "bf16" or "no bf16" of the GPU, "gpu" whether there is one, "" anything else."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return {"bf16": "no bf16"}.get(_asks(test.operand, ctx), "")
        case ast.BoolOp(op=ast.And()):
            asked = {_asks(item, ctx) for item in test.values}
            return "bf16" if "bf16" in asked and asked <= {"bf16", "gpu"} else ""
        case ast.Call():
            return {_SUPPORTED: "bf16", _AVAILABLE: "gpu"}.get(ctx.qualname(test.func), "")
        case ast.Compare(left=left, ops=[ast.GtE()], comparators=[ast.Constant(value=8) | ast.Tuple() as bound]):
            major = isinstance(left, ast.Subscript) and isinstance(left.slice, ast.Constant) and left.slice.value == 0
            asked_call = left.value if isinstance(left, ast.Subscript) and major else left
            is_ampere = major if isinstance(bound, ast.Constant) else ast.unparse(bound) == "(8, 0)" and not major
            if is_ampere and isinstance(asked_call, ast.Call) and ctx.qualname(asked_call.func) == _CAPABILITY:
                return "bf16"
    return ""


def _ternary(node: ast.IfExp, ctx: Context) -> Iterator[Report]:
    asked = _asks(node.test, ctx)
    if not asked or not looks_only(node.test):
        return
    chosen, other = (node.orelse, node.body) if asked == "no bf16" else (node.body, node.orelse)
    text = name("torch") + ".bfloat16"
    named = _word(chosen) in ("bfloat16", "bf16") and _word(other) in ("float16", "fp16", "float32", "fp32")
    if asked != "gpu" and (named or (ctx.qualname(chosen) == BFLOAT16 and _is_dtype(other, ctx))):
        message = "the GPU's generation decides the dtype; every TPU has bfloat16"
        yield Report(node, message, ctx.replace(node, ctx.text(chosen)))
    elif asked == "gpu" and is_float16(chosen, ctx) and ctx.qualname(other) in ("torch.float32", "torch.float"):
        message = "half precision is chosen when there is a GPU; the TPU's is bfloat16"
        yield Report(node, message, ctx.replace(node, text, safe=False), claims=(node.test,))


def _word(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _is_dtype(node: ast.expr, ctx: Context) -> bool:
    return is_float16(node, ctx) or ctx.qualname(node) in ("torch.float32", "torch.float")


def _is_choice_by_statement(node: ast.If, ctx: Context) -> bool:
    """`if <bf16 probe>: dtype = torch.bfloat16` with an `else` that gives the same variable another dtype."""
    if len(node.body) != 1 or len(node.orelse) != 1 or _asks(node.test, ctx) not in ("bf16", "no bf16"):
        return False
    arms = [node.body[0], node.orelse[0]]
    first, second = arms if _asks(node.test, ctx) == "bf16" else arms[::-1]
    if not isinstance(first, ast.Assign) or not isinstance(second, ast.Assign) or not looks_only(node.test):
        return False
    source = ctx.source
    start, end = source.span(node)
    return (
        [ast.unparse(item) for item in first.targets] == [ast.unparse(item) for item in second.targets]
        and ctx.qualname(first.value) == BFLOAT16
        and _is_dtype(second.value, ctx)
        and not source.text.startswith("elif", start)
        and source.position(source.span(first)[0])[0] == source.position(source.span(first)[1])[0]
        and not any(token.kind == "comment" for token in source.tokens(start, end))
    )


def is_probed(place: ast.AST, ctx: Context) -> bool:
    """Whether a dtype is one arm of a choice that TPU209 makes."""
    if isinstance(place, ast.IfExp):
        return next(_ternary(place, ctx), None) is not None
    statement = parent(place)
    above = parent(statement) if statement is not None else None
    return isinstance(above, ast.If) and _is_choice_by_statement(above, ctx)
