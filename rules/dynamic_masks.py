"""TPU4xx: reading, writing and reducing the elements of a tensor that a boolean mask chooses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, add_argument, name, remove_arguments
from tpumigrate.model import argument, call_of, parent
from tpumigrate.rule import Context, Report, rule

from ._common import is_pure
from ._dynamic import evidence, same_shape, severity

_ANCHORS = ("[", "masked_select")
_LARGEST_HALF = 65504


def _costs(ctx: Context) -> str:
    if ctx.xla:
        return "the host reads the mask (`aten::nonzero`), the step is cut in two, and each new count compiles"
    return "it waits for the mask and each new count compiles; `torch.compile(fullgraph=True)` refuses it"


def mask_in(node: ast.Subscript, ctx: Context) -> ast.expr | None:
    """The mask that a subscript of a tensor holds, alone or beside slices."""
    known = evidence(ctx)
    if not known.array(node.value) and not known.mask(node.value) and not _may_be_tensor(node.value, ctx):
        return None
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return next((part for part in parts if known.mask(part)), None)


def _may_be_tensor(node: ast.expr, ctx: Context) -> bool:
    """Whether a thing of unknown kind can be nothing but a tensor when it is indexed by a tensor's mask."""
    root = node
    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
        root = root.func if isinstance(root, ast.Call) else root.value
    if ctx.kind(node) or not isinstance(root, ast.Name):
        return False
    return not isinstance(node, ast.Name) or not ctx.model.qualnames(node)


def _on_device(node: ast.Subscript, mask: ast.expr, ctx: Context) -> bool:
    return not evidence(ctx).host(node.value) and not evidence(ctx).host(mask)


@rule("TPU402", "mask-read", anchors=("[",), keeps_cuda=True)
def mask_read(node: ast.Subscript, ctx: Context) -> Iterator[Report]:
    """Takes the elements of a tensor that a boolean mask chooses: their number is known only after the mask.

    ## What it does
    Finds `x[mask]` where the file shows that the index is a tensor of booleans: a comparison, `~m`, `a & b`,
    `torch.isfinite(x)`, `.bool()`, and names of such. In code that a model runs it is a warning, in functions
    of which nothing is known an information; data preparation stays silent. A cross entropy over the elements
    whose label is not a given number is rewritten with `ignore_index`.

    ## Why it matters on a TPU
    PyTorch/XLA computes such an index on the host and compiles a program for each new number of elements (measured:
    3 of 5 steps, two programs a step). TorchTPU waits for the mask, and has 2 cache misses for each new number.

    ## Example
    ```python
    import torch
    import torch.nn.functional as F

    def masked_loss(logits, labels):
        keep = labels != -100
        return F.cross_entropy(logits[keep], labels[keep])
    ```

    ## Use instead
    ```python
    import torch
    import torch.nn.functional as F

    def masked_loss(logits, labels):
        keep = labels != -100
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)
    ```

    ## Example: averaged afterwards
    ```python
    import torch
    import torch.nn.functional as F

    def masked_loss(logits, labels, ignore=-100):
        keep = labels != ignore
        per_token = F.cross_entropy(logits[keep], labels[keep], reduction="none")
        return per_token.mean()
    ```

    ## Use instead
    ```python
    import torch
    import torch.nn.functional as F

    def masked_loss(logits, labels, ignore=-100):
        keep = labels != ignore
        per_token = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore)
        return per_token
    ```

    ## Example: in a model
    ```python
    import torch

    class Head(torch.nn.Module):
        def forward(self, boxes, scores):
            valid = torch.isfinite(scores) & (scores > 0.5)
            return boxes[valid], scores[~valid, 0]
    ```

    ## Not flagged
    ```python
    import torch

    class Head(torch.nn.Module):
        def forward(self, x, order, keep: slice, names: dict[str, int | None]):
            return x[order], x[keep], x[:, 0], x[..., None], x[x.argmax(-1)]
    ```
    ```python
    import numpy as np
    import torch

    def loss_curve(values):
        values = np.asarray(values)
        return torch.from_numpy(values[values > 0])
    ```
    ```python
    import pandas as pd
    import torch

    def forward(df, threshold):
        return torch.tensor(df[df["score"] > threshold].values)
    ```
    ```python
    import torch

    class Records(torch.utils.data.Dataset):
        def __getitem__(self, index):
            x = torch.rand(9)
            return x[x > 0.5]
    ```

    ## Fix safety
    Safe: `ignore_index` leaves the same elements out of the sum and of the count, for any weights.

    ## References
    pytorch/xla issues 7622 and 5038; measured on torch_xla 2.9 and torch_tpu 0.2.
    """
    if not isinstance(node.ctx, ast.Load) or reduction_of(node) is not None or _is_written(node, ctx):
        return
    mask = mask_in(node, ctx)
    level = severity(node, ctx) if mask is not None else ""
    if mask is None or not level or not _on_device(node, mask, ctx):
        return
    message = f"a mask as index gives a new shape for each count of its elements: {_costs(ctx)}"
    fix = _with_ignore_index(node, ctx)
    if fix is not None:
        yield Report(node, f"{message}; `ignore_index` leaves the same elements out", fix, severity=level)
        return
    yield Report(
        node,
        f"{message}. Keep the shape: `torch.where(mask, x, 0)`, or weigh by the mask and divide by `mask.sum()`",
        unfixed="what replaces the elements left out depends on what is done with the rest",
        severity=level,
    )


