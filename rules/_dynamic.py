"""Which expressions are tensors and boolean masks of tensors, as far as a file shows, and where that matters.

`ctx.kind` tells what is certainly a tensor. Here names also count that are used as only tensors are, and, in files
that have no other arrays, what is compared or inverted to index with.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from tpumigrate.model import class_of, function, packages, parents, statement
from tpumigrate.names import Binding
from tpumigrate.rule import Context

from ._devices import is_annotation
from ._hot import hot, throttled

_OTHER_ARRAYS = frozenset(
    """numpy pandas cupy jax tensorflow xarray polars pyarrow PIL cv2 scipy datasets mxnet paddle dask geopandas
    skimage anndata mindspore keras""".split()
)
_TENSOR_METHODS = frozenset(
    """bool byte clamp clamp_ contiguous cuda detach detach_ double expand expand_as float half index_select
    int is_floating_point logical_and logical_not logical_or long masked_fill masked_fill_ masked_scatter masked_select
    new_empty new_full new_ones new_tensor new_zeros numel permute requires_grad_ scatter scatter_ sigmoid size softmax
    log_softmax topk to type_as unsqueeze unsqueeze_ view view_as""".split()
)
_TENSOR_ATTRIBUTES = frozenset({"device", "is_cuda", "requires_grad"})
_TAKES_NO_TENSOR = frozenset(
    """arange as_tensor device empty eye from_numpy full linspace load logspace manual_seed ones rand randint randn
    randperm range save tensor zeros Size is_tensor isinstance Generator compile no_grad Tensor is_grad_enabled
    normal tril_indices triu_indices hann_window autocast finfo iinfo typename""".split()
)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_TESTS = frozenset(
    """isfinite isnan isinf isposinf isneginf isclose isin isreal eq ne gt lt ge le equal_ greater greater_equal less
    less_equal not_equal logical_and logical_or logical_not logical_xor signbit""".split()
)
_CREATES = frozenset(
    "zeros ones empty full tensor zeros_like ones_like full_like empty_like as_tensor rand_like".split()
)
_MAKES = frozenset(
    """arange empty eye full linspace ones rand randint randn randperm tensor Tensor zeros FloatTensor LongTensor
    BoolTensor from_numpy as_tensor tril_indices triu_indices""".split()
)
_KEEPS = frozenset(
    """view reshape flatten unsqueeze squeeze expand expand_as to cpu cuda clone detach contiguous transpose permute
    repeat t roll flip view_as reshape_as narrow unflatten type_as scatter scatter_ masked_fill index_fill bool
    logical_and_ logical_or_ logical_not_ fill_""".split()
)
_SAME_SHAPE = frozenset(
    """abs bool byte clamp clone contiguous detach double exp float half int isfinite isinf isnan log log1p logical_not
    long neg relu round sigmoid sign sqrt square tanh zeros_like ones_like full_like empty_like rand_like randn_like
    softmax log_softmax isposinf isneginf bitwise_not""".split()
)
_BROADCASTS = frozenset(
    """eq ne gt lt ge le greater greater_equal less less_equal not_equal logical_and logical_or logical_xor
    bitwise_and bitwise_or isclose""".split()
)


class Evidence:
    """What a file shows of its tensors."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        imported = {name for node in ctx.model.imports() for name in packages(node)}
        self.only_torch = "torch" in imported and not imported & _OTHER_ARRAYS
        self._uses: dict[ast.AST, dict[str, set[str]]] = {}
        self._masks: dict[ast.AST, bool] = {}

    # -- tensors -------------------------------------------------------------------------------------------

    def tensor(self, node: ast.expr) -> bool:
        """Whether an expression is a tensor, by its kind or by how its name is used in the function."""
        kind = self._ctx.kind(node)
        used = self._used(node)
        if "array" in used:
            return False
        if kind:
            return kind == "tensor"
        if isinstance(node, ast.Subscript):
            return self.tensor(node.value)
        return "tensor" in used

    def array(self, node: ast.expr) -> bool:
        """Whether an expression is a tensor if it is an array at all."""
        if self.tensor(node):
            return True
        if self._ctx.kind(node) or "array" in self._used(node):
            return False
        if isinstance(node, ast.Constant | ast.Tuple | ast.List | ast.Dict | ast.Set | ast.JoinedStr | ast.Compare):
            return False
        root = _root(node)
        if root is None or not isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            return False
        annotated = [b for b in self._ctx.model.bindings(root) if getattr(b.node, "annotation", None) is not None]
        if annotated and isinstance(node, ast.Name):
            return False  # annotated as something else
        if self._ctx.model.qualnames(root):
            return False  # of a module
        return self.only_torch or self._in_forward(node)

    def _in_forward(self, node: ast.expr) -> bool:
        around, owner = function(node), class_of(node)
        if around is None or owner is None or around.name != "forward":
            return False
        return self._ctx.kinds.is_module_class(owner)

    def _used(self, node: ast.expr) -> set[str]:
        path = dotted(node)
        around = function(node)
        if not path or around is None:
            return set()
        known = self._uses.get(around)
        if known is None:
            known = self._uses[around] = {}
            for item in ast.walk(around):
                for found, what in self._shown_by(item):
                    known.setdefault(found, set()).add(what)
        return known.get(path, set())

    def _shown_by(self, item: ast.AST) -> Iterator[tuple[str, str]]:
        """Dotted names of which a node shows what they are."""
        if isinstance(item, ast.Attribute) and item.attr in _TENSOR_ATTRIBUTES:
            yield dotted(item.value), "tensor"
        elif isinstance(item, ast.UnaryOp) and isinstance(item.op, ast.Invert):
            yield dotted(item.operand), "mask"
        elif isinstance(item, ast.Assign) and isinstance(item.value, ast.Call) and len(item.targets) == 1:
            name = self._ctx.qualname(item.value.func)
            if name.startswith(("numpy.", "pandas.", "cv2.", "scipy.")):
                yield dotted(item.targets[0]), "array"
        elif isinstance(item, ast.Call):
            yield from self._shown_by_call(item)

    def _shown_by_call(self, call: ast.Call) -> Iterator[tuple[str, str]]:
        name = self._ctx.qualname(call.func)
        last = name.rpartition(".")[2]
        if name.startswith(("numpy.", "pandas.")):
            for arg in call.args:
                yield dotted(arg), "array"
        elif name.startswith("torch.") and (name.count(".") == 1 or name.startswith("torch.nn.functional.")):
            if last in _TAKES_NO_TENSOR or last[:1].isupper():
                if last in ("from_numpy", "as_tensor") and call.args:
                    yield dotted(call.args[0]), "array"
                return
            first = call.args[0] if call.args else None
            if isinstance(first, ast.List | ast.Tuple):
                for item in first.elts:
                    yield dotted(item), "tensor"
            elif first is not None:
                yield dotted(first), "tensor"
            if last == "where" and len(call.args) == 3:
                yield dotted(call.args[0]), "mask"
            elif last == "masked_select" and len(call.args) > 1:
                yield dotted(call.args[1]), "mask"
            elif name.startswith("torch.nn.functional.") and last.endswith(("loss", "entropy", "logits")):
                for arg in call.args[1:2]:
                    yield dotted(arg), "tensor"
        elif isinstance(call.func, ast.Attribute) and not name:
            method = call.func.attr
            if method in _TENSOR_METHODS:
                yield dotted(call.func.value), "tensor"
            if method in ("astype", "copy", "iloc"):
                yield dotted(call.func.value), "array"
            if method in ("masked_fill", "masked_fill_", "masked_select", "masked_scatter") and call.args:
                yield dotted(call.args[0]), "mask"
                yield dotted(call.args[0]), "tensor"

    # -- masks ---------------------------------------------------------------------------------------------

    def mask(self, node: ast.expr) -> bool:
        """Whether an expression is a tensor of booleans."""
        known = self._masks.get(node)
        if known is None:
            self._masks[node] = False
            known = self._masks[node] = self._is_mask(node)
        return known

    def _is_mask(self, node: ast.expr) -> bool:
        match node:
            case ast.Compare():
                return self._compared(node)
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return self.mask(operand) or (isinstance(operand, ast.Name | ast.Attribute) and self.array(operand))
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor(), left=left, right=right):
                return self.mask(left) or self.mask(right)
            case ast.BinOp(op=ast.Mult(), left=left, right=right):
                return self.mask(left) and self.mask(right)
            case ast.Subscript(value=value, slice=index):
                return self.mask(value) and not isinstance(index, ast.Constant | ast.Name)
            case ast.Call():
                return self._called(node)
            case ast.Attribute() | ast.Name():
                return self._named(node)
        return False

    def _compared(self, node: ast.Compare) -> bool:
        operands = [node.left, *node.comparators]
        if len(operands) != 2 or not isinstance(node.ops[0], _COMPARISONS):
            return False
        if any(isinstance(item, ast.Constant) and not isinstance(item.value, int | float) for item in operands):
            return False
        if any(self._ctx.kind(item) in ("str", "device_str", "array", "list") for item in operands):
            return False
        return any(self.tensor(item) for item in operands) or any(self.array(item) for item in operands)

    def _called(self, node: ast.Call) -> bool:
        name = self._ctx.qualname(node.func)
        head, _, last = name.rpartition(".")
        if name:
            if head != "torch":
                return False
            return last in _TESTS or (last in _CREATES and self._is_bool_dtype(node))
        func = node.func
        if not isinstance(func, ast.Attribute):
            return False
        if func.attr == "bool" and not node.args:
            return self.array(func.value) or self._ctx.kind(func.value) == "tensor"
        if func.attr in ("to", "type") and len(node.args) == 1 and self._ctx.qualname(node.args[0]) == "torch.bool":
            return True
        if func.attr in _TESTS:
            return self.tensor(func.value) or (self.only_torch and self.array(func.value))
        if func.attr in ("any", "all") and (node.args or node.keywords):
            return self.mask(func.value)
        if func.attr in ("new_zeros", "new_ones", "new_full"):
            return self._is_bool_dtype(node)
        if func.attr in ("to", "type") and any(self._ctx.kind(arg) == "dtype" for arg in node.args):
            return False
        return func.attr in _KEEPS and self.mask(func.value)

    def _is_bool_dtype(self, node: ast.Call) -> bool:
        dtype = self._ctx.arg(node, "dtype")
        return dtype is not None and self._ctx.qualname(dtype) == "torch.bool"

    def _named(self, node: ast.Name | ast.Attribute) -> bool:
        if self._ctx.model.qualnames(node):
            return False
        used = self._used(node)
        if "mask" in used and "array" not in used and self.array(node):
            return True
        if isinstance(node, ast.Attribute):
            owner = class_of(node)
            if owner is None or not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                return False
            values = self._ctx.kinds.attribute_values(owner, node.attr)
            return bool(values) and all(self.mask(value) for value in values)
        bindings = [item for item in self._ctx.model.bindings(node) if item.kind != "augment"]
        return bool(bindings) and all(self._bound(item) for item in bindings)

    def _bound(self, binding: Binding) -> bool:
        if binding.kind == "param" and isinstance(binding.node, ast.arg) and binding.node.annotation is not None:
            return self._ctx.qualname(binding.node.annotation) == "torch.BoolTensor"
        return binding.kind == "assign" and binding.value is not None and self.mask(binding.value)

    # -- the host ------------------------------------------------------------------------------------------

    def host(self, node: ast.AST, depth: int = 4) -> bool:
        """Whether a tensor is on the host by its own expression: `x.cpu()`, `torch.from_numpy(a)`, `torch.zeros(3)`."""
        if self._created_on_host(node, depth):
            return True
        for item in ast.walk(node):
            if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute):
                moved = item.func.attr == "to" and any(_is_cpu(arg) for arg in item.args)
                if item.func.attr in ("cpu", "numpy", "tolist") or moved:
                    return True
                if self._ctx.qualname(item.func) in ("torch.from_numpy",) or _moved_to_cpu(item):
                    return True
            if depth and isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load):
                bindings = [found for found in self._ctx.model.bindings(item) if found.kind != "augment"]
                values = [found.value for found in bindings if found.kind == "assign" and found.value is not None]
                if values and len(values) == len(bindings) and all(self.host(v, depth - 1) for v in values):
                    return True
        return False

    def _created_on_host(self, node: ast.AST, depth: int, within: frozenset[str] = frozenset()) -> bool | None:
        """Whether a tensor is made of numbers without a device, and not moved since.

        None where it is made of a name in `within` again: `x = torch.zeros(3); x = x[1:]`.
        """
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Call):
                head, _, last = self._ctx.qualname(node.func).rpartition(".")
                if head == "torch" and last in _MAKES:
                    return self._ctx.arg(node, "device") is None
                if isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda", "type_as"):
                    return False
                following: ast.AST | None = node.func if not head else node.args[0] if node.args else None
            elif isinstance(node, ast.Compare):
                following = node.left
            elif isinstance(node, ast.UnaryOp):
                following = node.operand
            else:
                following = node.value if isinstance(node, ast.Attribute | ast.Subscript) else None
            if following is None:
                return False
            node = following
        if node.id in within:
            return None
        if not depth:
            return False
        bindings = [item for item in self._ctx.model.bindings(node) if item.kind != "augment"]
        if not all(item.kind == "assign" and item.value is not None for item in bindings):
            return False
        inside = within | {node.id}
        made = [self._created_on_host(item.value, depth - 1, inside) for item in bindings if item.value is not None]
        return any(made) and False not in made


