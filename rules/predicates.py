"""TPU105: code that asks what device a tensor is on, judged by what the answer decides."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix
from tpumigrate.model import class_of, parent, statement
from tpumigrate.rule import Context, Report, rule

from ._common import imports_torch
from ._devices import in_test_decorator, is_annotation, quote

_AUTOGRAD_FUNCTION = frozenset({"torch.autograd.Function", "torch.autograd.function.Function"})
_ACCELERATORS = frozenset("cuda xpu npu mps mtia hpu mlu musa privateuseone ipu xla tpu".split())


@rule("TPU105", "device-predicate", anchors=("is_cuda", "cuda"))
def device_predicate(
    node: ast.Attribute | ast.Compare | ast.Set | ast.Tuple | ast.List | ast.Dict | ast.Call, ctx: Context
) -> Iterator[Report]:
    """Asks whether something is on a CUDA device, which is never so on a TPU.

    ## What it does
    An assertion on `x.is_cuda` asks for the target. Sets and tables of accelerator types gain the target's type, and
    CUDA stays. Comparisons (`device.type == "cuda"`, `"cuda" in str(device)`) are reported: what stands behind them
    may be a kernel that only CUDA has, and switching it on would crash.

    ## Why it matters on a TPU
    No exception: the answer is False, and the slow path, the CPU's batch size or the gloo backend is taken.

    ## Example
    ```python
    import torch

    def norm(x):
        assert x.is_cuda, "move x to the accelerator first"
        return x
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    def norm(x):
        assert x.device.type == "xla", "move x to the accelerator first"
        return x
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def norm(x):
        assert x.device.type == "tpu", "move x to the accelerator first"
        return x
    ```

    ## Example: a set and a table
    ```python
    import torch

    FAST = {"cuda", "mtia"}
    BATCH = {"cuda": 256, "cpu": 16}

    def pick(device: torch.device):
        return device.type in FAST, BATCH.get(device.type, BATCH["cpu"])
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    FAST = {"cuda", "mtia", "xla"}
    BATCH = {"cuda": 256, "cpu": 16, "xla": 256}

    def pick(device: torch.device):
        return device.type in FAST, BATCH.get(device.type, BATCH["cpu"])
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    FAST = {"cuda", "mtia", "tpu"}
    BATCH = {"cuda": 256, "cpu": 16, "tpu": 256}

    def pick(device: torch.device):
        return device.type in FAST, BATCH.get(device.type, BATCH["cpu"])
    ```

    ## Example: membership
    ```python
    import torch

    def fused(x):
        return x.device.type in ("cuda", "xpu")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    def fused(x):
        return x.device.type in ("cuda", "xpu", "xla")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def fused(x):
        return x.device.type in ("cuda", "xpu", "tpu")
    ```

    ## Example: a guard around a move
    ```python
    import torch

    def noise(mu, eps):
        if mu.is_cuda:
            eps = eps.cuda()
        return mu + eps
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    def noise(mu, eps):
        if mu.device.type == "xla":
            eps = eps.to("xla")
        return mu + eps
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def noise(mu, eps):
        if mu.device.type == "tpu":
            eps = eps.to("tpu")
        return mu + eps
    ```

    ## Example: a guard around a kernel
    ```python
    import torch
    from my_ext import fused_norm_cuda

    def norm(x, w):
        if w.is_cuda and w.dtype is torch.float16:
            return fused_norm_cuda(x, w)
        if x.device.type == "cuda":
            return x
        return torch.relu(x)
    ```

    ## Example: a step of autograd around a kernel
    ```python
    import torch
    from my_ext import kernels

    class Carafe(torch.autograd.Function):
        @staticmethod
        def backward(ctx, grad):
            assert grad.is_cuda
            return kernels.carafe_backward(grad)
    ```

    ## Not flagged
    ```python
    import torch

    barracuda = {"cuda": 1, "cuda_home": "/usr/local/cuda"}
    kinds = ["cuda", "jazz"]
    ```
    ```python
    import torch

    def f(args):
        return args.mode == "cuda"
    ```
    ```python
    import torch

    SUPPORTED = {"cuda", "xla", "tpu"}
    ```

    ## Fix safety
    Safe. Sets and tables keep CUDA; an assertion then wants the target in its place, and stays as it is in a
    `torch.autograd.Function`, in classes about CUDA by their name, and in a file that tells accelerators apart.

    ## References
    torch.Tensor.is_cuda, torch.device.type.
    """
    if in_test_decorator(node) or is_annotation(node):
        return
    match node:
        case ast.Attribute(attr="is_cuda", ctx=ast.Load()):
            yield from _is_cuda(node, ctx)
        case ast.Compare():
            yield from _comparison(node, ctx)
        case ast.Set() | ast.Tuple() | ast.List():
            yield from _collection(node, ctx)
        case ast.Dict():
            yield from _table(node, ctx)
        case ast.Call(func=ast.Attribute(attr="startswith"), args=[ast.Constant(value=str(text))]):
            if text.rstrip(":") == "cuda" and is_device_text(node.func.value, ctx):  # type: ignore[attr-defined]
                yield _reported(node, ctx)
        case _:
            pass


def _reported(node: ast.AST, ctx: Context, why: str = "") -> Report:
    return Report(
        node,
        "this is False on a TPU; what it guards is not taken there",
        unfixed=why or f'decide whether the branch holds for "{ctx.device}" too, or only for CUDA',
        severity="warning",
    )


def _is_cuda(node: ast.Attribute, ctx: Context) -> Iterator[Report]:
    if ctx.model.qualnames(node) or ctx.kind(node.value).startswith("class:") or not imports_torch(ctx):
        return
    stmt = statement(node)
    _, end = ctx.source.span(node)
    if isinstance(stmt, ast.Assert) and (node is stmt.test or _only_conjunction(node, stmt.test)):
        if _in_kernel(node, ctx):
            why = "what follows is a step of autograd written by hand, which may call a CUDA kernel"
            yield Report(node, "`is_cuda` is False on a TPU, and the assertion stops the program", unfixed=why)
            return
        edit = Edit(end - len(node.attr), end, f'device.type == "{ctx.device}"')
        message = "`is_cuda` is False on a TPU, and the assertion stops the program"
        yield Report(node, message, Fix((edit,)))
    elif _only_moves(node, ctx):
        edit = Edit(end - len(node.attr), end, f'device.type == "{ctx.device}"')
        message = "`is_cuda` is False on a TPU, so that this move is left out and two devices meet"
        yield Report(node, message, Fix((edit,)))
    else:
        yield Report(
            node,
            "`is_cuda` is False on a TPU: a branch for CUDA alone is dead there",
            unfixed="what it guards may be a CUDA kernel; decide whether the branch holds for the TPU",
            severity="info",
        )


def _in_kernel(node: ast.AST, ctx: Context) -> bool:
    """Whether a node is in a torch.autograd.Function, as code around compiled kernels is."""
    owner = class_of(node)
    return owner is not None and any(ctx.qualname(base) in _AUTOGRAD_FUNCTION for base in owner.bases)


_MOVING = frozenset("cuda to cpu float half bfloat16 contiguous detach clone long int bool type_as size".split())


def _only_moves(node: ast.Attribute, ctx: Context) -> bool:
    """Whether the question decides on nothing but moving tensors to the device: what it guards holds for the TPU."""
    above = parent(node)
    if isinstance(above, ast.If) and above.test is node:
        guarded: list[ast.AST] = list(above.body)
        if not all(isinstance(stmt, ast.Assign) for stmt in above.body):
            return False
    elif isinstance(above, ast.IfExp) and above.test is node:
        guarded = [above.body]
    else:
        return False
    calls = [item for stmt in guarded for item in ast.walk(stmt) if isinstance(item, ast.Call)]
    moves = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in ("cuda", "to")]
    return bool(moves) and all(
        isinstance(call.func, ast.Attribute) and call.func.attr in _MOVING and not ctx.qualname(call.func)
        for call in calls
    )


def _only_conjunction(node: ast.AST, test: ast.expr) -> bool:
    """Whether `node` is one of the `and`-ed parts of an assertion."""
    above = parent(node)
    while isinstance(above, ast.BoolOp) and isinstance(above.op, ast.And):
        if above is test:
            return True
        above = parent(above)
    return False


def _comparison(node: ast.Compare, ctx: Context) -> Iterator[Report]:
    if len(node.ops) != 1:
        return
    left, right = node.left, node.comparators[0]
    if isinstance(node.ops[0], ast.Eq | ast.NotEq):
        for one, other in ((left, right), (right, left)):
            asked = _is_cuda_text(one) and is_device_type(other, ctx)
            if asked or (_is_cuda_device(one, ctx) and not isinstance(other, ast.Constant)):
                yield _reported(node, ctx)
    elif isinstance(node.ops[0], ast.In | ast.NotIn) and _is_cuda_text(left) and is_device_text(right, ctx):
        yield _reported(node, ctx)


def _is_cuda_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda"


def _is_cuda_device(node: ast.expr, ctx: Context) -> bool:
    return (
        isinstance(node, ast.Call)
        and ctx.qualname(node.func) == "torch.device"
        and bool(node.args)
        and _is_cuda_text(node.args[0])
    )


def is_device_type(node: ast.expr, ctx: Context) -> bool:
    """Whether an expression holds a device type or a device that a text is compared with."""
    kind = ctx.kind(node)
    if kind in ("device", "device_str", "device_type"):
        return True
    if isinstance(node, ast.Attribute):
        return (node.attr == "type" and "dev" in ctx.text(node.value).lower()) or node.attr in ("device", "device_type")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return is_device_type(node.args[0], ctx)
    return isinstance(node, ast.Name) and node.id.lower() in ("device", "device_type", "dev", "device_str")


def is_device_text(node: ast.expr, ctx: Context) -> bool:
    """Whether an expression holds the text of a device, perhaps after `.lower()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("lower", "strip"):
        return is_device_text(node.func.value, ctx)
    return is_device_type(node, ctx)


def _collection(node: ast.Set | ast.Tuple | ast.List, ctx: Context) -> Iterator[Report]:
    """A literal whose elements are device types, used to ask whether a device is among them."""
    texts = [item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    if len(texts) != len(node.elts) or "cuda" not in texts or ctx.device in texts:
        return
    if "cpu" in texts or not set(texts) <= _ACCELERATORS or not imports_torch(ctx):
        return  # with the CPU among them it is no list of accelerators but of what a user may choose
    if not _asked_of_device(node, ctx):
        return
    last = node.elts[-1]
    end = ctx.source.span(last)[1]
    mark = quote(ctx.text(last))
    edit = Edit(end, end, f", {mark}{ctx.device}{mark}")
    yield Report(
        node,
        f'these accelerators do not include the TPU ("{ctx.device}"): the question is answered with no there',
        Fix((edit,), adds=True),
        severity="warning",
    )


def _asked_of_device(node: ast.expr, ctx: Context) -> bool:
    above = parent(node)
    if isinstance(above, ast.Compare):
        return node in above.comparators and is_device_type(above.left, ctx)
    if isinstance(above, ast.Assign) and len(above.targets) == 1 and isinstance(above.targets[0], ast.Name):
        for use in ctx.model.uses(above.targets[0].id):
            compared = parent(use)
            if not isinstance(compared, ast.Compare) or use not in compared.comparators:
                continue
            if is_device_type(compared.left, ctx):
                return True
    return False


def _table(node: ast.Dict, ctx: Context) -> Iterator[Report]:
    """A table keyed by device type: other keys are device types, and it is looked up by a device."""
    keys = [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    if len(keys) != len(node.keys) or len(keys) < 2 or "cuda" not in keys or ctx.device in keys:
        return
    if not set(keys) <= _ACCELERATORS | {"cpu", "meta"} or not imports_torch(ctx):
        return
    if not _looked_up_by_device(node, ctx):
        return
    value = node.values[keys.index("cuda")]
    message = f'this table has no entry for the TPU ("{ctx.device}")'
    if not isinstance(value, ast.Constant) or value.value in ("nccl", "cuda"):
        yield Report(node, message, unfixed="add an entry: CUDA's own does not hold for the TPU", severity="warning")
        return
    _, end = ctx.source.span(node.values[-1])
    mark = quote(ctx.text(node.keys[-1]))  # type: ignore[arg-type]
    entry = f"{mark}{ctx.device}{mark}: {ctx.text(value)}"
    key_start = ctx.source.span(node.keys[-1])[0]  # type: ignore[arg-type]
    own_line = not ctx.source.text[ctx.source.line_start(key_start) : key_start].strip()
    separator = f",{ctx.source.newline}{ctx.source.indent(key_start)}" if own_line else ", "
    yield Report(node, message, Fix((Edit(end, end, separator + entry),), adds=True), severity="warning")


def _looked_up_by_device(node: ast.Dict, ctx: Context) -> bool:
    above = parent(node)
    uses: list[ast.AST] = [node]
    if isinstance(above, ast.Assign) and len(above.targets) == 1 and isinstance(above.targets[0], ast.Name):
        uses = list(ctx.model.uses(above.targets[0].id))
    for use in uses:
        place = parent(use)
        if isinstance(place, ast.Subscript) and place.value is use and is_device_type(place.slice, ctx):
            return True
        if isinstance(place, ast.Attribute) and place.attr == "get":
            call = parent(place)
            if isinstance(call, ast.Call) and call.args and is_device_type(call.args[0], ctx):
                return True
    return False