def _is_written(node: ast.Subscript, ctx: Context) -> bool:
    """Whether this is `other[mask]` in `x[mask] = other[mask]`, of which TPU403 speaks."""
    above = parent(node)
    if not isinstance(above, ast.Assign) or above.value is not node or not isinstance(above.targets[0], ast.Subscript):
        return False
    return ast.dump(above.targets[0].slice) == ast.dump(node.slice) and mask_in(above.targets[0], ctx) is not None


def _with_ignore_index(node: ast.Subscript, ctx: Context) -> Fix | None:
    """The fix of `cross_entropy(logits[labels != i], labels[labels != i])`."""
    call = parent(node)
    if not isinstance(call, ast.Call) or node not in call.args or len(call.args) != 2:
        return None
    if ctx.qualname(call.func) not in ("torch.nn.functional.cross_entropy", "torch.nn.functional.nll_loss"):
        return None
    logits, labels = call.args
    if not (isinstance(logits, ast.Subscript) and isinstance(labels, ast.Subscript)):
        return None
    if {item.arg for item in call.keywords} - {"reduction", "weight", "label_smoothing"}:
        return None
    ignored = _ignored(labels, ctx)
    if ignored is None or ast.dump(logits.slice) != ast.dump(labels.slice):
        return None
    reduction = argument(call, "reduction")
    edits = [_instead_of_index(logits, ".flatten(0, -2)", ctx), _instead_of_index(labels, ".flatten()", ctx)]
    how = reduction.value if isinstance(reduction, ast.Constant) else "mean" if reduction is None else ""
    if how == "none":
        mean = _mean_of(call, ctx)
        if mean is None:
            return None
        edits.extend(remove_arguments(ctx.source, call, [k for k in call.keywords if k.arg == "reduction"]))
        edits.append(Edit(ctx.source.span(mean.func.value)[1], ctx.source.span(mean)[1], ""))  # type: ignore[attr-defined]
    elif how not in ("mean", "sum"):
        return None
    edits.append(add_argument(ctx.source, call, f"ignore_index={ctx.text(ignored)}"))
    return Fix(tuple(edits))


def _instead_of_index(node: ast.Subscript, text: str, ctx: Context) -> Edit:
    return Edit(ctx.source.span(node.value)[1], ctx.source.span(node)[1], text)


