"""Which accelerators besides CUDA a file already knows how to handle."""

from __future__ import annotations

import ast
import re

from tpumigrate.model import Model, parents

# Not mps: scripts for one machine ask for it too, in a ladder that gets an arm.
_OTHERS = frozenset("xpu npu hpu mlu musa sdaa mtia neuron".split())
# Packages whose every use means an NVIDIA GPU, or a runtime of its own that is told to use one.
_ENGINES = frozenset("tensorrt torch_tensorrt pycuda cupy triton onnxruntime paddle bitsandbytes eetq".split())
# Of these an import inside a function says what the function (or its class) is about; others are loaded in passing.
_RUNTIMES = frozenset("tensorrt torch_tensorrt pycuda onnxruntime paddle bitsandbytes eetq".split())
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

    An import at the head of a module ties all of it; one in a function ties the function, or its whole class.
    """
    places = {id(above) for above in parents(node)}
    for found in model.imports():
        package = _engine(found)
        if package and id(_tied(found, package)) in places:
            return package
    return ""


def _engine(node: ast.Import | ast.ImportFrom) -> str:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        root = name.partition(".")[0]
        of_numba = root == "numba" and (name == "numba.cuda" or any(alias.name == "cuda" for alias in node.names))
        if (root in _ENGINES and not getattr(node, "level", 0)) or of_numba:
            return root
    return ""


def _tied(node: ast.AST, package: str) -> ast.AST | None:
    """The class, function or module that an import of `package` ties to CUDA; None when it ties nothing."""
    function: ast.AST | None = None
    for above in parents(node):
        if isinstance(above, ast.ClassDef) or (isinstance(above, ast.Module) and function is not None):
            tied = function if isinstance(above, ast.Module) else above
            return tied if package in _RUNTIMES else None
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef):
            function = above
        elif isinstance(above, ast.Try | ast.If) and function is None and not _inside_function(above):
            return None  # the module works without it
        elif isinstance(above, ast.Module):
            return above
    return None


def _inside_function(node: ast.AST) -> bool:
    return any(isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef) for above in parents(node))


def asked_accelerator(name: str) -> str:
    """The accelerator that a function such as `is_torch_xpu_available` asks for, "" for any other name."""
    match = _QUESTION.search(name)
    return (match["name"] or match["bare"] or "") if match else ""