@functools.lru_cache(maxsize=1)
def evidence(ctx: Context) -> Evidence:
    """The evidence of a file, gathered once."""
    return Evidence(ctx)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or of attributes of one, "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _root(node: ast.expr) -> ast.Name | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def _is_cpu(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cpu"


def _moved_to_cpu(call: ast.Call) -> bool:
    return any(item.arg == "device" and _is_cpu(item.value) for item in call.keywords)


# -- shapes ------------------------------------------------------------------------------------------------


def same_shape(ctx: Context, tensor: ast.expr, mask: ast.expr) -> bool:
    """Whether `tensor[mask]`, if it works at all, has a mask of the tensor's own shape.

    A mask made elementwise of the tensor has at least its rank, and indexing allows no more than its rank.
    """
    root = _exact(ctx, tensor, True)
    return root != "" and root in _operands(ctx, mask, True)


def _exact(ctx: Context, node: ast.expr, here: bool) -> str:
    """A key for the shape of an expression; `here`: it stands in the statement that is looked at."""
    if isinstance(node, ast.Name):
        bindings = [item for item in ctx.model.bindings(node) if item.kind != "augment"]
        if len(bindings) == 1 and bindings[0].kind in ("assign", "param"):
            value = bindings[0].value
            deeper = _exact(ctx, value, False) if value is not None else ""
            return deeper or f"binding {id(bindings[0])}"
        return f"text {node.id}" if here else ""
    if isinstance(node, ast.Call):
        operand = _operand(ctx, node, _SAME_SHAPE)
        return _exact(ctx, operand, here) if operand is not None else ""
    if isinstance(node, ast.UnaryOp):
        return _exact(ctx, node.operand, here)
    pure = not any(isinstance(item, ast.Call | ast.NamedExpr | ast.Await) for item in ast.walk(node))
    if here and pure and isinstance(node, ast.Attribute | ast.Subscript):
        return f"text {ast.unparse(node)}"
    return ""


