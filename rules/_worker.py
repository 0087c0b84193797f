"""The number of processes, which a parent hands to its workers, found out by the workers instead."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from tpumigrate.edits import Edit, name
from tpumigrate.model import arguments, callable_around, parent, statement
from tpumigrate.rule import Context

from ._distributed import assigned, function_named, is_device_count


@dataclass
class Move:
    """What goes from the parent into the worker, so that the parent does not ask the runtime.

    names: what the worker's parameters are called that got the number of processes
    fields: assignments `args.world_size = n` of the parent, with the worker's name for `args`
    """

    edits: list[Edit] = field(default_factory=list)
    deletes: list[ast.stmt] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    fields: list[tuple[str, str]] = field(default_factory=list)


def counted_by(count: ast.expr, ctx: Context) -> ast.expr | None:
    """The call of `device_count()` that a number of processes comes from."""
    if is_device_count(count, ctx):
        return count
    if isinstance(count, ast.Name):
        bindings = assigned(count, ctx)
        if len(bindings) == 1 and bindings[0].value is not None and is_device_count(bindings[0].value, ctx):
            return bindings[0].value
    return None


def moved(call: ast.Call, count: ast.expr, ctx: Context) -> Move | None:
    """How the uses of the number of processes get into the worker; None when some cannot."""
    move = Move()
    passed = ctx.arg(call, "args", 1)
    elements = list(passed.elts) if isinstance(passed, ast.Tuple | ast.List) else []
    worker = function_named(ctx.arg(call, "fn", 0) or call.func, ctx)
    counted = counted_by(count, ctx)
    uses = _uses(call, count, counted, ctx)
    if uses is None:
        return None
    for use in uses:
        if use is count:
            continue
        if not _move_use(use, elements, worker, move, ctx):
            return None
    stmt = statement(counted) if counted is not None and counted is not count else None
    if stmt is not None:
        move.deletes.append(stmt)
    if worker is not None and move.names and is_simple_line(worker.body[0], ctx):
        move.edits.append(_first_lines(worker, move, ctx))
    elif move.fields or move.names:
        return None  # no parameter gets the number of processes, or the body is on the line of the `def`
    return move


def _uses(call: ast.Call, count: ast.expr, counted: ast.expr | None, ctx: Context) -> list[ast.expr] | None:
    """Where the number of processes is used: everywhere if it came from the runtime, else in the call."""
    inside = [item for item in ast.walk(call) if isinstance(item, ast.expr) and _is_same(item, count, ctx)]
    if isinstance(count, ast.Constant):
        return [count]  # an equal number among the arguments may mean something else
    if counted is None or counted is count:
        others = [
            item
            for item in ctx.model.nodes(ast.Call)
            if counted is count
            and is_device_count(item, ctx)
            and callable_around(item) is callable_around(call)
            and item not in inside
        ]
        return None if others else inside
    assert isinstance(count, ast.Name)
    binding = assigned(count, ctx)[0]
    if not isinstance(parent(binding.node), ast.Assign) or len(parent(binding.node).targets) != 1:  # type: ignore[union-attr]
        return None
    return [use for use in ctx.model.uses(count.id) if any(item is binding for item in ctx.model.bindings(use))]


def _is_same(node: ast.expr, count: ast.expr, ctx: Context) -> bool:
    return type(node) is type(count) and ctx.text(node) == ctx.text(count)


def _move_use(
    use: ast.expr, elements: list[ast.expr], worker: ast.FunctionDef | None, move: Move, ctx: Context
) -> bool:
    """Make the worker find out what the parent passed; False when that is not possible."""
    if worker is None:
        return False
    parameters = [arg.arg for arg in arguments(worker)]
    if use in elements:
        place = elements.index(use) + 1  # the worker gets its index first
        if place >= len(parameters):
            return False
        move.edits.append(ctx.edit(use, "None"))
        move.names.append(parameters[place])
        return True
    stmt = parent(use)
    if isinstance(stmt, ast.Assign) and stmt.value is use and len(stmt.targets) == 1:
        target = stmt.targets[0]
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            places = [index for index, item in enumerate(elements) if ctx.text(item) == target.value.id]
            if places and places[0] + 1 < len(parameters) and not _is_read(target, stmt, ctx):
                move.fields.append((parameters[places[0] + 1], target.attr))
                move.deletes.append(stmt)
                return True
    return False


def _is_read(target: ast.Attribute, stmt: ast.stmt, ctx: Context) -> bool:
    """Whether the parent reads the field that it sets."""
    owner = callable_around(stmt)
    return any(
        item.attr == target.attr
        and item is not target
        and ctx.text(item) == ctx.text(target)
        and callable_around(item) is owner
        for item in ctx.model.nodes(ast.Attribute)
    )


def _first_lines(worker: ast.FunctionDef, move: Move, ctx: Context) -> Edit:
    """The lines that begin the worker, after its docstring."""
    source = ctx.source
    body = worker.body
    first = body[0]
    is_docstring = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    indent = source.indent(source.span(first)[0])
    number = move.names[0]
    lines = [f"{item} = {name('torch_xla.runtime')}.world_size()" for item in dict.fromkeys(move.names)]
    lines += [f"{owner}.{attribute} = {number}" for owner, attribute in move.fields]
    if is_docstring:
        end = source.line_end(source.span(first)[1])
        return Edit(end, end, "".join(f"{indent}{line}{source.newline}" for line in lines))
    start = source.start(first)
    return Edit(start, start, "".join(f"{line}{source.newline}{indent}" for line in lines))


def is_simple_line(stmt: ast.stmt, ctx: Context) -> bool:
    """Whether a statement begins its line, so that another can be put before it."""
    start = ctx.source.start(stmt)
    line = ctx.source.text[ctx.source.line_start(start) : start]
    return not line.strip()
