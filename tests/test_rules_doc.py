"""Every rule's documentation holds: its sections are there, its examples behave as they say.

An example triggers its rule; its fix (all rules together) gives the block below it, or changes nothing
where no block stands; a second fix changes nothing; what is "Not flagged" is not.
"""

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tpumigrate.registry import all_rules
from tpumigrate.rule import Rule
from tpumigrate.testing import Example, check_text, codes, examples, fix_text

SECTIONS = ("What it does", "Why it matters on a TPU", "Example", "Fix safety", "References")
WANTED = 3  # positive and negative examples that a rule should have


@dataclass(frozen=True)
class Positive:
    rule: Rule
    example: Example
    target: str


@dataclass(frozen=True)
class Negative:
    rule: Rule
    code: str
    target: str


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _targets(rule: Rule, only: str = "") -> tuple[str, ...]:
    return tuple(target for target in rule.targets if only in ("", target))


def _positives() -> Iterator[object]:
    for rule in all_rules():
        for number, example in enumerate(examples(rule).positive, 1):
            for target in _targets(rule, example.only):
                name = f"{rule.code}-{number}-{_slug(example.title)}-{target}"
                yield pytest.param(Positive(rule, example, target), id=name)


def _negatives() -> Iterator[object]:
    for rule in all_rules():
        for number, code in enumerate(examples(rule).negative, 1):
            for target in _targets(rule):
                yield pytest.param(Negative(rule, code, target), id=f"{rule.code}-{number}-{target}")


each_rule = pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
each_positive = pytest.mark.parametrize("case", list(_positives()))
each_negative = pytest.mark.parametrize("case", list(_negatives()))


def test_there_are_rules() -> None:
    assert "TPU102" in [rule.code for rule in all_rules()]


@each_rule
def test_sections(rule: Rule) -> None:
    headings = re.findall(r"^## (.*?)\s*$", rule.doc, re.MULTILINE)
    titles = {re.split(r"[:(]", heading)[0].strip() for heading in headings}
    assert [section for section in SECTIONS if section not in titles] == []
    assert rule.summary.endswith("."), "the first line is a sentence"
    found = examples(rule)
    assert found.positive, "no example"
    assert found.negative, "nothing under `## Not flagged`"


@each_rule
def test_every_block_is_read(rule: Rule) -> None:
    """A misspelt heading or fence would silently leave an example out."""
    found = examples(rule)
    blocks = [example.code for example in found.positive] + found.negative
    texts = [text for example in found.positive for text in example.after.values()]
    headings = re.findall(r"^## (.*?)\s*$", rule.doc, re.MULTILINE)
    known = ("Example", "Use instead", "Not flagged", *SECTIONS)
    assert [heading for heading in headings if not heading.startswith(known)] == []
    assert rule.doc.count("```") % 2 == 0
    shared = sum(heading == "Use instead" for heading in headings)  # one block for both targets
    assert rule.doc.count("```python\n") == len(blocks) + len(texts) - shared


@each_positive
def test_example_is_found(case: Positive) -> None:
    ast.parse(case.example.code)
    assert case.rule.code in [code for _, code in codes(case.example.code, case.target)]


@each_positive
def test_example_is_fixed(case: Positive) -> None:
    expected = case.example.after.get(case.target, case.example.code)
    assert fix_text(case.example.code, case.target, unsafe=case.example.unsafe) == expected


@each_positive
def test_fixed_example_is_at_rest(case: Positive) -> None:
    fixed = fix_text(case.example.code, case.target, unsafe=case.example.unsafe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        compile(fixed, "<fixed>", "exec", dont_inherit=True)
    assert fix_text(fixed, case.target, unsafe=case.example.unsafe) == fixed
    left = [
        item.report.message
        for item in check_text(fixed, case.target).found
        if item.rule.code == case.rule.code
        and item.report.fix is not None
        and (item.report.fix.safe or case.example.unsafe)
    ]
    assert left == []


@each_positive
def test_finding_is_said(case: Positive) -> None:
    """A finding has a message, and one without a fix says why there is none."""
    for item in check_text(case.example.code, case.target).found:
        assert item.report.message.strip()
        assert item.report.fix is not None or item.report.unfixed.strip(), item.report.message


@each_negative
def test_not_flagged(case: Negative) -> None:
    ast.parse(case.code)
    assert case.rule.code not in [code for _, code in codes(case.code, case.target)]


def test_examples_are_counted(record_property: Callable[[str, object], None]) -> None:
    """How many rules have fewer examples than wanted: shown, not judged."""
    few = {}
    for rule in all_rules():
        found = examples(rule)
        if min(len(found.positive), len(found.negative)) < WANTED:
            few[rule.code] = f"{len(found.positive)} positive, {len(found.negative)} negative"
    record_property("rules_with_few_examples", str(few))
    print(f"{len(few)} of {len(all_rules())} rules have fewer than {WANTED} examples of a kind: {few}")
