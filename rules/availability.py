"""TPU103: asking whether there is a GPU, which on a TPU host silently means "use the CPU"."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.accelerators import asked_accelerator
from tpumigrate.edits import Edit, Fix, name, replace
from tpumigrate.model import parent, parents
from tpumigrate.rule import Context, Report, rule

from ._common import device_string, registers_device
from ._devices import device_text, in_test_decorator, quote
from ._guards import means_cuda_itself
from ._table import table_reports

CUDA_AVAILABLE = "torch.cuda.is_available"
_QUESTIONS = frozenset({CUDA_AVAILABLE, "torch.accelerator.is_available"})
_OTHER_ACCELERATORS = (
    "torch.backends.mps.is_available",
    "torch.mps.is_available",
    "torch.xpu.is_available",
    "torch.npu.is_available",
    "torch.hpu.is_available",
    "torch.mlu.is_available",
    "torch.musa.is_available",
    "torch.mtia.is_available",
)


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
    ladder = _ladder(node, ctx)
    if ladder is not None:
        yield from _one_more_arm(node, ladder, message, ctx)
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


# -- one question ------------------------------------------------------------------------------------------


def available(ctx: Context) -> str:
    """An expression that is true where the target's device can be used."""
    if ctx.xla:
        return f"{name('torch_xla.runtime')}.device_type() is not None"
    return f"{name('torch')}.accelerator.is_available()"


def _answer(node: ast.Call, ctx: Context) -> Fix:
    above = parent(node)
    if ctx.xla and isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not):
        return Fix((replace(ctx.source, above, f"{name('torch_xla.runtime')}.device_type() is None"),))
    return Fix((replace(ctx.source, node, available(ctx)),))


# -- "cuda" if is_available() else "cpu" -------------------------------------------------------------------


def _choice(node: ast.Call, ctx: Context) -> ast.IfExp | None:
    """The conditional expression that chooses a device by this question alone."""
    above = parent(node)
    if isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not):
        above = parent(above)
    if not isinstance(above, ast.IfExp) or node in (above.body, above.orelse):
        return None
    arms = [above.body, above.orelse]
    positive, negative = arms if above.test is node else arms[::-1]
    if _device_of(positive, ctx) and _is_cpu(negative, ctx):
        return above
    return None


def _device_of(node: ast.expr, ctx: Context) -> ast.expr | None:
    """The accelerator's device in an arm: a string, torch.device of one, or the current accelerator."""
    if device_text(node, ctx) is not None:
        return node
    if isinstance(node, ast.Attribute) and node.attr == "type":
        return node if _device_of(node.value, ctx) is not None else None
    if isinstance(node, ast.Call):
        called = ctx.qualname(node.func)
        if called == "torch.accelerator.current_accelerator" and ctx.xla:
            return node
        if called == "torch.device" and node.args and _device_of(node.args[0], ctx) is not None:
            return node
    return None


def _is_cpu(node: ast.expr, ctx: Context) -> bool:
    if isinstance(node, ast.Call) and ctx.qualname(node.func) == "torch.device" and len(node.args) == 1:
        return _is_cpu(node.args[0], ctx)
    return isinstance(node, ast.Constant) and node.value == "cpu"


def _chosen_device(choice: ast.IfExp, question: ast.Call, message: str, ctx: Context) -> Report:
    positive = choice.body if choice.test is question else choice.orelse
    if ctx.xla:
        text = _device_text(positive, ctx)
        return Report(choice, message, Fix((replace(ctx.source, choice, text),)))
    edits = [replace(ctx.source, question, available(ctx)), _device_edit(positive, ctx)]
    return Report(choice, message, Fix(tuple(edits)), claims=(choice,))


def _device_text(node: ast.expr, ctx: Context) -> str:
    """The target's device in the type (string or torch.device) that the arm had."""
    if isinstance(node, ast.Call) and device_text(node, ctx) is None:
        return f'{name("torch")}.device("{ctx.device}"){registers_device(ctx)}'
    return device_string(ctx, quote(ctx.text(node)))


def _device_edit(node: ast.expr, ctx: Context) -> Edit:
    return replace(ctx.source, node, _device_text(node, ctx))


# -- ladders of accelerators -------------------------------------------------------------------------------


def _is_other_accelerator(node: ast.AST, ctx: Context) -> bool:
    for item in ast.walk(node):
        if isinstance(item, ast.Call):
            func = item.func
            called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            asked = asked_accelerator(called)
            if ctx.qualname(func) in _OTHER_ACCELERATORS or (asked and asked not in ("cuda", "torch", "gpu", "bf")):
                return True
    return False


def _ladder(node: ast.Call, ctx: Context) -> ast.If | ast.IfExp | None:
    """The if/elif statement or chained conditional in whose tests this question and other accelerators stand."""
    for above in parents(node):
        if isinstance(above, ast.If | ast.IfExp):
            top = _top(above)
            if any(node in ast.walk(test) for test, _ in _arms(top)[0]):
                tests = [test for test, _ in _arms(top)[0]]
                if len(tests) > 1 and any(_is_other_accelerator(test, ctx) for test in tests):
                    return top
        if isinstance(above, ast.stmt):
            break
    return None


