"""TPU107: waiting for the GPU, and the streams and events that order its work."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, name
from tpumigrate.model import parent, statement
from tpumigrate.names import Binding
from tpumigrate.rule import Context, Report, rule

from ._common import imports_torch
from ._table import message_of, table_reports

_STREAM = "torch.cuda.Stream"
_STREAMS = (_STREAM, "torch.cuda.current_stream", "torch.cuda.default_stream")
_EVENT = "torch.cuda.Event"
_WAITS = ("wait_stream", "wait_event", "record_stream")


@rule("TPU107", "cuda-stream", anchors=("cuda", "accelerator"))
def cuda_stream(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Synchronises with the GPU, or orders its work with streams and events.

    ## What it does
    Maps `synchronize()`; takes `with torch.cuda.stream(s)` away, keeping its body; reports what needs a person.

    ## Why it matters on a TPU
    There are no user streams: torch_xla runs a graph in order, torch_tpu queues operators in order. Code that
    orders streams is not needed, code that measures time with events must wait for the device instead.

    ## Example
    ```python
    import time

    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    ```

    ## Use instead (torch_xla)
    ```python
    import time

    import torch
    import torch_xla

    torch_xla.sync(wait=True)
    start = time.perf_counter()
    ```

    ## Use instead (torch_tpu)
    ```python
    import time

    import torch

    torch.accelerator.synchronize()
    start = time.perf_counter()
    ```

    ## Example: side streams
    ```python
    import torch

    def fetch(side, x):
        with torch.cuda.stream(side):
            x = x * 2
        return torch.relu(x)
    ```

    ## Use instead
    ```python
    import torch

    def fetch(side, x):
        x = x * 2
        return torch.relu(x)
    ```

    ## Example: ordering of streams
    ```python
    import torch

    def prefetch(loader):
        side = torch.cuda.Stream()
        for x in loader:
            with torch.cuda.stream(side):
                y = x.to("cpu")
            torch.cuda.current_stream().wait_stream(side)
            y.record_stream(torch.cuda.current_stream())
            yield torch.relu(y)
    ```

    ## Use instead
    ```python
    import torch

    def prefetch(loader):
        for x in loader:
            y = x.to("cpu")
            yield torch.relu(y)
    ```

    ## Example: timing with events
    ```python
    import torch

    def timed(f, x):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        y = f(x)
        end.record()
        torch.cuda.synchronize()
        return torch.relu(y), start.elapsed_time(end)
    ```

    ## Use instead (torch_xla)
    ```python
    import time
    import torch
    import torch_xla

    def timed(f, x):
        torch_xla.sync(wait=True)
        start = time.perf_counter()
        y = f(x)
        torch_xla.sync(wait=True)
        end = time.perf_counter()
        torch_xla.sync(wait=True)
        return torch.relu(y), (end - start) * 1000
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def timed(f, x):
        start = torch.Event("tpu", enable_timing=True)
        end = torch.Event("tpu", enable_timing=True)
        start.record()
        y = f(x)
        end.record()
        torch.accelerator.synchronize()
        return torch.relu(y), start.elapsed_time(end)
    ```

    ## Example: from another name
    ```python
    from torch import cuda, zeros

    cuda.synchronize(); x = zeros(1)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch_xla
    from torch import zeros

    torch_xla.sync(wait=True); x = zeros(1)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    from torch import zeros

    torch.accelerator.synchronize(); x = zeros(1)
    ```

    ## Not flagged
    ```python
    import cupy as cp

    with cp.cuda.Stream():
        pass
    ```
    ```python
    from numba import cuda

    cuda.synchronize()
    ```
    ```python
    from typing import Optional

    import torch

    def f(stream: Optional[torch.cuda.Stream] = None):
        return stream
    ```

    ## Fix safety
    Safe. `torch_xla.sync(wait=True)` also cuts the graph, so keep it out of the hot loop.

    ## References
    torch_xla.sync, torch.accelerator.synchronize.
    """
    special = _ordering(node, ctx) or _life_of_event(node, ctx)
    if special is not None:
        yield special
    else:
        yield from table_reports(node, ctx, "TPU107")


# -- streams -----------------------------------------------------------------------------------------------


