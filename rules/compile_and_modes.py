"""TPU119, TPU121, TPU122: arguments and modes of torch that only CUDA understands."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, add_argument, name, remove_arguments, replace
from tpumigrate.model import call_of, parent
from tpumigrate.rule import Context, Report, rule

from ._xla_whole import STAYS, stays_on_xla

_CUDA_BACKENDS = ("inductor", "cudagraphs", "tensorrt", "torch_tensorrt", "onnxrt")


@rule("TPU119", "compile-arguments", anchors=("compile",))
def compile_arguments(node: ast.Call | ast.Attribute, ctx: Context) -> Iterator[Report]:
    """Compiles with arguments that the TPU's compiler refuses.

    ## What it does
    For torch_xla adds `backend="openxla"` to torch.compile and takes `mode` away; for torch_tpu takes away `mode`,
    `dynamic=True` and backends of CUDA.

    ## Why it matters on a TPU
    torch_xla: torch.compile without a backend calls inductor, which raises KeyError 'xla'. torch_tpu: `mode=` raises
    TypeError, `dynamic=True` NotImplementedError, `backend="inductor"` BackendCompilerFailed.

    ## Example
    ```python
    import torch

    def f(x):
        return x + 1

    g = torch.compile(f)
    h = torch.compile(f, mode="max-autotune", fullgraph=True)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    def f(x):
        return x + 1

    g = torch.compile(f, backend="openxla")
    h = torch.compile(f, fullgraph=True, backend="openxla")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def f(x):
        return x + 1

    g = torch.compile(f)
    h = torch.compile(f, fullgraph=True)
    ```

    ## Example: a backend of CUDA
    ```python
    import torch

    model = torch.compile(torch.nn.Linear(2, 2), backend="inductor", dynamic=True)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    model = torch.compile(torch.nn.Linear(2, 2), dynamic=True, backend="openxla")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    model = torch.compile(torch.nn.Linear(2, 2))
    ```

    ## Example: a mode from elsewhere
    ```python
    import torch

    def build(model, mode):
        return torch.compile(model, mode=mode)
    ```

    ## Not flagged
    ```python
    import re

    pattern = re.compile("x", flags=0)
    ```
    ```python
    import torch

    h = torch.jit.script(lambda x: x)
    ```
    ```python
    import torch

    g = torch.compile(lambda x: x, backend="aot_eager")
    ```

    ## Fix safety
    Safe.

    ## References
    torch.compile; torch_xla's dynamo backend openxla; torch_tpu's backend tpu is the default there.
    """
    if isinstance(node, ast.Attribute):
        above = parent(node)
        decorated = isinstance(above, ast.FunctionDef | ast.ClassDef) and node in above.decorator_list
        if ctx.xla and decorated and ctx.qualname(node) == "torch.compile":
            end = ctx.source.span(node)[1]
            yield Report(node, _NO_BACKEND, Fix((Edit(end, end, '(backend="openxla")'),)))
        return
    if ctx.qualname(node.func) != "torch.compile" or any(keyword.arg is None for keyword in node.keywords):
        return
    mode = ctx.arg(node, "mode")
    if mode is not None and not isinstance(mode, ast.Constant):
        message = f"the compiler of {ctx.target} refuses any mode but the default"
        yield Report(node.func, message, unfixed="the mode comes from elsewhere: leave it out there and here")
        return
    gone = [keyword for keyword in node.keywords if _refused(keyword, ctx)]
    backend = ctx.arg(node, "backend")
    needs = ctx.xla and (backend is None or any(keyword.value is backend for keyword in gone))
    if not gone and not needs:
        return
    edits = remove_arguments(ctx.source, node, list(gone)) if gone else []
    if needs:
        edits.append(add_argument(ctx.source, node, 'backend="openxla"', gone=len(gone)))
    words = ", ".join(f"`{keyword.arg}`" for keyword in gone)
    message = f"the compiler of {ctx.target} refuses {words}" if gone and not needs else _NO_BACKEND
    if isinstance(backend, ast.Constant) and backend.value == "openxla" and stays_on_xla(ctx):
        yield Report(node.func, message, unfixed=STAYS)
        return
    yield Report(node.func, message, Fix(tuple(edits)))


_NO_BACKEND = "without backend=\"openxla\" torch.compile hands XLA tensors to inductor, which raises KeyError 'xla'"


def _refused(keyword: ast.keyword, ctx: Context) -> bool:
    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
    if keyword.arg == "mode":
        return value not in (None, "default")
    if keyword.arg == "backend":
        return value in _CUDA_BACKENDS or (value == "openxla" and not ctx.xla)
    return keyword.arg == "dynamic" and value is True and not ctx.xla


@rule("TPU121", "inference-mode", anchors=("inference_mode",), targets=("torch_xla",))
def inference_mode(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Runs a model under torch.inference_mode, which torch_xla's linear layer refuses.

    ## What it does
    Writes `torch.no_grad()` instead.

    ## Why it matters on a TPU
    On torch_xla 2.9 any `nn.Linear` under inference_mode raises "Cannot set version_counter for inference tensor".

    ## Example
    ```python
    import torch

    @torch.inference_mode()
    def predict(model, x):
        with torch.inference_mode():
            return model(x)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    @torch.no_grad()
    def predict(model, x):
        with torch.no_grad():
            return model(x)
    ```

    ## Example: a flag
    ```python
    import torch

    def predict(model, x, training):
        with torch.inference_mode(not training):
            return model(x)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    def predict(model, x, training):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not (not training)):
            return model(x)
    ```

    ## Not flagged
    ```python
    import torch

    with torch.no_grad():
        y = torch.ones(1)
    ```
    ```python
    class Engine:
        def inference_mode(self):
            return self

    Engine().inference_mode()
    ```

    ## Fix safety
    Safe: no gradients either way.

    ## References
    torch.no_grad. Seen in a run on torch_xla 2.9.
    """
    if ctx.qualname(node.func if isinstance(node, ast.Call) else node) != "torch.inference_mode":
        return
    message = "a linear layer under inference_mode raises on torch_xla; no_grad does what is wanted"
    if isinstance(node, ast.Call):
        if not node.args and not node.keywords:
            yield Report(node, message, Fix((replace(ctx.source, node.func, f"{name('torch')}.no_grad"),)))
        elif len(node.args) == 1 and not node.keywords:
            yield from _inference_flag(node, message, ctx)
        else:
            yield Report(node, message, unfixed="write torch.set_grad_enabled by hand")
        return
    above = parent(node)
    if call_of(node):
        return
    if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef) and node in above.decorator_list:
        yield Report(node, message, Fix((replace(ctx.source, node, f"{name('torch')}.no_grad()"),)))
    elif isinstance(node.ctx, ast.Load) and not isinstance(above, ast.Attribute):
        yield Report(node, message, Fix((replace(ctx.source, node, f"{name('torch')}.no_grad"),)))


