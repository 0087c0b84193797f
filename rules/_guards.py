"""What a question such as `torch.cuda.is_available()` decides: may it be answered with yes on a TPU?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpumigrate.model import block, parent, statement
from tpumigrate.rule import Context

from ._devices import device_text

_CUDA_PACKAGES = frozenset(
    """triton apex flash_attn xformers pynvml cupy numba tensorrt torch_tensorrt pycuda bitsandbytes deepspeed
    transformer_engine nvidia nvtx cuda onnxruntime""".split()
)
# Generations of NVIDIA's chips, and what only CUDA's compiler has.
_CUDA_WORDS = re.compile(
    r"ampere|hopper|volta|turing|blackwell|capability|cudagraph|cuda_graph|\bsm_?\d\d", re.IGNORECASE
)
_PROBES = ("torch.cuda.get_device_capability", "torch.cuda.get_arch_list", "torch.version.cuda")
_TABLE_RULES = frozenset({"TPU106", "TPU107", "TPU108", "TPU109", "TPU113", "TPU118"})
_TEXTS_OF_TORCH = frozenset({"cpu", "nccl", "gloo", "mpi", "xla", "tpu", "tpu_dist", "mps", "xpu"})


def means_cuda_itself(question: ast.expr, ctx: Context) -> bool:
    """Whether everything that a question decides can only be meant for CUDA.

    What it guards directly counts as soon as one thing in it needs CUDA, because switching that on would crash. A
    flag that holds the answer counts when all its uses do.
    """
    if _decides_on_cuda(question, ctx):
        return True
    flag = _flag(question)
    uses = list(_flag_uses(flag, ctx)) if flag is not None else []
    return bool(uses) and all(_decides_on_cuda(use, ctx) for use in uses)


def _flag(question: ast.expr) -> ast.Name | ast.Attribute | None:
    """The name or attribute that is given the answer, possibly combined with others."""
    above = parent(question)
    while isinstance(above, ast.BoolOp):
        above = parent(above)
    if isinstance(above, ast.Assign) and len(above.targets) == 1:
        target = above.targets[0]
        return target if isinstance(target, ast.Name | ast.Attribute) else None
    return None


def _flag_uses(flag: ast.Name | ast.Attribute, ctx: Context) -> Iterator[ast.expr]:
    if isinstance(flag, ast.Name):
        yield from ctx.model.uses(flag.id, ctx.model.bindings(flag))
    else:
        text = ctx.text(flag)
        for node in ctx.model.nodes(ast.Attribute):
            if node.attr == flag.attr and isinstance(node.ctx, ast.Load) and ctx.text(node) == text:
                yield node


def _decides_on_cuda(question: ast.expr, ctx: Context) -> bool:
    above = parent(question)
    if isinstance(above, ast.BoolOp) and "torch.version." in ctx.text(above):
        return True  # a build of torch for one vendor
    if any(_names_cuda_package(text) for text in _refusals(question)) or _probed_after_refusal(question, ctx):
        return True
    return any(_needs_cuda(node, ctx) for node in _decided(question)) or _chooses_text(question, ctx)


def _refusals(question: ast.expr) -> Iterator[str]:
    """Texts with which a statement stops the program when the answer is no."""
    stmt = statement(question)
    told = [stmt.msg] if isinstance(stmt, ast.Assert) and stmt.msg is not None else []
    if isinstance(stmt, ast.If):
        told += [item.exc for item in stmt.body if isinstance(item, ast.Raise) and item.exc is not None]
    for expression in told:
        for node in ast.walk(expression):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _names_cuda_package(text: str) -> bool:
    words = set(re.findall(r"[a-z_]+", text.lower()))
    return bool(words & (_CUDA_PACKAGES | {"megatron", "dali", "tensor_rt"}) - {"cuda", "nvidia"})


def _decided(question: ast.expr) -> Iterator[ast.AST]:
    """Code that runs only where the answer is yes."""
    child: ast.AST = question
    above = parent(child)
    negated = False
    while above is not None:
        match above:
            case ast.UnaryOp(op=ast.Not()):
                negated = not negated
            case ast.BoolOp():
                if isinstance(above.op, ast.And) == negated:
                    return  # the whole may be true without this part
                index = next(i for i, value in enumerate(above.values) if value is child)
                yield from above.values[index + 1 :]
            case ast.IfExp() if child is above.test:
                yield above.orelse if negated else above.body
                return
            case ast.If() if child is above.test:
                yield from above.orelse if negated else above.body
                if negated and isinstance(above.body[-1], ast.Return):
                    yield from _following(above)
                return
            case _:
                return
        child, above = above, parent(above)


def _following(stmt: ast.stmt) -> list[ast.stmt]:
    siblings = block(stmt)
    return siblings[siblings.index(stmt) + 1 :]


def _probed_after_refusal(question: ast.expr, ctx: Context) -> bool:
    """Whether `if not available: raise` opens code that asks for a compute capability."""
    stmt = statement(question)
    if not isinstance(stmt, ast.If) or not isinstance(stmt.body[-1], ast.Raise):
        return False
    return any(
        isinstance(node, ast.Attribute) and ctx.qualname(node) in _PROBES
        for following in _following(stmt)
        for node in ast.walk(following)
    )


def _needs_cuda(region: ast.AST, ctx: Context) -> bool:
    for node in ast.walk(region):
        if isinstance(node, ast.Import | ast.ImportFrom) and _imports_cuda(node):
            return True
        if isinstance(node, ast.Attribute | ast.Name):
            word = node.attr if isinstance(node, ast.Attribute) else node.id
            if _CUDA_WORDS.search(word) or _has_no_counterpart(node, ctx):
                return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "CUDAExecutionProvider" in node.value:
            return True
    return False


def _imports_cuda(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names]
    roots = (
        {(node.module or "").partition(".")[0]}
        if isinstance(node, ast.ImportFrom)
        else {name.partition(".")[0] for name in names}
    )
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    return bool(roots & _CUDA_PACKAGES) or (
        "torch" not in roots and any("cuda" in name.lower() for name in [*names, module])
    )


def _has_no_counterpart(node: ast.Attribute | ast.Name, ctx: Context) -> bool:
    name = ctx.qualname(node)
    if not name or name.partition(".")[0] in _CUDA_PACKAGES or name.startswith("torch.utils.cpp_extension"):
        return bool(name)
    row = ctx.table.get(name)
    if row is None or row.rule not in _TABLE_RULES or row.call or row.ref or row.context:
        return False
    above = parent(node)
    stmt = parent(above) if isinstance(above, ast.Call) else above
    return not (row.statement and isinstance(stmt, ast.Expr))


def _chooses_text(question: ast.expr, ctx: Context) -> bool:
    """Whether the answer chooses between texts that are no devices: names of packages, parts of file names."""
    above = parent(question)
    while isinstance(above, ast.UnaryOp | ast.BoolOp):
        above = parent(above)
    if not isinstance(above, ast.IfExp) or not any(node is question for node in ast.walk(above.test)):
        return False
    arms = (above.body, above.orelse)
    return any(_is_other_text(arm, ctx) for arm in arms) and all(_is_literal(arm) for arm in arms)


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_literal(node.body) and _is_literal(node.orelse)
    return isinstance(node, ast.Constant | ast.List | ast.Tuple)


def _is_other_text(node: ast.expr, ctx: Context) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return any(_is_other_text(item, ctx) for item in node.elts)
    if isinstance(node, ast.IfExp):
        return _is_other_text(node.body, ctx) or _is_other_text(node.orelse, ctx)
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value not in _TEXTS_OF_TORCH
        and device_text(node, ctx) is None
    )
