"""What a rule is: a function from a node to reports, registered by its decorator and its annotation.

@rule("TPU102", "cuda-method", anchors=("cuda",))
def cuda_method(node: ast.Call, ctx: Context) -> Iterator[Report]:
    '''documentation in fixed sections, with examples that are tests'''
"""

from __future__ import annotations

import ast
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tpumigrate.accelerators import accelerators
from tpumigrate.edits import Edit, Fix, replace
from tpumigrate.kinds import Kinds
from tpumigrate.model import Model, argument
from tpumigrate.project import Project
from tpumigrate.tables import TARGETS, Row, table

DEVICE_STRING = {"torch_xla": "xla", "torch_tpu": "tpu"}


@dataclass(frozen=True, slots=True)
class Report:
    """What a rule says of a node.

    unfixed: why there is no fix; required when `fix` is None
    claims: nodes inside which no other rule should speak (their trouble is this one's)
    severity: error (wrong or crashes on the target), warning (slow or risky), info
    silent: only claim: the code is right as it is, and no rule should speak of it
    """

    node: ast.AST
    message: str
    fix: Fix | None = None
    unfixed: str = ""
    claims: tuple[ast.AST, ...] = ()
    severity: str = "error"
    silent: bool = False


RuleFunction = Callable[[typing.Any, "Context"], Iterator[Report]]


@dataclass(frozen=True, slots=True)
class Rule:
    code: str
    name: str
    anchors: tuple[str, ...]
    targets: tuple[str, ...]
    keeps_cuda: bool
    node_types: tuple[type[ast.AST], ...]
    function: RuleFunction

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        return self.doc.partition("\n")[0]


class BadRule(Exception):
    """A rule is declared wrongly; the message names its file and line."""


def rule(
    code: str,
    name: str,
    *,
    anchors: tuple[str, ...],
    targets: tuple[str, ...] = TARGETS,
    keeps_cuda: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as a rule.

    code: family and number, stable once shipped
    name: what is found, in words with hyphens
    anchors: words of which a file must contain one for the rule to run on it
    targets: targets for which the rule speaks
    keeps_cuda: after its fixes the code does on CUDA what it did; other rules put the target in CUDA's place, and are
        not applied in a file that tells several accelerators apart, where the target wants an arm of its own

    Raises BadRule when the first parameter is not annotated with one or more `ast` node types.
    """

    def register(function: RuleFunction) -> RuleFunction:
        if isinstance(anchors, str):  # ("word") is no tuple
            raise BadRule(f"{_place(function)}: anchors of {code} must be a tuple")
        function.__tpumigrate_rule__ = Rule(  # type: ignore[attr-defined]
            code, name, anchors, targets, keeps_cuda, _node_types(function), function
        )
        return function

    return register


def _place(function: RuleFunction) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _node_types(function: RuleFunction) -> tuple[type[ast.AST], ...]:
    where = _place(function)
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) != 2:
        raise BadRule(f"{where}: a rule takes a node and a context")
    annotation = typing.get_type_hints(function, localns={"Context": Context}).get(parameters[0])
    types = typing.get_args(annotation) or (annotation,)
    if not all(isinstance(item, type) and issubclass(item, ast.AST) for item in types):
        raise BadRule(f"{where}: annotate {parameters[0]!r} with ast node types")
    return types


@dataclass(eq=False)
class Context:
    """What a rule may ask of the file and its project; it never sees paths, other rules or findings."""

    model: Model
    target: str
    project: Project
    kinds: Kinds = field(init=False)

    def __post_init__(self) -> None:
        self.source = self.model.source
        self.kinds = Kinds(self.model, self.project)
        self.table: dict[str, Row] = table(self.target)

    @property
    def device(self) -> str:
        """The target's device type, "xla" or "tpu"."""
        return DEVICE_STRING[self.target]

    @property
    def xla(self) -> bool:
        """Whether the target is torch_xla."""
        return self.target == "torch_xla"

    @functools.cached_property
    def several_accelerators(self) -> bool:
        """Whether the file already tells accelerators apart that are neither CUDA nor the target."""
        return accelerators(self.model) != frozenset()

    def text(self, node: ast.AST) -> str:
        return self.source.segment(node)

    def qualname(self, node: ast.AST) -> str:
        """The canonical dotted name behind an expression, "" when it has none or several."""
        return self.model.qualname(node)

    def kind(self, node: ast.expr) -> str:
        """What an expression is ("tensor", "module", "device", ...; see tpumigrate.kinds), "" when unknown."""
        return self.kinds.of(node)

    def arg(self, call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
        return argument(call, name, position)

    def replace(self, node: ast.AST, text: str, *, safe: bool = True) -> Fix:
        """A fix of one edit: `text`, which may hold markers (see tpumigrate.edits), in place of a node."""
        return Fix((replace(self.source, node, text),), safe=safe)

    def edit(self, node: ast.AST, text: str) -> Edit:
        return replace(self.source, node, text)
