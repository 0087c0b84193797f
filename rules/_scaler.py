"""The life of a GradScaler in a file: where it is kept, how it is used, and whether all of it can go."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from tpumigrate.compose import apply
from tpumigrate.edits import Edit, Fix
from tpumigrate.model import arguments, class_of, function, parent
from tpumigrate.rule import Context

from ._precision import is_constant, looks_only

SCALERS = frozenset(
    {
        "torch.amp.GradScaler",
        "torch.amp.grad_scaler.GradScaler",
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    }
)
CUDA_SCALERS = frozenset({"torch.cuda.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler"})
XLA_SCALERS = frozenset({"torch_xla.amp.GradScaler", "torch_xla.amp.grad_scaler.GradScaler"})
ANY_SCALER = SCALERS | CUDA_SCALERS | XLA_SCALERS

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


class Stays(Exception):
    """The scaler can't be taken out of the file; the message says what holds it."""


@dataclass
class _Removal:
    """What taking the scaler out takes: calls rewritten, statements deleted, `if`s that ask for it."""

    edits: list[Edit] = field(default_factory=list)
    deletes: list[ast.stmt] = field(default_factory=list)
    questions: list[ast.If] = field(default_factory=list)
    branches: list[ast.If] = field(default_factory=list)


def removal(call: ast.Call, ctx: Context) -> Fix:
    """The fix that takes the scaler that `call` makes out of the file.  Raises Stays."""
    target = _kept_in(call, ctx)
    removal_ = _Removal()
    if isinstance(target, ast.Name):
        uses = _name_uses(target, removal_, ctx)
    else:
        uses = _attribute_uses(target, removal_, ctx)
    for use in uses:
        _take_out(use, removal_, ctx)
    _grow(removal_.deletes)
    return _with_branches(removal_, ctx)


# -- where it is kept --------------------------------------------------------------------------------------


def _is_maker(node: ast.expr, ctx: Context) -> bool:
    """Whether an expression makes a scaler, or None instead of one."""
    if isinstance(node, ast.IfExp):
        return looks_only(node.test) and _is_maker(node.body, ctx) and _is_maker(node.orelse, ctx)
    if isinstance(node, ast.Call) and set(ctx.model.qualnames(node.func)) & ANY_SCALER:
        return all(looks_only(item) for item in [*node.args, *(keyword.value for keyword in node.keywords)])
    return is_constant(node, None)


def _kept_in(call: ast.Call, ctx: Context) -> ast.Name | ast.Attribute:
    """The name or the `self.attribute` to which a new scaler is assigned."""
    value: ast.AST = call
    above = parent(call)
    while isinstance(above, ast.IfExp) and above.test is not value:
        value, above = above, parent(above)
    target = None
    if isinstance(above, ast.Assign) and len(above.targets) == 1:
        target = above.targets[0]
    elif isinstance(above, ast.AnnAssign):
        target = above.target
    if isinstance(target, ast.Name | ast.Attribute) and isinstance(value, ast.expr) and _is_maker(value, ctx):
        return target
    raise Stays("it is not simply kept in a variable")


def _delete_binding(target: ast.AST, removal_: _Removal, ctx: Context) -> None:
    """Delete the assignment to a place of the scaler."""
    statement = parent(target)
    simple = isinstance(statement, ast.AnnAssign) or (isinstance(statement, ast.Assign) and len(statement.targets) == 1)
    if not simple or not isinstance(statement, ast.Assign | ast.AnnAssign):
        raise Stays(f"`{ctx.text(target)}` is not simply assigned")
    if statement.value is not None and not _is_maker(statement.value, ctx):
        raise Stays(f"`{ctx.text(target)}` is given other values too")
    removal_.deletes.append(statement)


def _name_uses(target: ast.Name, removal_: _Removal, ctx: Context) -> list[ast.expr]:
    name = target.id
    if ctx.model.scope(target).is_class:
        raise Stays("it is an attribute of a class")
    for kind in (ast.Global, ast.Nonlocal):
        if any(name in node.names for node in ctx.model.nodes(kind)):  # type: ignore[attr-defined]
            raise Stays(f"`{name}` is shared between functions")
    if any(
        isinstance(node, ast.Assign)
        and any(isinstance(item, ast.Name) and item.id == "__all__" for item in node.targets)
        and any(isinstance(item, ast.Constant) and item.value == name for item in ast.walk(node.value))
        for node in ctx.model.tree.body
    ):
        raise Stays(f"`{name}` is exported")
    bindings = ctx.model.bindings(target)
    for binding in bindings:
        if binding.kind != "assign":
            raise Stays(f"`{name}` is given other values too")
    uses: list[ast.expr] = []
    for node in ctx.model.nodes(ast.Name):
        if node.id == name and ctx.model.bindings(node) is bindings:
            if isinstance(node.ctx, ast.Load):
                uses.append(node)
            else:
                _delete_binding(node, removal_, ctx)
    return uses


