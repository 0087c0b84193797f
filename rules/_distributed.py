"""What the distributed rules share: rank guards, device counts, how a value that a call gets was made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpumigrate.model import call_of, parents
from tpumigrate.names import FUNCTIONS, Binding
from tpumigrate.rule import Context

INIT = frozenset({"torch.distributed.init_process_group", "torch.distributed.distributed_c10d.init_process_group"})
DDP = "torch.nn.parallel.DistributedDataParallel"
_RANK = re.compile(r"(?:^|_)(?:rank|ordinal|process_index|proc_id)\Z", re.IGNORECASE)
_MAIN = re.compile(
    r"is_?(?:the_)?(?:global_|world_|local_)?(?:main|master|rank_?zero|rank_?0|primary|chief)(?:_process|_ordinal|_rank)?"
    r"|(?:main|master)_process|is_rank_?zero|is_logging_process",
    re.IGNORECASE,
)
_COUNTS = frozenset({"torch.cuda.device_count", "torch.accelerator.device_count"})


def is_distributed(ctx: Context) -> bool:
    """Whether the project, or this file by its calls of torch.distributed, works with several processes."""
    project = ctx.project
    return (
        project.process_group
        or project.ddp
        or project.launch
        or any(ctx.qualname(call.func).startswith("torch.distributed.") for call in ctx.model.nodes(ast.Call))
    )


# -- ranks -------------------------------------------------------------------------------------------------


def rank_guard(node: ast.AST) -> ast.If | None:
    """The innermost `if` within the function whose body runs on some ranks only and holds `node`."""
    child = node
    for above in parents(node):
        if isinstance(above, FUNCTIONS):
            return None
        if isinstance(above, ast.If) and any(child is item for item in above.body) and is_rank_test(above.test):
            return above
        child = above
    return None


def is_rank_test(test: ast.expr) -> bool:
    """`rank == 0`, `is_main_process()`, `not rank`, and combinations with other conditions."""
    match test:
        case ast.BoolOp(values=values):
            return any(is_rank_test(value) for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _is_rank(operand)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return (_is_rank(left) and _picks_some(op, right)) or (
                _is_rank(right) and isinstance(left, ast.Constant) and left.value == 0 and isinstance(op, ast.Eq)
            )
    return bool(_MAIN.fullmatch(_last_name(test)))


def _picks_some(op: ast.cmpop, right: ast.expr) -> bool:
    """Whether a comparison of the rank holds for some ranks only; -1 stands for "not distributed"."""
    try:
        value = ast.literal_eval(right)
    except ValueError:
        return isinstance(op, ast.Eq | ast.NotEq) and not isinstance(right, ast.UnaryOp)
    if isinstance(op, ast.In):
        return True
    if not isinstance(value, int) or value < 0:
        return False
    return not (isinstance(op, ast.GtE) and value == 0)


def _is_rank(node: ast.expr) -> bool:
    match node:
        case ast.BinOp(left=left, op=ast.Mod()):
            return _is_rank(left)
        case ast.Call(func=ast.Name(id="int"), args=[only]):
            return _is_rank(only)
        case ast.Call(args=[ast.Constant(value=str(text)), *_]) | ast.Subscript(slice=ast.Constant(value=str(text))):
            return text in ("RANK", "LOCAL_RANK", "rank", "local_rank")
    return bool(_RANK.search(_last_name(node)))


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def names_rank(node: ast.AST) -> bool:
    """Whether an expression depends on the rank by name."""
    return any(isinstance(item, ast.Name | ast.Attribute | ast.Call) and _is_rank(item) for item in ast.walk(node))


# -- values ------------------------------------------------------------------------------------------------


def is_device_count(node: ast.AST, ctx: Context) -> bool:
    return isinstance(node, ast.Call) and ctx.qualname(node.func) in _COUNTS


def assigned(node: ast.Name, ctx: Context) -> list[Binding]:
    """Bindings of a variable when every one of them is a plain assignment with a value, else []."""
    bindings = ctx.model.bindings(node)
    if all(item.kind == "assign" and item.value is not None for item in bindings):
        return bindings
    return []


def function_called(call: ast.Call, ctx: Context) -> ast.FunctionDef | None:
    """The function of this file that a call by plain name reaches, when there is only one."""
    return function_named(call.func, ctx)


def function_named(node: ast.expr, ctx: Context) -> ast.FunctionDef | None:
    if not isinstance(node, ast.Name):
        return None
    bindings = ctx.model.bindings(node)
    if len(bindings) == 1 and isinstance(bindings[0].node, ast.FunctionDef):
        return bindings[0].node
    return None


def calls_of(function: ast.FunctionDef, ctx: Context) -> Iterator[ast.Call]:
    """Calls by plain name of a function of this file."""
    for use in ctx.model.uses(function.name):
        call = call_of(use)
        if call is not None and function_named(use, ctx) is function:
            yield call


def keyword_of(call: ast.Call, value: ast.expr) -> ast.expr | ast.keyword:
    """The argument that passes `value`: its keyword when it has one."""
    return next((item for item in call.keywords if item.value is value), value)
