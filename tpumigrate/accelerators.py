"""Which accelerators besides CUDA a file already knows how to handle."""

from __future__ import annotations

import ast
import re

from tpumigrate.model import Model, parent

# Not mps: scripts for one machine ask for it too, in a ladder that gets an arm.
_OTHERS = frozenset("xpu npu hpu mlu musa sdaa mtia neuron".split())
_QUESTION = re.compile(r"(?:_|^)is_(?:torch_)?(?P<name>[a-z]+?)_available$|^(?P<bare>[a-z]+)_is_available$")


def accelerators(model: Model) -> frozenset[str]:
    """Device types other than cuda, cpu, mps, xla and tpu that the code (not its comments) tells apart."""
    found: set[str] = set()
    for constant in model.nodes(ast.Constant):
        if isinstance(constant.value, str) and not isinstance(parent(constant), ast.Set | ast.Dict | ast.Tuple):
            found.add(constant.value.partition(":")[0])
    for attribute in model.nodes(ast.Attribute):
        name = model.qualname(attribute)
        if name.startswith("torch.") and name.count(".") == 1:
            found.add(attribute.attr)
        found.add(asked_accelerator(attribute.attr))
    for used in model.nodes(ast.Name):
        found.add(asked_accelerator(used.id))
    return frozenset(found & _OTHERS)


def asked_accelerator(name: str) -> str:
    """The accelerator that a function such as `is_torch_xpu_available` asks for, "" for any other name."""
    match = _QUESTION.search(name)
    return (match["name"] or match["bare"] or "") if match else ""
