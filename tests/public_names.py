"""Prints the public names of torch's CUDA-centric modules, one a line; to be run with a backend's python.

Public is what a module lists in ``__all__``, the classes and functions without underscore that it defines
itself, and flags that can be set. Modules, and what they import from elsewhere, are not.
"""

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MODULES = [
    "torch.cuda",
    "torch.cuda.amp",
    "torch.cuda.amp.autocast_mode",
    "torch.cuda.amp.common",
    "torch.cuda.amp.grad_scaler",
    "torch.cuda.comm",
    "torch.cuda.gds",
    "torch.cuda.graphs",
    "torch.cuda.green_contexts",
    "torch.cuda.jiterator",
    "torch.cuda.memory",
    "torch.cuda.nccl",
    "torch.cuda.nvtx",
    "torch.cuda.profiler",
    "torch.cuda.random",
    "torch.cuda.sparse",
    "torch.cuda.streams",
    "torch.cuda.tunable",
    "torch.backends.cuda",
    "torch.backends.cudnn",
    "torch.accelerator",
    "torch.accelerator.graphs",
    "torch.accelerator.memory",
]
SETTINGS = [
    "torch.backends.cudnn",
    "torch.backends.cudnn.conv",
    "torch.backends.cudnn.rnn",
    "torch.backends.cuda.matmul",
]
# Documented, but where the rules above do not look.
OTHERS = [
    "torch.cuda.OutOfMemoryError",
    "torch.cuda.AcceleratorError",
    "torch.version.cuda",
    "torch.backends.cuda.cufft_plan_cache.size",
    "torch.backends.cuda.cufft_plan_cache.max_size",
    "torch.backends.cuda.cufft_plan_cache.clear",
]


def find(name: str) -> Any:
    """A module or attribute by its dotted name, None when this torch does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        above, _, last = name.rpartition(".")
        return getattr(find(above), last, None) if above else None


def members(module: Any) -> Iterator[str]:
    """What a module publishes."""
    module = getattr(module, "m", module)  # torch.backends wraps a module to catch assignments
    listed = getattr(module, "__all__", ())
    for name in {*vars(module), *listed}:
        value = getattr(module, name, None)
        own = callable(value) and getattr(value, "__module__", "") == module.__name__
        if not name.startswith("_") and not isinstance(value, ModuleType) and (own or name in listed):
            yield name


def settings(place: Any) -> Iterator[str]:
    """Flags of an object, which its class describes, its module annotates, or ``__getattr__`` answers to."""
    yield from (name for name, value in vars(type(place)).items() if hasattr(type(value), "__set__"))
    yield from getattr(getattr(place, "m", None), "__annotations__", ())
    answers = getattr(type(place), "__getattr__", None)
    for name in answers.__code__.co_consts if answers else ():
        try:
            getattr(place, name)
        except (AttributeError, TypeError):
            continue
        yield name


def public_names() -> set[str]:
    """Every public name, by each path that leads to it."""
    names = set(OTHERS)
    for module in MODULES:
        if (found := find(module)) is not None:
            names.update(f"{module}.{name}" for name in members(found))
    for place in SETTINGS:
        names.update(f"{place}.{name}" for name in settings(find(place)) if not name.startswith("_"))
    return names


if __name__ == "__main__":
    print("\n".join(sorted(public_names())))
