"""Backends of process groups: how code spells them, and which one a value will be."""

from __future__ import annotations

import ast
import functools
import re

from tpumigrate.edits import Edit, load, name, replace
from tpumigrate.model import arguments, callable_around, default_of, function, parent
from tpumigrate.rule import Context

from ._devices import is_option, quote
from ._distributed import INIT, calls_of, function_called
from ._xla_whole import stays_on_xla

BACKEND = {"torch_xla": "xla", "torch_tpu": "tpu_dist"}
NCCL_AVAILABLE = "torch.distributed.is_nccl_available"
HOST_BACKENDS = ("gloo", "mpi", "ucc", "fake")
_NCCL = frozenset({"torch.distributed.Backend.NCCL", "torch.distributed.distributed_c10d.Backend.NCCL"})

# Backends of other makers' accelerators: code that names them chooses between several kinds.
OTHER_BACKENDS = frozenset({"hccl", "xccl", "ccl", "cncl", "mccl", "tccl", "eccl", "bkcl", "lccl"})

XLA_URL = "xla://"  # torch_xla's rendezvous: rank and world size come from its runtime

BACKEND_NAME = re.compile(r"(?:^|_)backend\Z", re.IGNORECASE)
GROUPS = frozenset(
    {
        "torch.distributed.new_group", "torch.distributed.distributed_c10d.new_group",
        "torch.distributed.new_subgroups", "torch.distributed.new_subgroups_by_enumeration",
    }
)  # fmt: skip

# What an expression will be once the file is migrated.
TARGET = "target"  # the TPU's backend
HOST = "host"  # gloo and the like
MIXED = "mixed"  # one of the two


def migrated(node: ast.AST, ctx: Context) -> str:
    """The text of the backend that takes the place of a "nccl" literal, "" for anything else.

    For torch_tpu "xla" is such a literal too, where a group is opened through torch_xla's rendezvous.
    """
    backend = BACKEND[ctx.target]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
        if text.lower() == "nccl" or (text == "xla" and comes_from_xla(ctx)):
            return backend
        parts = text.split(",")
        foreign = {"cuda:nccl", "xla:xla"} if comes_from_xla(ctx) else {"cuda:nccl"}
        if foreign & set(parts):
            return ",".join(f"{ctx.device}:{backend}" if part in foreign else part for part in parts)
    if isinstance(node, ast.Attribute) and ctx.qualname(node) in _NCCL:
        return backend
    return ""


