"""TPU305: processes that are started with torch.multiprocessing.spawn."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from tpumigrate.edits import Edit, Fix, name, remove_arguments
from tpumigrate.model import arguments, parent, parents, statement
from tpumigrate.names import FUNCTIONS
from tpumigrate.rule import Context, Report, rule

from ._common import is_pure
from ._distributed import assigned, function_named, has_stars, is_device_count, keyword_of

_SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")
_SET_ENV = "set_tpu_launch_env"


@rule("TPU305", "spawn", anchors=("spawn",))
def spawn(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Training processes are started with torch.multiprocessing.spawn.

    ## What it does
    PyTorch/XLA starts its replicas itself: `torch_xla.launch(fn, args=...)`. A number of processes that the
    parent takes from `device_count()` is asked for in the worker instead, because the parent must not touch
    the runtime. TorchTPU keeps `spawn`, after `set_tpu_launch_env` has laid out the processes.

    ## Why it matters on a TPU
    `nprocs=torch.cuda.device_count()` is 0 on a TPU host: spawn returns at once, with exit status 0 and
    nothing trained. torch_xla refuses any number of processes but one or all, and raises "Runtime is already
    initialized" if the parent has counted devices. TorchTPU aborts the first operation of workers without the
    launch environment.

    ## Example
    ```python
    import torch
    import torch.multiprocessing as mp

    def worker(rank, world_size, cfg):
        print("worker", rank, "of", world_size, cfg)

    def main():
        n = torch.cuda.device_count()
        mp.spawn(worker, args=(n, {"lr": 0.1}), nprocs=n, join=True)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    def worker(rank, world_size, cfg):
        world_size = xr.world_size()
        print("worker", rank, "of", world_size, cfg)

    def main():
        torch_xla.launch(worker, args=(None, {"lr": 0.1}))
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.multiprocessing as mp

    def worker(rank, world_size, cfg):
        print("worker", rank, "of", world_size, cfg)

    def main():
        n = torch.accelerator.device_count()
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=n)
        mp.spawn(worker, args=(n, {"lr": 0.1}), nprocs=n, join=True)
    ```

    ## Example: through a field of the options
    ```python
    import torch
    import torch.multiprocessing as mp

    def main(args):
        ngpus_per_node = torch.cuda.device_count()
        args.world_size = ngpus_per_node
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))

    def main_worker(gpu, ngpus_per_node, args):
        \"\"\"One process.\"\"\"
        print(gpu, ngpus_per_node, args.world_size)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    def main(args):
        torch_xla.launch(main_worker, args=(None, args))

    def main_worker(gpu, ngpus_per_node, args):
        \"\"\"One process.\"\"\"
        ngpus_per_node = xr.world_size()
        args.world_size = ngpus_per_node
        print(gpu, ngpus_per_node, args.world_size)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.multiprocessing as mp

    def main(args):
        ngpus_per_node = torch.accelerator.device_count()
        args.world_size = ngpus_per_node
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=ngpus_per_node)
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))

    def main_worker(gpu, ngpus_per_node, args):
        \"\"\"One process.\"\"\"
        print(gpu, ngpus_per_node, args.world_size)
    ```

    ## Example: a number that somebody chose (unsafe)
    ```python
    import torch.multiprocessing as mp

    def worker(rank, lr):
        print(rank, lr)

    if __name__ == "__main__":
        mp.spawn(worker, (0.1,), 4, start_method="spawn")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch_xla

    def worker(rank, lr):
        print(rank, lr)

    if __name__ == "__main__":
        torch_xla.launch(worker, (0.1,), start_method="spawn")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.multiprocessing as mp

    def worker(rank, lr):
        print(rank, lr)

    if __name__ == "__main__":
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=4)
        mp.spawn(worker, (0.1,), 4, start_method="spawn")
    ```

    ## Example: the number decides more than the processes (torch_xla)
    ```python
    import torch.multiprocessing as mp
    import mylib

    def main(n):
        context = mp.spawn(mylib.worker, args=(n,), nprocs=n, join=False)
        context.join()
    ```

    ## Not flagged
    ```python
    import torch.multiprocessing as mp

    mp.set_start_method("spawn")
    process = mp.Process(target=print)
    ```
    ```python
    import subprocess
    from pool import spawn

    spawn(print, nprocs=2)
    ```
    ```python
    import torch_xla

    torch_xla.launch(print, args=())
    ```

    ## Fix safety
    Safe when the processes are as many as devices. With any other number the fix for torch_xla is unsafe,
    because all devices of the host take part.

    ## References
    torch_xla.launch, torch_xla.runtime.world_size; torch.tpu.distributed.set_tpu_launch_env.
    """
    if ctx.qualname(node.func) not in _SPAWN:
        return
    if ctx.xla:
        yield from _launched(node, ctx)
    else:
        yield from _laid_out(node, ctx)


# -- torch_tpu ---------------------------------------------------------------------------------------------


