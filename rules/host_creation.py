"""TPU120: tensors made on the host and copied to the device in every round of a loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, add_argument, remove_arguments
from tpumigrate.model import loops
from tpumigrate.rule import Context, Report, rule

from ._devices import device_text

_FACTORIES = frozenset(
    f"torch.{name}" for name in "rand randn randint zeros ones full empty arange linspace eye randperm".split()
)
_LIKE = frozenset(f"torch.{name}_like" for name in "zeros ones rand randn empty full".split())


@rule("TPU120", "host-creation", anchors=(".to(", ".cuda("))
def host_creation(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Makes a tensor on the host and copies it to the device, in a loop.

    ## What it does
    Finds `torch.randn(...).to(device)` inside loops and makes the tensor on the device.

    ## Why it matters on a TPU
    The host computes, and each round uploads a buffer, which stalls the device; with `device=` the operator becomes
    part of the program that the TPU runs.

    ## Example (unsafe)
    ```python
    import torch

    def corrupt(x, steps, sigma=0.1):
        for _ in range(steps):
            noise = torch.randn(x.shape).cuda()
            x = x + sigma * noise
            mask = torch.zeros_like(x, device="cpu").to(x.device)
        return x, mask
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    def corrupt(x, steps, sigma=0.1):
        for _ in range(steps):
            noise = torch.randn(x.shape, device="xla")
            x = x + sigma * noise
            mask = torch.zeros_like(x)
        return x, mask
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def corrupt(x, steps, sigma=0.1):
        for _ in range(steps):
            noise = torch.randn(x.shape, device="tpu")
            x = x + sigma * noise
            mask = torch.zeros_like(x)
        return x, mask
    ```

    ## Not flagged
    ```python
    import torch

    def once(device):
        return torch.randn(3).to(device)
    ```
    ```python
    import torch

    def draws(g, device, n):
        for _ in range(n):
            yield torch.randn(3, generator=g).to(device)
    ```
    ```python
    import torch

    def batches(loader, device):
        for x in loader:
            yield x.to(device)
    ```

    ## Fix safety
    Unsafe: the device's random numbers are not the host's.

    ## References
    torch.randn.
    """
    func = node.func
    if not isinstance(func, ast.Attribute) or func.attr not in ("to", "cuda") or not isinstance(func.value, ast.Call):
        return
    made = func.value
    called = ctx.qualname(made.func)
    if called not in _FACTORIES | _LIKE or not loops(node):
        return
    if any(keyword.arg in ("generator", "out", None) for keyword in made.keywords):
        return
    device = _target(node, ctx)
    if device is None:
        return
    message = "the host makes this tensor and copies it in every round; with `device=` the TPU makes it"
    given = next((keyword for keyword in made.keywords if keyword.arg == "device"), None)
    rest = Edit(ctx.source.span(made)[1], ctx.source.span(node)[1], "")
    if called in _LIKE:
        on_cpu = given is not None and isinstance(given.value, ast.Constant) and given.value.value == "cpu"
        same = bool(made.args) and device == f"{ctx.text(made.args[0])}.device"
        if on_cpu and same and given is not None:
            edits = [*remove_arguments(ctx.source, made, [given]), rest]
            yield Report(node, message, Fix(tuple(edits), safe=False), severity="info")
        return
    if given is None:
        edits = [add_argument(ctx.source, made, f"device={device}"), rest]
        yield Report(node, message, Fix(tuple(edits), safe=False), severity="info")


def _target(node: ast.Call, ctx: Context) -> str | None:
    """The device that the copy goes to, as text; None when the call is not only a copy to a device."""
    assert isinstance(node.func, ast.Attribute)
    if len(node.args) != 1 or any(keyword.arg != "non_blocking" for keyword in node.keywords):
        return f'"{ctx.device}"' if node.func.attr == "cuda" and not node.args else None
    target = node.args[0]
    if device_text(target, ctx) is not None or ctx.kind(target) == "int":
        return f'"{ctx.device}"'
    is_device = ctx.kind(target) in ("device", "device_str") or ctx.text(target).rpartition(".")[2] in ("device", "dev")
    return ctx.text(target) if is_device and not ctx.qualname(target) else None
