"""TPU211: which kernel computes attention."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Fix, name, unwrap_with
from tpumigrate.model import parent
from tpumigrate.rule import Context, Report, rule

from ._precision import is_constant, looks_only

_KERNEL = frozenset({"torch.nn.attention.sdpa_kernel"})
_SWITCHES = {
    "torch.backends.cuda.enable_flash_sdp": "flash",
    "torch.backends.cuda.enable_mem_efficient_sdp": "efficient",
    "torch.backends.cuda.enable_math_sdp": "math",
    "torch.backends.cuda.enable_cudnn_sdp": "cudnn",
}
_CUDA_ONLY = ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION")


@rule("TPU211", "attention-backend", anchors=("sdp_kernel", "sdpa_kernel", "_sdp("))
def attention_backend(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """A CUDA kernel is selected for scaled dot product attention.

    ## What it does
    Finds `torch.backends.cuda.sdp_kernel(...)`, `sdpa_kernel()` with nothing but CUDA's kernels, and the
    switches `torch.backends.cuda.enable_mem_efficient_sdp()` and its like.

    ## Why it matters on a TPU
    torch_xla ignores the selection. torch_tpu has a flash kernel and the plain computation; with nothing
    but CUDA's kernels allowed it raises "no viable SDPBackend found". `torch.backends.cuda.sdp_kernel` is
    deprecated.

    ## Example
    ```python
    import torch
    import torch.nn.functional as F

    def attend(q, k, v):
        with torch.backends.cuda.sdp_kernel(enable_flash=True, enable_math=False):
            return F.scaled_dot_product_attention(q, k, v)

    torch.backends.cuda.enable_mem_efficient_sdp(False)
    ```

    ## Use instead
    ```python
    import torch
    import torch.nn.functional as F

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    ```

    ## Example: nothing but CUDA's kernels (torch_tpu)
    ```python
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q, k, v):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v)
    ```

    ## Example: the plain computation is wanted (torch_tpu)
    ```python
    import torch
    import torch.nn.functional as F

    def attend(q, k, v):
        with torch.backends.cuda.sdp_kernel(enable_flash=False, enable_mem_efficient=False):
            return F.scaled_dot_product_attention(q, k, v)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.nn.attention
    import torch.nn.functional as F

    def attend(q, k, v):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)
    ```

    ## Not flagged
    ```python
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(f):
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return f()
    ```
    ```python
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(f, backends):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), sdpa_kernel(backends):
            return f()
    ```
    ```python
    import torch

    print(torch.backends.cuda.flash_sdp_enabled())
    ```

    ## Fix safety
    Safe: all kernels compute the same.

    ## References
    torch.nn.attention.sdpa_kernel; run on torch_xla 2.9 and torch_tpu 0.2.
    """
    called = ctx.qualname(node.func)
    if called == "torch.backends.cuda.sdp_kernel":
        yield _context(node, ctx)
    elif called in _KERNEL and not ctx.xla:
        yield from _kernel(node, ctx)
    elif called in _SWITCHES:
        yield from _switch(node, _SWITCHES[called], ctx)


def _context(call: ast.Call, ctx: Context) -> Report:
    """`with torch.backends.cuda.sdp_kernel(flash, math, mem_efficient, cudnn)`."""
    message = "it chooses among CUDA's attention kernels; the TPU chooses its own"
    flash, math = ctx.arg(call, "enable_flash", 0), ctx.arg(call, "enable_math", 1)
    if not ctx.xla and is_constant(flash, False) and (math is None or is_constant(math, True)):
        module = name("torch.nn.attention")
        return Report(call, message, ctx.replace(call, f"{module}.sdpa_kernel({module}.SDPBackend.MATH)"))
    item = parent(call)
    with_ = parent(item) if isinstance(item, ast.withitem) else None
    inputs = [*call.args, *(keyword.value for keyword in call.keywords)]
    if isinstance(item, ast.withitem) and isinstance(with_, ast.With) and all(looks_only(value) for value in inputs):
        edits = unwrap_with(ctx.source, with_, [item]) if item.optional_vars is None else []
        if edits:
            return Report(call, message, Fix(tuple(edits)), severity="warning")
    unfixed = "it is not the context of a `with` that can be left out: use `torch.nn.attention.sdpa_kernel`"
    return Report(call, message, unfixed=unfixed, severity="warning")


def _kernel(call: ast.Call, ctx: Context) -> Iterator[Report]:
    """`sdpa_kernel()` on torch_tpu needs the flash kernel or the plain computation among its backends."""
    backends = ctx.arg(call, "backends", 0)
    if backends is None:
        return
    listed = backends.elts if isinstance(backends, ast.List | ast.Tuple | ast.Set) else [backends]
    if not listed or not all(
        isinstance(item, ast.Attribute)
        and item.attr in _CUDA_ONLY
        and ctx.qualname(item.value) == "torch.nn.attention.SDPBackend"
        for item in listed
    ):
        return
    first = listed[0]
    assert isinstance(first, ast.Attribute)
    owner = ctx.text(first.value)
    text = f"[{owner}.FLASH_ATTENTION, {owner}.MATH]"
    message = 'none of these kernels is there on the TPU: attention raises "no viable SDPBackend found"'
    yield Report(call, message, ctx.replace(backends, text))


def _switch(call: ast.Call, kernel: str, ctx: Context) -> Iterator[Report]:
    """The switches `torch.backends.cuda.enable_..._sdp`: torch_tpu heeds those of flash and math."""
    if not ctx.xla and kernel in ("flash", "math"):
        return
    statement = parent(call)
    message = "the switch of a CUDA attention kernel has no effect on the TPU"
    if isinstance(statement, ast.Expr) and all(
        looks_only(value) for value in [*call.args, *(keyword.value for keyword in call.keywords)]
    ):
        yield Report(call, message, Fix(deletes=(statement,)), severity="warning")
    else:
        yield Report(call, message, unfixed="it is not a statement of its own", severity="warning")
