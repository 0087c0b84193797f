"""TPU103: asking whether there is a GPU, which on a TPU host silently means "use the CPU"."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Fix, name, replace
from tpumigrate.model import parent
from tpumigrate.rule import Context, Report, rule

from ._choices import CUDA_AVAILABLE, available, device_of, is_cpu, text_of_device
from ._devices import in_test_decorator
from ._guards import means_cuda_itself
from ._ladders import ladder_around, one_more_arm
from ._table import table_reports

_QUESTIONS = frozenset({CUDA_AVAILABLE, "torch.accelerator.is_available"})


@rule("TPU103", "cuda-availability", anchors=("is_available", "current_accelerator", "is_initialized"))
def cuda_availability(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Asks for a GPU; on a TPU host the answer is no, and the program quietly runs on the CPU.

    ## What it does
    Finds `torch.cuda.is_available()` in choices of a device, in conditions, flags and assertions, and asks for the
    TPU instead. A ladder that already knows other accelerators (`elif torch.backends.mps...`) gets one more arm,
    its CUDA arm stays. For torch_xla also `torch.accelerator`, which does not know that device. What stands behind
    the question and can only be CUDA (an extension, a compute capability) is reported, not switched on.

    ## Why it matters on a TPU
    `"cuda" if torch.cuda.is_available() else "cpu"` trains on the host's cores, with no error. With torch_xla,
    `torch.accelerator.is_available()` is False too: the public MNIST example ends well with not one device execution.

    ## Example
    ```python
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(2, device=device)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    device = "xla"
    x = torch.ones(2, device=device)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    device = "tpu" if torch.accelerator.is_available() else "cpu"
    x = torch.ones(2, device=device)
    ```

    ## Example: a device object
    ```python
    import torch

    device = torch.device("cpu" if not torch.cuda.is_available() else "cuda:0")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    device = torch.device("xla")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    device = torch.device("cpu" if not torch.accelerator.is_available() else "tpu")
    ```

    ## Example: a flag
    ```python
    import torch

    def main(args):
        use_cuda = not args.no_cuda and torch.cuda.is_available()
        if not torch.cuda.is_available():
            raise SystemExit("needs a GPU")
        return torch.device("cuda" if use_cuda else "cpu")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla.runtime as xr

    def main(args):
        use_cuda = not args.no_cuda and xr.device_type() is not None
        if xr.device_type() is None:
            raise SystemExit("needs a GPU")
        return torch.device("xla" if use_cuda else "cpu")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def main(args):
        use_cuda = not args.no_cuda and torch.accelerator.is_available()
        if not torch.accelerator.is_available():
            raise SystemExit("needs a GPU")
        return torch.device("tpu" if use_cuda else "cpu")
    ```

    ## Example: a ladder of accelerators
    ```python
    import torch

    if torch.cuda.is_available():
        device = torch.device("cuda")
    elif torch.backends.mps.is_available():
        device = torch.device("mps")
    else:
        device = torch.device("cpu")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla.runtime as xr

    if torch.cuda.is_available():
        device = torch.device("cuda")
    elif torch.backends.mps.is_available():
        device = torch.device("mps")
    elif xr.device_type() is not None:
        device = torch.device("xla")
    else:
        device = torch.device("cpu")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    if torch.cuda.is_available():
        device = torch.device("cuda")
    elif torch.backends.mps.is_available():
        device = torch.device("mps")
    elif torch.accelerator.is_available():
        device = torch.device("tpu")
    else:
        device = torch.device("cpu")
    ```

    ## Example: a ladder in one expression
    ```python
    import torch
    from torch import cuda
    from torch.backends import mps

    d = (
        "cuda" if cuda.is_available()
        else "mps" if mps.is_available() else "cpu"
    )
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    from torch import cuda
    from torch.backends import mps

    d = (
        "cuda" if cuda.is_available()
        else "mps" if mps.is_available() else "tpu" if torch.accelerator.is_available() else "cpu"
    )
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla.runtime as xr
    from torch import cuda
    from torch.backends import mps

    d = (
        "cuda" if cuda.is_available()
        else "mps" if mps.is_available() else "xla" if xr.device_type() is not None else "cpu"
    )
    ```

    ## Example: device-neutral code (torch_xla)
    ```python
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    device = torch.device("xla")
    ```

    ## Example: only CUDA can be meant
    ```python
    import torch

    if torch.cuda.is_available():
        from my_kernels import fused_norm_cuda
    ```

    ## Example: a package or a statistic of CUDA
    ```python
    import torch

    def info(install):
        cuda = torch.cuda.is_available()
        install("onnxruntime-gpu" if cuda else "onnxruntime")
        install(f"tensorflow{'' if torch.cuda.is_available() else '-cpu'}")
        return torch.cuda.get_arch_list() if torch.cuda.is_available() else []
    ```

    ## Not flagged
    ```python
    import torch

    ok = torch.distributed.is_available()
    ```
    ```python
    import pytest
    import torch

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    def test_kernel():
        pass
    ```
    ```python
    class Store:
        def is_available(self):
            return True

    cuda = Store()
    print(cuda.is_available())
    ```

    ## Fix safety
    Safe. For torch_xla a two-way choice becomes the device itself: with torch_xla installed there always is one,
    the PJRT CPU client where there is no TPU.

    ## References
    torch_xla.runtime.device_type, torch.accelerator.is_available.
    """
    if isinstance(node, ast.Call):
        asked = ctx.qualname(node.func)
        if asked in _QUESTIONS and (asked == CUDA_AVAILABLE or ctx.xla):
            if not in_test_decorator(node):
                yield from _question(node, ctx)
            return
    yield from table_reports(node, ctx, "TPU103")


