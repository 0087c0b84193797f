"""Every name that a rule can write exists in the target's installed package.

Two sources: what the fixes of all examples, cases and programs put into the text, and what the code of the rules spells
behind a module marker, whether an example reaches it or not.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from backends.client import Backend

from tpumigrate.edits import MARKER
from tpumigrate.registry import all_rules
from tpumigrate.tables import TARGETS
from tpumigrate.testing import check_text, examples

ROOT = Path(__file__).parents[1]
EMITTED = re.compile(MARKER.pattern + r"((?:\.[A-Za-z_]\w*)*)")
ENVIRONMENTS = {"torch_xla": "xla", "torch_tpu": "tpu"}
# `name("torch_xla") + ".device().index"`: what follows a call is an attribute of its result.
CHAIN = re.compile(r"(?:\.[A-Za-z_]\w*)+")

FIND = """
import importlib, json, sys
def exists(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        try:
            for part in parts[length:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False
print("MISSING", json.dumps([name for name in NAMES if not exists(name)]))
"""


def texts() -> Iterator[str]:
    for rule in all_rules():
        found = examples(rule)
        yield from (example.code for example in found.positive)
    for path in [*ROOT.glob("fixtures/cases/*/*/input.py"), *ROOT.glob("fixtures/programs/*.py")]:
        yield path.read_text(encoding="utf-8")


@functools.cache
def written(target: str) -> frozenset[str]:
    """Dotted names in the fixes of everything that the fixtures show."""
    names: set[str] = set()
    for text in texts():
        for item in check_text(text, target).found:
            for edit in item.report.fix.edits if item.report.fix else ():
                for module, attributes in EMITTED.findall(edit.text):
                    names.add(module.removeprefix("!") + attributes)
    return frozenset(names)


def spelled() -> Iterator[tuple[str, str]]:
    """Dotted names that the code of the rules puts together from `name("module")` and a literal, with their file."""
    for path in sorted((ROOT / "rules").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        variables = {
            node.targets[0].id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _module(node.value, {})
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                for part, following in zip(node.values, node.values[1:], strict=False):
                    if isinstance(part, ast.FormattedValue) and isinstance(following, ast.Constant):
                        yield from _joined(_module(part.value, variables), str(following.value), path)
            if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
                yield from _joined(_module(node.left, variables), str(node.right.value), path)


def _module(node: ast.expr, variables: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Name) and node.id in variables:
        return _module(variables[node.id], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "name" and node.args:
        argument = node.args[0]
        return str(argument.value) if isinstance(argument, ast.Constant) else ""
    return ""


def _joined(module: str, text: str, path: Path) -> Iterator[tuple[str, str]]:
    match = CHAIN.match(text)
    if module and match:
        yield module + match.group(), path.name


def _environments(name: str) -> set[str]:
    """Where a name that the rules' code spells must exist."""
    if name.startswith("torch_xla"):
        return {"torch_xla"}
    if name.startswith(("torch.tpu", "torch.accelerator")):
        return {"torch_tpu"}
    return set(TARGETS)


def missing(backend: Backend, names: set[str]) -> list[str]:
    result = backend.run(f"NAMES = {sorted(names)!r}\n{FIND}")
    assert result.rc == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("MISSING"))
    return list(ast.literal_eval(line.removeprefix("MISSING ")))


@pytest.mark.parametrize("target", TARGETS)
def test_written_names_exist(target: str, request: pytest.FixtureRequest) -> None:
    names = set(written(target))
    assert len(names) > 10
    assert missing(request.getfixturevalue(ENVIRONMENTS[target]), names) == []


@pytest.mark.parametrize("target", TARGETS)
def test_spelled_names_exist(target: str, request: pytest.FixtureRequest) -> None:
    names = {name for name, _ in spelled() if target in _environments(name)}
    assert len(names) > 5
    assert missing(request.getfixturevalue(ENVIRONMENTS[target]), names) == []
