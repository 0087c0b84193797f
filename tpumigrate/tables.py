"""Facts that differ only by name: `rules/targets/*.toml`, read once a process.

Raises KeyError for an unknown target.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from dataclasses import dataclass
from typing import Any, Literal

TARGETS = ("torch_xla", "torch_tpu")
Verdict = Literal["exact", "approximate", "none"]


@dataclass(frozen=True, slots=True)
class Row:
    """What a target offers for one public name; the fields are described in rules/targets/README.md."""

    name: str
    verdict: Verdict
    rule: str = ""
    call: str = ""
    ref: str = ""
    statement: str = ""
    context: str = ""
    safety: str = "safe"
    note: str = ""
    unless_fixed: str = ""
    source: str = ""


def _read(name: str) -> dict[str, Any]:
    text = importlib.resources.files("tpumigrate.rules.targets").joinpath(f"{name}.toml")
    return tomllib.loads(text.read_text(encoding="utf-8"))


@functools.cache
def table(target: str) -> dict[str, Row]:
    """Rows of a target by canonical dotted name."""
    if target not in TARGETS:
        raise KeyError(target)
    return {name: Row(name=name, **row) for name, row in _read(target).items()}


@functools.cache
def _aliases() -> dict[str, str]:
    aliases: dict[str, str] = _read("aliases")["aliases"]
    return aliases


def canonical(name: str) -> str:
    """The one name under which a public object is known, whatever path it was imported by."""
    aliases = _aliases()
    known = aliases.get(name)
    if known is not None:
        return known
    head, dot, last = name.rpartition(".")
    if dot and head in aliases:
        return f"{aliases[head]}.{last}"
    return name
