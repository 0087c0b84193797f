"""Cases from real migrations: an input, what each target's fix makes of it, and what is found.

A folder `fixtures/cases/<category>/<ID>/` holds

    input.py
    torch_xla.py, torch_tpu.py    the expected text; absent where nothing is changed
    findings.toml                 `unsafe = true` when unsafe fixes are applied too, and for each target
                                  `codes = [[line, "TPU201"], ...]`: every finding of each code that is named;
                                  an empty list says that nothing at all is found
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tpumigrate.tables import TARGETS
from tpumigrate.testing import codes, fix_text

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
FILES = {"input.py", "findings.toml", *(f"{target}.py" for target in TARGETS)}


@dataclass(frozen=True)
class Case:
    folder: Path
    target: str

    @property
    def text(self) -> str:
        return (self.folder / "input.py").read_text(encoding="utf-8")

    @property
    def expected(self) -> str:
        path = self.folder / f"{self.target}.py"
        return path.read_text(encoding="utf-8") if path.exists() else self.text

    @property
    def findings(self) -> dict[str, object]:
        return tomllib.loads((self.folder / "findings.toml").read_text(encoding="utf-8"))

    @property
    def codes(self) -> list[tuple[int, str]] | None:
        section = self.findings.get(self.target)
        return [(line, code) for line, code in section["codes"]] if isinstance(section, dict) else None

    @property
    def unsafe(self) -> bool:
        return bool(self.findings.get("unsafe"))


def _cases() -> list[object]:
    folders = sorted(path.parent for path in CASES.glob("*/*/input.py"))
    return [
        pytest.param(Case(folder, target), id=f"{folder.name}-{target}")
        for folder in folders
        for target in TARGETS
    ]


each_case = pytest.mark.parametrize("case", _cases())


def test_folders_hold_what_is_read() -> None:
    assert {path.name for path in CASES.glob("*/*/*")} <= FILES


@each_case
def test_fix(case: Case) -> None:
    assert fix_text(case.text, case.target, unsafe=case.unsafe) == case.expected


@each_case
def test_fix_of_fixed(case: Case) -> None:
    fixed = fix_text(case.text, case.target, unsafe=case.unsafe)
    assert fix_text(fixed, case.target, unsafe=case.unsafe) == fixed


@each_case
def test_findings(case: Case) -> None:
    expected = case.codes
    if expected is None:
        pytest.skip("no findings are given for this target")
    named = {code for _, code in expected}
    found = [item for item in codes(case.text, case.target) if not named or item[1] in named]
    assert sorted(found) == sorted(expected)
