"""TPU111: the typed tensors of torch.cuda, which are constructors, cast targets, classes and strings at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, name, replace
from tpumigrate.model import call_of, parent
from tpumigrate.rule import Context, Report, rule

from ._choices import CUDA_AVAILABLE, available
from ._common import device_string, imports_torch
from ._devices import is_annotation

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
}
_SETTER = "torch.set_default_tensor_type"


@rule("TPU111", "cuda-tensor-type", anchors=("cuda",))
def cuda_tensor_type(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Uses a typed tensor of torch.cuda: `torch.cuda.FloatTensor`, `"torch.cuda.HalfTensor"`.

    ## What it does
    Constructors become `torch.tensor` (of data) or `torch.empty` (of sizes), casts become `.to(device, dtype)`,
    `set_default_tensor_type` becomes a default device and dtype, and a switch between the CPU's and CUDA's type for
    casting or construction is taken apart where it can be. Checks with isinstance are reported.

    ## Why it matters on a TPU
    The types do not exist there: calling one raises, and isinstance is False.

    ## Example
    ```python
    import torch

    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    idx = torch.cuda.LongTensor([0, 2, 5])
    z = torch.cuda.FloatTensor(2, 3)
    mask = idx.type(torch.cuda.ByteTensor)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    torch.set_default_dtype(torch.float32); torch.set_default_device("xla")
    idx = torch.tensor([0, 2, 5], dtype=torch.int64, device="xla")
    z = torch.empty(2, 3, dtype=torch.float32, device="xla")
    mask = idx.to("xla", torch.uint8)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    torch.set_default_dtype(torch.float32); torch.set_default_device("tpu")
    idx = torch.tensor([0, 2, 5], dtype=torch.int64, device="tpu")
    z = torch.empty(2, 3, dtype=torch.float32, device="tpu")
    mask = idx.to("tpu", torch.uint8)
    ```

    ## Example: a name for the type
    ```python
    import torch

    cuda = torch.cuda.is_available()
    Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor

    def labels(x, noise):
        ones = Tensor(x.size(0), 1).fill_(1.0)
        return ones, noise.type(Tensor)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla.runtime as xr

    cuda = xr.device_type() is not None

    def labels(x, noise):
        ones = torch.empty(x.size(0), 1, dtype=torch.float32, device="xla" if cuda else "cpu").fill_(1.0)
        return ones, noise.to("xla" if cuda else "cpu", torch.float32)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    cuda = torch.accelerator.is_available()

    def labels(x, noise):
        ones = torch.empty(x.size(0), 1, dtype=torch.float32, device="tpu" if cuda else "cpu").fill_(1.0)
        return ones, noise.to("tpu" if cuda else "cpu", torch.float32)
    ```

    ## Example: a class among others
    ```python
    import torch

    def on_gpu(t):
        return isinstance(t, (torch.cuda.FloatTensor, torch.cuda.HalfTensor))
    ```

    ## Example: what is the argument?
    ```python
    import torch

    def make(n):
        return torch.cuda.LongTensor(n)
    ```

    ## Not flagged
    ```python
    import torch

    x = torch.FloatTensor([1.0])
    ```
    ```python
    import torch

    def f(x: "torch.cuda.FloatTensor") -> torch.cuda.FloatTensor:
        return x
    ```
    ```python
    NAME = "torch.cuda.FloatTensor"
    ```

    ## Fix safety
    Safe.

    ## References
    torch.set_default_device.
    """
    if isinstance(node, ast.Call):
        if ctx.qualname(node.func) == _SETTER and len(node.args) == 1:
            yield from _default_type(node, ctx)
        elif _cuda_dtype(node.func, ctx):
            yield _constructor(node, ctx)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "type" and len(node.args) == 1:
            yield from _cast(node, ctx)
        return
    dtype = _cuda_dtype(node, ctx)
    above = parent(node)
    if not dtype or is_annotation(node) or call_of(node):
        return
    alias = _alias_fix(node, ctx)
    if alias is not None:
        yield Report(node, "typed CUDA tensors do not exist on a TPU", alias)
    elif not (isinstance(above, ast.Call) and isinstance(above.func, ast.Attribute) and above.func.attr == "type"):
        yield Report(
            node,
            "no tensor on a TPU is of this class",
            unfixed="compare `t.dtype` and `t.device.type` instead",
            severity="warning",
        )


def _cuda_dtype(node: ast.AST, ctx: Context) -> str:
    """The dtype of a typed CUDA tensor class, by name or in a string, "" for anything else."""
    dotted = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ctx.qualname(node)
    head, _, last = dotted.rpartition(".")
    return _DTYPES.get(last.removesuffix("Tensor"), "") if head == "torch.cuda" and last.endswith("Tensor") else ""


def _default_type(node: ast.Call, ctx: Context) -> Iterator[Report]:
    dtype = _cuda_dtype(node.args[0], ctx)
    if not dtype:
        return
    message = "the default tensor type can't be a CUDA type on a TPU host"
    stmt = parent(node)
    if not isinstance(stmt, ast.Expr):
        yield Report(node, message, unfixed="set the default device and dtype by hand", claims=(node,))
        return
    torch = name("torch")
    text = f"{torch}.set_default_dtype({torch}.{dtype}); {torch}.set_default_device({device_string(ctx)})"
    yield Report(node, message, Fix((Edit(*ctx.source.span(node), text),)))


