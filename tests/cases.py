"""The cases of fixtures/cases, as the tests read them.

A folder `fixtures/cases/<category>/<ID>/` holds

    input.py
    torch_xla.py, torch_tpu.py    the expected text; absent where nothing is changed
    findings.toml                 see below
    effect.py                     run after the expected text, in the same module, on the target's backend:
                                  asserts what the case is about. `DEVICE` is "xla" or "tpu". Why a case has
                                  none stands in fixtures/cases/README.md

Keys of findings.toml, all optional:

    unsafe = true                 unsafe fixes are applied too
    only = "torch_xla"            the one target on which the effect can run
    harmless = ["torch_tpu"]      targets on which, for want of a GPU, the text has the effect as it is
    [stubs]                       modules that are not installed: `my_ext = ["names", "it", "has"]`; the names
                                  are functions that must not be called
    [torch_xla], [torch_tpu]
    codes = [[line, "TPU201"]]    every finding of each code that is named; an empty list says that nothing
                                  at all is found
    printed = "text"              a line that the text itself prints on the backend
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tpumigrate.tables import TARGETS

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
FILES = {"input.py", "findings.toml", "effect.py", *(f"{target}.py" for target in TARGETS)}


@dataclass(frozen=True)
class Case:
    folder: Path
    target: str

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def text(self) -> str:
        return (self.folder / "input.py").read_text(encoding="utf-8")

    @property
    def expected(self) -> str:
        path = self.folder / f"{self.target}.py"
        return path.read_text(encoding="utf-8") if path.exists() else self.text

    @property
    def effect(self) -> str | None:
        """What is asserted on this target's backend, if it can be."""
        path = self.folder / "effect.py"
        if not path.exists() or self.findings.get("only", self.target) != self.target:
            return None
        return path.read_text(encoding="utf-8")

    @property
    def findings(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "findings.toml").read_text(encoding="utf-8"))

    @property
    def codes(self) -> list[tuple[int, str]] | None:
        section = self.findings.get(self.target, {})
        return [(line, code) for line, code in section["codes"]] if "codes" in section else None

    @property
    def printed(self) -> str | None:
        line: str | None = self.findings.get(self.target, {}).get("printed")
        return line

    @property
    def stubs(self) -> dict[str, list[str]]:
        modules: dict[str, list[str]] = self.findings.get("stubs", {})
        return modules

    @property
    def unsafe(self) -> bool:
        return bool(self.findings.get("unsafe"))


def folders() -> list[Path]:
    """The folder of each case."""
    return sorted(path.parent for path in CASES.glob("*/*/input.py"))


def parameters(wanted: Callable[[Case], object] = lambda case: True) -> list[Any]:
    """A parameter of a test for each case and target."""
    cases = [Case(folder, target) for folder in folders() for target in TARGETS]
    return [pytest.param(case, id=f"{case.name}-{case.target}") for case in cases if wanted(case)]
