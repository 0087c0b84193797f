"""Finds rules: every function with the mark of `@rule` in tpumigrate.rules and in plug-ins.

Plug-ins name a module in the entry-point group `tpumigrate.rules`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
import re
from collections.abc import Iterable, Iterator
from types import ModuleType

from tpumigrate.rule import BadRule, Rule

_CODE = re.compile(r"[A-Z]{3,}\d{3}\Z")


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code.  Raises BadRule for a code that is malformed or used twice."""
    found: dict[str, Rule] = {}
    for module in _modules():
        for item in vars(module).values():
            known = getattr(item, "__tpumigrate_rule__", None)
            if isinstance(known, Rule) and item.__module__ == module.__name__:
                if not _CODE.match(known.code):
                    raise BadRule(f"{module.__name__}: {known.code!r} is not a code such as TPU101")
                if known.code in found:
                    raise BadRule(f"{module.__name__}: {known.code} is already {found[known.code].name!r}")
                found[known.code] = known
    return tuple(found[code] for code in sorted(found))


def _modules() -> Iterator[ModuleType]:
    package = importlib.import_module("tpumigrate.rules")
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not info.ispkg:
            yield importlib.import_module(info.name)
    for entry in importlib.metadata.entry_points(group="tpumigrate.rules"):
        yield entry.load()


def selected(rules: Iterable[Rule], target: str, select: Iterable[str], ignore: Iterable[str]) -> list[Rule]:
    """Rules that speak for `target` and whose longest matching prefix is in `select`, not in `ignore`."""

    def longest(code: str, prefixes: Iterable[str]) -> int:
        return max((_reach(code, prefix) for prefix in prefixes), default=-1)

    return [
        rule for rule in rules if target in rule.targets and longest(rule.code, select) > longest(rule.code, ignore)
    ]


def _reach(code: str, prefix: str) -> int:
    """How closely a prefix names a code; -1 when it does not, 0 for ALL."""
    if prefix == "ALL":
        return 0
    return len(prefix) if code.startswith(prefix) else -1
