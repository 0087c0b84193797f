"""What the rules of precision share: which dtype an expression chooses, how bfloat16 takes its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, argument_span, call_parentheses, name, rename_method
from tpumigrate.model import function, parents
from tpumigrate.rule import Context

FLOAT16 = frozenset({"torch.float16", "torch.half"})
BFLOAT16 = "torch.bfloat16"
AUTOCAST = frozenset({"torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"})
CUDA_AUTOCAST = frozenset({"torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast"})
XLA_AUTOCAST = frozenset({"torch_xla.amp.autocast", "torch_xla.amp.autocast_mode.autocast"})
CUSTOM_FORWARD_BACKWARD = frozenset(
    f"torch.{module}.{which}"
    for module in ("amp", "cuda.amp", "amp.autocast_mode", "cuda.amp.autocast_mode")
    for which in ("custom_fwd", "custom_bwd")
)
ANY_AUTOCAST = AUTOCAST | CUDA_AUTOCAST | XLA_AUTOCAST
_NAMES = ("fp16", "float16", "half", "16", "16-mixed", "16-true", "fp16-mixed")
# Calls that only look: evaluating them or not makes no difference.
_LOOKS = {
    "bool", "int", "float", "str", "len", "hasattr", "isinstance", "getattr", "any", "all", "get",
    "getenv", "lower", "upper", "startswith", "endswith", "is_available", "is_bf16_supported",
    "get_device_capability", "device_count", "current_device", "device", "get_rank", "get_world_size",
    "is_initialized", "parameters", "get_device_properties",
}  # fmt: skip


def values(node: ast.expr) -> Iterator[ast.expr]:
    """The expressions of which one becomes the value: the arms of a ternary, the operands of `or`."""
    match node:
        case ast.IfExp():
            yield from values(node.body)
            yield from values(node.orelse)
        case ast.BoolOp():
            for item in node.values:
                yield from values(item)
        case _:
            yield node


def is_float16(node: ast.AST, ctx: Context) -> bool:
    return isinstance(node, ast.Attribute | ast.Name) and ctx.qualname(node) in FLOAT16


def to_bfloat16(node: ast.expr, ctx: Context) -> Edit:
    """`torch.float16` or `torch.half` made bfloat16, however the file spells torch."""
    if isinstance(node, ast.Attribute):
        return rename_method(ctx.source, node, "bfloat16")
    return ctx.edit(node, name("torch") + ".bfloat16")


def halves_to_bfloat16(node: ast.expr, ctx: Context) -> list[Edit]:
    """Edits that make float16 bfloat16 where it is a possible value of `node`.

    A ternary whose arms become the same loses its condition, when evaluating that has no effect.
    """
    found = [item for item in values(node) if is_float16(item, ctx)]
    if not found:
        return []
    if isinstance(node, ast.IfExp) and looks_only(node.test):
        arms = [node.body, node.orelse]
        if all(is_float16(arm, ctx) or ctx.qualname(arm) == BFLOAT16 for arm in arms):
            return [ctx.edit(node, name("torch") + ".bfloat16")]
    return [to_bfloat16(item, ctx) for item in found]


def looks_only(node: ast.AST) -> bool:
    """Whether an expression has no effect, so that it can go when its value is not wanted."""
    for item in ast.walk(node):
        if isinstance(item, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
            return False
        if isinstance(item, ast.Call):
            called = item.func.attr if isinstance(item.func, ast.Attribute) else getattr(item.func, "id", "")
            if called not in _LOOKS:
                return False
    return True


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def in_handler(node: ast.AST) -> bool:
    """Whether a node stands in the arm that runs when another way failed."""
    return any(isinstance(above, ast.ExceptHandler) for above in parents(node))


def before_arguments(call: ast.Call, text: str, keyword: str, ctx: Context) -> Edit:
    """Put an argument before the others of a call, on a line of its own where they have lines of their own.

    keyword: written in front of what was the first argument, when its place now means something else
    """
    source = ctx.source
    every: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    first = min(argument_span(source, item)[0] for item in every)
    line = source.line_end(call_parentheses(source, call)[0])
    if line <= first and not source.text[source.line_start(first) : first].strip():
        return Edit(line, first, f"{source.indent(first)}{text},{source.newline}{source.text[line:first]}{keyword}")
    return Edit(first, first, f"{text}, {keyword}")


def float16_wanted(node: ast.AST, ctx: Context) -> str:
    """Why float16 is exactly what is meant at this place, "" when nothing says so.

    A branch taken because a tensor is float16, or because a setting is named "fp16", means float16.
    """
    child = node
    for above in parents(node):
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            break
        if isinstance(above, ast.If | ast.IfExp) and (child is above.body or child in _statements(above)):
            for test in _conditions(above.test, ctx):
                if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.Is | ast.In):
                    compared = list(ast.walk(test))
                    if any(is_float16(item, ctx) for item in compared):
                        return "it matches a tensor that is float16: choose bfloat16 where that one is made"
                    if any(isinstance(item, ast.Constant) and item.value in _NAMES for item in compared):
                        return "a setting names float16: choose bfloat16 there"
        child = above
    return ""


def _conditions(test: ast.expr, ctx: Context) -> Iterator[ast.AST]:
    """All parts of a condition, those of the flags in it too: `needs_upcasting = vae.dtype == torch.float16`."""
    yield from ast.walk(test)
    around = function(test)
    flags = {ctx.text(node) for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute)}
    for node in ast.walk(around) if around is not None else ():
        if isinstance(node, ast.Assign) and any(ctx.text(target) in flags for target in node.targets):
            yield from ast.walk(node.value)


def _statements(node: ast.If | ast.IfExp) -> list[ast.stmt]:
    return node.body if isinstance(node, ast.If) else []
