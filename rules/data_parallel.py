"""TPU303: DataParallel, which replicates a model over the GPUs of one process."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix
from tpumigrate.model import class_of, has_stars, parent, parents
from tpumigrate.rule import Context, Report, rule

from ._common import is_pure
from ._distributed import DDP

_DATA_PARALLEL = "torch.nn.DataParallel"
_FUNCTIONS = frozenset(
    f"torch.nn.parallel.{name}"
    for name in (
        "data_parallel", "replicate", "scatter", "gather", "parallel_apply", "data_parallel.data_parallel",
        "replicate.replicate", "scatter_gather.scatter", "scatter_gather.gather",
        "parallel_apply.parallel_apply",
    )
)  # fmt: skip
_SAME_MODEL = frozenset({"cuda", "to", "cpu", "train", "eval", "float", "half", "bfloat16", "double"})


@rule("TPU303", "data-parallel", anchors=("DataParallel", "parallel"))
def data_parallel(node: ast.Call | ast.ClassDef, ctx: Context) -> Iterator[Report]:
    """DataParallel replicates a model over the GPUs of one process.

    ## What it does
    Finds `torch.nn.DataParallel` and its building blocks. Where a variable is wrapped, the wrapper goes, and
    so does `.module` behind that variable.

    ## Why it matters on a TPU
    A process owns one TPU device. With TorchTPU the wrapper is made and its forward raises ("torch._C has no
    attribute '_scatter'"); with PyTorch/XLA it finds no GPU and silently runs the plain module. All devices
    are used by one process each, with DistributedDataParallel.

    ## Example
    ```python
    import torch.nn as nn

    def wrap(net):
        return nn.DataParallel(net)

    def save(model):
        return model.module.state_dict()

    class Wrapper(nn.DataParallel):
        pass
    ```

    ## Example: a variable (unsafe)
    ```python
    from torch import nn

    def build(net, count):
        if count > 1:
            print("several devices")
            net = nn.DataParallel(net)
        head = nn.DataParallel(nn.Linear(2, 2), device_ids=list(range(count))).eval()
        return {"net": net.module.state_dict(), "head": head.module.state_dict()}
    ```

    ## Use instead
    ```python
    from torch import nn

    def build(net, count):
        if count > 1:
            print("several devices")
        head = nn.Linear(2, 2).eval()
        return {"net": net.state_dict(), "head": head.state_dict()}
    ```

    ## Example: attributes and guards (unsafe)
    ```python
    from torch.nn import DataParallel

    class Trainer:
        def __init__(self, net):
            self.net = DataParallel(net)

        def weights(self):
            return self.net.module.state_dict()

    def plain(net):
        net = DataParallel(net) if net.large else net
        return net.module if isinstance(net, DataParallel) else net
    ```

    ## Use instead
    ```python
    from torch.nn import DataParallel

    class Trainer:
        def __init__(self, net):
            self.net = net

        def weights(self):
            return self.net.state_dict()

    def plain(net):
        return net.module if isinstance(net, DataParallel) else net
    ```

    ## Not flagged
    ```python
    from torch import nn

    def plain(net):
        return net.module if isinstance(net, nn.DataParallel) else net
    ```
    ```python
    from mylib import DataParallel

    net = DataParallel(lambda x: x)
    ```
    ```python
    from torch.nn.parallel import DistributedDataParallel

    net = DistributedDataParallel(make())
    ```

    ## Fix safety
    Unsafe: the names in a `state_dict()` lose the prefix "module.", so that checkpoints of the wrapped model
    have to be renamed, and code in other files may use `.module`.

    ## References
    torch.nn.DataParallel; ran on torch_xla 2.9 and torch_tpu 0.2.
    """
    if isinstance(node, ast.ClassDef):
        yield from _subclass(node, ctx)
        return
    name = ctx.qualname(node.func)
    severity = "warning" if ctx.xla else "error"
    if name in _FUNCTIONS:
        message = f"`{name}` spreads work over the GPUs of one process; a process owns one TPU device"
        yield Report(node, message, unfixed="start one process per device, with DDP", severity=severity)
        return
    if name != _DATA_PARALLEL:
        return
    happens = "silently runs the plain module" if ctx.xla else "fails in its forward"
    message = f"DataParallel {happens} on a TPU; every device needs its own process, with DistributedDataParallel"
    fix = _unwrapped(node, ctx)
    if isinstance(fix, str):
        yield Report(node, message, unfixed=fix, severity=severity)
    else:
        yield Report(node, message, fix, severity=severity)


def _subclass(node: ast.ClassDef, ctx: Context) -> Iterator[Report]:
    for base in node.bases:
        if ctx.qualname(base) == _DATA_PARALLEL:
            message = "a class derives from DataParallel, which does not work on a TPU"
            why = "start one process per device, with DDP"
            yield Report(base, message, unfixed=why, severity="warning" if ctx.xla else "error")


def _unwrapped(call: ast.Call, ctx: Context) -> Fix | str:
    """The fix that removes a wrapper, or why there is none."""
    module = ctx.arg(call, "module", 0)
    if module is None or has_stars(call):
        return "its arguments are passed on with stars"
    others = [item for item in [*call.args, *(keyword.value for keyword in call.keywords)] if item is not module]
    if not all(is_pure(item) for item in others):
        return "its arguments call something"
    whole = _whole_value(call)
    stmt = parent(whole)
    if not isinstance(stmt, ast.Assign) or len(stmt.targets) != 1:
        return "what is wrapped is handed on: code elsewhere may use its `.module`"
    target = stmt.targets[0]
    if not (isinstance(target, ast.Name) or _is_self(target)):
        return "what is wrapped is handed on: code elsewhere may use its `.module`"
    accesses = _module_accesses(target, ctx)
    if accesses is None:
        return "`.module` is used where it is not clear that this model is meant: remove the wrapper by hand"
    source = ctx.source
    edits = [Edit(source.span(item.value)[1], source.span(item)[1], "") for item in accesses]
    unchanged = ctx.text(module) == ctx.text(target)
    if unchanged and (whole is call or _falls_back_to(whole, module, ctx)):
        return Fix(tuple(edits), deletes=(stmt,), safe=False)
    if _falls_back_to(whole, module, ctx):
        edits.append(ctx.edit(whole, ctx.text(module)))
    else:
        start, end = source.span(call)
        inner_start, inner_end = source.span(module)
        loose = isinstance(parent(call), ast.Attribute) and not isinstance(
            module, ast.Name | ast.Attribute | ast.Call | ast.Subscript
        )
        edits += [Edit(start, inner_start, "(" if loose else ""), Edit(inner_end, end, ")" if loose else "")]
    return Fix(tuple(edits), safe=False)


def _whole_value(call: ast.Call) -> ast.expr:
    """The expression around a wrapper that still is the model: `DataParallel(net).cuda()`, a choice."""
    whole: ast.expr = call
    while True:
        above = parent(whole)
        call_above = parent(above) if isinstance(above, ast.Attribute) and above.attr in _SAME_MODEL else None
        if isinstance(call_above, ast.Call) and call_above.func is above:
            whole = call_above
        elif isinstance(above, ast.IfExp) and whole is not above.test:
            whole = above
        else:
            return whole


def _falls_back_to(whole: ast.expr, module: ast.expr, ctx: Context) -> bool:
    """`DataParallel(net) if many else net`."""
    if not isinstance(whole, ast.IfExp) or not is_pure(whole.test):
        return False
    plain = [arm for arm in (whole.body, whole.orelse) if not isinstance(arm, ast.Call)]
    return len(plain) == 1 and ctx.text(plain[0]) == ctx.text(module)


def _is_self(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


def _module_accesses(target: ast.expr, ctx: Context) -> list[ast.Attribute] | None:
    """The `.module` behind what is assigned to `target`; None when another one may mean the same model."""
    found = []
    for node in ctx.model.nodes(ast.Attribute):
        if node.attr != "module" or ctx.model.qualnames(node) or _is_guarded(node):
            continue
        if _is_same(node.value, target, ctx) and isinstance(node.ctx, ast.Load):
            found.append(node)
        elif not _is_wrapped_otherwise(node.value, ctx):
            return None
    if found and _is_ddp_too(found[0].value, ctx):
        return None
    return found


def _is_guarded(node: ast.Attribute) -> bool:
    """Whether `.module` is only asked of a wrapper: behind `isinstance(...)`, `hasattr(net, "module")`."""
    return any(
        isinstance(item, ast.Name) and item.id in ("isinstance", "hasattr")
        for above in parents(node)
        if isinstance(above, ast.If | ast.IfExp)
        for item in ast.walk(above.test)
    )


def _is_same(node: ast.expr, target: ast.expr, ctx: Context) -> bool:
    if isinstance(node, ast.Name) and isinstance(target, ast.Name):
        return node.id == target.id and any(item.node is target for item in ctx.model.bindings(node))
    if _is_self(node) and _is_self(target):
        return ctx.text(node) == ctx.text(target) and class_of(node) is class_of(target)
    return False


def _values(node: ast.expr, ctx: Context) -> list[ast.expr]:
    """What is assigned to a variable or a field of `self`."""
    if isinstance(node, ast.Name):
        return [item.value for item in ctx.model.bindings(node) if item.value is not None]
    owner = class_of(node)
    if isinstance(node, ast.Attribute) and _is_self(node) and owner is not None:
        return ctx.kinds.attribute_values(owner, node.attr)
    return []


def _wrappers(node: ast.expr, ctx: Context) -> set[str]:
    """Which wrappers of torch are among the values of a variable."""
    return {
        name
        for value in _values(node, ctx)
        for item in ast.walk(value)
        if isinstance(item, ast.Call) and (name := ctx.qualname(item.func)) in (_DATA_PARALLEL, DDP)
    }


def _is_wrapped_otherwise(node: ast.expr, ctx: Context) -> bool:
    """Whether the `.module` of a variable is explained by a wrapper of its own."""
    return bool(_wrappers(node, ctx))


def _is_ddp_too(node: ast.expr, ctx: Context) -> bool:
    return DDP in _wrappers(node, ctx)
