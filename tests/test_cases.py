"""Cases from real migrations: an input, what each target's fix makes of it, and what is found."""

import pytest
from cases import CASES, FILES, Case, parameters

from tpumigrate.testing import codes, fix_text

each_case = pytest.mark.parametrize("case", parameters())


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