def _constructor(node: ast.Call, ctx: Context) -> Report:
    dtype = _cuda_dtype(node.func, ctx)
    message = "typed CUDA tensors can't be made on a TPU host"
    keywords = f"dtype={name('torch')}.{dtype}, device={device_string(ctx)}"
    if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
        return Report(node, message, unfixed="its arguments are passed on: write torch.empty or torch.tensor")
    end = ctx.source.span(node)[1] - 1
    if len(node.args) == 1 and _is_data(node.args[0], ctx):
        factory = "tensor"
    elif node.args and all(_is_size(arg, ctx) for arg in node.args):
        factory = "empty"
    elif not node.args:
        edits = (replace(ctx.source, node.func, f"{name('torch')}.empty"), Edit(end, end, f"0, {keywords}"))
        return Report(node, message, Fix(edits))
    else:
        return Report(node, message, unfixed="its argument may be data (torch.tensor) or a size (torch.empty)")
    edits = (replace(ctx.source, node.func, f"{name('torch')}.{factory}"), Edit(end, end, f", {keywords}"))
    return Report(node, message, Fix(edits))


def _is_data(node: ast.expr, ctx: Context) -> bool:
    return isinstance(node, ast.List | ast.ListComp)


def _is_size(node: ast.expr, ctx: Context) -> bool:
    if ctx.kind(node) == "int":
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
        return len(node.args) == 1
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape"


def _cast(node: ast.Call, ctx: Context) -> Iterator[Report]:
    dtype = _cuda_dtype(node.args[0], ctx)
    receiver = node.func.value if isinstance(node.func, ast.Attribute) else node
    if not dtype or not imports_torch(ctx) or ctx.kind(receiver).startswith("class:"):
        return
    _, end = ctx.source.span(node.func)
    assert isinstance(node.func, ast.Attribute)
    edits = (
        Edit(end - len("type"), end, "to"),
        Edit(*ctx.source.span(node.args[0]), f"{device_string(ctx)}, {name('torch')}.{dtype}"),
    )
    yield Report(node, "a cast to a typed CUDA tensor raises on a TPU host", Fix(edits))


def _alias_fix(node: ast.Attribute | ast.Name, ctx: Context) -> Fix | None:
    """A fix for `Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor` whose uses make or cast tensors.

    The name goes; each use says its dtype and device itself.
    """
    choice = parent(node)
    assign = parent(choice) if isinstance(choice, ast.IfExp) else choice
    if not isinstance(assign, ast.Assign) or len(assign.targets) != 1 or not isinstance(assign.targets[0], ast.Name):
        return None
    scope = ctx.model.scope(assign)
    bindings = scope.bindings.get(assign.targets[0].id, [])
    dtype = _cuda_dtype(node, ctx)
    device = _alias_device(node, choice, dtype, ctx) if isinstance(choice, ast.IfExp) else device_string(ctx)
    if len(bindings) != 1 or not device:
        return None
    edits: list[Edit] = []
    for use in ctx.model.uses(bindings[0].name, bindings):
        edit = _alias_use(use, dtype, device, ctx)
        if edit is None:
            return None
        edits.extend(edit)
    return Fix(tuple(edits), deletes=(assign,)) if edits else None


def _alias_device(node: ast.expr, choice: ast.IfExp, dtype: str, ctx: Context) -> str:
    """The device that a choice between two tensor types means, "" when it can't be told or repeated elsewhere."""
    other = choice.orelse if choice.body is node else choice.body
    if ctx.qualname(other) not in (f"torch.{_type_name(dtype)}", "torch.Tensor"):
        return ""
    if isinstance(choice.test, ast.Call) and ctx.qualname(choice.test.func) == CUDA_AVAILABLE:
        condition = available(ctx)
        if ctx.xla:
            return device_string(ctx) if choice.body is node else ""
    elif isinstance(choice.test, ast.Name) and len(ctx.model.bindings(choice.test)) == 1:
        condition = choice.test.id
    else:
        return ""
    arms = (device_string(ctx), '"cpu"') if choice.body is node else ('"cpu"', device_string(ctx))
    return f"{arms[0]} if {condition} else {arms[1]}"


def _type_name(dtype: str) -> str:
    return next(f"{prefix}Tensor" for prefix, known in _DTYPES.items() if known == dtype)


def _alias_use(use: ast.Name, dtype: str, device: str, ctx: Context) -> list[Edit] | None:
    """Edits for one use of a name for a tensor type, None when the use is not understood."""
    above = parent(use)
    source = ctx.source
    torch = name("torch")
    if isinstance(above, ast.Call) and above.func is use and not above.keywords:
        end = source.span(above)[1] - 1
        keywords = f", dtype={torch}.{dtype}, device={device}"
        if len(above.args) == 1 and _is_data(above.args[0], ctx):
            return [Edit(*source.span(use), f"{torch}.tensor"), Edit(end, end, keywords)]
        if above.args and all(_is_size(arg, ctx) for arg in above.args):
            return [Edit(*source.span(use), f"{torch}.empty"), Edit(end, end, keywords)]
        return None
    if not isinstance(above, ast.Call) or above.args != [use] or not isinstance(above.func, ast.Attribute):
        return None
    if above.func.attr != "type":
        return None
    end = source.span(above.func)[1]
    return [Edit(end - len("type"), end, "to"), Edit(*source.span(use), f"{device}, {torch}.{dtype}")]