def _inference_flag(node: ast.Call, message: str, ctx: Context) -> Iterator[Report]:
    """`inference_mode(flag)`: without gradients when the flag is set, as it was before when not."""
    flag = node.args[0]
    if isinstance(flag, ast.Constant):
        if flag.value is True:
            yield Report(node, message, Fix((replace(ctx.source, node, f"{name('torch')}.no_grad()"),)))
        return
    if isinstance(parent(node), ast.FunctionDef | ast.AsyncFunctionDef):
        yield Report(node, message, unfixed="the flag is read when the function is defined: write it by hand")
        return
    torch = name("torch")
    start, end = ctx.source.span(flag)
    edits = [replace(ctx.source, node.func, f"{torch}.set_grad_enabled")]
    edits += [Edit(start, start, f"{torch}.is_grad_enabled() and not ("), Edit(end, end, ")")]
    yield Report(node, message, Fix(tuple(edits)))


@rule("TPU122", "fused-optimizer", anchors=("fused",), targets=("torch_xla",))
def fused_optimizer(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Builds an optimizer with `fused=True` or an expression that asks for CUDA.

    ## What it does
    For torch_xla takes `fused=True` away. On torch_tpu it works.

    ## Why it matters on a TPU
    torch_xla raises "`fused=True` requires all the params to be floating point Tensors of supported devices".

    ## Example
    ```python
    import torch

    model = torch.nn.Linear(2, 2)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    model = torch.nn.Linear(2, 2)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ```

    ## Not flagged
    ```python
    import torch

    opt = torch.optim.Adam(torch.nn.Linear(2, 2).parameters(), fused=False)
    ```
    ```python
    def Adam(parameters, fused):
        return fused

    Adam([], fused=True)
    ```

    ## Fix safety
    Safe: the same update, fused by XLA anyway.

    ## References
    torch.optim.AdamW.
    """
    if not ctx.qualname(node.func).startswith("torch.optim."):
        return
    for keyword in node.keywords:
        if keyword.arg == "fused" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
            edits = remove_arguments(ctx.source, node, [keyword])
            yield Report(keyword, "fused optimizers refuse XLA tensors; XLA fuses the update anyway", Fix(tuple(edits)))
