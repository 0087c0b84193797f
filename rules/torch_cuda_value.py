"""TPU116: torch.cuda handed around as an object, replaced on purpose, or imported by a star."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.model import parent, parents
from tpumigrate.rule import Context, Report, rule

from ._devices import is_annotation

_MODULES = frozenset({"torch.cuda", "torch.cuda.amp", "torch.cuda.nvtx", "torch.backends.cuda", "torch.backends.cudnn"})


@rule("TPU116", "cuda-module-value", anchors=("cuda",), keeps_cuda=True)
def cuda_module_value(node: ast.Attribute | ast.Name | ast.Call | ast.Constant, ctx: Context) -> Iterator[Report]:
    """Uses the module torch.cuda as a value, patches it, or gets its names from a star import.

    ## What it does
    Reports `backend = torch.cuda`, `getattr(torch, "cuda")`, `torch.cuda.x = ...`, `mock.patch("torch.cuda.x")`,
    `monkeypatch.setattr(torch.cuda, ...)` and names that only `from torch import *` can have brought.

    ## Why it matters on a TPU
    No object of the target has all the names of torch.cuda, and code that patches it means CUDA.

    ## Example
    ```python
    import torch

    backend = torch.cuda if torch.version.hip is None else torch.cpu
    ```

    ## Example: patches
    ```python
    import torch

    def test_cpu_path(monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert torch.cuda.device_count() == 2

    def force_off():
        torch.cuda.is_available = lambda: False
    ```

    ## Example: a star import
    ```python
    from torch import *

    if cuda.is_available():
        print("ready")
    ```

    ## Not flagged
    ```python
    import torch

    class Cfg:
        cuda = True

    print(Cfg.cuda)
    ```
    ```python
    from my_project import cuda

    backend = cuda
    ```
    ```python
    import torch
    import torch.cuda

    x = torch.zeros(1)
    ```

    ## Fix safety
    No fix.

    ## References
    torch.accelerator is the device-neutral module of torch; torch_xla is not behind it.
    """
    match node:
        case ast.Attribute(ctx=ast.Store()) | ast.Attribute(ctx=ast.Del()):
            if ctx.qualname(node).startswith("torch.cuda."):
                yield _patch(node, ctx)
        case ast.Constant(value=str(text)):
            if text.startswith("torch.cuda.") and _is_patch_call(parent(node)):
                yield _patch(node, ctx)
        case ast.Call():
            if _is_getattr(node, ctx):
                yield _value(node)
        case ast.Attribute() | ast.Name():
            yield from _reference(node, ctx)


def _value(node: ast.AST) -> Report:
    return Report(
        node,
        "torch.cuda is used as an object; nothing of the target has all of its names",
        unfixed="choose the functions that are needed and call the target's",
        severity="warning",
    )


def _patch(node: ast.AST, ctx: Context) -> Report:
    around = next((above for above in parents(node) if isinstance(above, ast.FunctionDef)), node)
    return Report(
        node,
        "this replaces a part of torch.cuda on purpose; it is left alone, with what depends on it",
        unfixed="it means CUDA itself",
        severity="info",
        claims=(around,),
    )


def _is_patch_call(node: ast.AST | None) -> bool:
    if not isinstance(node, ast.Call):
        return False
    func = node.func
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    return name in ("patch", "setattr", "delattr", "object")


def _is_getattr(node: ast.Call, ctx: Context) -> bool:
    return (
        isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) >= 2
        and ctx.qualname(node.args[0]) == "torch"
        and isinstance(node.args[1], ast.Constant)
        and node.args[1].value == "cuda"
    )


def _reference(node: ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    above = parent(node)
    if isinstance(above, ast.Attribute) or not isinstance(node.ctx, ast.Load) or is_annotation(node):
        return
    if ctx.qualname(node) in _MODULES:
        yield _patch(node, ctx) if _is_patch_call(above) else _value(node)
        return
    starred = ctx.model.star_name(node)
    if starred.startswith("torch.cuda") and starred in {*ctx.table, *_MODULES}:
        yield Report(
            node,
            f"{starred} comes from a star import",
            unfixed="import torch by name, then it can be rewritten",
            severity="warning",
        )
