"""What a loop's batch is made of, as far as its body shows, and the line that moves it to the TPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpumigrate.edits import Edit
from tpumigrate.model import parent
from tpumigrate.rule import Context

from ._worker import is_simple_line

# What tells that a name of a batch is no tensor.
_NO_TENSOR = re.compile(
    r"(?:^|_)(?:paths?|names?|files?|filenames?|captions?|texts?|meta|metas|info|infos|keys?|urls?)$"
)
_TENSOR_METHODS = frozenset(
    """to size view reshape float long half bfloat16 int bool item dim numel detach permute transpose unsqueeze squeeze
    contiguous flatten eq ne sum mean argmax max min shape device dtype ndim view_as expand type_as cpu t T""".split()
)


def moves(loop: ast.For, ctx: Context) -> list[Edit] | None:
    """Edits that move what a loop takes from its loader; None when something may be no tensor."""
    target: ast.expr = loop.target
    for _ in range(_enumerations(loop.iter)):
        if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
            return None
        target = target.elts[1]
    if isinstance(target, ast.Tuple | ast.List):
        return _moved_names(target, loop.body[0], loop, ctx, before=True)
    if not isinstance(target, ast.Name):
        return None
    if not any(True for _ in _reads(target, loop)):
        return []
    unpacked = _unpacking(target, loop, ctx)
    if unpacked is not None:
        return _moved_names(unpacked.targets[0], unpacked, loop, ctx, before=False)
    if any(_is_tensor_use(use) for use in _reads(target, loop)):
        return _moved_names(ast.Tuple([target]), loop.body[0], loop, ctx, before=True)
    return None


def _enumerations(node: ast.expr) -> int:
    """How often `enumerate` numbers what is iterated over, inside progress bars too."""
    count = 0
    while isinstance(node, ast.Call) and node.args:
        count += getattr(node.func, "id", "") == "enumerate"
        node = node.args[0]
    return count


def _unpacking(target: ast.Name, loop: ast.For, ctx: Context) -> ast.Assign | None:
    """The statement `data, target = batch` that begins a loop, if the batch is used nowhere else."""
    first = loop.body[0]
    if not isinstance(first, ast.Assign) or len(first.targets) != 1 or not isinstance(first.targets[0], ast.Tuple):
        return None
    uses = list(_reads(target, loop))
    return first if len(uses) == 1 and first.value is uses[0] else None


def _moved_names(target: ast.expr, stmt: ast.stmt, loop: ast.For, ctx: Context, *, before: bool) -> list[Edit] | None:
    """Edits that move the names of a tuple before or after a statement."""
    assert isinstance(target, ast.Tuple | ast.List)
    names: list[str] = []
    for item in target.elts:
        if not isinstance(item, ast.Name):
            return None
        uses = list(_reads(item, loop))
        if not uses or item.id == "_":
            continue
        if _NO_TENSOR.search(item.id) or any(_is_other_use(use, ctx) for use in uses):
            return None
        names.append(item.id)
    if not names:
        return []
    if not is_simple_line(stmt, ctx):
        return None
    copies = [f'{item}.to("tpu")' for item in names]
    line = f"{', '.join(names)} = {', '.join(copies)}"
    source = ctx.source
    start, end = source.start(stmt), source.span(stmt)[1]
    indent = source.indent(start)
    if before:
        return [Edit(start, start, f"{line}{source.newline}{indent}")]
    if source.text[end : source.line_end(end)].strip():
        return None
    return [Edit(end, end, f"{source.newline}{indent}{line}")]


def _reads(name: ast.Name, loop: ast.For) -> Iterator[ast.Name]:
    for stmt in loop.body:
        for node in ast.walk(stmt):
            if isinstance(node, ast.Name) and node.id == name.id and isinstance(node.ctx, ast.Load):
                yield node


def _is_tensor_use(use: ast.Name) -> bool:
    above = parent(use)
    return isinstance(above, ast.Attribute) and above.attr in _TENSOR_METHODS


def _is_other_use(use: ast.Name, ctx: Context) -> bool:
    """Whether a name is used like a list, a dictionary or a text."""
    above = parent(use)
    if isinstance(above, ast.Attribute):
        return above.attr not in _TENSOR_METHODS
    if isinstance(above, ast.Subscript) and above.value is use:
        return isinstance(above.slice, ast.Constant) and isinstance(above.slice.value, str)
    if isinstance(above, ast.keyword):
        return above.arg is None
    if isinstance(above, ast.Call):
        func = above.func
        last = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        return last in ("zip", "join", "extend", "tokenizer", "encode", "list", "sorted", "set", "open", "dict")
    return isinstance(above, ast.Starred | ast.For | ast.comprehension | ast.JoinedStr | ast.FormattedValue)