def _ignored(labels: ast.Subscript, ctx: Context) -> ast.expr | None:
    """The number i of `labels[labels != i]`."""
    test: ast.expr | None = labels.slice
    if isinstance(test, ast.Name):
        bindings = ctx.model.bindings(test)
        test = bindings[0].value if len(bindings) == 1 and bindings[0].kind == "assign" else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.NotEq):
        return None
    if not isinstance(labels.value, ast.Name) or len(ctx.model.bindings(labels.value)) != 1:
        return None
    if not isinstance(test.left, ast.Name) or test.left.id != labels.value.id:
        return None
    number = test.comparators[0]
    return number if ctx.kind(number) == "int" and isinstance(number, ast.Name | ast.Constant | ast.UnaryOp) else None


def _mean_of(call: ast.Call, ctx: Context) -> ast.Call | None:
    """The one `.mean()` that is all that is done with what a call returns."""
    above: ast.AST | None = parent(call)
    value: ast.AST = call
    if isinstance(above, ast.Assign) and len(above.targets) == 1 and isinstance(above.targets[0], ast.Name):
        target = above.targets[0]
        scope = ctx.model.scope(target)
        uses = [item for item in ctx.model.uses(target.id) if ctx.model.scope(item) is scope]
        if len(uses) != 1 or len(ctx.model.uses(target.id)) != 1 or len(ctx.model.bindings(target)) != 1:
            return None
        value, above = uses[0], parent(uses[0])
    if not (isinstance(above, ast.Attribute) and above.attr == "mean" and above.value is value):
        return None
    mean = call_of(above)
    return mean if mean is not None and not mean.args and not mean.keywords else None


