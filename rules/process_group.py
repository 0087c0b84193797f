"""TPU301: process groups over NCCL."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, add_argument, argument_span, load, remove_arguments, replace
from tpumigrate.model import has_stars, parent
from tpumigrate.rule import Context, Report, rule

from ._backends import (
    BACKEND,
    BACKEND_NAME,
    GROUPS,
    HOST,
    OTHER_BACKENDS,
    TARGET,
    availability_edits,
    becomes,
    comes_from_xla,
    is_backend_place,
    is_choice_by_cuda,
    is_xla_url,
    literal_edits,
    migrated,
    migration,
    option_dest,
    positional_is_backend,
)
from ._common import imports_torch, is_pure
from ._devices import in_test_decorator, is_option, option_choices, quote, quote_in
from ._distributed import INIT, function_called, keyword_of

# Parameters of init_process_group after which xla:// takes over, with their positions.
_FROM_RUNTIME = (("world_size", 3), ("rank", 4), ("store", 5), ("device_id", 8))


@rule("TPU301", "nccl-backend", anchors=("nccl", "NCCL", "init_process_group"))
def nccl_backend(node: ast.Call | ast.Constant | ast.Attribute, ctx: Context) -> Iterator[Report]:
    """A process group is made with NCCL, which only works between NVIDIA GPUs.

    ## What it does
    Finds the backend "nccl" in `init_process_group`, in `new_group`, in variables, parameters and command
    line options named after a backend, and in tables by device type. The backend is "xla" for PyTorch/XLA,
    which also takes rank and world size from its runtime (`init_method="xla://"`), and "tpu_dist" for
    TorchTPU. Groups made with gloo are meant for the host and stay.

    ## Why it matters on a TPU
    "nccl" raises: "ProcessGroupNCCL is only supported with GPUs" or "Distributed package doesn't have NCCL
    built in". `"nccl" if torch.cuda.is_available() else "gloo"` silently moves every tensor through the host.
    With torch_xla, `backend="xla"` alone looks for MASTER_ADDR and fails where the runtime knows the ranks
    already.

    ## Example
    ```python
    import torch.distributed as dist

    def setup(rank, world_size):
        dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=world_size)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch.distributed as dist
    import torch_xla  # noqa: F401  registers the device

    def setup(rank, world_size):
        dist.init_process_group("xla", init_method="xla://")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch.distributed as dist

    def setup(rank, world_size):
        dist.init_process_group("tpu_dist", init_method="env://", rank=rank, world_size=world_size)
    ```

    ## Example: over several lines, with a timeout
    ```python
    import datetime
    import torch
    import torch.distributed as dist

    def setup(args):
        dist.init_process_group(
            backend='nccl',
            rank=args.rank,
            world_size=args.world_size,  # all nodes
            timeout=datetime.timedelta(minutes=30),
            device_id=args.device,
        )
        torch.distributed.init_process_group(backend="cpu:gloo,cuda:nccl")
    ```

    ## Use instead (torch_xla)
    ```python
    import datetime
    import torch
    import torch.distributed as dist
    import torch_xla  # noqa: F401  registers the device

    def setup(args):
        dist.init_process_group(
            backend='xla',
            init_method='xla://',
            # all nodes
            timeout=datetime.timedelta(minutes=30),
        )
        torch.distributed.init_process_group(backend="cpu:gloo,xla:xla", init_method="xla://")
    ```

    ## Use instead (torch_tpu)
    ```python
    import datetime
    import torch
    import torch.distributed as dist

    def setup(args):
        dist.init_process_group(
            backend='tpu_dist',
            rank=args.rank,
            world_size=args.world_size,  # all nodes
            timeout=datetime.timedelta(minutes=30),
        )
        torch.distributed.init_process_group(backend="cpu:gloo,tpu:tpu_dist")
    ```

    ## Example: an option
    ```python
    import argparse
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    args = parser.parse_args()
    dist.init_process_group(backend=args.backend, init_method="tcp://localhost:2345", world_size=1, rank=0)
    ```

    ## Use instead (torch_xla)
    ```python
    import argparse
    import torch.distributed as dist
    import torch_xla  # noqa: F401  registers the device

    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="xla", choices=["nccl", "gloo", "xla"])
    args = parser.parse_args()
    dist.init_process_group(backend=args.backend, init_method="xla://")
    ```

    ## Use instead (torch_tpu)
    ```python
    import argparse
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="tpu_dist", choices=["nccl", "gloo", "tpu_dist"])
    args = parser.parse_args()
    dist.init_process_group(backend=args.backend, init_method="tcp://localhost:2345", world_size=1, rank=0)
    ```

    ## Example: a choice, and a table by device type (torch_tpu)
    ```python
    import torch
    import torch.distributed as dist

    def setup(use_gpu, kind):
        dist.init_process_group("nccl" if use_gpu else "gloo")
        fast_backend = "nccl" if dist.is_nccl_available() else "gloo"
        return fast_backend, {"cuda": "nccl", "cpu": "gloo"}[kind]
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.distributed as dist

    def setup(use_gpu, kind):
        dist.init_process_group("tpu_dist" if use_gpu else "gloo")
        fast_backend = "tpu_dist" if torch.accelerator.is_available() else "gloo"
        return fast_backend, {"cuda": "nccl", "tpu": "tpu_dist", "cpu": "gloo"}[kind]
    ```

    ## Example: a backend that is decided elsewhere (torch_xla)
    ```python
    import torch.distributed as dist

    def setup(backend, rank, size):
        dist.init_process_group(backend, rank=rank, world_size=size)
    ```

    ## Example: a group of PyTorch/XLA (torch_tpu)
    ```python
    import torch
    import torch.distributed as dist
    import torch_xla  # noqa: F401  registers the device

    backend = "xla"
    dist.init_process_group(backend, init_method="xla://")
    x = torch.ones(2, device="xla")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.distributed as dist

    backend = "tpu_dist"
    dist.init_process_group(backend)
    x = torch.ones(2, device="tpu")
    ```

    ## Not flagged
    ```python
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1)
    objects = dist.new_group(backend="gloo")
    ```
    ```python
    import torch

    print("nccl")
    versions = {"nccl": "2.20", "name": "nccl"}
    path = "/usr/lib/libnccl.so"
    ```
    ```python
    class Mixer:
        def init_process_group(self, backend):
            return backend

    Mixer().init_process_group("nccl")
    ```

    ## Fix safety
    Safe. With "xla://" the arguments that the runtime answers (rank, world_size, init_method, store) go, and
    so does `device_id`, which both targets refuse. Where the backend is a parameter with a default, the fix
    of the call is unsafe for torch_xla: callers in other files may pass something else.

    ## References
    torch.distributed.init_process_group; torch_xla.distributed.xla_backend; ran on torch_xla 2.9 and
    torch_tpu 0.2.
    """
    if isinstance(node, ast.Call):
        if ctx.qualname(node.func) in INIT:
            yield from _initialised(node, ctx)
        return
    if migrated(node, ctx) and not in_test_decorator(node) and _is_about_torch(ctx):
        yield from _elsewhere(node, ctx)


def _is_about_torch(ctx: Context) -> bool:
    return imports_torch(ctx) or ctx.project.process_group


# -- init_process_group ------------------------------------------------------------------------------------


def _initialised(call: ast.Call, ctx: Context) -> Iterator[Report]:
    backend = ctx.arg(call, "backend", 0)
    if ctx.xla:
        yield from _initialised_for_xla(call, backend, ctx)
    else:
        yield from _initialised_for_tpu(call, backend, ctx)


def _initialised_for_tpu(call: ast.Call, backend: ast.expr | None, ctx: Context) -> Iterator[Report]:
    edits = literal_edits(backend, ctx) if backend is not None else []
    is_host = backend is not None and becomes(backend, ctx) == HOST
    device = None if is_host else ctx.arg(call, "device_id")
    if device is not None and is_pure(device):
        edits.extend(remove_arguments(ctx.source, call, [keyword_of(call, device)]))
    method = ctx.arg(call, "init_method", 1)
    from_xla = method is not None and is_xla_url(method) and comes_from_xla(ctx)
    if method is not None and from_xla:
        edits.extend(_without_url(call, method, ctx))
    if not edits:
        return
    if from_xla:
        message = 'there is no "xla://" without torch_xla: rank and world size come from the variables of torchrun'
    elif backend is not None and literal_edits(backend, ctx):
        message = 'NCCL only works between NVIDIA GPUs; between TPUs the backend is "tpu_dist"'
    else:
        message = "`device_id` without an index raises on a TPU, and each process owns one device: leave it out"
    yield Report(call, message, Fix(tuple(edits)))


def _without_url(call: ast.Call, method: ast.expr, ctx: Context) -> list[Edit]:
    if method in call.args[:-1]:
        return [replace(ctx.source, method, "None")]
    return remove_arguments(ctx.source, call, [keyword_of(call, method)])


def _initialised_for_xla(call: ast.Call, backend: ast.expr | None, ctx: Context) -> Iterator[Report]:
    if isinstance(backend, ast.Constant) and backend.value is not None and not migrated(backend, ctx):
        return  # gloo, mpi, or migrated before
    method = ctx.arg(call, "init_method", 1)
    if is_xla_url(method):
        return
    missing = backend is None or (isinstance(backend, ast.Constant) and backend.value is None)
    kind = TARGET if missing else becomes(backend, ctx)  # type: ignore[arg-type]
    if kind == HOST:
        return
    message = 'between TPUs the backend is "xla", which takes rank and world size from the runtime with "xla://"'
    if kind != TARGET:
        why = 'the backend is not known here; "xla" needs init_method="xla://" and no rank, world_size or store'
        yield Report(call, message, unfixed=why, severity="warning")
        return
    if has_stars(call) or len(call.args) > 6:
        yield Report(call, message, unfixed="arguments are passed on with stars: write the call by hand")
        return
    gone = [item for key, place in _FROM_RUNTIME if (item := ctx.arg(call, key, place)) is not None]
    if not all(is_pure(item) for item in [*gone, *([method] if method is not None else [])]):
        yield Report(call, message, unfixed="an argument that has to go calls something: write the call by hand")
        return
    edits = _rewired(call, backend, method, gone, ctx)
    yield Report(call, message, Fix(tuple(edits), safe=not _is_parameter(backend, ctx)))


def _rewired(
    call: ast.Call, backend: ast.expr | None, method: ast.expr | None, gone: list[ast.expr], ctx: Context
) -> list[Edit]:
    """Edits that give a call the backend and "xla://" in place of what the runtime answers."""
    mark = quote_in(call, ctx)
    url = f"{mark}xla://{mark}"
    edits = literal_edits(backend, ctx) if backend is not None else []
    if backend is None or (isinstance(backend, ast.Constant) and backend.value is None):
        text = f"{mark}xla{mark}{load('torch_xla')}"
        if backend is not None:
            edits.append(replace(ctx.source, backend, text))
        elif call.keywords:
            start = argument_span(ctx.source, call.keywords[0])[0]
            edits.append(Edit(start, start, f"backend={text}, "))
        else:
            return [add_argument(ctx.source, call, f"backend={text}, init_method={url}")]
    leaving = [keyword_of(call, item) for item in gone]
    if method is not None:
        edits.append(replace(ctx.source, method, url))
    elif leaving:
        leaving.sort(key=lambda item: ctx.source.span(item)[0])
        edits.append(Edit(*argument_span(ctx.source, leaving.pop(0)), f"init_method={url}"))
    else:
        edits.append(add_argument(ctx.source, call, f"init_method={url}"))
    if leaving:
        edits.extend(remove_arguments(ctx.source, call, leaving))
    return edits


def _is_parameter(node: ast.expr | None, ctx: Context) -> bool:
    return isinstance(node, ast.Name) and any(item.kind == "param" for item in ctx.model.bindings(node))


# -- "nccl" in other places --------------------------------------------------------------------------------


def _elsewhere(node: ast.Constant | ast.Attribute, ctx: Context) -> Iterator[Report]:
    place: ast.expr = node
    above = parent(node)
    while isinstance(above, ast.IfExp) and place is not above.test:
        place, above = above, parent(above)
    message = f'NCCL only works between NVIDIA GPUs; between TPUs the backend is "{BACKEND[ctx.target]}"'
    whole = isinstance(place, ast.IfExp) and is_choice_by_cuda(place, ctx)
    edit = migration(node, ctx, instead=place if whole else None)
    test = availability_edits(place, ctx) if isinstance(place, ast.IfExp) and not whole else []
    fix = Fix((edit, *test))
    call = parent(above) if isinstance(above, ast.keyword) else above
    if isinstance(call, ast.Call) and ctx.qualname(call.func) in INIT:
        return
    if isinstance(above, ast.Dict):
        yield from _table_entry(node, above, message, fix, ctx)
    elif isinstance(above, ast.keyword) and isinstance(call, ast.Call):
        yield from _passed_by_name(node, above, call, message, fix, ctx)
    elif isinstance(above, ast.Call):
        if positional_is_backend(place, above, ctx):
            yield Report(node, message, fix)
    elif is_backend_place(place, above):
        if _knows_other_makers(ctx):
            why = f'the file chooses between kinds of accelerators: add a way to "{BACKEND[ctx.target]}"'
            yield Report(node, message, unfixed=why)
        else:
            yield Report(place if whole else node, message, fix)


def _knows_other_makers(ctx: Context) -> bool:
    return any(isinstance(item.value, str) and item.value in OTHER_BACKENDS for item in ctx.model.nodes(ast.Constant))


def _table_entry(node: ast.expr, table: ast.Dict, message: str, fix: Fix, ctx: Context) -> Iterator[Report]:
    """`{"cuda": "nccl", "cpu": "gloo"}` gets an entry for the TPU; `{"backend": "nccl"}` another value."""
    keys = [item.value if isinstance(item, ast.Constant) else None for item in table.keys]
    place = next((index for index, item in enumerate(table.values) if item is node), None)
    if place is None:
        return
    key = keys[place]
    if key == "cuda" and ctx.device not in keys:
        mark = quote(ctx.text(node))
        end = ctx.source.span(node)[1]
        entry = f",{_gap(table, place, ctx)}{mark}{ctx.device}{mark}: {mark}{migrated(node, ctx)}{mark}"
        yield Report(node, message, Fix((Edit(end, end, entry),)))
    elif isinstance(key, str) and BACKEND_NAME.search(key):
        yield Report(node, message, fix)


def _gap(table: ast.Dict, place: int, ctx: Context) -> str:
    """What stands before an entry of a table: a space, or a line end where each entry has its own line."""
    key = table.keys[place]
    assert key is not None
    start = ctx.source.span(key)[0]
    if ctx.source.text[ctx.source.line_start(start) : start].strip():
        return " "
    return ctx.source.newline + ctx.source.indent(start)


def _passed_by_name(
    node: ast.expr, keyword: ast.keyword, call: ast.Call, message: str, fix: Fix, ctx: Context
) -> Iterator[Report]:
    if is_option(call):
        if keyword.arg == "default" and BACKEND_NAME.search(option_dest(call)):
            yield Report(node, message, Fix((*fix.edits, *_more_choices(call, ctx))))
        return
    if not BACKEND_NAME.search(keyword.arg or ""):
        return
    if ctx.qualname(call.func) in GROUPS or function_called(call, ctx) is not None:
        yield Report(node, message, fix)
    else:
        why = "what is called passes it on: check that it accepts the TPU's backend"
        yield Report(node, message, unfixed=why, severity="warning")


def _more_choices(call: ast.Call, ctx: Context) -> list[Edit]:
    """Add the target's backend to the choices of an option."""
    choices = list(option_choices(call))
    backend = BACKEND[ctx.target]
    if not choices or any(isinstance(item, ast.Constant) and item.value == backend for item in choices):
        return []
    end = ctx.source.span(choices[-1])[1]
    mark = quote(ctx.text(choices[-1]))
    return [Edit(end, end, f", {mark}{backend}{mark}")]
