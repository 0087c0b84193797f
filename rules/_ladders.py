"""Ladders of accelerators, `if cuda: ... elif mps: ... else: cpu`, which get one more arm for the target."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.accelerators import asked_accelerator
from tpumigrate.edits import Edit, Fix
from tpumigrate.model import parent, parents
from tpumigrate.rule import Context, Report

from ._choices import available, device_of, text_of_device
from ._devices import device_text

_OTHER_ACCELERATORS = (
    "torch.backends.mps.is_available",
    "torch.mps.is_available",
    "torch.xpu.is_available",
    "torch.npu.is_available",
    "torch.hpu.is_available",
    "torch.mlu.is_available",
    "torch.musa.is_available",
    "torch.mtia.is_available",
)


def _is_other_accelerator(node: ast.AST, ctx: Context) -> bool:
    for item in ast.walk(node):
        if isinstance(item, ast.Call):
            func = item.func
            called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            asked = asked_accelerator(called)
            if ctx.qualname(func) in _OTHER_ACCELERATORS or (asked and asked not in ("cuda", "torch", "gpu", "bf")):
                return True
    return False


def ladder_around(node: ast.Call, ctx: Context) -> ast.If | ast.IfExp | None:
    """The if/elif statement or chained conditional in whose tests this question and other accelerators stand."""
    for above in parents(node):
        if isinstance(above, ast.If | ast.IfExp):
            top = _top(above)
            if any(node in ast.walk(test) for test, _ in _arms(top)[0]):
                tests = [test for test, _ in _arms(top)[0]]
                if len(tests) > 1 and any(_is_other_accelerator(test, ctx) for test in tests):
                    return top
        if isinstance(above, ast.stmt):
            break
    return None


def _top(node: ast.If | ast.IfExp) -> ast.If | ast.IfExp:
    """The first rung of the ladder that `node` is a rung of."""
    above = parent(node)
    while isinstance(above, type(node)) and (above.orelse == [node] or above.orelse is node):
        node = above
        above = parent(node)
    return node


def _arms(top: ast.If | ast.IfExp) -> tuple[list[tuple[ast.expr, ast.AST]], list[ast.stmt] | ast.expr]:
    """Tests with the rung that holds them, and the final else."""
    rungs: list[tuple[ast.expr, ast.AST]] = []
    current: ast.AST = top
    while True:
        assert isinstance(current, ast.If | ast.IfExp)
        rungs.append((current.test, current))
        rest = current.orelse
        if isinstance(rest, ast.IfExp):
            current = rest
        elif isinstance(rest, list) and len(rest) == 1 and isinstance(rest[0], ast.If) and isinstance(top, ast.If):
            current = rest[0]
        else:
            return rungs, rest


def one_more_arm(node: ast.Call, ladder: ast.If | ast.IfExp, message: str, ctx: Context) -> Iterator[Report]:
    rungs, rest = _arms(ladder)
    claims = (ladder,) if isinstance(ladder, ast.IfExp) else tuple(part for part in _claimed(ladder))
    if _knows_target(ladder, ctx):
        yield Report(node, "", claims=claims, silent=True)
        return
    fix = _arm_fix(ladder, rungs, rest, node, ctx)
    unfixed = "" if fix else "add an arm for the TPU beside the others"
    yield Report(node, f"{message}; this ladder has no arm for the TPU", fix, unfixed, claims)


def _claimed(ladder: ast.If) -> Iterator[ast.AST]:
    """What the new arm settles: the tests, and the statements that choose a device."""
    for test, rung in _arms(ladder)[0]:
        yield test
        assert isinstance(rung, ast.If)
        yield from rung.body


def _knows_target(ladder: ast.AST, ctx: Context) -> bool:
    """Whether a ladder has an arm for the target already."""
    for item in ast.walk(ladder):
        if isinstance(item, ast.Constant) and item.value == ctx.device:
            return True
        if isinstance(item, ast.Name) and (ctx.device in item.id.lower() or "tpu" in item.id.lower()):
            return True
        if isinstance(item, ast.Attribute):
            used = ctx.qualname(item)
            if item.attr in ("is_tpu", "xla_device", "is_xla_available") or "torch_xla" in used:
                return True
            if used == "torch.accelerator.is_available":
                return True
    return False


def _arm_fix(
    ladder: ast.If | ast.IfExp,
    rungs: list[tuple[ast.expr, ast.AST]],
    rest: list[ast.stmt] | ast.expr,
    node: ast.Call,
    ctx: Context,
) -> Fix | None:
    """A copy of the CUDA arm for the target, before the final else."""
    cuda = next((rung for test, rung in rungs if test is node), None)
    if isinstance(ladder, ast.IfExp) and isinstance(cuda, ast.IfExp) and isinstance(rest, ast.expr):
        device = device_text(cuda.body, ctx)
        if device is None and device_of(cuda.body, ctx) is None:
            return None
        start = ctx.source.span(rest)[0]
        return Fix((Edit(start, start, f"{text_of_device(cuda.body, ctx)} if {available(ctx)} else "),), adds=True)
    if not isinstance(cuda, ast.If) or not isinstance(rest, list) or len(cuda.body) != 1:
        return None
    body = cuda.body[0]
    if not isinstance(body, ast.Assign | ast.Return | ast.AnnAssign) or body.value is None:
        return None
    if device_of(body.value, ctx) is None:
        return None
    source = ctx.source
    first, last = source.span(body)
    start, end = source.span(body.value)
    text = source.text[first:start] + text_of_device(body.value, ctx) + source.text[end:last]
    place = _else_line(ladder, rest, ctx)  # type: ignore[arg-type]
    if place is None or source.line_start(first) == source.line_start(source.span(cuda.test)[0]):
        return None
    outer, inner = source.indent(source.span(ladder)[0]), source.indent(first)
    arm = f"{outer}elif {available(ctx)}:{source.newline}{inner}{text}{source.newline}"
    return Fix((Edit(place, place, arm),), adds=True)


def _else_line(ladder: ast.If, rest: list[ast.stmt], ctx: Context) -> int | None:
    """Offset of the line of the final `else:`, or of the line after a ladder without one."""
    source = ctx.source
    if not rest:
        end = source.line_end(source.span(ladder)[1])
        return end if source.text[end - 1] in "\r\n" else None
    last_rung = _arms(ladder)[0][-1][1]
    assert isinstance(last_rung, ast.If)
    after = source.span(last_rung.body[-1])[1]
    for token in source.tokens(after, source.span(rest[0])[0]):
        if token.text == "else":
            line = source.line_start(token.start)
            return line if not source.text[line : token.start].strip() else None
    return None
