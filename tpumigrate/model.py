"""What is known of one module: its tree with parents, its names, and where code stands.

Built once per file by a single iterative walk; rules ask it, they never walk by themselves.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import TypeVar

from tpumigrate.fstrings import fix_positions
from tpumigrate.names import (
    COMPREHENSIONS,
    FUNCTIONS,
    SCOPES,
    Binding,
    Scope,
    import_bindings,
    target_bindings,
)
from tpumigrate.source import Source
from tpumigrate.tables import canonical

N = TypeVar("N", bound=ast.AST)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Model:
    """The syntax tree of `source` with parents, scopes and resolved names."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tree = source.parse()
        self.root = Scope(self.tree, None)
        self.by_type: dict[type[ast.AST], list[ast.AST]] = {}
        self.scopes: dict[ast.AST, Scope] = {self.tree: self.root}
        self.stars: list[Binding] = []
        self._qualnames: dict[ast.AST, tuple[str, ...]] = {}
        self._walk()

    # -- building ------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        fix_fstrings = sys.version_info < (3, 12)
        stack: list[tuple[ast.AST, ast.AST | None, Scope]] = [(self.tree, None, self.root)]
        by_type = self.by_type
        while stack:
            node, parent, scope = stack.pop()
            node._parent = parent  # type: ignore[attr-defined]
            by_type.setdefault(type(node), []).append(node)
            kind = type(node)
            if kind is ast.Name:
                node._scope = scope  # type: ignore[attr-defined]
                continue
            if kind is ast.Constant:
                continue
            if kind is ast.JoinedStr and fix_fstrings:
                fix_positions(self.source, node)  # type: ignore[arg-type]
            inner = self._bind(node, scope) if kind in _BINDERS else scope
            outer_children = _OUTER.get(kind, ()) if inner is not scope else ()
            children: list[tuple[ast.AST, ast.AST | None, Scope]] = []
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    where = scope if name in outer_children else inner
                    children.extend((item, node, where) for item in value if isinstance(item, ast.AST))
                elif isinstance(value, ast.AST):
                    where = scope if name in outer_children else inner
                    if kind is ast.comprehension and name == "iter" and node is parent.generators[0]:  # type: ignore[union-attr]
                        where = scope.parent or scope  # evaluated before the comprehension's own scope opens
                    children.append((value, node, where))
            stack.extend(reversed(children))
        for scope in list(self.scopes.values()):
            scope.share_declared()

    def _bind(self, node: ast.AST, scope: Scope) -> Scope:
        """Record what `node` binds; returns the scope of its children."""
        match node:
            case ast.Import() | ast.ImportFrom():
                for binding in import_bindings(node, scope):
                    scope.add(binding)
                    if binding.kind == "star":
                        self.stars.append(binding)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                kind = "class" if isinstance(node, ast.ClassDef) else "def"
                scope.add(Binding(node.name, kind, node, scope))
            case ast.Assign():
                for target in node.targets:
                    _add_all(scope, target_bindings(target, "assign", node.value, scope))
            case ast.AnnAssign() if node.value is not None:
                _add_all(scope, target_bindings(node.target, "assign", node.value, scope))
            case ast.AugAssign():
                _add_all(scope, target_bindings(node.target, "augment", None, scope))
            case ast.For() | ast.AsyncFor():
                _add_all(scope, target_bindings(node.target, "for", node.iter, scope))
            case ast.withitem() if node.optional_vars is not None:
                _add_all(scope, target_bindings(node.optional_vars, "with", node.context_expr, scope))
            case ast.NamedExpr():
                owner = scope
                while isinstance(owner.node, COMPREHENSIONS) and owner.parent is not None:
                    owner = owner.parent
                _add_all(owner, target_bindings(node.target, "assign", node.value, owner))
            case ast.comprehension():
                _add_all(scope, target_bindings(node.target, "comprehension", node.iter, scope))
            case ast.ExceptHandler() if node.name:
                scope.add(Binding(node.name, "except", node, scope))
            case ast.MatchAs() | ast.MatchStar() if node.name:
                scope.add(Binding(node.name, "match", node, scope))
            case ast.MatchMapping() if node.rest:
                scope.add(Binding(node.rest, "match", node, scope))
            case ast.Global() | ast.Nonlocal():
                kind = "global" if isinstance(node, ast.Global) else "nonlocal"
                for name in node.names:
                    scope.add(Binding(name, kind, node, scope))
            case ast.Delete():
                for target in node.targets:
                    _add_all(scope, target_bindings(target, "delete", None, scope))
            case _:
                pass
        if isinstance(node, SCOPES):
            inner = Scope(node, scope)
            self.scopes[node] = inner
            if isinstance(node, FUNCTIONS):
                for arg in arguments(node):
                    inner.add(Binding(arg.arg, "param", arg, inner))
            return inner
        return scope

    # -- the tree ------------------------------------------------------------------------------------------

    def nodes(self, kind: type[N]) -> list[N]:
        """All nodes of exactly this type, in source order."""
        return self.by_type.get(kind, [])  # type: ignore[return-value]

    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """All import statements, wherever they stand."""
        return [*self.nodes(ast.Import), *self.nodes(ast.ImportFrom)]

    def scope(self, node: ast.AST) -> Scope:
        """The scope in which the expression or statement `node` is evaluated."""
        current: ast.AST | None = node
        while current is not None:
            known: Scope | None = current.__dict__.get("_scope")
            if known is not None:
                return known
            above = parent(current)
            if above is not None and above in self.scopes:
                outer = _OUTER.get(type(above), ())
                if not any(current is getattr(above, name, None) or _among(current, above, name) for name in outer):
                    return self.scopes[above]
            current = above
        return self.root

    # -- names ---------------------------------------------------------------------------------------------

    def qualnames(self, node: ast.AST) -> tuple[str, ...]:
        """Every canonical dotted name that an expression may stand for; () when it is not an imported name."""
        known = self._qualnames.get(node)
        if known is None:
            self._qualnames[node] = ()  # a name defined by itself has no meaning
            known = self._qualnames[node] = tuple(dict.fromkeys(self._resolve(node)))
        return known

    def qualname(self, node: ast.AST) -> str:
        """The canonical dotted name of an imported thing, "" when there is none or more than one."""
        names = self.qualnames(node)
        return names[0] if len(names) == 1 else ""

    def _resolve(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Attribute):
            for name in self.qualnames(node.value):
                yield canonical(f"{name}.{node.attr}")
        elif isinstance(node, ast.Name):
            bindings = self.bindings(node)
            imports = [binding for binding in bindings if binding.kind == "import"]
            if imports and all(b.kind == "import" or _is_fallback(b) for b in bindings):
                for binding in imports:
                    yield canonical(binding.qualname)

    def bindings(self, name: ast.Name) -> list[Binding]:
        scope: Scope = name.__dict__.get("_scope", self.root)
        return scope.lookup(name.id)

    def star_name(self, node: ast.AST) -> str:
        """The dotted name that an unbound name would have through `from torch... import *`, or ""."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and self.stars and not self.bindings(node):
            for star in self.stars:
                if star.qualname.partition(".")[0] == "torch":
                    return canonical(".".join([star.qualname, node.id, *reversed(parts)]))
        return ""

    def binds(self, name: str) -> bool:
        """Whether any scope of the module gives `name` a meaning."""
        return any(name in scope.bindings for scope in self.scopes.values())

    def uses(self, name: str, bindings: list[Binding] | None = None) -> list[ast.Name]:
        """Every reading of the name `name`: whatever it means there, or only where it means `bindings`."""
        found = [node for node in self.nodes(ast.Name) if node.id == name and isinstance(node.ctx, ast.Load)]
        return found if bindings is None else [node for node in found if self.bindings(node) == bindings]


# -- places ------------------------------------------------------------------------------------------------


def parent(node: ast.AST) -> ast.AST | None:
    above: ast.AST | None = node.__dict__.get("_parent")
    return above


def parents(node: ast.AST) -> Iterator[ast.AST]:
    """From the immediate parent up to the module."""
    above = parent(node)
    while above is not None:
        yield above
        above = parent(above)


def statement(node: ast.AST) -> ast.stmt:
    """The innermost statement that holds `node` (or is it)."""
    current: ast.AST | None = node
    while current is not None and not isinstance(current, ast.stmt):
        current = parent(current)
    assert current is not None, "only the module has no statement around it"
    return current


def function(node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost named function around `node`."""
    for above in parents(node):
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return above
    return None


