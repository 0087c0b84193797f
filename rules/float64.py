"""TPU208: float64 on the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.model import parent
from tpumigrate.rule import Context, Report, rule

from ._common import imports_torch
from ._precision import is_constant


@rule("TPU208", "float64", anchors=("float64", "double"), keeps_cuda=True)
def float64(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """float64 is computed on the TPU.

    ## What it does
    Finds `model.double()`, `torch.set_default_dtype(torch.float64)`, tensors that are made on or moved to
    a device as float64, and conversions in the `forward` of a module.

    ## Why it matters on a TPU
    TPUs have no float64 unit: it is emulated by many float32 operations, several tens of times slower,
    and takes twice the memory. Sums that need it can be done on the CPU.

    ## Example
    ```python
    import torch

    torch.set_default_dtype(torch.float64)
    model = torch.nn.Linear(4, 4).double()
    ```

    ## Example: made on or moved to a device
    ```python
    import torch

    def total(device, x):
        a = torch.zeros(1, dtype=torch.float64, device=device)
        return a + x.to(device, torch.double)
    ```

    ## Example: in forward
    ```python
    import torch

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            return x.double().sum()
    ```

    ## Not flagged
    ```python
    import torch

    def metric(x):
        return x.cpu().double().mean()
    ```
    ```python
    import torch

    w = torch.ones(3, dtype=torch.float64)
    v = torch.ones(3, dtype=torch.float64, device="cpu")
    same = v.dtype == torch.float64
    ```
    ```python
    import numpy as np

    a = np.zeros(3, dtype=np.float64)
    ```

    ## Fix safety
    No fix: whether float32 is enough is for its author to say.

    ## References
    Measured on torch_tpu 0.2: float64 programs compile for v5e, v6e and v7x; see also
    torch.set_default_dtype.
    """
    if _is_on_device(node, ctx):
        yield Report(
            node,
            "float64 is emulated on the TPU and slow: use float32 there, or compute this on the CPU",
            unfixed="whether float32 is precise enough here is not for a tool to say",
            severity="info",
        )


def _is_float64(node: ast.expr | None, ctx: Context) -> bool:
    return node is not None and ctx.qualname(node) in ("torch.float64", "torch.double")


def _is_on_device(call: ast.Call, ctx: Context) -> bool:
    called = ctx.qualname(call.func)
    if called == "torch.set_default_dtype":
        return _is_float64(ctx.arg(call, "d", 0), ctx)
    dtype, device = ctx.arg(call, "dtype"), ctx.arg(call, "device")
    if called.startswith("torch."):
        return _is_float64(dtype, ctx) and device is not None and not _is_cpu(device, ctx)
    func = call.func
    if not isinstance(func, ast.Attribute):
        return False
    kind = ctx.kind(func.value)
    if func.attr == "double" and not call.args:
        return kind == "module" or (kind == "tensor" and _in_forward(call, ctx) and not _from_cpu(func.value))
    if func.attr == "to" and (kind in ("tensor", "module") or (not kind and imports_torch(ctx))):
        if len(call.args) == 2:
            device, dtype = call.args
        elif len(call.args) == 1 and device is None and dtype is None:
            return _is_float64(call.args[0], ctx) and kind == "tensor" and _in_forward(call, ctx)
        return _is_float64(dtype, ctx) and device is not None and not _is_cpu(device, ctx)
    return False


def _is_cpu(node: ast.expr, ctx: Context) -> bool:
    if isinstance(node, ast.Call) and ctx.qualname(node.func) == "torch.device" and node.args:
        node = node.args[0]
    return is_constant(node, None) or (isinstance(node, ast.Constant) and node.value in ("cpu", "meta"))


def _from_cpu(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cpu"


def _in_forward(node: ast.AST, ctx: Context) -> bool:
    above = parent(node)
    while above is not None and not isinstance(above, ast.FunctionDef):
        above = parent(above)
    owner = parent(above) if above is not None else None
    return (
        isinstance(above, ast.FunctionDef)
        and above.name == "forward"
        and isinstance(owner, ast.ClassDef)
        and ctx.kinds.is_module_class(owner)
    )
