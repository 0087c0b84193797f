"""One way to apply a row of the target's table to a place in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpumigrate.edits import Fix, replace, template, unwrap_with
from tpumigrate.model import call_of, parent
from tpumigrate.rule import Context, Report
from tpumigrate.tables import Row

from ._common import is_pure
from ._devices import in_test_decorator, is_annotation

_ARGUMENT = re.compile(r"\{(?P<comma>, )?(?:(?P<all>args)|(?P<index>\d)(?:=(?P<default>[^{}]*))?)\}")


def table_reports(node: ast.Call | ast.Attribute | ast.Name, ctx: Context, code: str) -> Iterator[Report]:
    """Reports for a use of a name whose row in the table belongs to the rule `code`."""
    if isinstance(node, ast.Call):
        row = ctx.table.get(ctx.qualname(node.func))
        if row is not None and row.rule == code and not in_test_decorator(node):
            yield call_report(node, row, ctx)
        return
    row = _reference_row(node, ctx)
    if row is None or row.rule != code or in_test_decorator(node) or is_annotation(node):
        return
    yield reference_report(node, row, ctx)


def _reference_row(node: ast.Attribute | ast.Name, ctx: Context) -> Row | None:
    above = parent(node)
    if call_of(node):
        return None  # the call speaks
    if isinstance(above, ast.Attribute) and ctx.qualname(above) in ctx.table:
        return None  # a longer name speaks
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return None
    row = ctx.table.get(ctx.qualname(node))
    if row is not None and not isinstance(node.ctx, ast.Load) and not row.name.startswith("torch.backends"):
        return None  # somebody replaces a function: TPU116 speaks
    return row


def message_of(row: Row) -> str:
    """What a finding about a table's name says."""
    return f"`{row.name}`: {row.note}"


def call_report(node: ast.Call, row: Row, ctx: Context) -> Report:
    """What a row says of a call of its name."""
    message = message_of(row)
    severity = "warning" if row.verdict == "approximate" else "error"
    above = parent(node)
    with_ = parent(above) if isinstance(above, ast.withitem) else None
    pure = all(is_pure(arg) for arg in [*node.args, *(keyword.value for keyword in node.keywords)])
    safe = row.safety == "safe"
    if isinstance(above, ast.withitem) and isinstance(with_, ast.With | ast.AsyncWith) and row.context == "unwrap":
        if above.optional_vars is not None:
            return Report(node, message, unfixed="the context's value is used: remove it by hand")
        edits = unwrap_with(ctx.source, with_, [above])
        if not edits or not pure:
            return Report(node, message, unfixed="the block can't be de-indented safely: remove the `with` by hand")
        return Report(node, message, Fix(tuple(edits), safe=safe), severity=severity)
    if isinstance(above, ast.Expr) and row.statement == "delete":
        if not pure:
            return Report(node, message, unfixed="its arguments call something: remove it by hand")
        return Report(node, message, Fix(deletes=(above,), safe=safe), severity=severity)
    if not row.call:
        return Report(node, message, unfixed=row.unless_fixed or row.note, severity=severity)
    text = _filled(row.call, node, ctx)
    if text is None:
        return Report(node, message, unfixed=f"its arguments do not fit `{_plain(row.call)}`", severity=severity)
    if not pure and "{args}" not in row.call:
        return Report(node, message, unfixed="its arguments call something: write the replacement by hand")
    return Report(node, message, Fix((replace(ctx.source, node, text),), safe=safe), severity=severity)


def _filled(call: str, node: ast.Call, ctx: Context) -> str | None:
    """The template of a row with the arguments of a call, None when one that it needs is missing."""
    missing = False

    def fill(match: re.Match[str]) -> str:
        nonlocal missing
        if match["all"]:
            every = sorted([*node.args, *node.keywords], key=lambda item: ctx.source.span(item)[0])
            text = ", ".join(ctx.text(item) for item in every)
        else:
            index = int(match["index"])
            known = index < len(node.args) and not any(isinstance(arg, ast.Starred) for arg in node.args[: index + 1])
            missing = missing or (not known and match["default"] is None)
            text = ctx.text(node.args[index]) if known else match["default"] or ""
        return f"{match['comma'] or ''}{text}" if text else ""

    filled = template(_ARGUMENT.sub(fill, call))
    return None if missing else filled


def _plain(text: str) -> str:
    return text.replace("{", "").replace("}", "")


def reference_report(node: ast.Attribute | ast.Name, row: Row, ctx: Context) -> Report:
    """What a row says of its name used without a call."""
    message = message_of(row)
    severity = "warning" if row.verdict == "approximate" else "error"
    above = parent(node)
    if isinstance(above, ast.Dict):
        why = "a table wants an entry for the target beside this one"
        return Report(node, message, unfixed=why, severity=severity)
    if isinstance(above, ast.Call) and ctx.qualname(above.func) == "functools.partial":
        return Report(node, message, unfixed="arguments are bound to it: write the partial by hand", severity=severity)
    if row.ref and isinstance(getattr(node, "ctx", None), ast.Load):
        text = template(row.ref)
        return Report(node, message, Fix((replace(ctx.source, node, text),), safe=row.safety == "safe"))
    why = row.unless_fixed or "it is used without being called: write the replacement by hand"
    return Report(node, message, unfixed=why, severity=severity)
