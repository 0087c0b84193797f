"""Scopes and bindings of a module: what a name means where it is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DECLARED = frozenset({"global", "nonlocal"})
SCOPES = (ast.Module, ast.ClassDef, *FUNCTIONS, *COMPREHENSIONS)


@dataclass(slots=True, eq=False)
class Binding:
    """One place that gives a name a meaning.

    kind: import, star, def, class, param, assign, augment, for, with, except, comprehension, match, delete, global,
        nonlocal
    node: the alias, definition, argument or target that binds
    qualname: the dotted name behind an import, relative imports with their leading dots
    value: what is assigned, iterated or entered, where that is one expression
    """

    name: str
    kind: str
    node: ast.AST
    scope: Scope
    qualname: str = ""
    value: ast.expr | None = None


@dataclass(slots=True, eq=False)
class Scope:
    node: ast.AST
    parent: Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    def add(self, binding: Binding) -> None:
        self.bindings.setdefault(binding.name, []).append(binding)

    def module(self) -> Scope:
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def share_declared(self) -> None:
        """Hand what is bound under `global` or `nonlocal` to the scope that owns the name."""
        for name, found in self.bindings.items():
            kinds = {binding.kind for binding in found}
            if not kinds & _DECLARED:
                continue
            owner = self.module() if "global" in kinds else self._owner(name)
            if owner is not None and owner is not self:
                owner.bindings.setdefault(name, []).extend(item for item in found if item.kind not in _DECLARED)

    def _owner(self, name: str) -> Scope | None:
        """The function around this scope that a `nonlocal` name belongs to."""
        scope = self.parent
        while scope is not None:
            found = scope.bindings.get(name, [])
            if found and not scope.is_class and not any(binding.kind in _DECLARED for binding in found):
                return scope
            scope = scope.parent
        return None

    def lookup(self, name: str) -> list[Binding]:
        """All bindings of `name` in the scope that owns it, as Python resolves names; empty for builtins."""
        scope: Scope | None = self
        first = True
        while scope is not None:
            found = scope.bindings.get(name)
            if found and (first or not scope.is_class):
                if any(binding.kind in _DECLARED for binding in found):
                    is_global = any(binding.kind == "global" for binding in found)
                    owner = scope.module() if is_global else scope._owner(name)
                    return owner.bindings.get(name, []) if owner is not None else []
                return found
            scope, first = scope.parent, False
        return []


def import_bindings(node: ast.Import | ast.ImportFrom, scope: Scope) -> Iterator[Binding]:
    """What an import statement binds."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            qualname = alias.name if alias.asname else bound
            yield Binding(bound, "import", alias, scope, qualname)
        return
    prefix = "." * node.level + (node.module or "")
    for alias in node.names:
        dotted = f"{prefix}{'' if prefix.endswith('.') or not prefix else '.'}{alias.name}"
        if alias.name == "*":
            yield Binding("*", "star", alias, scope, prefix)
        else:
            yield Binding(alias.asname or alias.name, "import", alias, scope, dotted)


def target_bindings(target: ast.expr, kind: str, value: ast.expr | None, scope: Scope) -> Iterator[Binding]:
    """Names bound by an assignment target; `value` is kept where it can be matched to the name."""
    if isinstance(target, ast.Name):
        yield Binding(target.id, kind, target, scope, value=value)
    elif isinstance(target, ast.Starred):
        yield from target_bindings(target.value, kind, None, scope)
    elif isinstance(target, (ast.Tuple, ast.List)):
        matched = (
            value.elts
            if isinstance(value, (ast.Tuple, ast.List))
            and kind == "assign"
            and len(value.elts) == len(target.elts)
            and not any(isinstance(item, ast.Starred) for item in [*value.elts, *target.elts])
            else [None] * len(target.elts)
        )
        for item, part in zip(target.elts, matched, strict=True):
            yield from target_bindings(item, kind if part is not None else f"{kind}-part", part, scope)