@rule("TPU403", "mask-write", anchors=("[",), keeps_cuda=True)
def mask_write(node: ast.Assign | ast.AugAssign, ctx: Context) -> Iterator[Report]:
    """Writes to the elements of a tensor that a boolean mask chooses.

    ## What it does
    Finds `x[mask] = value` and writes `x.masked_fill_(mask, value)` for numbers, and
    `x.copy_(torch.where(mask, other, x))` for `x[mask] = other[mask]`: both in place, so that views of the tensor
    and other names for it see the change as before.

    ## Why it matters on a TPU
    The assignment is computed as a list of indices, which PyTorch/XLA makes on the host: `aten::nonzero` at every
    step and a program for each new count (measured), where `masked_fill_` compiles once. TorchTPU fills in place where
    one number is written, so nothing is said of that for it; other values compile for each new count (measured).

    ## Example (torch_xla)
    ```python
    import torch

    def masked_loss(ids: torch.Tensor, pad: int):
        labels = ids.clone()
        labels[labels == pad] = -100
        return labels
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    def masked_loss(ids: torch.Tensor, pad: int):
        labels = ids.clone()
        labels.masked_fill_(labels == pad, -100)
        return labels
    ```

    ## Example: by a name (torch_xla)
    ```python
    import torch

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            scale = x.abs()
            bad = ~torch.isfinite(scale)
            scale[bad] = 1.0
            return x / scale
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            scale = x.abs()
            bad = ~torch.isfinite(scale)
            scale.masked_fill_(bad, 1.0)
            return x / scale
    ```

    ## Example: a mask from elsewhere (unsafe)
    ```python
    import torch

    def attention_bias(scores, mask, other):
        scores[mask] = float("-inf")
        scores[~mask] = other[~mask]
        return scores
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    def attention_bias(scores, mask, other):
        scores.masked_fill_(mask.reshape(mask.shape + (1,) * (scores.ndim - mask.ndim)), float("-inf"))
        scores.copy_(torch.where((~mask).reshape(mask.shape + (1,) * (scores.ndim - mask.ndim)), other, scores))
        return scores
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def attention_bias(scores, mask, other):
        scores[mask] = float("-inf")
        scores.copy_(torch.where((~mask).reshape(mask.shape + (1,) * (scores.ndim - mask.ndim)), other, scores))
        return scores
    ```

    ## Example: values of another shape
    ```python
    import torch

    class Embed(torch.nn.Module):
        def forward(self, ids: torch.Tensor, x: torch.Tensor, images: torch.Tensor):
            x[ids == 7] = images
            x[ids == 8] += 1
            return x
    ```

    ## Not flagged
    ```python
    import torch

    def step(scores: torch.Tensor, rows: torch.Tensor):
        scores[:, 0] = 1.0
        scores[rows] = 0.0
        scores[3] = 2.0
        return scores
    ```
    ```python
    import numpy as np
    import torch

    def loss_weights(mask):
        mask = np.asarray(mask)
        weights = np.ones(mask.shape)
        weights[mask > 0] = 2.0
        return torch.from_numpy(weights)
    ```
    ```python
    import torch

    def collate(items):
        batch = torch.stack(items)
        batch[batch < 0] = 0
        return batch
    ```

    ## Fix safety
    Safe where the mask is made elementwise of the tensor that is written. A mask from elsewhere may have fewer
    dimensions: an index matches it to the first ones of the tensor, `masked_fill_` and `where` to the last ones, so
    dimensions are added; that is unsafe, because such a mask may also be on the host, which only an index allows.
    Unsafe also where the number may not fit float16 (an index writes an infinity, `masked_fill_` raises).

    ## References
    pytorch/xla issue 4248; measured on torch_xla 2.9 and torch_tpu 0.2.
    """
    target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
    if not isinstance(target, ast.Subscript) or (isinstance(node, ast.Assign) and len(node.targets) != 1):
        return
    mask = mask_in(target, ctx)
    level = severity(node, ctx) if mask is not None else ""
    if mask is None or not level or not _on_device(target, mask, ctx):
        return
    message = f"an assignment through a mask is computed as a list of indices: {_costs(ctx)}"
    if not ctx.xla and isinstance(node, ast.Assign) and not _is_of_many(node.value, ctx):
        return  # one value for all: TorchTPU fills in place
    if isinstance(node, ast.AugAssign):
        yield _unfixed(target, f"{message}. Write `x = torch.where(mask, ..., x)`", level)
        return
    whole = mask is target.slice
    proven = whole and same_shape(ctx, target.value, mask)
    aligned = _aligned(ctx, target.value, mask, proven) if whole else ""
    fits = _number(node.value, ctx)
    written = ctx.text(target.value)
    if aligned and fits is not None:
        text = f"{written}.masked_fill_({aligned}, {ctx.text(node.value)})"
        safe = proven and fits and _is_tensor(target.value, level, ctx)
        message = f"{message}; `masked_fill_` keeps the shape"
        yield Report(target, message, ctx.replace(node, text, safe=safe), severity=level)
    elif aligned and isinstance(node.value, ast.Subscript) and ast.dump(node.value.slice) == ast.dump(mask):
        text = f"{written}.copy_({name('torch')}.where({aligned}, {ctx.text(node.value.value)}, {written}))"
        message = f"{message}; `torch.where` keeps the shape"
        yield Report(target, message, ctx.replace(node, text, safe=False), claims=(node.value,), severity=level)
    else:
        yield _unfixed(target, f"{message}. Write `torch.where(mask, values of x's shape, x)`", level)


def _is_of_many(node: ast.expr, ctx: Context) -> bool:
    """Whether what is written is a tensor of more than one value, as far as the file shows."""
    if isinstance(node, ast.Subscript):
        return mask_in(node, ctx) is not None
    is_literal = isinstance(node, ast.Call) and ctx.qualname(node.func) == "torch.tensor"
    return ctx.kind(node) == "tensor" and not is_literal


def _is_tensor(node: ast.expr, level: str, ctx: Context) -> bool:
    """Whether a thing indexed by a mask is a tensor beyond doubt: in what a model runs, where no other arrays are."""
    known = evidence(ctx)
    return known.tensor(node) or (known.only_torch and level == "warning")