def _attribute_uses(target: ast.Attribute, removal_: _Removal, ctx: Context) -> list[ast.expr]:
    owner = class_of(target)
    if owner is None or not _is_self(target.value):
        raise Stays("it is kept in an attribute of another object")
    if any(not (isinstance(base, ast.Name) and base.id == "object") for base in owner.bases) or owner.keywords:
        raise Stays(f"a base class of `{owner.name}` may use `self.{target.attr}`")
    if any(_names(base, owner.name) for other in ctx.model.nodes(ast.ClassDef) for base in other.bases):
        raise Stays(f"a class derived from `{owner.name}` may use `self.{target.attr}`")
    if not target.attr.startswith("_") and not any(_names(call.func, owner.name) for call in ctx.model.nodes(ast.Call)):
        raise Stays(f"other files may read `{target.attr}` of a `{owner.name}`")
    uses: list[ast.expr] = []
    for node in ctx.model.nodes(ast.Attribute):
        if node.attr != target.attr:
            continue
        if not _is_self(node.value) or class_of(node) is not owner:
            raise Stays(f"`{ctx.text(node)}` may be it")
        if isinstance(node.ctx, ast.Load):
            uses.append(node)
        else:
            _delete_binding(node, removal_, ctx)
    for constant in ctx.model.nodes(ast.Constant):
        if constant.value == target.attr and isinstance(parent(constant), ast.Call):
            raise Stays(f"`{target.attr}` is looked up by its name")
    return uses