def callable_around(node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    """The innermost function or lambda around `node`; parameters, defaults and decorators count as inside."""
    return next((above for above in parents(node) if isinstance(above, FUNCTIONS)), None)


def class_of(node: ast.AST) -> ast.ClassDef | None:
    """The class whose method holds `node`."""
    for above in parents(node):
        if isinstance(above, ast.ClassDef):
            return above
    return None


def loops(node: ast.AST) -> list[ast.For | ast.AsyncFor | ast.While]:
    """Loops around `node` within its function, innermost first; the iterable of a loop is not inside it."""
    found: list[ast.For | ast.AsyncFor | ast.While] = []
    child = node
    for above in parents(node):
        if isinstance(above, FUNCTIONS):
            break
        if isinstance(above, LOOPS) and child is not getattr(above, "iter", None):
            found.append(above)
        child = above
    return found


def packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Top packages that an import statement loads; none for a relative import."""
    if isinstance(node, ast.ImportFrom):
        return set() if node.level else {(node.module or "").partition(".")[0]}
    return {alias.name.partition(".")[0] for alias in node.names}


def block(stmt: ast.stmt) -> list[ast.stmt]:
    """The list of statements that `stmt` is a member of."""
    above = parent(stmt)
    for name in ("body", "orelse", "finalbody", "handlers"):
        statements = getattr(above, name, None)
        if isinstance(statements, list) and any(item is stmt for item in statements):
            return statements
    for case in getattr(above, "cases", []):
        if stmt in case.body:
            return case.body  # type: ignore[no-any-return]
    return [stmt]


def before(stmt: ast.stmt) -> list[ast.stmt]:
    """The statements that stand before `stmt` in its block."""
    siblings = block(stmt)
    return siblings[: siblings.index(stmt)]


def arguments(node: ast.AST) -> Iterator[ast.arg]:
    """Every parameter of a function or lambda."""
    args: ast.arguments = node.args  # type: ignore[attr-defined]
    yield from args.posonlyargs
    yield from args.args
    if args.vararg:
        yield args.vararg
    yield from args.kwonlyargs
    if args.kwarg:
        yield args.kwarg


def default_of(node: ast.AST, arg: ast.arg) -> ast.expr | None:
    """The default of a parameter of a function, if it has one."""
    args: ast.arguments = node.args  # type: ignore[attr-defined]
    positional = [*args.posonlyargs, *args.args]
    if arg in positional:
        index = positional.index(arg) - len(positional) + len(args.defaults)
        return args.defaults[index] if index >= 0 else None
    if arg in args.kwonlyargs:
        return args.kw_defaults[args.kwonlyargs.index(arg)]
    return None


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The value passed for a parameter by keyword, or by `position` when given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and position < len(call.args):
        before = call.args[: position + 1]
        if not any(isinstance(item, ast.Starred) for item in before):
            return call.args[position]
    return None


def call_of(node: ast.AST) -> ast.Call | None:
    """The call of which `node` is the function."""
    above = parent(node)
    return above if isinstance(above, ast.Call) and above.func is node else None


def has_stars(call: ast.Call) -> bool:
    """Whether arguments are passed on with `*args` or `**kwargs`."""
    return any(isinstance(arg, ast.Starred) for arg in call.args) or any(item.arg is None for item in call.keywords)


def _add_all(scope: Scope, bindings: Iterator[Binding]) -> None:
    for binding in bindings:
        scope.add(binding)


def _among(node: ast.AST, above: ast.AST, name: str) -> bool:
    value = getattr(above, name, None)
    return isinstance(value, list) and any(item is node for item in value)


def _is_fallback(binding: Binding) -> bool:
    """`x = None` and the like in the arm of a guarded import, which does not change what x means when it works."""
    value = binding.value
    if binding.kind == "assign" and isinstance(value, ast.Constant) and value.value in (None, False, True):
        return any(isinstance(above, (ast.ExceptHandler, ast.If, ast.Try)) for above in parents(binding.node))
    if binding.kind in ("def", "class"):
        return any(isinstance(above, ast.ExceptHandler) for above in parents(binding.node))
    return False


_BINDERS = frozenset(
    {
        ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor, ast.withitem,
        ast.NamedExpr, ast.comprehension, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping,
        ast.Global, ast.Nonlocal, ast.Delete, *(scope for scope in SCOPES if scope is not ast.Module),
    }
)  # fmt: skip
# Children that are evaluated outside of the scope that the node opens.
_OUTER: dict[type[ast.AST], tuple[str, ...]] = {
    ast.FunctionDef: ("decorator_list", "args", "returns"),
    ast.AsyncFunctionDef: ("decorator_list", "args", "returns"),
    ast.Lambda: ("args",),
    ast.ClassDef: ("decorator_list", "bases", "keywords"),
}
