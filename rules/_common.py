"""What several families of rules need: how a device is written on a target, which code is device-neutral."""

from __future__ import annotations

import ast

from tpumigrate.edits import load
from tpumigrate.model import packages
from tpumigrate.rule import Context


def device_string(ctx: Context, quote: str = '"') -> str:
    """The target's device as a string literal; the file imports what makes it known to torch."""
    return f"{quote}{ctx.device}{quote}{registers_device(ctx)}"


def registers_device(ctx: Context) -> str:
    """A marker for the import without which the device string means nothing: torch_xla has no autoload entry."""
    return load("torch_xla") if ctx.xla else ""


def imports_torch(ctx: Context) -> bool:
    """Whether the file imports torch, so that `.cuda()` on an unknown object is torch's."""
    return any(packages(node) & {"torch", "pytorch_lightning", "lightning"} for node in ctx.model.imports())


def is_pure(node: ast.AST) -> bool:
    """Whether evaluating an expression has no effect worth keeping when its value is not used any more."""
    return all(
        not isinstance(item, ast.Call | ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr) or _harmless_call(item)
        for item in ast.walk(node)
    )


def _harmless_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    func = node.func
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    return name in {
        "int", "str", "len", "get", "getenv", "current_device", "device_count", "current_stream", "device", "get_rank",
        "format", "range", "list", "default_stream", "Stream", "Event",
    }  # fmt: skip
