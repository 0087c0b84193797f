"""Rules are tested by their own documentation: the fenced examples of a docstring are inputs and expected outputs.

Sections, each with ```python blocks:

    ## Example            triggers the rule (as many sections as wanted: `## Example: with an index`)
    ## Use instead (torch_xla)      what fixing the example above gives for a target
    ## Use instead (torch_tpu)
    ## Use instead        the same for both targets
    ## Not flagged        code on which the rule stays silent

An example without a "Use instead" for a target has no fix there, and is silent where the rule does not speak.
`## Example (unsafe)` is fixed with unsafe fixes too.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from tpumigrate import fixer
from tpumigrate.engine import Analysis, analyse
from tpumigrate.project import scan
from tpumigrate.registry import all_rules, selected
from tpumigrate.rule import Rule
from tpumigrate.source import Source
from tpumigrate.tables import TARGETS

_HEADING = re.compile(r"^## (?P<title>.*)$", re.MULTILINE)
_FENCE = re.compile(r"```python\n(?P<code>.*?)```", re.DOTALL)
_FOR_TARGET = re.compile(r"\((torch_xla|torch_tpu)\)")


@dataclass
class Example:
    """code: what triggers the rule; after: expected text by target; only: target for which it is meant, or both"""

    title: str
    code: str
    unsafe: bool = False
    only: str = ""
    after: dict[str, str] = field(default_factory=dict)


@dataclass
class Examples:
    positive: list[Example] = field(default_factory=list)
    negative: list[str] = field(default_factory=list)


def examples(rule: Rule) -> Examples:
    """The examples in a rule's documentation."""
    found = Examples()
    for title, body in _sections(rule.doc):
        codes = [textwrap.dedent(match["code"]) for match in _FENCE.finditer(body)]
        target = _FOR_TARGET.search(title)
        if title.startswith("Example"):
            for code in codes:
                found.positive.append(Example(title, code, "(unsafe)" in title, target[1] if target else ""))
        elif title.startswith("Use instead"):
            for name in [target[1]] if target else TARGETS:
                found.positive[-1].after[name] = codes[0]
        elif title.startswith("Not flagged"):
            found.negative.extend(codes)
    return found


def _sections(doc: str) -> Iterator[tuple[str, str]]:
    headings = list(_HEADING.finditer(doc))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        yield heading["title"].strip(), doc[heading.end() : following.start() if following else len(doc)]


def check_text(text: str, target: str, *, select: tuple[str, ...] = ("ALL",)) -> Analysis:
    """Findings of a text, as `tpumigrate check` has them."""
    return analyse(Source(text), selected(all_rules(), target, select, ()), target, scan([text.encode()]))


def fix_text(text: str, target: str, *, unsafe: bool = False, select: tuple[str, ...] = ("ALL",)) -> str:
    """What `tpumigrate fix --apply` makes of a text."""
    rules = selected(all_rules(), target, select, ())
    return fixer.fix(Source(text), rules, target, scan([text.encode()]), unsafe=unsafe).text


def codes(text: str, target: str) -> list[tuple[int, str]]:
    """Line and code of each finding of a text."""
    analysis = check_text(text, target)
    return [(analysis.model.source.position(item.start)[0], item.rule.code) for item in analysis.found]
