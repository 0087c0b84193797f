"""TPU802: writing tensors that live on the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, add_argument, name
from tpumigrate.model import arguments, function, has_stars, parent
from tpumigrate.rule import Context, Report, rule

from ._distributed import assigned, calls_of, is_distributed, names_rank, rank_guard

SAVES = frozenset({"torch.save", "torch.serialization.save"})
# Objects whose state is made of plain numbers.
_HOST_STATES = ("sched", "scaler", "sampler", "loader", "callback")


@rule("TPU802", "save", anchors=("state_dict",))
def save(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """A checkpoint is written with the device's tensors in it.

    ## What it does
    Finds `torch.save` of a `state_dict()`, alone or in a table. For PyTorch/XLA it writes `xm.save`, which
    copies the tensors to the host first and lets one process of a host write; all processes have to call it.

    ## Why it matters on a TPU
    `torch.save` works, but the file says that its tensors belong on the TPU: elsewhere it only loads with
    `map_location="cpu"`. In several processes of PyTorch/XLA every one would write the same file.

    ## Example
    ```python
    import torch

    def save(model, opt, epoch, path):
        torch.save({
            "epoch": epoch,
            "model": model.state_dict(),
            "opt": opt.state_dict(),  # keep moments
        }, path)
        torch.save(model.state_dict(), f=path)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla.core.xla_model as xm

    def save(model, opt, epoch, path):
        xm.save({
            "epoch": epoch,
            "model": model.state_dict(),
            "opt": opt.state_dict(),  # keep moments
        }, path)
        xm.save(model.state_dict(), file_or_path=path)
    ```

    ## Example: what is saved has a name
    ```python
    import torch

    def save(model, path):
        state = {"epoch": 3}
        state["model"] = model.state_dict()
        torch.save(state, path)

    def keep(state, path):
        torch.save(state, path)

    def finish(model):
        keep({"weights": model.state_dict()}, "last.pt")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla.core.xla_model as xm

    def save(model, path):
        state = {"epoch": 3}
        state["model"] = model.state_dict()
        xm.save(state, path)

    def keep(state, path):
        xm.save(state, path)

    def finish(model):
        keep({"weights": model.state_dict()}, "last.pt")
    ```

    ## Example: each rank its own file (torch_xla) (unsafe)
    ```python
    import torch
    import torch.distributed as dist

    dist.init_process_group("xla", init_method="xla://")

    def save(model, rank):
        torch.save(model.state_dict(), f"part{rank}.pt")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm

    dist.init_process_group("xla", init_method="xla://")

    def save(model, rank):
        xm.save(model.state_dict(), f"part{rank}.pt", master_only=False)
    ```

    ## Example: options of pickle
    ```python
    import torch

    def save(model, path):
        torch.save(model.state_dict(), path, pickle_protocol=4)
    ```

    ## Not flagged
    ```python
    import torch

    def save(args, vocabulary, scheduler, path):
        torch.save(vars(args), path)
        torch.save({"words": vocabulary, "lr": 0.1}, path)
        torch.save(scheduler.state_dict(), path)
    ```
    ```python
    import torch

    def save(model, path):
        torch.save(model.cpu().state_dict(), path)
        torch.save({k: v.cpu() for k, v in model.state_dict().items()}, path)
    ```
    ```python
    import numpy as np

    def save(model, path):
        np.save(path, model.state_dict())
        model.save(path)
    ```

    ## Fix safety
    Safe in a single process. In a project that trains with several, unsafe: `xm.save` has to be called by all
    of them, which is not seen from the function that saves. Saves that only the first rank reaches are
    TPU310's.

    ## References
    torch_xla.core.xla_model.save; ran on torch_xla 2.9 and torch_tpu 0.2.
    """
    if ctx.qualname(node.func) not in SAVES:
        return
    data = ctx.arg(node, "obj", 0)
    path = ctx.arg(node, "f", 1)
    if data is None or not is_state(data, ctx):
        return
    if ctx.xla:
        yield from _save_from_xla(node, path, ctx)
    else:
        message = 'the file keeps the device "tpu": without a TPU it only loads with `map_location="cpu"`'
        why = "fine where the checkpoint is read on TPUs; otherwise save copies made with `.cpu()`"
        yield Report(node, message, unfixed=why, severity="info")


def _save_from_xla(node: ast.Call, path: ast.expr | None, ctx: Context) -> Iterator[Report]:
    if is_distributed(ctx) and is_reached_by_one_rank(node, ctx):
        return
    message = "the file only loads where there is an XLA device; `xm.save` writes copies that load anywhere"
    if path is None or has_stars(node) or len(node.args) > 2 or {item.arg for item in node.keywords} - {"obj", "f"}:
        why = "it has options that `xm.save` lacks: move the tensors to the CPU first"
        yield Report(node, message, unfixed=why, severity="warning")
        return
    edits = [ctx.edit(node.func, name("torch_xla.core.xla_model") + ".save")]
    for keyword in node.keywords:
        start = ctx.source.span(keyword)[0]
        edits.append(Edit(start, start + len(keyword.arg or ""), "data" if keyword.arg == "obj" else "file_or_path"))
    if is_distributed(ctx) and names_rank(path):
        edits.append(add_argument(ctx.source, node, "master_only=False"))
    owner = function(node)
    seen = not isinstance(owner, ast.FunctionDef) or any(True for _ in calls_of(owner, ctx))
    yield Report(node, message, Fix(tuple(edits), safe=seen or not is_distributed(ctx)), severity="warning")


def is_reached_by_one_rank(node: ast.AST, ctx: Context) -> bool:
    """Whether a save is inside a rank guard, or in a function of this file that is called inside one."""
    if rank_guard(node) is not None:
        return True
    owner = function(node)
    return isinstance(owner, ast.FunctionDef) and any(rank_guard(call) is not None for call in calls_of(owner, ctx))


# -- what is saved -----------------------------------------------------------------------------------------


def is_state(node: ast.expr, ctx: Context, depth: int = 0) -> bool:
    """Whether an expression holds the state of a model or optimizer on the device."""
    if depth > 4:
        return False
    match node:
        case ast.Call(func=ast.Attribute(attr="state_dict", value=owner)):
            return not _is_on_host(owner, ctx)
        case ast.Dict(values=values):
            return any(is_state(value, ctx, depth + 1) for value in values)
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            return any(is_state(item.value, ctx, depth + 1) for item in keywords)
        case ast.Name():
            return _variable_is_state(node, ctx, depth)
    return False


def _variable_is_state(node: ast.Name, ctx: Context, depth: int) -> bool:
    bindings = assigned(node, ctx)
    if any(item.value is not None and is_state(item.value, ctx, depth + 1) for item in bindings):
        return True
    if bindings:
        return any(is_state(value, ctx, depth + 1) for value in _entries(node, ctx))
    return any(is_state(value, ctx, depth + 1) for value in _passed(node, ctx))


def _entries(node: ast.Name, ctx: Context) -> Iterator[ast.expr]:
    """What is put into a table: `state["model"] = ...`."""
    bindings = ctx.model.bindings(node)
    for item in ctx.model.nodes(ast.Assign):
        for target in item.targets:
            owner = target.value if isinstance(target, ast.Subscript) else None
            if isinstance(owner, ast.Name) and owner.id == node.id and ctx.model.bindings(owner) == bindings:
                yield item.value


def _passed(node: ast.Name, ctx: Context) -> Iterator[ast.expr]:
    """What the calls in this file pass for a parameter."""
    bindings = ctx.model.bindings(node)
    owner = function(node)
    if len(bindings) != 1 or bindings[0].kind != "param" or not isinstance(owner, ast.FunctionDef):
        return
    names = [arg.arg for arg in arguments(owner)]
    if node.id not in names or parent(owner) is None:
        return
    for call in calls_of(owner, ctx):
        value = ctx.arg(call, node.id, names.index(node.id))
        if value is not None:
            yield value


def _is_on_host(owner: ast.expr, ctx: Context) -> bool:
    """Whether `owner.state_dict()` holds no device tensors: a scheduler, a model moved to the CPU."""
    if ctx.kind(owner) in ("scaler", "loader"):
        return True
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute):
        return owner.func.attr == "cpu" or (
            owner.func.attr == "to"
            and len(owner.args) == 1
            and isinstance(owner.args[0], ast.Constant)
            and owner.args[0].value == "cpu"
        )
    text = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return any(word in text.lower() for word in _HOST_STATES)