def _top(node: ast.If | ast.IfExp) -> ast.If | ast.IfExp:
    """The first rung of the ladder that `node` is a rung of."""
    above = parent(node)
    while isinstance(above, type(node)) and (above.orelse == [node] or above.orelse is node):
        node = above
        above = parent(node)
    return node


def _arms(top: ast.If | ast.IfExp) -> tuple[list[tuple[ast.expr, ast.AST]], list[ast.stmt] | ast.expr]:
    """Tests with the rung that holds them, and the final else."""
    rungs: list[tuple[ast.expr, ast.AST]] = []
    current: ast.AST = top
    while True:
        assert isinstance(current, ast.If | ast.IfExp)
        rungs.append((current.test, current))
        rest = current.orelse
        if isinstance(rest, ast.IfExp):
            current = rest
        elif isinstance(rest, list) and len(rest) == 1 and isinstance(rest[0], ast.If) and isinstance(top, ast.If):
            current = rest[0]
        else:
            return rungs, rest


def _one_more_arm(node: ast.Call, ladder: ast.If | ast.IfExp, message: str, ctx: Context) -> Iterator[Report]:
    rungs, rest = _arms(ladder)
    claims = (ladder,) if isinstance(ladder, ast.IfExp) else tuple(part for part in _claimed(ladder))
    if _knows_target(ladder, ctx):
        yield Report(node, "", claims=claims, silent=True)
        return
    fix = _arm_fix(ladder, rungs, rest, node, ctx)
    unfixed = "" if fix else "add an arm for the TPU beside the others"
    yield Report(node, f"{message}; this ladder has no arm for the TPU", fix, unfixed, claims)


def _claimed(ladder: ast.If) -> Iterator[ast.AST]:
    """What the new arm settles: the tests, and the statements that choose a device."""
    for test, rung in _arms(ladder)[0]:
        yield test
        assert isinstance(rung, ast.If)
        yield from rung.body


def _knows_target(ladder: ast.AST, ctx: Context) -> bool:
    """Whether a ladder has an arm for the target already."""
    for item in ast.walk(ladder):
        if isinstance(item, ast.Constant) and item.value == ctx.device:
            return True
        if isinstance(item, ast.Name) and (ctx.device in item.id.lower() or "tpu" in item.id.lower()):
            return True
        if isinstance(item, ast.Attribute):
            used = ctx.qualname(item)
            if item.attr in ("is_tpu", "xla_device", "is_xla_available") or "torch_xla" in used:
                return True
            if used == "torch.accelerator.is_available":
                return True
    return False


def _arm_fix(
    ladder: ast.If | ast.IfExp,
    rungs: list[tuple[ast.expr, ast.AST]],
    rest: list[ast.stmt] | ast.expr,
    node: ast.Call,
    ctx: Context,
) -> Fix | None:
    """A copy of the CUDA arm for the target, before the final else."""
    cuda = next((rung for test, rung in rungs if test is node), None)
    if isinstance(ladder, ast.IfExp) and isinstance(cuda, ast.IfExp) and isinstance(rest, ast.expr):
        device = device_text(cuda.body, ctx)
        if device is None and _device_of(cuda.body, ctx) is None:
            return None
        start = ctx.source.span(rest)[0]
        return Fix((Edit(start, start, f"{_device_text(cuda.body, ctx)} if {available(ctx)} else "),), adds=True)
    if not isinstance(cuda, ast.If) or not isinstance(rest, list) or len(cuda.body) != 1:
        return None
    body = cuda.body[0]
    if not isinstance(body, ast.Assign | ast.Return | ast.AnnAssign) or body.value is None:
        return None
    if _device_of(body.value, ctx) is None:
        return None
    source = ctx.source
    first, last = source.span(body)
    start, end = source.span(body.value)
    text = source.text[first:start] + _device_text(body.value, ctx) + source.text[end:last]
    place = _else_line(ladder, rest, ctx)  # type: ignore[arg-type]
    if place is None or source.line_start(first) == source.line_start(source.span(cuda.test)[0]):
        return None
    outer, inner = source.indent(source.span(ladder)[0]), source.indent(first)
    arm = f"{outer}elif {available(ctx)}:{source.newline}{inner}{text}{source.newline}"
    return Fix((Edit(place, place, arm),), adds=True)


def _else_line(ladder: ast.If, rest: list[ast.stmt], ctx: Context) -> int | None:
    """Offset of the line of the final `else:`, or of the line after a ladder without one."""
    source = ctx.source
    if not rest:
        end = source.line_end(source.span(ladder)[1])
        return end if source.text[end - 1] in "\r\n" else None
    last_rung = _arms(ladder)[0][-1][1]
    assert isinstance(last_rung, ast.If)
    after = source.span(last_rung.body[-1])[1]
    for token in source.tokens(after, source.span(rest[0])[0]):
        if token.text == "else":
            line = source.line_start(token.start)
            return line if not source.text[line : token.start].strip() else None
    return None