def _laid_out(call: ast.Call, ctx: Context) -> Iterator[Report]:
    if any(item.attr == _SET_ENV for item in ctx.model.nodes(ast.Attribute)) or ctx.model.binds(_SET_ENV):
        return
    message = "before processes are spawned, the parent has to lay them out with `set_tpu_launch_env`"
    count = ctx.arg(call, "nprocs", 2)
    stmt = statement(call)
    simple = isinstance(stmt, ast.Expr | ast.Assign | ast.Return) and _is_simple_line(stmt, ctx)
    if has_stars(call) or (count is not None and not is_pure(count)) or not simple:
        why = "call `torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=...)` before it"
        yield Report(call, message, unfixed=why)
        return
    text = _count_text(count, ctx)
    start = ctx.source.span(stmt)[0]
    line = f"{name('torch')}.tpu.distributed.{_SET_ENV}(nproc_per_node={text}){ctx.source.newline}"
    yield Report(call, message, Fix((Edit(start, start, line + ctx.source.indent(start)),)))


def _count_text(count: ast.expr | None, ctx: Context) -> str:
    if count is None:
        return "1"
    if is_device_count(count, ctx):
        return f"{name('torch')}.accelerator.device_count()"
    return ctx.text(count)


def _is_simple_line(stmt: ast.stmt, ctx: Context) -> bool:
    """Whether a statement begins its line, so that another can be put before it."""
    start = ctx.source.start(stmt)
    line = ctx.source.text[ctx.source.line_start(start) : start]
    return not line.strip()


# -- torch_xla ---------------------------------------------------------------------------------------------


@dataclass
class _Move:
    """What goes from the parent into the worker, so that the parent does not ask the runtime.

    names: what the worker's parameters are called that got the number of processes
    fields: assignments `args.world_size = n` of the parent, with the worker's name for `args`
    """

    edits: list[Edit] = field(default_factory=list)
    deletes: list[ast.stmt] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    fields: list[tuple[str, str]] = field(default_factory=list)


def _launched(call: ast.Call, ctx: Context) -> Iterator[Report]:
    message = "torch_xla starts one process per device itself, with `torch_xla.launch`"
    count = ctx.arg(call, "nprocs", 2)
    join = ctx.arg(call, "join", 3)
    if has_stars(call) or len(call.args) > 4:
        yield Report(
            call, message, unfixed="its arguments are passed on: write `torch_xla.launch(fn, args=...)`"
        )
        return
    if (isinstance(join, ast.Constant) and not join.value) or not isinstance(parent(call), ast.Expr):
        yield Report(call, message, unfixed="`torch_xla.launch` waits for its processes and returns nothing")
        return
    move = _moved(call, count, ctx) if count is not None else _Move()
    counted = _counted(count, ctx) if count is not None else None
    if move is None:
        why = (
            "the parent must not count devices before `torch_xla.launch`: ask `xr.world_size()` in the worker"
        )
        yield Report(call, message, unfixed=why, claims=() if counted is None else (counted,))
        return
    gone = [
        keyword_of(call, item)
        for key, place in (("nprocs", 2), ("join", 3), ("daemon", 4))
        if (item := ctx.arg(call, key, place)) is not None
    ]
    edits = [ctx.edit(call.func, name("torch_xla") + ".launch"), *move.edits]
    if gone:
        edits.extend(remove_arguments(ctx.source, call, gone))
    yield Report(call, message, Fix(tuple(edits), deletes=tuple(move.deletes), safe=counted is not None))


def _counted(count: ast.expr, ctx: Context) -> ast.expr | None:
    """The call of `device_count()` that a number of processes comes from."""
    if is_device_count(count, ctx):
        return count
    if isinstance(count, ast.Name):
        bindings = assigned(count, ctx)
        if len(bindings) == 1 and bindings[0].value is not None and is_device_count(bindings[0].value, ctx):
            return bindings[0].value
    return None


def _moved(call: ast.Call, count: ast.expr, ctx: Context) -> _Move | None:
    """How the uses of the number of processes get into the worker; None when some cannot."""
    move = _Move()
    passed = ctx.arg(call, "args", 1)
    elements = list(passed.elts) if isinstance(passed, ast.Tuple | ast.List) else []
    worker = function_named(ctx.arg(call, "fn", 0) or call.func, ctx)
    counted = _counted(count, ctx)
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
    if worker is not None and move.names and _is_simple_line(worker.body[0], ctx):
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
            and _owner(item) is _owner(call)
            and item not in inside
        ]
        return None if others else inside
    assert isinstance(count, ast.Name)
    binding = assigned(count, ctx)[0]
    if not isinstance(parent(binding.node), ast.Assign) or len(parent(binding.node).targets) != 1:  # type: ignore[union-attr]
        return None
    return [
        use for use in ctx.model.uses(count.id) if any(item is binding for item in ctx.model.bindings(use))
    ]


def _is_same(node: ast.expr, count: ast.expr, ctx: Context) -> bool:
    return type(node) is type(count) and ctx.text(node) == ctx.text(count)


def _owner(node: ast.AST) -> ast.AST | None:
    return next((above for above in parents(node) if isinstance(above, FUNCTIONS)), None)


def _move_use(
    use: ast.expr, elements: list[ast.expr], worker: ast.FunctionDef | None, move: _Move, ctx: Context
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
    owner = _owner(stmt)
    return any(
        item.attr == target.attr
        and item is not target
        and ctx.text(item) == ctx.text(target)
        and _owner(item) is owner
        for item in ctx.model.nodes(ast.Attribute)
    )


def _first_lines(worker: ast.FunctionDef, move: _Move, ctx: Context) -> Edit:
    """The lines that begin the worker, after its docstring."""
    source = ctx.source
    body = worker.body
    first = body[0]
    is_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
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