def _question(node: ast.Call, ctx: Context) -> Iterator[Report]:
    message = (
        "there is no CUDA device on a TPU host: this is False, and what depends on it silently runs on the CPU"
        if ctx.qualname(node.func) == CUDA_AVAILABLE
        else "torch.accelerator does not know torch_xla: this is False, and the program silently runs on the CPU"
    )
    ladder = ladder_around(node, ctx)
    if ladder is not None:
        yield from one_more_arm(node, ladder, message, ctx)
        return
    choice = _choice(node, ctx)
    if choice is not None:
        yield _chosen_device(choice, node, message, ctx)
        return
    if means_cuda_itself(node, ctx):
        yield Report(
            node,
            "what depends on this question can only be meant for CUDA; on a TPU it stays off",
            unfixed="check what the TPU should do instead",
            severity="info",
        )
        return
    yield Report(node, message, _answer(node, ctx))


def _answer(node: ast.Call, ctx: Context) -> Fix:
    above = parent(node)
    if ctx.xla and isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not):
        return Fix((replace(ctx.source, above, f"{name('torch_xla.runtime')}.device_type() is None"),))
    return Fix((replace(ctx.source, node, available(ctx)),))


def _choice(node: ast.Call, ctx: Context) -> ast.IfExp | None:
    """The conditional expression that chooses a device by this question alone."""
    above = parent(node)
    if isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not):
        above = parent(above)
    if not isinstance(above, ast.IfExp) or node in (above.body, above.orelse):
        return None
    arms = [above.body, above.orelse]
    positive, negative = arms if above.test is node else arms[::-1]
    if device_of(positive, ctx) and is_cpu(negative, ctx):
        return above
    return None


def _chosen_device(choice: ast.IfExp, question: ast.Call, message: str, ctx: Context) -> Report:
    positive = choice.body if choice.test is question else choice.orelse
    if ctx.xla:
        text = text_of_device(positive, ctx)
        return Report(choice, message, Fix((replace(ctx.source, choice, text),)))
    edits = [
        replace(ctx.source, question, available(ctx)),
        replace(ctx.source, positive, text_of_device(positive, ctx)),
    ]
    return Report(choice, message, Fix(tuple(edits)), claims=(choice,))
