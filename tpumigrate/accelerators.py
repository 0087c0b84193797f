"""Which accelerators besides CUDA a file already knows how to handle."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from tpumigrate.model import Model, parents, statement

# Not mps: scripts for one machine ask for it too, in a ladder that gets an arm.
_OTHERS = frozenset("xpu npu hpu mlu musa sdaa mtia neuron".split())
# Packages whose every use means an NVIDIA GPU, or a runtime of its own that is told to use one.
_ENGINES = frozenset("tensorrt torch_tensorrt pycuda cupy triton onnxruntime paddle bitsandbytes eetq".split())
# Of these an import inside a function says what the function (or its class) is about; others are loaded in passing.
_RUNTIMES = frozenset("tensorrt torch_tensorrt pycuda onnxruntime paddle bitsandbytes eetq".split())
# And of these a use does, where the module works without them.
_ALWAYS_CUDA = frozenset("tensorrt torch_tensorrt pycuda".split())
_CLASS_OF_CUDA = re.compile(r"CUDA|Cuda|NCCL|Nccl|NVIDIA|Nvidia")
_FUNCTION_OF_CUDA = re.compile(
    r"(?:^|_)(?:is|has|have|requires?|supports?|num|count)_(?:\w+_)?(?:cuda|rocm|nvidia|nccl|hip)(?:_|$)|check_cuda_\w"
)
_QUESTION = re.compile(r"(?:_|^)is_(?:torch_)?(?P<name>[a-z]+?)_available$|^(?P<bare>[a-z]+)_is_available$")


def accelerators(model: Model) -> frozenset[str]:
    """Device types other than cuda, cpu, mps, xla and tpu that the code (not its comments) tells apart."""
    found: set[str] = set()
    for constant in model.nodes(ast.Constant):
        if isinstance(constant.value, str):
            found.add(constant.value.partition(":")[0])
    for attribute in model.nodes(ast.Attribute):
        name = model.qualname(attribute)
        if name.startswith("torch.") and name.count(".") == 1:
            found.add(attribute.attr)
        found.add(asked_accelerator(attribute.attr))
    for used in model.nodes(ast.Name):
        found.add(asked_accelerator(used.id))
    return frozenset(found & _OTHERS)


def named_after_cuda(node: ast.AST) -> str:
    """The class or function around `node` that is about CUDA by its name, "" when there is none.

    A class such as CUDAAccelerator, a function that asks or counts such as `is_cuda_available`: their callers mean
    CUDA.  Functions that move or set up (`to_cuda`, `init_cuda`) are what a migration changes.
    """
    for above in parents(node):
        if isinstance(above, ast.ClassDef) and _CLASS_OF_CUDA.search(above.name):
            return above.name
        if isinstance(above, ast.FunctionDef) and _FUNCTION_OF_CUDA.search(above.name):
            return above.name
    return ""


def bound_to_cuda(model: Model, node: ast.AST) -> str:
    """The package that ties the code around `node` to CUDA, "" when there is none.

    An import at the head of a module ties all of it; one in a function ties the function, or its whole class.  What a
    module loads only where it is installed ties the functions and classes that use it.
    """
    tied = _tied_places(model)
    return next((tied[above] for above in parents(node) if above in tied), "")


@functools.lru_cache(maxsize=1)
def _tied_places(model: Model) -> dict[ast.AST, str]:
    """The module, classes and functions that are tied to CUDA, each with the package that ties it."""
    found: dict[ast.AST, str] = {}
    for node in model.imports():
        package = _engine(node)
        place = _tied(model, node, package) if package else None
        if place is not None:
            found.setdefault(place, package)
    for name, package in _optional(model):
        for use in model.uses(name):
            place = _around(use)
            if place is not None:
                found.setdefault(place, package)
    for attribute in model.nodes(ast.Attribute):
        place = _around(attribute) if attribute.attr == "cuda_stream" else None
        if place is not None:
            found.setdefault(place, "the handle of a CUDA stream")
    return found


def _engine(node: ast.Import | ast.ImportFrom) -> str:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        root = name.partition(".")[0]
        of_numba = root == "numba" and (name == "numba.cuda" or any(alias.name == "cuda" for alias in node.names))
        if (root in _ENGINES and not getattr(node, "level", 0)) or of_numba:
            return root
    return ""


def _tied(model: Model, node: ast.AST, package: str) -> ast.AST | None:
    """The class, function or module that an import of `package` ties to CUDA; None when it ties nothing."""
    place = _around(node)
    if place is not None:
        return place if package in _RUNTIMES else None
    guarded = any(isinstance(above, ast.Try | ast.If) for above in parents(node))
    return None if guarded else model.tree  # the module works without what is guarded


def _around(node: ast.AST) -> ast.AST | None:
    """The innermost class around `node`, else the outermost function, None at the head of a module."""
    function: ast.AST | None = None
    for above in parents(node):
        if isinstance(above, ast.ClassDef):
            return above
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef):
            function = above
    return function


def _optional(model: Model) -> Iterator[tuple[str, str]]:
    """Names at the head of a module for runtimes that may be missing, with the package of each."""
    for name, bindings in model.root.bindings.items():
        for binding in bindings:
            package = binding.qualname.partition(".")[0] if binding.kind == "import" else ""
            if binding.kind.startswith("assign"):
                package = _loaded_by_string(statement(binding.node))
            if package in _ALWAYS_CUDA:
                yield name, package


def _loaded_by_string(stmt: ast.stmt) -> str:
    """The package of `import_module("package")`, `optional_import("package")` and the like in an assignment."""
    for node in ast.walk(stmt):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if "import" in last:
                return str(node.args[0].value).partition(".")[0]
    return ""


def asked_accelerator(name: str) -> str:
    """The accelerator that a function such as `is_torch_xpu_available` asks for, "" for any other name."""
    match = _QUESTION.search(name)
    return (match["name"] or match["bare"] or "") if match else ""
