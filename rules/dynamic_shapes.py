"""TPU4xx: results and bounds whose size is known only after the values are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.model import parent, statement
from tpumigrate.names import Binding
from tpumigrate.rule import Context, Report, rule

from ._dynamic import evidence, severity

_UNFIXED = "how many elements there may be is not in the code"


@rule("TPU401", "nonzero", anchors=("nonzero", "argwhere", "where"), keeps_cuda=True)
def nonzero(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Asks for the places of elements with `nonzero`, `argwhere` or `where` of a condition alone.

    ## What it does
    Finds `torch.nonzero(m)`, `m.nonzero()`, `torch.argwhere(m)` and `torch.where(m)`, which is `nonzero` under another
    name, in code that a model runs (a warning) and in functions of which nothing is known (an information).

    ## Why it matters on a TPU
    The number of places is the shape of the result. PyTorch/XLA computes it on the host and compiles a program for
    each new number (measured, 4 steps with a changing threshold: 5 compilations, 4 times `aten::nonzero`). On TorchTPU
    it waits for the values, and each new number is a cache miss.

    ## Example
    ```python
    import torch

    class Select(torch.nn.Module):
        def forward(self, scores, boxes, thr):
            idx = torch.nonzero(scores > thr).squeeze(1)
            return boxes[idx]
    ```

    ## Example: where of a condition alone
    ```python
    import torch

    def loss(scores: torch.Tensor, thr: float):
        (rows,) = torch.where(scores > thr)
        return scores.gather(0, rows).sum()
    ```

    ## Example: methods
    ```python
    from torch import Tensor

    def forward(scores: Tensor):
        flat = (scores > 0.5).nonzero(as_tuple=True)[0]
        return flat, scores.argwhere()
    ```

    ## Not flagged
    ```python
    import torch

    def loss(scores: torch.Tensor, thr: float):
        return torch.where(scores > thr, scores, torch.zeros_like(scores)).sum()
    ```
    ```python
    import numpy as np
    import torch

    def loss_places(values):
        mask = np.asarray(values) > 0
        return mask.nonzero()[0], np.where(mask)[0], torch.tensor(values)
    ```
    ```python
    import torch

    class Boxes(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return torch.nonzero(torch.rand(9) > 0.5)
    ```
    ```python
    import torch

    def forward(x: torch.Tensor):
        return torch.nonzero(x.cpu())
    ```

    ## Fix safety
    There is no fix: a constant number of places is a choice. `values, places = scores.topk(K); valid = values > thr`
    with a constant `K` keeps every shape.

    ## References
    pytorch/xla pull 1401, roboflow/rf-detr pull 1450; measured on torch_xla 2.9 and torch_tpu 0.2.
    """
    subject = _asked_for_places(node, ctx)
    if subject is None:
        return
    level = severity(node, ctx)
    if not level or evidence(ctx).host(subject):
        return
    what = "one-argument `torch.where` is `nonzero`: " if ctx.qualname(node.func) == "torch.where" else ""
    costs = (
        "it is computed on the host (`aten::nonzero`), cuts the step in two, and compiles for each new count"
        if ctx.xla
        else "it waits for the values and compiles for each new count"
    )
    advice = "Keep the shape: `values, places = scores.topk(K)` with a constant K and a mask of the valid ones"
    if _is_counted(node):
        advice = "Count without the places: `(condition).sum()`"
    elif _is_index(node):
        advice = "Keep the shape: `torch.where(condition, x, other)` in place of the index"
    message = f"{what}the number of places is the shape of the result: {costs}. {advice}"
    yield Report(node, message, unfixed=_UNFIXED, severity=level)


def _asked_for_places(node: ast.Call, ctx: Context) -> ast.expr | None:
    """The tensor of which the places of the elements that are not zero are asked for."""
    called = ctx.qualname(node.func)
    if called == "torch.where":
        alone = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        return node.args[0] if alone else None
    if called in ("torch.nonzero", "torch.argwhere"):
        return ctx.arg(node, "input", 0)
    func = node.func
    if called or not isinstance(func, ast.Attribute) or func.attr not in ("nonzero", "argwhere") or node.args:
        return None
    known = evidence(ctx)
    as_tuple = any(item.arg == "as_tuple" for item in node.keywords)  # a parameter of torch's alone
    return func.value if as_tuple or known.tensor(func.value) or known.mask(func.value) else None


