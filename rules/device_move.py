"""TPU1xx: moving tensors and modules with `.cuda()` and with integer devices."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, call_parentheses, rename_method
from tpumigrate.model import argument
from tpumigrate.rule import Context, Report, rule

from ._common import device_string, imports_torch, is_pure
from ._devices import SPECIAL_CALLS


@rule("TPU102", "cuda-method", anchors=(".cuda",))
def cuda_method(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Moves to the GPU with `.cuda()`, which has no counterpart on a TPU.

    ## What it does
    Finds `x.cuda()`, `model.cuda(rank)` and `t.cuda(non_blocking=True)` on tensors and modules, and writes `.to()`.
    The index goes: each process owns one TPU device.

    ## Why it matters on a TPU
    `.cuda()` asks for an NVIDIA driver and raises. There is no `Tensor.xla()`.

    ## Example
    ```python
    import torch

    model = torch.nn.Linear(4, 4).cuda()
    x = torch.ones(2, 4).cuda(0, non_blocking=True)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    model = torch.nn.Linear(4, 4).to("xla")
    x = torch.ones(2, 4).to("xla", non_blocking=True)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    model = torch.nn.Linear(4, 4).to("tpu")
    x = torch.ones(2, 4).to("tpu", non_blocking=True)
    ```

    ## Not flagged
    ```python
    import torch

    class Car:
        def cuda(self):
            return "engine"

    print(Car().cuda())
    ```

    ## Fix safety
    Safe.

    ## References
    torch.Tensor.to; facts measured on torch_xla 2.9 and torch_tpu 0.2.
    """
    func = node.func
    if not isinstance(func, ast.Attribute) or func.attr != "cuda" or not _is_torch_receiver(func.value, ctx):
        return
    message = f'`.cuda()` needs an NVIDIA GPU; on the TPU it is `.to("{ctx.device}")`'
    others = [keyword for keyword in node.keywords if keyword.arg not in ("device", "non_blocking")]
    if others or len(node.args) > 2 or any(isinstance(arg, ast.Starred) for arg in node.args):
        yield Report(node, message, unfixed="its arguments are passed on by name or star: write `.to(device, ...)`")
        return
    if _may_be_foreign(func.value, ctx):
        yield Report(node, message, unfixed="a class of this project defines `cuda()`: check which one this is")
        return
    device = argument(node, "device", 0)
    if device is not None and not is_pure(device):
        yield Report(node, message, unfixed="the device argument calls something: write `.to()` by hand")
        return
    opening, closing = call_parentheses(ctx.source, node)
    text = device_string(ctx)
    edits = [rename_method(ctx.source, func, "to")]
    non_blocking = argument(node, "non_blocking", 1)
    if device is None and non_blocking is None:
        edits.append(Edit(opening, closing, f"({text})"))
    elif device is None:
        edits.append(Edit(opening + 1, opening + 1, f"{text}, "))
    else:
        edits.append(Edit(*ctx.source.span(device), text))
        keyword = next((item for item in node.keywords if item.arg == "device"), None)
        if keyword is not None:
            start, _ = ctx.source.span(keyword)
            edits[-1] = Edit(start, edits[-1].end, text)
            if node.keywords[0] is not keyword:
                yield Report(node, message, unfixed="the device is not the first argument: write `.to()` by hand")
                return
        elif len(node.args) == 2:
            start, _ = ctx.source.span(node.args[1])
            edits.append(Edit(start, start, "non_blocking="))
    yield Report(node, message, Fix(tuple(edits)))


def _is_torch_receiver(receiver: ast.expr, ctx: Context) -> bool:
    """Whether `receiver.cuda()` is torch's method, as far as the file shows."""
    kind = ctx.kind(receiver)
    if kind in ("tensor", "module", "optimizer", "loader"):
        return True
    if kind and not kind.startswith("class:"):
        return False
    if kind.startswith("class:"):
        return False
    if ctx.model.qualnames(receiver):
        return False  # a function of an imported module: `numba.cuda()`
    if isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Name) and receiver.func.id == "super":
        return False  # an override passes on to its parent: its own meaning is not ours to change
    return imports_torch(ctx)


def _may_be_foreign(receiver: ast.expr, ctx: Context) -> bool:
    """Whether an object of unknown kind may be of a project class with a `cuda()` of its own and no `to()`."""
    return bool(ctx.project.foreign_cuda) and not ctx.kind(receiver)


@rule("TPU104", "integer-device", anchors=(".to(", "device=", "torch.device("))
def integer_device(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Names a device by a number: `.to(0)`, `.to(local_rank)`, `torch.device(0)`, `device=0`.

    ## What it does
    Finds numbers where a device is wanted, when the value is known to be an integer, and writes the target's device.
    `.to(dtype)` and `.to(other)` stay.

    ## Why it matters on a TPU
    With torch 2.9 and torch_xla a number means `cuda:0` and raises "Found no NVIDIA driver". On torch_tpu it means
    the current accelerator, but every process there sees its device as 0, so a rank is the wrong number.

    ## Example
    ```python
    import torch

    local_rank = 0
    model = torch.nn.Linear(4, 4).to(local_rank)
    z = torch.zeros(3, device=0)
    w = z.to(torch.float32)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    local_rank = 0
    model = torch.nn.Linear(4, 4).to("xla")
    z = torch.zeros(3, device="xla")
    w = z.to(torch.float32)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    local_rank = 0
    model = torch.nn.Linear(4, 4).to("tpu")
    z = torch.zeros(3, device="tpu")
    w = z.to(torch.float32)
    ```

    ## Example: from the environment
    ```python
    import os
    import torch

    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(rank)
    x = torch.ones(1).to(device=rank, non_blocking=True)
    ```

    ## Use instead (torch_xla)
    ```python
    import os
    import torch
    import torch_xla  # noqa: F401  registers the device

    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("xla")
    x = torch.ones(1).to(device="xla", non_blocking=True)
    ```

    ## Use instead (torch_tpu)
    ```python
    import os
    import torch

    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("tpu")
    x = torch.ones(1).to(device="tpu", non_blocking=True)
    ```

    ## Not flagged
    ```python
    import torch

    def convert(x, kind):
        return x.to(kind)
    ```
    ```python
    import torch

    class Unit:
        def to(self, n):
            return n

    Unit().to(3)
    ```
    ```python
    import torch

    x = torch.zeros(3).to(torch.int64)
    run = dict(device=0)
    ```

    ## Fix safety
    Safe: one process has one device.

    ## References
    torch.device.
    """
    value = _device_argument(node, ctx)
    if value is None or ctx.kind(value) != "int" or not is_pure(value):
        return
    text = device_string(ctx)
    yield Report(
        value,
        f'the number {ctx.text(value)} stands for a CUDA device; the TPU is "{ctx.device}"',
        Fix((Edit(*ctx.source.span(value), text),)),
        severity="error" if ctx.xla else "info",
    )


def _device_argument(node: ast.Call, ctx: Context) -> ast.expr | None:
    func = node.func
    called = ctx.qualname(func)
    if called == "torch.device":
        return node.args[0] if len(node.args) == 1 and not node.keywords else None
    if isinstance(func, ast.Attribute) and func.attr == "to" and not called:
        known = ctx.kind(func.value) in ("tensor", "module")
        unknown = not ctx.kind(func.value) and imports_torch(ctx) and not ctx.project.foreign_cuda
        return argument(node, "device", 0) if known or unknown else None
    if called.startswith("torch.cuda."):
        return None  # the call speaks
    if called.startswith(("torch.", "torchvision.")) and called not in SPECIAL_CALLS:
        return argument(node, "device")
    return None
