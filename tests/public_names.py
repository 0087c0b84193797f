"""Prints, as a JSON list, the public names of torch's CUDA-centric modules; run it with a backend's python.

Public is what a module lists in ``__all__``, plus the classes and functions without underscore that it defines
itself, plus settable flags. Modules and what they import from elsewhere are not.
"""

import importlib
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MODULES = """
    torch.cuda torch.cuda.amp torch.cuda.amp.autocast_mode torch.cuda.amp.common torch.cuda.amp.grad_scaler
    torch.cuda.comm torch.cuda.gds torch.cuda.graphs torch.cuda.green_contexts torch.cuda.jiterator torch.cuda.memory
    torch.cuda.nccl torch.cuda.nvtx torch.cuda.profiler torch.cuda.random torch.cuda.sparse torch.cuda.streams
    torch.cuda.tunable torch.backends.cuda torch.backends.cudnn torch.backends.cudnn.conv torch.backends.cudnn.rnn
    torch.accelerator torch.accelerator.graphs torch.accelerator.memory
""".split()
# Documented there, but defined in C++ under another module's name.
ELSEWHERE = ["torch.cuda.OutOfMemoryError", "torch.cuda.AcceleratorError", "torch.version.cuda"]
# Helpers of torch's own RNN code.
INTERNAL = ("torch.backends.cudnn.rnn.Unserializable", "torch.backends.cudnn.rnn.get_cudnn_mode",
            "torch.backends.cudnn.rnn.init_dropout_state", "torch.cuda.classproperty")  # fmt: skip


def find(name: str) -> Any:
    """A module or attribute by its dotted name; None when this version of torch does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        parent, _, last = name.rpartition(".")
        return getattr(find(parent), last, None) if parent else None


def members(module: Any) -> Iterator[str]:
    """Names of a module that are public in themselves."""
    listed = getattr(module, "__all__", None) or ()
    for name in set(dir(module)).union(listed):
        value = getattr(module, name, None)
        is_own = callable(value) and getattr(value, "__module__", "") == module.__name__
        if not name.startswith("_") and not isinstance(value, ModuleType) and (name in listed or is_own):
            yield name


def flags(module: Any) -> Iterator[str]:
    """Settings of a module, or of an object that stands in a module's place."""
    replaced = getattr(module, "m", None)  # torch.backends wraps modules to catch assignments
    for place in (type(module), replaced):
        names = [*vars(place), *getattr(place, "__annotations__", ())] if place is not None else []
        for name in names:
            kind = type(vars(place).get(name)).__name__
            if not name.startswith("_") and (kind == "ContextProp" or kind == "property" or name in place.__dict__.get("__annotations__", {})):
                yield name
    if replaced is not None:
        yield from members(replaced)


def lists_of_names(value: Any) -> Iterator[str]:
    """Attributes that an object of torch.backends.cuda answers to in ``__getattr__`` or by descriptors."""
    for name in type(value).__getattr__.__code__.co_consts:
        if isinstance(name, str) and name.isidentifier():
            try:
                getattr(value, name)
            except AttributeError:
                continue
            yield name