def _is_counted(node: ast.Call) -> bool:
    """Whether only the number of places is used: `len(...)`, `.numel()`, `.shape[0]`, `.size(0)`."""
    above = parent(node)
    if isinstance(above, ast.Call) and isinstance(above.func, ast.Name) and above.func.id == "len":
        return True
    return isinstance(above, ast.Attribute) and above.attr in ("numel", "shape", "size", "nelement")


def _is_index(node: ast.Call) -> bool:
    above = parent(node)
    return isinstance(above, ast.Subscript) and above.slice is node


@rule(
    "TPU405",
    "counted-result",
    anchors=("unique", "masked_select", "bincount"),
    keeps_cuda=True,
)
def counted_result(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Calls functions whose result is as large as the values say: `unique`, `masked_select`, `bincount`.

    ## What it does
    Finds `unique`, `unique_consecutive`, `masked_select`, and `bincount` without `minlength`, of tensors.

    ## Why it matters on a TPU
    PyTorch/XLA computes them on the host, and each new size of the result compiles what follows again (measured:
    `masked_select` 3 of 5 steps, `unique` and `bincount` 1 of 5). TorchTPU waits for the values first.

    ## Example
    ```python
    import torch

    class Router(torch.nn.Module):
        def forward(self, x, experts):
            for expert in torch.unique(experts):
                x = x + torch.masked_select(x, experts == expert).max()
            return x
    ```

    ## Example: counts
    ```python
    import torch

    def load_loss(experts: torch.Tensor):
        return torch.bincount(experts.flatten()).float().var()
    ```

    ## Example: methods
    ```python
    import torch

    def loss(labels: torch.Tensor):
        kinds, counts = labels.unique(return_counts=True)
        return counts.max() - labels.bincount().max()
    ```

    ## Not flagged
    ```python
    import pandas as pd
    import torch

    def load_loss(frame):
        return frame["label"].unique(), frame.groupby("label").unique()
    ```
    ```python
    import torch

    def load_loss(experts: torch.Tensor, n: int):
        return torch.bincount(experts, minlength=n).float().var()
    ```
    ```python
    import numpy as np
    import torch

    def loss_kinds(labels):
        return np.unique(labels), np.bincount(labels)
    ```

    ## Fix safety
    There is no fix: the largest size is not in the code.

    ## References
    Measured on torch_xla 2.9 and torch_tpu 0.2.
    """
    found = _counted(node, ctx)
    if found is None:
        return
    called, subject = found
    level = severity(node, ctx)
    if not level or evidence(ctx).host(subject):
        return
    advice = {
        "masked_select": "Keep the shape: `torch.where(mask, x, 0)`",
        "bincount": "Count with a known number of classes: `one_hot(x, n).sum(0)`, or `zeros(n).scatter_add_`",
    }.get(called, "Work with a constant number of classes and a mask")
    costs = (
        "runs on the host and its size compiles anew" if ctx.xla else "waits for the values and its size compiles anew"
    )
    message = f"the values decide how large the result of `{called}` is: it {costs} what follows. {advice}"
    yield Report(node, message, unfixed=_UNFIXED, severity=level)


def _counted(node: ast.Call, ctx: Context) -> tuple[str, ast.expr] | None:
    """The name of a function whose result has a size of its own, and its tensor."""
    called = ctx.qualname(node.func)
    func = node.func
    if called:
        head, _, name = called.rpartition(".")
        subject = ctx.arg(node, "input", 0) if head == "torch" else None
        position = 2
    elif isinstance(func, ast.Attribute):
        name, subject, position = func.attr, func.value, 1
        if name != "masked_select" and not evidence(ctx).tensor(subject):
            return None
    else:
        return None
    if subject is None or name not in ("unique", "unique_consecutive", "masked_select", "bincount"):
        return None
    if name == "bincount" and ctx.arg(node, "minlength", position) is not None:
        return None
    if name == "masked_select" and _is_reduced(node):
        return None  # TPU404
    return name, subject


def _is_reduced(node: ast.Call) -> bool:
    above = parent(node)
    call = parent(above) if isinstance(above, ast.Attribute) and above.attr in ("sum", "mean") else None
    return isinstance(call, ast.Call) and call.func is above and not call.args and not call.keywords


@rule("TPU406", "repeat-by-tensor", anchors=("repeat_interleave",), keeps_cuda=True)
def repeat_by_tensor(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Repeats elements as often as a tensor says, without `output_size`.

    ## What it does
    Finds `repeat_interleave` with a tensor of repeats. Numbers are fine, and what is not known to be a tensor is not
    spoken of: nearly always it is a number.

    ## Why it matters on a TPU
    The sum of the repeats is the size of the result: it is read back to the host, and each new sum compiles what
    follows (measured on PyTorch/XLA: 4 of 5 steps).

    ## Example
    ```python
    import torch

    class Regulator(torch.nn.Module):
        def forward(self, x: torch.Tensor, durations: torch.Tensor):
            return x.repeat_interleave(durations, dim=0)
    ```

    ## Example: a function
    ```python
    import torch

    def decode(x: torch.Tensor, log_durations: torch.Tensor):
        repeats = log_durations.exp().round().long()
        return torch.repeat_interleave(x, repeats, dim=0)
    ```

    ## Example: places of segments
    ```python
    import torch

    def attention_segments(lengths: torch.Tensor):
        return torch.repeat_interleave(lengths)
    ```

    ## Not flagged
    ```python
    import torch

    def attention(k: torch.Tensor, n_rep: int, heads, kv_heads):
        return k.repeat_interleave(n_rep, dim=1), k.repeat_interleave(heads // kv_heads, 1)
    ```
    ```python
    import torch

    def decode(x: torch.Tensor, repeats: torch.Tensor, total: int):
        return torch.repeat_interleave(x, repeats, dim=0, output_size=total)
    ```
    ```python
    import torch

    def attention(x: torch.Tensor, num_images):
        return x.repeat_interleave(num_images, dim=0), x.repeat_interleave(x.shape[0])
    ```

    ## Fix safety
    There is no fix: a constant size of the result is a choice.

    ## References
    torch.repeat_interleave; measured on torch_xla 2.9.
    """
    called = ctx.qualname(node.func)
    func = node.func
    if called == "torch.repeat_interleave":
        subject = ctx.arg(node, "input", 0)
        alone = len(node.args) == 1 and not any(item.arg in ("repeats", "input") for item in node.keywords)
        repeats = subject if alone else ctx.arg(node, "repeats", 1)
    elif not called and isinstance(func, ast.Attribute) and func.attr == "repeat_interleave":
        subject, repeats = func.value, ctx.arg(node, "repeats", 0)
    else:
        return
    if subject is None or repeats is None or ctx.arg(node, "output_size") is not None:
        return
    level = severity(node, ctx)
    known = evidence(ctx)
    if not level or ctx.kind(repeats) != "tensor" or known.host(repeats) or known.host(subject):
        return
    if isinstance(repeats, ast.Call) and ctx.qualname(repeats.func) == "torch.tensor":
        return  # constants
    yield Report(
        node,
        "the sum of the repeats is the size of the result: it is read back to the host, and each new sum compiles what "
        "follows again. Pad to a constant size and give `output_size=`",
        unfixed=_UNFIXED,
        severity=level,
    )


@rule("TPU407", "tensor-bound", anchors=(":", "range("), keeps_cuda=True)
def tensor_bound(node: ast.Slice | ast.Call, ctx: Context) -> Iterator[Report]:
    """Takes a slice or a range as far as a tensor's value says.

    ## What it does
    Finds slices of tensors whose bound is a tensor's value (`x[:, : lengths.max()]`, `x[:n]` after `n = t.item()`)
    and `torch.arange` and `range` up to one.

    ## Why it matters on a TPU
    The bound is read back to the host, and each new value is a program of its own (measured for
    `x[:int((x > 0).sum())]` on PyTorch/XLA: 3 of 5 steps; TorchTPU: 1 cache miss for each new bound).

    ## Example
    ```python
    import torch

    class Encoder(torch.nn.Module):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor):
            return x[:, : lengths.max()]
    ```

    ## Example: by a name
    ```python
    import torch

    def loss(x: torch.Tensor):
        n = int((x > 0).sum())
        m = x.argmax().item()
        return x[:n].sum() + x[m:].sum()
    ```

    ## Example: a range
    ```python
    import torch

    class Mask(torch.nn.Module):
        def forward(self, lengths: torch.Tensor):
            places = torch.arange(lengths.max().item(), device=lengths.device)
            return places < lengths[:, None]
    ```

    ## Not flagged
    ```python
    import torch

    def loss(x: torch.Tensor, n: int, sizes: list[int]):
        return x[:n] + x[: x.shape[0] // 2] + x[: sizes[0]] + torch.arange(x.size(0))
    ```
    ```python
    import torch

    def decode(words: list[str], n: torch.Tensor):
        return words[: n.item()]
    ```
    ```python
    import torch

    def collate(items: torch.Tensor, lengths: torch.Tensor):
        return items[:, : lengths.max()]
    ```
    ```python
    import torch

    def loss(lengths: list[int], x: torch.Tensor):
        n = int(max(lengths))
        return x[:n], torch.arange(int(n))
    ```

    ## Fix safety
    There is no fix: keep the whole length and mask what lies beyond, or round the bound up to a few lengths.

    ## References
    Measured on torch_xla 2.9 and torch_tpu 0.2.
    """
    if isinstance(node, ast.Slice):
        bounds = [bound for bound in (node.lower, node.upper, node.step) if bound is not None]
        what = "slice"
    else:
        what = _range_name(node, ctx)
        bounds = list(node.args) if what else []
    bound = next((item for item in bounds if is_read_back(item, ctx)), None)
    if bound is None:
        return
    place: ast.AST = node
    if isinstance(node, ast.Slice):
        sliced = place = _subscript(node)
        known = evidence(ctx)
        if not known.tensor(sliced.value) or known.host(sliced.value):
            return
    level = severity(place, ctx)
    if not level or evidence(ctx).host(bound):
        return
    costs = "is read back to the host and each new value compiles a program of its own"
    repeats = "a loop that is unrolled into the program" if what == "range" else "the shape"
    yield Report(
        place,
        f"the bound of this {what} is a tensor's value, and {repeats} depends on it: it {costs}. "
        "Keep the whole length and mask what lies beyond, or round the bound up to a few lengths",
        unfixed="the largest length is not in the code",
        severity=level,
    )


def _subscript(node: ast.Slice) -> ast.Subscript:
    above = parent(node)
    if isinstance(above, ast.Tuple):
        above = parent(above)
    assert isinstance(above, ast.Subscript)
    return above


def _range_name(node: ast.Call, ctx: Context) -> str:
    if ctx.qualname(node.func) == "torch.arange":
        return "torch.arange"
    func = node.func
    if isinstance(func, ast.Name) and func.id == "range" and not ctx.model.bindings(func):
        return "range" if isinstance(statement(node), ast.For) else ""
    return ""


def is_read_back(node: ast.expr, ctx: Context, depth: int = 3) -> bool:
    """Whether a number is a tensor's value: the tensor itself, `int(t)`, `t.item()`, a name or sum of such."""
    kind = ctx.kind(node)
    if kind == "tensor":
        return not isinstance(node, ast.Name) or not _may_be_number(node, ctx)
    if isinstance(node, ast.BinOp):
        return is_read_back(node.left, ctx, depth) or is_read_back(node.right, ctx, depth)
    if isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr == "item" and not node.args:
            return evidence(ctx).tensor(func.value)
        builtin = isinstance(func, ast.Name) and func.id in ("int", "round") and not ctx.model.bindings(func)
        return builtin and len(node.args) == 1 and is_read_back(node.args[0], ctx, depth)
    if isinstance(node, ast.Name) and depth:
        bindings: list[Binding] = [item for item in ctx.model.bindings(node) if item.kind != "augment"]
        return (
            len(bindings) == 1
            and bindings[0].kind == "assign"
            and bindings[0].value is not None
            and (is_read_back(bindings[0].value, ctx, depth - 1))
        )
    return False


def _may_be_number(node: ast.Name, ctx: Context) -> bool:
    """Whether a name that the file takes for a tensor is bound by a loop over one or given as either."""
    return any(item.kind in ("for", "comprehension") for item in ctx.model.bindings(node))
