"""TPU801: where torch.load puts what it reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, add_argument
from tpumigrate.model import has_stars, parent, parents
from tpumigrate.rule import Context, Report, rule

from ._common import is_pure
from ._devices import device_text, is_device_name, quote, quote_in
from ._distributed import assigned

_LOADS = {
    "torch.load": 1,
    "torch.serialization.load": 1,
    "torch.hub.load_state_dict_from_url": 2,
    "torch.utils.model_zoo.load_url": 2,
}
_READS = frozenset({"get", "keys", "items", "values", "pop", "copy"})
_CPU, _CUDA, _DEVICE = "cpu", "cuda", "device"


@rule("TPU801", "map-location", anchors=("map_location", "torch.load", "import load"), keeps_cuda=True)
def map_location(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """A checkpoint is loaded to a GPU, or to wherever it was saved.

    ## What it does
    Finds `torch.load` with a `map_location` that names a GPU in any form (string, device, table, lambda,
    variable), and without one. For PyTorch/XLA it writes "cpu", from which `load_state_dict` copies to the
    device; for TorchTPU it writes "tpu".

    ## Why it matters on a TPU
    A checkpoint written on a GPU raises "Attempting to deserialize object on a CUDA device" when it is loaded
    without `map_location`. PyTorch/XLA cannot load to its device: `map_location="xla"`, and a variable that
    holds the XLA device, raise "don't know how to restore data location".

    ## Example
    ```python
    import torch

    def restore(model, path, local_rank):
        ckpt = torch.load(path, map_location=f"cuda:{local_rank}")
        model.load_state_dict(ckpt["model"])
        model.load_state_dict(torch.load(path, torch.device("cuda:0"), weights_only=True))
        return torch.load("ema.pt", map_location="cpu")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    def restore(model, path, local_rank):
        ckpt = torch.load(path, map_location="cpu")
        model.load_state_dict(ckpt["model"])
        model.load_state_dict(torch.load(path, "cpu", weights_only=True))
        return torch.load("ema.pt", map_location="cpu")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def restore(model, path, local_rank):
        ckpt = torch.load(path, map_location="tpu")
        model.load_state_dict(ckpt["model"])
        model.load_state_dict(torch.load(path, "tpu", weights_only=True))
        return torch.load("ema.pt", map_location="cpu")
    ```

    ## Example: a table, a lambda, a variable
    ```python
    import torch

    def restore(model, path, rank, gpu):
        model.load_state_dict(torch.load(path, map_location={"cuda:0": "cuda:%d" % rank}))
        model.load_state_dict(torch.load(path, map_location=lambda s, loc: s.cuda(gpu)))
        loc = 'cuda:{}'.format(gpu)
        state = torch.load(path, map_location=loc)
        model.load_state_dict(state)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    def restore(model, path, rank, gpu):
        model.load_state_dict(torch.load(path, map_location="cpu"))
        model.load_state_dict(torch.load(path, map_location="cpu"))
        loc = 'cpu'
        state = torch.load(path, map_location=loc)
        model.load_state_dict(state)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def restore(model, path, rank, gpu):
        model.load_state_dict(torch.load(path, map_location="tpu"))
        model.load_state_dict(torch.load(path, map_location="tpu"))
        loc = 'tpu'
        state = torch.load(path, map_location=loc)
        model.load_state_dict(state)
    ```

    ## Example: without a location
    ```python
    import torch

    def restore(model, path):
        model.load_state_dict(torch.load(path)["state_dict"])
        whole = torch.load(path)
        return whole
    ```

    ## Use instead
    ```python
    import torch

    def restore(model, path):
        model.load_state_dict(torch.load(path, map_location="cpu")["state_dict"])
        whole = torch.load(path)
        return whole
    ```

    ## Example: the device of the program (torch_xla)
    ```python
    import torch

    def restore(model, path, device):
        checkpoint = torch.load(path, map_location=device)
        model.load_state_dict(checkpoint["model"])
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    def restore(model, path, device):
        checkpoint = torch.load(path, map_location="cpu")
        model.load_state_dict(checkpoint["model"])
    ```

    ## Not flagged
    ```python
    import torch

    def restore(path, options):
        first = torch.load(path, map_location="cpu")
        second = torch.load(path, map_location=torch.device("cpu"))
        third = torch.load(path, map_location=lambda storage, loc: storage)
        return first, second, third, torch.load(path, **options)
    ```
    ```python
    import json
    import pickle
    import numpy as np

    def read(file):
        return json.load(file), pickle.load(file), np.load("x.npy")
    ```
    ```python
    import torch

    place = "cpu"
    weights = torch.load("w.pt", map_location=place)
    ```

    ## Fix safety
    Safe where the result is seen to go into `load_state_dict`, which copies to the device of the parameters,
    and for "tpu", which is where the GPU was. Otherwise unsafe: what is loaded stays on the CPU and has to be
    moved.

    ## References
    torch.load; ran on torch_xla 2.9 and torch_tpu 0.2.
    """
    name = ctx.qualname(node.func)
    place = _LOADS.get(name)
    lightning = isinstance(node.func, ast.Attribute) and node.func.attr == "load_from_checkpoint"
    if place is None and not lightning:
        return
    location = ctx.arg(node, "map_location", place)
    if location is None or (isinstance(location, ast.Constant) and location.value is None):
        if name in ("torch.load", "torch.serialization.load"):
            yield from _without_location(node, location, ctx)
        return
    kind = _kind(location, ctx)
    if kind == _CUDA or (kind == _DEVICE and ctx.xla):
        yield from _with_location(node, location, kind, ctx)


# -- what a location is ------------------------------------------------------------------------------------


def _kind(node: ast.expr, ctx: Context, depth: int = 0) -> str:
    """_CPU, _CUDA, _DEVICE (that of the program, whatever it is), or "" when it is not known."""
    if depth > 5:
        return ""
    if device_text(node, ctx):
        return _CUDA
    match node:
        case ast.Constant(value="cpu"):
            return _CPU
        case ast.Constant(value="xla") if ctx.xla:
            return _DEVICE
        case ast.Call() if ctx.qualname(node.func) == "torch.device":
            first = ctx.arg(node, "type", 0) or ctx.arg(node, "device", 0)
            return _kind(first, ctx, depth + 1) if first is not None else ""
        case ast.Dict(values=values):
            return _CUDA if any(_kind(value, ctx, depth + 1) == _CUDA for value in values) else ""
        case ast.Lambda():
            return _CUDA if _moves_to_cuda(node.body, ctx) else ""
        case ast.IfExp():
            arms = {_kind(node.body, ctx, depth + 1), _kind(node.orelse, ctx, depth + 1)}
            return _strongest(arms)
        case ast.Name():
            bindings = assigned(node, ctx)
            kinds = {_kind(item.value, ctx, depth + 1) for item in bindings if item.value is not None}
            known = _strongest(kinds) if "" not in kinds else ""
            if known == _CUDA and not _only_locates(node, ctx):
                known = _DEVICE  # other rules make it the program's device
            return known or _by_name(node.id, node, ctx)
        case ast.Attribute():
            return _by_name(node.attr, node, ctx)
    return ""


def _strongest(kinds: set[str]) -> str:
    return next((kind for kind in (_CUDA, _DEVICE, _CPU) if kind in kinds), "")


def _by_name(name: str, node: ast.expr, ctx: Context) -> str:
    if ctx.kind(node) == "device" or (is_device_name(name) and ctx.kind(node) in ("", "device_str")):
        return _DEVICE
    return ""


def _moves_to_cuda(body: ast.expr, ctx: Context) -> bool:
    return any(
        (isinstance(item, ast.Attribute) and item.attr == "cuda") or device_text(item, ctx) is not None
        for item in ast.walk(body)
    )


def _only_locates(node: ast.Name, ctx: Context) -> bool:
    """Whether a variable is used as `map_location` alone."""
    return all(_is_location(use, ctx) for use in ctx.model.uses(node.id, ctx.model.bindings(node)))


def _is_location(use: ast.Name, ctx: Context) -> bool:
    above = parent(use)
    if isinstance(above, ast.keyword):
        return above.arg == "map_location"
    return isinstance(above, ast.Call) and ctx.arg(above, "map_location", _LOADS.get(ctx.qualname(above.func))) is use


# -- findings ----------------------------------------------------------------------------------------------


def _with_location(call: ast.Call, location: ast.expr, kind: str, ctx: Context) -> Iterator[Report]:
    if kind == _CUDA:
        message = "a TPU host has no GPU to load this to"
    else:
        message = "PyTorch/XLA cannot load to its own device"
    if ctx.xla:
        message += '; load to "cpu", from where `load_state_dict` copies to the device'
    if not is_pure(location) and not isinstance(location, ast.Lambda | ast.Dict | ast.Attribute):
        yield Report(call, message, unfixed="computing the location calls something: write it by hand")
        return
    edits = [
        Edit(*ctx.source.span(part), f"{mark}{'cpu' if ctx.xla else 'tpu'}{mark}")
        for part in _parts(location, ctx)
        for mark in (quote(_string_in(part, ctx)),)
    ]
    yield Report(call, message, Fix(tuple(edits), safe=not ctx.xla or _is_state(call, ctx)))


def _parts(location: ast.expr, ctx: Context) -> list[ast.expr]:
    """The expressions that name the GPU: of a choice one arm, of a variable what is assigned to it."""
    if isinstance(location, ast.IfExp) and not ctx.xla:
        arms = (location.body, location.orelse)
        return [part for arm in arms if _kind(arm, ctx) == _CUDA for part in _parts(arm, ctx)]
    if isinstance(location, ast.Name) and _kind(location, ctx) == _CUDA:
        values = [item.value for item in assigned(location, ctx) if item.value is not None]
        return [part for value in values if _kind(value, ctx) == _CUDA for part in _parts(value, ctx)]
    return [location]


def _string_in(node: ast.expr, ctx: Context) -> str:
    strings = [item for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return ctx.text(strings[0]) if strings and not isinstance(node, ast.JoinedStr) else ctx.text(node)


def _without_location(call: ast.Call, location: ast.expr | None, ctx: Context) -> Iterator[Report]:
    if has_stars(call):
        return
    message = 'a checkpoint that was written on a GPU cannot be loaded here without `map_location="cpu"`'
    if location is not None:
        edit = ctx.edit(location, '"cpu"')
    else:
        edit = add_argument(ctx.source, call, f"map_location={_quoted('cpu', call, ctx)}")
    safe = _is_state(call, ctx)
    yield Report(call, message, Fix((edit,), safe=safe), severity="warning" if safe else "info")


def _quoted(text: str, call: ast.Call, ctx: Context) -> str:
    mark = quote_in(call, ctx)
    return f"{mark}{text}{mark}"


# -- what becomes of the result ----------------------------------------------------------------------------


def _is_state(node: ast.expr, ctx: Context, depth: int = 0) -> bool:
    """Whether what is loaded is seen to go into `load_state_dict`."""
    if depth > 4:
        return False
    whole: ast.expr = node
    while True:
        above = parent(whole)
        if isinstance(above, ast.Subscript) and above.value is whole:
            whole = above
        elif isinstance(above, ast.Attribute) and above.value is whole and above.attr in _READS:
            call = parent(above)
            if not isinstance(call, ast.Call):
                return False
            whole = call
        elif isinstance(above, ast.IfExp) and whole is not above.test:
            whole = above
        else:
            break
    if isinstance(above, ast.keyword):
        above = parent(above)
    if isinstance(above, ast.Call) and isinstance(above.func, ast.Attribute):
        return above.func is not whole and above.func.attr in ("load_state_dict", "_load_from_state_dict")
    if isinstance(above, ast.Assign) and len(above.targets) == 1 and isinstance(above.targets[0], ast.Name):
        return any(_is_state(use, ctx, depth + 1) for use in _uses_after(above.targets[0], ctx))
    return False


def _uses_after(target: ast.Name, ctx: Context) -> list[ast.Name]:
    """Readings of a variable below its assignment, in the same function."""
    end = ctx.source.span(target)[1]
    scopes = {id(above) for above in parents(target) if isinstance(above, ast.FunctionDef | ast.Module)}
    return [
        use
        for use in ctx.model.uses(target.id, ctx.model.bindings(target))
        if ctx.source.span(use)[0] > end and any(id(above) in scopes for above in parents(use))
    ]