def _aligned(ctx: Context, tensor: ast.expr, mask: ast.expr, proven: bool) -> str:
    """The mask as `where` and `masked_fill_` want it: with as many dimensions as the tensor; "" when too long.

    An index matches a mask of fewer dimensions to the first ones of the tensor, they match it to the last ones.
    """
    if proven:
        return ctx.text(mask)
    named = mask.operand if isinstance(mask, ast.UnaryOp) else mask
    simple = isinstance(named, ast.Name | ast.Attribute | ast.Subscript) and is_pure(named)
    if not simple or not isinstance(tensor, ast.Name | ast.Attribute | ast.Subscript) or not is_pure(tensor):
        return ""
    text, rank = ctx.text(named), f"(1,) * ({ctx.text(tensor)}.ndim - {ctx.text(named)}.ndim)"
    mask_text = f"({ctx.text(mask)})" if named is not mask else text
    return f"{mask_text}.reshape({text}.shape + {rank})"


def _unfixed(node: ast.expr, message: str, level: str) -> Report:
    return Report(node, message, unfixed="the values have to be brought to the tensor's shape first", severity=level)


def _number(node: ast.expr, ctx: Context) -> bool | None:
    """Whether a number fits every floating type; None where it is not known to be a number."""
    value = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    if isinstance(value, ast.Constant):
        return abs(value.value) <= _LARGEST_HALF if isinstance(value.value, int | float) else None
    if ctx.qualname(value) in ("math.inf", "math.nan", "torch.inf", "torch.nan", "numpy.inf", "numpy.nan"):
        return True
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "float":
        arg = value.args[0] if len(value.args) == 1 else None
        infinite = isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        return True if infinite and not ctx.model.bindings(value.func) else None
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Call):
        return True if ctx.qualname(value.value.func) == "torch.finfo" and value.attr in ("min", "max") else None
    return False if ctx.kind(value) in ("int", "float") else None