def _ordering(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Report | None:
    """A statement that only orders streams, and a stream whose every use does."""
    if not isinstance(node, ast.Call):
        return None
    stmt = parent(node)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _WAITS and isinstance(stmt, ast.Expr):
        concerned = node.func.value if node.func.attr != "record_stream" else node.args[0] if node.args else node
        if _is_stream(concerned, ctx) or any(_is_stream(arg, ctx) for arg in node.args):
            what = f"`{node.func.attr}` orders streams, which a TPU does not have"
            return Report(node, what, Fix(deletes=(stmt,)), claims=(stmt,))
        return None
    if ctx.qualname(node.func) != _STREAM or not isinstance(stmt, ast.Assign):
        return None
    binding = _only_binding(stmt, ctx)
    if binding is None or not all(_is_order(use, ctx) for use in _uses(binding, ctx)):
        return None
    message = message_of(ctx.table[_STREAM])
    return Report(node, message, Fix(deletes=(stmt,)))


def _is_stream(node: ast.expr, ctx: Context) -> bool:
    if isinstance(node, ast.Call):
        return ctx.qualname(node.func) in _STREAMS
    return ctx.kind(node) == "stream" and imports_torch(ctx)


def _is_order(use: ast.Name, ctx: Context) -> bool:
    """Whether a use of a stream goes by itself: `with torch.cuda.stream(s)`, `x.wait_stream(s)`, `s.wait_stream(x)`."""
    above = parent(use)
    if isinstance(above, ast.Call) and use in above.args:
        if ctx.qualname(above.func) == "torch.cuda.stream":
            return isinstance(parent(above), ast.withitem)
        func = above.func
        return isinstance(func, ast.Attribute) and func.attr in _WAITS and isinstance(parent(above), ast.Expr)
    if isinstance(above, ast.Attribute) and above.attr in _WAITS:
        return isinstance(parent(parent(above) or above), ast.Expr)
    return False


def _only_binding(stmt: ast.Assign, ctx: Context) -> Binding | None:
    """The binding of a statement that gives one name its only meaning."""
    if len(stmt.targets) != 1 or not isinstance(stmt.targets[0], ast.Name):
        return None
    bindings = ctx.model.scope(stmt).bindings.get(stmt.targets[0].id, [])
    return bindings[0] if len(bindings) == 1 else None


def _uses(binding: Binding, ctx: Context) -> list[ast.Name]:
    return ctx.model.uses(binding.name, [binding])


# -- events ------------------------------------------------------------------------------------------------


def _life_of_event(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Report | None:
    """For torch_xla: events that time a piece of one function become readings of the clock."""
    if not ctx.xla or not isinstance(node, ast.Call) or ctx.qualname(node.func) != _EVENT:
        return None
    events = _timed_together(node, ctx)
    edits: list[Edit] = []
    deletes: list[ast.stmt] = []
    for binding in events:
        deletes.append(statement(binding.node))
        for use in _uses(binding, ctx):
            edits.extend(_reading(use, events, ctx) or [])
    if not events or statement(events[0].node) is not statement(node):
        return Report(node, "", silent=True) if events else None
    claims = tuple(statement(binding.node) for binding in events)
    return Report(node, message_of(ctx.table[_EVENT]), Fix(tuple(dict.fromkeys(edits)), tuple(deletes)), claims=claims)


def _timed_together(node: ast.Call, ctx: Context) -> list[Binding]:
    """All events of the scope, when every use of each is a record or an elapsed time in that same scope."""
    scope = ctx.model.scope(node)
    events: list[Binding] = []
    for bindings in scope.bindings.values():
        for binding in bindings:
            value = binding.value
            if isinstance(value, ast.Call) and ctx.qualname(value.func) == _EVENT:
                stmt = statement(binding.node)
                if not isinstance(stmt, ast.Assign) or _only_binding(stmt, ctx) is None:
                    return []
                events.append(binding)
    for binding in events:
        for use in _uses(binding, ctx):
            if use.__dict__.get("_scope") is not scope or _reading(use, events, ctx) is None:
                return []
    return sorted(events, key=lambda item: ctx.source.span(item.node)[0])


def _reading(use: ast.Name, events: list[Binding], ctx: Context) -> list[Edit] | None:
    """Edits for one use of an event; None when it is not understood."""
    above = parent(use)
    call = parent(above) if isinstance(above, ast.Attribute) else above
    source = ctx.source
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    stmt = parent(call)
    names = {binding.name for binding in events}
    if call.func.attr == "elapsed_time" and len(call.args) == 1 and isinstance(call.func.value, ast.Name):
        other = call.args[0]
        if not isinstance(other, ast.Name) or not {other.id, call.func.value.id} <= names:
            return None
        return [Edit(*source.span(call), f"({other.id} - {call.func.value.id}) * 1000")]
    if call.func.value is not use or not isinstance(stmt, ast.Expr) or call.args or call.keywords:
        return None
    start, end = source.span(stmt)
    if source.text[source.line_start(start) : start].strip():
        return None
    wait = f"{name('torch_xla')}.sync(wait=True)"
    if call.func.attr == "record":
        line = f"{source.newline}{source.indent(start)}{use.id} = {name('time')}.perf_counter()"
        return [Edit(start, end, wait + line)]
    if call.func.attr == "synchronize":
        return [Edit(start, end, wait)]
    return None