def _operands(ctx: Context, node: ast.expr, here: bool) -> set[str]:
    """Keys of the shapes that an elementwise expression is broadcast from; unknown operands add none."""
    match node:
        case ast.Compare():
            parts = [node.left, *node.comparators]
        case ast.BinOp():
            parts = [node.left, node.right]
        case ast.UnaryOp():
            parts = [node.operand]
        case ast.Call():
            operand = _operand(ctx, node, _SAME_SHAPE | _BROADCASTS)
            if operand is None:
                return set()
            is_method = isinstance(node.func, ast.Attribute) and operand is node.func.value
            both = isinstance(node.func, ast.Attribute) and node.func.attr in _BROADCASTS
            parts = [operand, *(node.args if is_method else node.args[1:])[:1]] if both else [operand]
        case ast.Name():
            own = _exact(ctx, node, here)
            bindings = [item for item in ctx.model.bindings(node) if item.kind != "augment"]
            value = bindings[0].value if len(bindings) == 1 and bindings[0].kind == "assign" else None
            return {own} - {""} | (_operands(ctx, value, False) if value is not None else set())
        case _:
            return {_exact(ctx, node, here)} - {""}
    return set[str]().union(*(_operands(ctx, part, here) for part in parts))


def _operand(ctx: Context, call: ast.Call, names: frozenset[str]) -> ast.expr | None:
    """The tensor that an elementwise function or method is applied to."""
    name = ctx.qualname(call.func)
    head, _, last = name.rpartition(".")
    if name:
        return call.args[0] if head in ("torch", "torch.nn.functional") and last in names and call.args else None
    if isinstance(call.func, ast.Attribute) and call.func.attr in names:
        return call.func.value
    return None


