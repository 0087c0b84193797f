"""Choosing a device by whether there is an accelerator: what the arms name, how the target is named in their place."""

from __future__ import annotations

import ast

from tpumigrate.edits import name
from tpumigrate.rule import Context

from ._common import device_string, registers_device
from ._devices import device_text, quote

CUDA_AVAILABLE = "torch.cuda.is_available"


def available(ctx: Context) -> str:
    """An expression that is true where the target's device can be used."""
    if ctx.xla:
        return f"{name('torch_xla.runtime')}.device_type() is not None"
    return f"{name('torch')}.accelerator.is_available()"


def device_of(node: ast.expr, ctx: Context) -> ast.expr | None:
    """The accelerator's device in an arm: a string, torch.device of one, or the current accelerator."""
    if device_text(node, ctx) is not None:
        return node
    if isinstance(node, ast.Attribute) and node.attr == "type":
        return node if device_of(node.value, ctx) is not None else None
    if isinstance(node, ast.Call):
        called = ctx.qualname(node.func)
        if called == "torch.accelerator.current_accelerator" and ctx.xla:
            return node
        if called == "torch.device" and node.args and device_of(node.args[0], ctx) is not None:
            return node
    return None


def is_cpu(node: ast.expr, ctx: Context) -> bool:
    if isinstance(node, ast.Call) and ctx.qualname(node.func) == "torch.device" and len(node.args) == 1:
        return is_cpu(node.args[0], ctx)
    return isinstance(node, ast.Constant) and node.value == "cpu"


def text_of_device(node: ast.expr, ctx: Context) -> str:
    """The target's device in the type (string or torch.device) that the arm had."""
    if isinstance(node, ast.Call) and device_text(node, ctx) is None:
        return f'{name("torch")}.device("{ctx.device}"){registers_device(ctx)}'
    return device_string(ctx, quote(ctx.text(node)))