def is_xla_url(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == XLA_URL


@functools.lru_cache(maxsize=1)
def comes_from_xla(ctx: Context) -> bool:
    """For torch_tpu: whether a file that can be migrated opens a group through torch_xla's rendezvous."""
    calls = [] if ctx.xla else [call for call in ctx.model.nodes(ast.Call) if ctx.qualname(call.func) in INIT]
    return any(is_xla_url(ctx.arg(call, "init_method", 1)) for call in calls) and not stays_on_xla(ctx)


def asks_for_cuda(test: ast.expr, ctx: Context) -> bool:
    """Whether a condition is `torch.cuda.is_available()`, or a variable that holds its answer."""
    if isinstance(test, ast.Call):
        return ctx.qualname(test.func) in ("torch.cuda.is_available", NCCL_AVAILABLE)
    if isinstance(test, ast.Name):
        bindings = ctx.model.bindings(test)
        return bool(bindings) and all(
            item.kind == "assign" and isinstance(item.value, ast.Call) and asks_for_cuda(item.value, ctx)
            for item in bindings
        )
    return False


def becomes(node: ast.expr, ctx: Context, depth: int = 0) -> str:
    """TARGET, HOST or MIXED: which backend an expression is after migration; "" when that is not seen."""
    if depth > 5:
        return ""
    match node:
        case ast.Constant(value=str(text)):
            if migrated(node, ctx) or BACKEND[ctx.target] in [part.rpartition(":")[2] for part in text.split(",")]:
                return TARGET
            return HOST if text in HOST_BACKENDS else ""
        case ast.IfExp():
            arms = (becomes(node.body, ctx, depth + 1), becomes(node.orelse, ctx, depth + 1))
            if ctx.xla and arms == (TARGET, HOST) and asks_for_cuda(node.test, ctx):
                return TARGET  # the whole choice is replaced
            return _together(arms)
        case ast.Name():
            values = [_bound(item.node, item.value, item.kind, ctx, depth) for item in ctx.model.bindings(node)]
            return _together(tuple(values))
        case ast.Attribute():
            if migrated(node, ctx):
                return TARGET
            option = option_named(node.attr, ctx)
            default = ctx.arg(option, "default") if option is not None else None
            return becomes(default, ctx, depth + 1) if default is not None else ""
    return ""


def _bound(node: ast.AST, value: ast.expr | None, kind: str, ctx: Context, depth: int) -> str:
    if kind == "assign" and value is not None:
        return becomes(value, ctx, depth + 1)
    if kind == "param" and isinstance(node, ast.arg):
        return _parameter(node, ctx, depth)
    return ""


def _parameter(node: ast.arg, ctx: Context, depth: int) -> str:
    """What a parameter is: its default, if every call in the file that passes it agrees."""
    owner = callable_around(node)
    default = default_of(owner, node) if owner is not None else None
    if default is None or not isinstance(owner, ast.FunctionDef):
        return ""
    names = [arg.arg for arg in arguments(owner)]
    passed = [ctx.arg(call, node.arg, names.index(node.arg)) for call in calls_of(owner, ctx)]
    values = [default, *(item for item in passed if item is not None)]
    return _together(tuple(becomes(value, ctx, depth + 1) for value in values))


def _together(kinds: tuple[str, ...]) -> str:
    distinct = set(kinds)
    if len(distinct) == 1:
        return distinct.pop()
    return MIXED if distinct and distinct <= {TARGET, HOST, MIXED} else ""


def option_named(dest: str, ctx: Context) -> ast.Call | None:
    """The `add_argument` call of this file that fills `args.dest`."""
    for call in ctx.model.nodes(ast.Call):
        if is_option(call) and option_dest(call) == dest:
            return call
    return None


def option_dest(call: ast.Call) -> str:
    """The attribute under which an option's value is found."""
    for keyword in call.keywords:
        if keyword.arg == "dest" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    flags = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
    return long.lstrip("-").replace("-", "_")


# -- edits -------------------------------------------------------------------------------------------------


def literal_edits(node: ast.expr, ctx: Context) -> list[Edit]:
    """Edits for the literals "nccl" in an expression, if it is one or a choice."""
    if isinstance(node, ast.IfExp):
        if is_choice_by_cuda(node, ctx):
            return [migration(node.body, ctx, instead=node)]
        return [
            *literal_edits(node.body, ctx),
            *literal_edits(node.orelse, ctx),
            *availability_edits(node, ctx),
        ]
    return [migration(node, ctx)] if migrated(node, ctx) else []


def availability_edits(node: ast.IfExp, ctx: Context) -> list[Edit]:
    """`is_nccl_available()`, where it chooses NCCL, becomes the question for a TPU."""
    test = node.test
    if isinstance(test, ast.Call) and ctx.qualname(test.func) == NCCL_AVAILABLE and migrated(node.body, ctx):
        return [ctx.edit(test, name("torch") + ".accelerator.is_available()")]
    return []


def is_choice_by_cuda(node: ast.IfExp, ctx: Context) -> bool:
    """`"nccl" if torch.cuda.is_available() else "gloo"` for torch_xla, whose CPU runs the XLA backend too."""
    return (
        ctx.xla
        and bool(migrated(node.body, ctx))
        and becomes(node.orelse, ctx) == HOST
        and asks_for_cuda(node.test, ctx)
    )


def migration(node: ast.expr, ctx: Context, instead: ast.expr | None = None) -> Edit:
    mark = quote(ctx.text(node))
    registration = load("torch_xla") if ctx.xla else ""
    return replace(ctx.source, instead or node, f"{mark}{migrated(node, ctx)}{mark}{registration}")


# -- places ------------------------------------------------------------------------------------------------


def is_backend_place(place: ast.expr, above: ast.AST | None) -> bool:
    """Whether a value is stored in, or returned by, something that is named after a backend."""
    match above:
        case ast.Assign(targets=targets):
            return any(_is_backend_target(target) for target in targets)
        case ast.AnnAssign(target=target) | ast.NamedExpr(target=target):
            return _is_backend_target(target)
        case ast.arguments():
            owner = parent(above)
            return owner is not None and any(
                default_of(owner, arg) is place and bool(BACKEND_NAME.search(arg.arg)) for arg in arguments(owner)
            )
        case ast.Return():
            owner = function(above)
            return owner is not None and bool(BACKEND_NAME.search(owner.name))
    return False


def _is_backend_target(target: ast.expr) -> bool:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return bool(BACKEND_NAME.search(name))
    return False


def positional_is_backend(place: ast.expr, call: ast.Call, ctx: Context) -> bool:
    if place not in call.args:
        return False
    position = call.args.index(place)
    if ctx.qualname(call.func) in GROUPS:
        return position == 2
    called = function_called(call, ctx)
    if called is None:
        return False
    names = [arg.arg for arg in arguments(called)]
    return position < len(names) and bool(BACKEND_NAME.search(names[position]))