def _names(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_self(node: ast.expr) -> bool:
    if not isinstance(node, ast.Name):
        return False
    method = function(node)
    first = next(arguments(method), None) if method is not None else None
    return node.id == "self" and first is not None and first.arg == "self"


# -- how it is used ----------------------------------------------------------------------------------------


def _take_out(use: ast.expr, removal_: _Removal, ctx: Context) -> None:
    """What becomes of one use of the scaler."""
    above = parent(use)
    if isinstance(above, ast.Attribute):
        call = parent(above)
        if isinstance(call, ast.Call) and call.func is above:
            _method(call, above.attr, removal_, ctx)
            return
        raise Stays(f"`{ctx.text(above)}` is read")
    question = parent(above) if above is not None and _is_question(above) else above
    if isinstance(question, ast.If):
        removal_.questions.append(question)
        return
    raise Stays(_where(use, above, ctx))


def _is_question(node: ast.AST) -> bool:
    """`not scaler`, `scaler is None`, `scaler is not None`."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare) and len(node.ops) == 1 and is_constant(node.comparators[0], None)


def _where(use: ast.expr, above: ast.AST | None, ctx: Context) -> str:
    text = ctx.text(use)
    if isinstance(above, ast.keyword):
        above = parent(above)
    if isinstance(above, ast.Call):
        return f"`{text}` is passed to `{ctx.text(above.func)}()`"
    if isinstance(above, ast.Return):
        return f"`{text}` is returned"
    return f"`{text}` is used as a value"


def _method(call: ast.Call, method: str, removal_: _Removal, ctx: Context) -> None:
    inputs = [*call.args, *(keyword.value for keyword in call.keywords)]
    alone = isinstance(parent(call), ast.Expr)
    text = ctx.text(call.func)
    if method in ("unscale_", "update", "get_scale") and alone and all(looks_only(item) for item in inputs):
        statement = parent(call)
        assert isinstance(statement, ast.Expr)
        removal_.deletes.append(statement)
    elif method in ("scale", "step") and len(inputs) == 1 and not isinstance(inputs[0], ast.Starred):
        removal_.edits.extend(_only_argument(call, inputs[0], ".step()" if method == "step" else "", ctx))
    elif method in ("state_dict", "load_state_dict"):
        raise Stays(f"`{text}()` is part of the checkpoint")
    else:
        raise Stays(f"`{text}()` is not simply to be left out")
    _note_branches(call, removal_)


def _only_argument(call: ast.Call, argument: ast.expr, after: str, ctx: Context) -> list[Edit]:
    """`scaler.scale(x)` becomes `x`, `scaler.step(x)` becomes `x.step()`; the argument's own text stays."""
    source = ctx.source
    start, end = source.span(call)
    first, last = source.span(argument)
    if any(token.kind == "comment" for span in ((start, first), (last, end)) for token in source.tokens(*span)):
        raise Stays("a comment stands inside one of its calls")
    tight = isinstance(parent(call), ast.Attribute | ast.BinOp | ast.UnaryOp | ast.Subscript | ast.Compare)
    several_lines = "\n" in source.text[first:last]
    loose = not isinstance(argument, _ATOMS) and (tight or bool(after) or several_lines)
    opening, closing = ("(", ")") if loose else ("", "")
    return [Edit(start, first, opening), Edit(last, end, closing + after)]


def _note_branches(call: ast.AST, removal_: _Removal) -> None:
    """Remember the innermost `if ... else` around a call: its branches may become the same."""
    child, above = call, parent(call)
    while above is not None and not isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
        if isinstance(above, ast.If) and above.orelse and child in above.body and above not in removal_.branches:
            removal_.branches.append(above)
        child, above = above, parent(above)


# -- what is left ------------------------------------------------------------------------------------------


def _grow(deletes: list[ast.stmt]) -> None:
    """Delete compound statements of which nothing is left, when evaluating their headers has no effect."""
    gone = {id(item) for item in deletes}
    for item in deletes:  # grows while it is walked
        above = parent(item)
        if id(above) in gone:
            continue
        if not isinstance(above, ast.If | ast.For):
            continue
        if not looks_only(above.test if isinstance(above, ast.If) else above.iter):
            continue
        if all(id(child) in gone for child in [*above.body, *above.orelse]):
            gone.add(id(above))
            deletes.append(above)


def _with_branches(removal_: _Removal, ctx: Context) -> Fix:
    """The fix, with the branches joined that became the same; every `if` that asks for the scaler must go."""
    gone = {id(item) for item in removal_.deletes}
    candidates = list(dict.fromkeys([*removal_.questions, *removal_.branches]))
    extra: list[Edit] = []
    removed: list[tuple[int, int]] = []
    for node in sorted(candidates, key=lambda item: ctx.source.span(item)[0]):
        start, end = ctx.source.span(node)
        if id(node) in gone or any(low <= start and end <= high for low, high in removed):
            continue
        joined = _joined(node, removal_, ctx)
        if joined:
            extra.extend(joined)
            removed.append((joined[0].start, joined[0].end))
        elif node in removal_.questions:
            raise Stays("an `if` asks whether there is one, and its branches do different things")
    deletes = [item for item in removal_.deletes if not _within(ctx.source.span(item), removed)]
    edits = [item for item in removal_.edits if not _within((item.start, item.end), removed)]
    whole = [ctx.source.span(item) for item in deletes]
    edits = [item for item in edits if not _within((item.start, item.end), whole)]
    return Fix(tuple(sorted([*edits, *extra])), tuple(deletes))


def _within(span: tuple[int, int], spans: list[tuple[int, int]]) -> bool:
    return any(low <= span[0] and span[1] <= high for low, high in spans)


def _joined(node: ast.If, removal_: _Removal, ctx: Context) -> list[Edit]:
    """Edits that leave the `else` branch alone, if without the scaler both do the same; [] otherwise."""
    source = ctx.source
    start, end = source.span(node)
    line = source.line_start(start)
    outer = source.text[line:start]
    if not node.orelse or outer.strip() or not looks_only(node.test) or source.text.startswith("elif", start):
        return []
    first = source.span(node.orelse[0])[0]
    row = source.line_start(first)
    inner = source.text[row:first]
    if inner.strip() or not inner.startswith(outer):
        return []
    if any(token.kind == "string" and "\n" in token.text for token in source.tokens(first, end)):
        return []  # white space inside a string is text
    if any(token.kind == "comment" for token in source.tokens(start, first)):
        return []
    body, orelse = (_left(item, removal_, ctx) for item in (node.body, node.orelse))
    if body is None or body != orelse:
        return []
    edits = [Edit(line, row, "")]
    for number in range(source.position(first)[0], source.position(end)[0] + 1):
        begin = source.line_starts[number - 1]
        if source.text.startswith(inner, begin):
            edits.append(Edit(begin + len(outer), begin + len(inner), ""))
    return edits


def _left(statements: list[ast.stmt], removal_: _Removal, ctx: Context) -> list[str] | None:
    """What is left of a branch without the scaler, in one spelling; None when that can't be told."""
    source = ctx.source
    begin, end = source.line_start(source.span(statements[0])[0]), source.span(statements[-1])[1]
    if source.text[begin : source.span(statements[0])[0]].strip():
        return None
    gone = [source.span(item) for item in removal_.deletes]
    gone = [span for span in gone if not _within(span, [other for other in gone if other != span])]
    kept = [item for item in removal_.edits if not _within((item.start, item.end), gone)]
    every = [*kept, *(Edit(low, high, "pass") for low, high in gone)]
    edits = [
        Edit(item.start - begin, item.end - begin, item.text)
        for item in every
        if begin <= item.start and item.end <= end
    ]
    try:
        tree = ast.parse("if 1:\n" + apply(source.text[begin:end], sorted(edits)))
    except SyntaxError:
        return None
    top = tree.body[0]
    assert isinstance(top, ast.If)
    return [ast.unparse(item) for item in top.body if not isinstance(item, ast.Pass)]