# -- places ------------------------------------------------------------------------------------------------

_HOT_WORDS = (
    "loss",
    "forward",
    "generate",
    "decode",
    "encode",
    "attention",
    "train_step",
    "training_step",
    "criterion",
)
_HOST_NAMES = frozenset(
    """__init__ __getitem__ __iter__ __repr__ __str__ extra_repr reset_parameters init_weights _init_weights main
    setup set_timesteps prepare_data on_load_checkpoint on_save_checkpoint __post_init__ __len__""".split()
)
_HOST_WORDS = (
    "collate", "preprocess", "pre_process", "plot", "visuali", "draw", "save", "export", "convert", "test_",
    "augment", "tokeniz", "prune", "mine_", "render", "show", "build_", "parse",
)  # fmt: skip
_HOST_CLASSES = ("Dataset", "DataModule", "Sampler", "Collat", "Tokenizer", "Processor", "TestCase", "Transform")
_MODEL_CLASSES = ("Loss", "Criterion", "Matcher", "Assigner")


def place(node: ast.AST, ctx: Context) -> str:
    """ "hot" in what a model runs every step, "host" in data preparation and what runs once, "" where unknown."""
    around = function(node)
    if throttled(node, None):
        return "host"  # a branch that ends in an error, or is not run each time
    if around is None:
        return "hot" if hot(node, ctx) is not None else "host"
    owner = class_of(around)
    bases = [owner.name, *(ast.unparse(base) for base in owner.bases)] if owner is not None else []
    if any(word in base for base in bases for word in _HOST_CLASSES if not base.startswith(("Transformer", "nn."))):
        return "host"
    outer = [around, *(item for item in parents(around) if isinstance(item, ast.FunctionDef))]
    names = [item.name.lower() for item in outer]
    if any(_is_host_name(name) for name in names):
        return "hot" if hot(node, ctx) is not None else "host"
    if hot(node, ctx) is not None or (owner is not None and owner.name.endswith(_MODEL_CLASSES)):
        return "hot"
    return "hot" if any(word in name for name in names for word in _HOT_WORDS) else ""


def _is_host_name(name: str) -> bool:
    loads = name.startswith("load") and "loss" not in name  # `load_balancing_loss` is about experts
    return (
        loads or name.startswith(("init_", "_init")) or name in _HOST_NAMES or any(word in name for word in _HOST_WORDS)
    )


def severity(node: ast.AST, ctx: Context) -> str:
    """The severity of a data-dependent shape where it stands, "" where nothing should be said of it."""
    if is_annotation(node) or _is_host_statement(node, ctx):
        return ""
    return {"hot": "warning", "": "info", "host": ""}[place(node, ctx)]


def _is_host_statement(node: ast.AST, ctx: Context) -> bool:
    """Whether a value is only looked at for an error: the test of an `assert`, what is raised or printed."""
    stmt = statement(node)
    if isinstance(stmt, ast.Assert | ast.Raise):
        return True
    call = stmt.value if isinstance(stmt, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"
