"""TPU101: strings that name a CUDA device, in every syntactic form."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, remove_arguments, replace
from tpumigrate.model import packages, parent
from tpumigrate.rule import Context, Report, rule

from ._common import device_string, is_pure
from ._devices import (
    DeviceText,
    device_text,
    in_device_position,
    in_test_decorator,
    option_choices,
    quote,
    registers_kernel,
)


@rule("TPU101", "device-string", anchors=("cuda", "xla"))
def device_string_rule(node: ast.Constant | ast.JoinedStr | ast.BinOp | ast.Call, ctx: Context) -> Iterator[Report]:
    """A string names a CUDA device where the TPU's is wanted.

    ## What it does
    Finds `"cuda"`, `"cuda:0"`, `f"cuda:{rank}"`, `"cuda:%d" % i`, `"cuda:{}".format(i)` and `"cuda:" + str(i)` where
    a device is meant: `device=`, `.to()`, `torch.device()`, default arguments, command line options, variables and
    fields named after a device, also in a file of constants or settings that does not import torch itself. The index
    goes, because each TPU process owns one device. Strings elsewhere (messages, keys, file names) stay.

    ## Why it matters on a TPU
    `device="cuda"` raises "Found no NVIDIA driver" or "Torch not compiled with CUDA enabled"; `"xla:1"` raises in
    a process that owns one device, and `"tpu:1"` silently lands on device 0.

    ## Example
    ```python
    import torch

    device = torch.device("cuda")
    x = torch.zeros(2, device='cuda:0')
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    device = torch.device("xla")
    x = torch.zeros(2, device='xla')
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    device = torch.device("tpu")
    x = torch.zeros(2, device='tpu')
    ```

    ## Example: computed index
    ```python
    import torch

    def make(n, idx=0, device="cuda"):
        a = torch.zeros(n, device=torch.device("cuda", idx))
        b = torch.ones(n).to(f"cuda:{idx}", torch.float32)
        return a, b, torch.ones(n, device="cuda:" + str(idx))
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    def make(n, idx=0, device="xla"):
        a = torch.zeros(n, device=torch.device("xla"))
        b = torch.ones(n).to("xla", torch.float32)
        return a, b, torch.ones(n, device="xla")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def make(n, idx=0, device="tpu"):
        a = torch.zeros(n, device=torch.device("tpu"))
        b = torch.ones(n).to("tpu", torch.float32)
        return a, b, torch.ones(n, device="tpu")
    ```

    ## Example: the type of a device
    ```python
    import torch

    def run(device="cuda"):
        device_type = "cuda" if "cuda" in device else "cpu"
        return torch.ones(1, device=device), device_type
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    def run(device="xla"):
        device_type = "xla" if "xla" in device else "cpu"
        return torch.ones(1, device=device), device_type
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def run(device="tpu"):
        device_type = "tpu" if "tpu" in device else "cpu"
        return torch.ones(1, device=device), device_type
    ```

    ## Example: an option with choices
    ```python
    import argparse
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    ```

    ## Use instead (torch_xla)
    ```python
    import argparse
    import torch
    import torch_xla  # noqa: F401  registers the device

    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda", "xla"], default="xla")
    ```

    ## Use instead (torch_tpu)
    ```python
    import argparse
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda", "tpu"], default="tpu")
    ```

    ## Example: a kernel that is for CUDA
    ```python
    import torch
    from my_kernels import scale_cuda

    @torch.library.custom_op("mine::scale", mutates_args=(), device_types="cuda")
    def scale(x: torch.Tensor) -> torch.Tensor:
        return scale_cuda(x)
    ```

    ## Not flagged
    ```python
    import torch

    print("cuda")
    TABLE = {"cuda": 1, "cuda_home": "/usr/local/cuda"}
    url = "https://example.org/cuda"
    raise RuntimeError("cuda: out of memory")
    ```
    ```python
    import torch

    x = torch.zeros(2, device="cpu")
    name = f"cuda kernels: {x}"
    ```
    ```python
    device = "cuda"  # no torch in this file
    ```

    ## Fix safety
    Safe for one device. A literal index above 0 means that the program places its parts on several devices of one
    process; that fix is unsafe, since all parts land on the same device.

    ## References
    torch.device; `torch.device("xla")` needs `import torch_xla`, `torch.device("tpu")` is loaded with torch.
    """
    found = device_text(node, ctx)
    if found is None or in_test_decorator(node) or not (_knows_torch(ctx) or _configures(found.node, ctx)):
        return
    above = parent(node)
    if isinstance(above, ast.BinOp | ast.Attribute | ast.JoinedStr) and device_text(above, ctx):
        return  # part of a longer device string
    if registers_kernel(found.node, ctx):
        yield Report(
            node,
            "this is for kernels that run on CUDA: on a TPU the operator has none",
            unfixed=f'register an implementation in PyTorch for "{ctx.device}" too',
            severity="warning",
        )
        return
    if _is_compared(found.node, ctx):
        return  # devices with and without an index differ: TPU105 speaks
    place = in_device_position(found.node, ctx)
    message = f'{ctx.text(node)} names a device that a TPU host does not have; the TPU is "{ctx.device}"'
    if place is False or (place is None and not _knows_torch(ctx)):
        return
    if place is None:
        yield Report(node, message, unfixed="it may not be a device: where it ends up is not clear", severity="warning")
    elif not all(is_pure(part) for part in found.parts):
        yield Report(node, message, unfixed="computing the index has effects")
    else:
        edits = [replace(ctx.source, found.node, device_string(ctx, quote(ctx.text(_first_literal(found.node)))))]
        edits.extend(_index_argument(found, ctx))
        edits.extend(_choices(found, ctx))
        test = _asks_for_type(found.node, ctx)
        if test is not None:
            mark = quote(ctx.text(test))
            edits.append(Edit(*ctx.source.span(test), f"{mark}{ctx.device}{mark}"))
        claims = (parent(test),) if test is not None else ()
        yield Report(node, message, Fix(tuple(edits), safe=not found.index), claims=claims)  # type: ignore[arg-type]


def _asks_for_type(node: ast.expr, ctx: Context) -> ast.Constant | None:
    """The literal in the test of `"cuda" if "cuda" in device else "cpu"`, which names the type of a device."""
    choice = parent(node)
    if not isinstance(choice, ast.IfExp) or node is not choice.body:
        return None
    match choice.test:
        case ast.Compare(left=ast.Constant(value="cuda") as text, ops=[ast.In()]):
            return text
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value="cuda") as text]):
            return text
        case ast.Call(func=ast.Attribute(attr="startswith"), args=[ast.Constant(value="cuda") as text]):
            return text
    return None


def _is_compared(node: ast.expr, ctx: Context) -> bool:
    """Whether a string makes a device that something is compared with: `x.device == torch.device("cuda:0")`."""
    call = parent(node)
    return (
        isinstance(call, ast.Call)
        and ctx.qualname(call.func) == "torch.device"
        and isinstance(parent(call), ast.Compare)
    )


def _first_literal(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.BinOp):
        return node.left
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value
    return node


def _knows_torch(ctx: Context) -> bool:
    """Whether the file imports torch or something built on it."""
    found = {name for node in ctx.model.imports() for name in packages(node)}
    return any(name.startswith("torch") for name in found - {"torch_xla"})  # which may only register the device


def _configures(node: ast.expr, ctx: Context) -> bool:
    """For a file without torch in a project with it: whether a constant, field, default or option names the device.

    A dictionary may be another library's (XGBoost has a device too).
    """
    above = parent(node)
    return ctx.project.torch and isinstance(above, ast.Assign | ast.AnnAssign | ast.arguments | ast.keyword)


def _index_argument(found: DeviceText, ctx: Context) -> list[Edit]:
    """Take the index out of `torch.device("cuda", index)`."""
    above = parent(found.node)
    call = parent(above) if isinstance(above, ast.keyword) else above
    if not isinstance(call, ast.Call) or ctx.qualname(call.func) != "torch.device":
        return []
    index = ctx.arg(call, "index", 1)
    if index is None or not is_pure(index):
        return []
    gone = next((keyword for keyword in call.keywords if keyword.value is index), index)
    return remove_arguments(ctx.source, call, [gone])


def _choices(found: DeviceText, ctx: Context) -> list[Edit]:
    """Add the target to the choices of the option whose default this is."""
    keyword = parent(found.node)
    call = parent(keyword) if isinstance(keyword, ast.keyword) else None
    if not isinstance(call, ast.Call) or not isinstance(keyword, ast.keyword) or keyword.arg != "default":
        return []
    choices = list(option_choices(call))
    if not choices or any(isinstance(item, ast.Constant) and item.value == ctx.device for item in choices):
        return []
    end = ctx.source.span(choices[-1])[1]
    mark = quote(ctx.text(choices[-1]))
    return [Edit(end, end, f", {mark}{ctx.device}{mark}")]