@rule("TPU404", "masked-reduction", anchors=_ANCHORS, keeps_cuda=True)
def masked_reduction(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Sums or averages the elements of a tensor that a boolean mask chooses.

    ## What it does
    Finds `x[mask].sum()`, `x[mask].mean()` and the same of `masked_select`, and writes them with `torch.where`, which
    keeps the shape. The average divides by the number of elements of the mask; without any it is nan, as before.

    ## Why it matters on a TPU
    The chosen elements are a tensor of a new shape for each count: a program for each on PyTorch/XLA (measured: 3 of 5
    steps and a transfer in every step), two cache misses on TorchTPU. With `torch.where` there is none.

    ## Example
    ```python
    import torch

    def l1_loss(x: torch.Tensor):
        return x[x > 0].sum() / 2
    ```

    ## Use instead
    ```python
    import torch

    def l1_loss(x: torch.Tensor):
        return torch.where(x > 0, x, 0).sum() / 2
    ```

    ## Example: an average
    ```python
    import torch

    def loss(x: torch.Tensor, error: torch.Tensor):
        cost = (x - 1).clone()
        far = cost > 0.5
        return 2 * cost[far].mean()
    ```

    ## Use instead
    ```python
    import torch

    def loss(x: torch.Tensor, error: torch.Tensor):
        cost = (x - 1).clone()
        far = cost > 0.5
        return 2 * (torch.where(far, cost, 0).sum() / far.sum())
    ```

    ## Example: a mask from elsewhere (unsafe)
    ```python
    import torch

    def loss(x: torch.Tensor, labels: torch.Tensor):
        keep = labels != -100
        total = x[keep].sum()
        return total + torch.masked_select(x, keep).sum()
    ```

    ## Use instead
    ```python
    import torch

    def loss(x: torch.Tensor, labels: torch.Tensor):
        keep = labels != -100
        total = torch.where(keep.reshape(keep.shape + (1,) * (x.ndim - keep.ndim)), x, 0).sum()
        return total + torch.where(keep, x, 0).sum()
    ```

    ## Example: an average over what may be rows
    ```python
    import torch

    def loss(per_token: torch.Tensor, labels: torch.Tensor):
        return per_token[labels != -100].mean()
    ```

    ## Not flagged
    ```python
    import torch

    def loss(x: torch.Tensor, index: torch.Tensor):
        return x[index].sum() + x[:3].mean() + torch.where(x > 0, x, 0).sum()
    ```
    ```python
    import numpy as np
    import torch

    def loss_summary(x):
        x = np.asarray(x)
        return x[x > 0].mean()
    ```
    ```python
    import torch

    def loss(x: torch.Tensor):
        rows = x.cpu()
        return rows[rows > 0].sum()
    ```

    ## Fix safety
    Safe where the mask is made elementwise of the tensor, and for `masked_select`, which broadcasts as `torch.where`
    does (sums only). A mask from elsewhere may choose whole rows: dimensions are added to it for a sum, which is unsafe
    because such a mask may be on the host; an average is left to you.

    ## References
    Measured on torch_xla 2.9 and torch_tpu 0.2.
    """
    found = _reduced(node, ctx)
    if found is None:
        return
    tensor, mask, selects = found
    level = severity(node, ctx)
    known = evidence(ctx)
    if not level or known.host(tensor) or known.host(mask):
        return
    assert isinstance(node.func, ast.Attribute)
    mean = node.func.attr == "mean"
    message = f"what a mask chooses has a new shape for each count: {_costs(ctx)}; `torch.where` keeps the shape"
    proven = same_shape(ctx, tensor, mask)
    aligned = _aligned(ctx, tensor, mask, proven or (selects and not mean))
    if not aligned or (mean and not proven):
        advice = "`torch.where(mask, x, 0).sum()`" + (", divided by the number of elements chosen" if mean else "")
        yield Report(node, f"{message}: {advice}", unfixed="the mask may choose whole rows", severity=level)
        return
    safe = (selects and not mean) or (proven and _is_tensor(tensor, level, ctx))
    chosen = f"{name('torch')}.where({aligned}, {ctx.text(tensor)}, 0)"
    if not mean:
        yield Report(node, message, Fix((Edit(*ctx.source.span(node.func.value), chosen),), safe=safe), severity=level)
        return
    text = ctx.text(mask)
    if not isinstance(mask, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        text = f"({text})"
    place = parent(node)
    edit = ctx.edit(node, f"{chosen}.sum() / {text}.sum()")
    if isinstance(place, ast.BinOp) and place.right is node and not edit.text.startswith("("):
        edit = edit._replace(text=f"({edit.text})")
    yield Report(node, message, Fix((edit,), safe=safe), severity=level)


def reduction_of(node: ast.expr) -> ast.Call | None:
    """The call of `node.sum()` or `node.mean()` over everything."""
    above = parent(node)
    if not isinstance(above, ast.Attribute) or above.attr not in ("sum", "mean"):
        return None
    call = call_of(above)
    return call if call is not None and not call.args and not call.keywords else None


def _reduced(node: ast.Call, ctx: Context) -> tuple[ast.expr, ast.expr, bool] | None:
    """Tensor and mask of a reduction, and whether `masked_select` chooses."""
    func = node.func
    if not isinstance(func, ast.Attribute) or reduction_of(func.value) is not node:
        return None
    inner = func.value
    if isinstance(inner, ast.Subscript):
        mask = mask_in(inner, ctx)
        return (inner.value, mask, False) if mask is not None and mask is inner.slice else None
    return _selected(inner, ctx)


def _selected(node: ast.expr, ctx: Context) -> tuple[ast.expr, ast.expr, bool] | None:
    if not isinstance(node, ast.Call) or node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
        return None
    if ctx.qualname(node.func) == "torch.masked_select" and len(node.args) == 2:
        return node.args[0], node.args[1], True
    func = node.func
    if isinstance(func, ast.Attribute) and func.attr == "masked_select" and len(node.args) == 1:
        return (func.value, node.args[0], True) if not ctx.qualname(func) else None
    return None
