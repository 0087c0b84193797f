"""What an expression is, as far as the file shows: enough to tell a tensor from a device from somebody's class.

Kinds: tensor, module, optimizer, scaler, loader, device_loader (torch_xla), device (torch.device), device_str, dtype,
int, float, str, bool, stream, event, args (parsed options), none, class:NAME (of a class of this file, not a module).
"""

from __future__ import annotations

import ast

from tpumigrate.model import Model, callable_around, class_of, default_of, parent, parents
from tpumigrate.names import FUNCTIONS, Binding
from tpumigrate.project import Project

DEVICE_WORD = ("cuda", "cpu", "xla", "tpu", "mps", "xpu", "npu", "hpu", "meta")
MODULE_BASES = frozenset({"torch.nn.Module", "torch.jit.ScriptModule", "pytorch_lightning.LightningModule"})

_CALLS = {
    "torch.device": "device",
    "torch.accelerator.current_accelerator": "device",
    "torch_xla.device": "device",
    "torch_xla.core.xla_model.xla_device": "device",
    "torch.amp.GradScaler": "scaler",
    "torch.cuda.amp.GradScaler": "scaler",
    "torch.utils.data.DataLoader": "loader",
    "torch_xla.distributed.parallel_loader.MpDeviceLoader": "device_loader",
    "torch_xla.distributed.parallel_loader.ParallelLoader": "device_loader",
    "torch.nn.parallel.DistributedDataParallel": "module",
    "torch.nn.DataParallel": "module",
    "torch.distributed.fsdp.FullyShardedDataParallel": "module",
    "torch.compile": "module",
    "torch.nn.Parameter": "tensor",
    "torch.autograd.Variable": "tensor",
    "torch.autograd.grad": "",
    "torch.cuda.Stream": "stream",
    "torch.cuda.current_stream": "stream",
    "torch.cuda.default_stream": "stream",
    "torch.cuda.Event": "event",
    "torch.cuda.device_count": "int",
    "torch.cuda.current_device": "int",
    "torch.distributed.get_rank": "int",
    "torch.distributed.get_world_size": "int",
    "torch.cuda.is_available": "bool",
    "argparse.ArgumentParser": "parser",
}
_TORCH_NOT_TENSOR = frozenset(
    """save load manual_seed compile device Generator Size finfo iinfo is_tensor set_grad_enabled no_grad enable_grad
    inference_mode autocast set_default_dtype set_default_device get_default_dtype is_grad_enabled typename
    set_num_threads get_rng_state set_rng_state Event Stream dtype seed initial_seed isfinite_ numel
    is_floating_point is_complex get_num_threads use_deterministic_algorithms is_nonzero equal allclose
    set_float32_matmul_precision split chunk unbind topk sort max_ Tensor_ meshgrid unique broadcast_tensors""".split()
)
_TENSOR_METHODS_TO_OTHER = {
    "item": "number", "tolist": "list", "numpy": "array", "size": "", "dim": "int", "numel": "int", "get_device": "int",
    "is_contiguous": "bool", "data_ptr": "int", "split": "", "chunk": "", "unbind": "", "topk": "",
    "sort": "", "backward": "none", "nelement": "int", "stride": "", "storage": "", "element_size": "int", "unique": "",
}  # fmt: skip
_MODULE_SAME = frozenset(
    "to cuda cpu half float double bfloat16 eval train requires_grad_ to_empty type xpu ipu apply module".split()
)
# Methods that only tensors have, by name alone.
_TENSOR_ONLY = frozenset(
    """contiguous unsqueeze unsqueeze_ detach detach_ permute view_as expand_as masked_fill masked_fill_ requires_grad_
    new_zeros new_ones new_full new_empty new_tensor scatter scatter_ scatter_add_ index_select type_as""".split()
)
_LEGACY_TENSORS = frozenset(
    f"{prefix}Tensor"
    for prefix in ("", "Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
)
_ANNOTATIONS = {
    "torch.Tensor": "tensor",
    "torch.FloatTensor": "tensor",
    "torch.LongTensor": "tensor",
    "torch.nn.Module": "module",
    "torch.device": "device",
    "torch.dtype": "dtype",
    "torch.optim.Optimizer": "optimizer",
    "torch.utils.data.DataLoader": "loader",
    "torch.amp.GradScaler": "scaler",
    "torch.cuda.amp.GradScaler": "scaler",
}


class Kinds:
    """Kinds of the expressions of one module, computed when asked."""

    def __init__(self, model: Model, project: Project) -> None:
        self._model = model
        self._project = project
        self._known: dict[ast.AST, str] = {}
        self._attributes: dict[ast.ClassDef, dict[str, list[ast.expr]]] = {}

    def of(self, node: ast.AST) -> str:
        """The kind of an expression, "" when unknown."""
        known = self._known.get(node)
        if known is None:
            self._known[node] = ""  # what depends on itself is unknown
            known = self._known[node] = self._infer(node)
        return known

    def is_module_class(self, node: ast.ClassDef) -> bool:
        """Whether a class of this file derives from torch.nn.Module, as far as its bases show."""
        for base in node.bases:
            name = self._model.qualname(base)
            if name in MODULE_BASES or (name.startswith("torch.nn.") and not name.startswith("torch.nn.functional")):
                return True
            if isinstance(base, ast.Name):
                for binding in self._model.bindings(base):
                    if isinstance(binding.node, ast.ClassDef) and binding.node is not node:
                        if self.is_module_class(binding.node):
                            return True
                    elif binding.kind == "import" and binding.name.endswith(("Module", "Model")):
                        return True
        return False

    def attribute_values(self, node: ast.ClassDef, name: str) -> list[ast.expr]:
        """What the methods of a class assign to `self.name`, and its class-level value."""
        known = self._attributes.get(node)
        if known is None:
            known = self._attributes[node] = {}
            for item in ast.walk(node):
                if isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None:
                    targets = item.targets if isinstance(item, ast.Assign) else [item.target]
                    for target in targets:
                        if (
                            isinstance(target, ast.Attribute)
                            and isinstance(target.value, ast.Name)
                            and target.value.id == "self"
                        ):
                            known.setdefault(target.attr, []).append(item.value)
                        elif isinstance(target, ast.Name) and parent(item) is node:
                            known.setdefault(target.id, []).append(item.value)
        return known.get(name, [])

    # -- inference -----------------------------------------------------------------------------------------

    def _infer(self, node: ast.AST) -> str:
        match node:
            case ast.Constant(value=value):
                return _constant_kind(value)
            case ast.JoinedStr():
                first = node.values[0] if node.values else None
                starts = isinstance(first, ast.Constant) and str(first.value).split(":")[0] in DEVICE_WORD
                return "device_str" if starts else "str"
            case ast.IfExp():
                return self._common([self.of(node.body), self.of(node.orelse)])
            case ast.BoolOp():
                return self._common([self.of(value) for value in node.values])
            case ast.BinOp():
                return self._binary(node)
            case ast.UnaryOp():
                return "bool" if isinstance(node.op, ast.Not) else self.of(node.operand)
            case ast.Compare():
                sides = [self.of(node.left), *(self.of(item) for item in node.comparators)]
                return "tensor" if "tensor" in sides else "bool"
            case ast.Subscript():
                return "tensor" if self.of(node.value) == "tensor" else ""
            case ast.Call():
                return self._call(node)
            case ast.Name():
                return self._common([self._binding(binding) for binding in self._model.bindings(node)])
            case ast.Attribute():
                return self._attribute(node)
            case ast.NamedExpr():
                return self.of(node.value)
            case ast.Await() | ast.Starred():
                return self.of(node.value)
        return ""

    def _common(self, kinds: list[str]) -> str:
        """The kind that all agree on; None beside a kind does not count."""
        distinct = {kind for kind in kinds if kind != "none"}
        if len(distinct) == 1:
            return distinct.pop()
        if distinct and distinct <= {"device", "device_str"}:
            return "device"
        return ""

    def _binary(self, node: ast.BinOp) -> str:
        left, right = self.of(node.left), self.of(node.right)
        if "tensor" in (left, right):
            return "tensor"
        if left in ("str", "device_str") and isinstance(node.op, ast.Mod | ast.Add):
            return left
        if {left, right} <= {"int", "bool"} and not isinstance(node.op, ast.Div):
            return "int"
        if {left, right} <= {"int", "float", "number", "bool"}:
            return "float"
        return ""

    def _call(self, node: ast.Call) -> str:
        name = self._model.qualname(node.func)
        if name:
            return self._torch_call(name, node)
        func = node.func
        if isinstance(func, ast.Name):
            return self._plain_call(func, node)
        if isinstance(func, ast.Attribute):
            return self._method_call(func)
        if self.of(func) == "module":
            return "tensor"
        return ""

    def _torch_call(self, name: str, node: ast.Call) -> str:
        known = _CALLS.get(name)
        if known is not None:
            return known
        head, _, last = name.rpartition(".")
        if head == "torch.optim" or head.startswith("torch.optim."):
            return "optimizer" if last[:1].isupper() and "lr_scheduler" not in head else ""
        if head == "torch.nn.functional":
            return "tensor"
        if head.startswith("torch.nn") and last[:1].isupper():
            return "module"
        if head in ("torch", "torch.cuda") and last in _LEGACY_TENSORS:
            return "tensor"
        if head in ("torch.linalg", "torch.fft", "torch.special"):
            return "tensor"
        if head == "torch" and last[:1].islower() and last not in _TORCH_NOT_TENSOR and last.isidentifier():
            return "tensor"
        if name in ("os.environ.get", "os.getenv"):
            return "str"
        if name.startswith(("torchvision.models.", "timm.create_model")):
            return "module"
        return ""

    def _plain_call(self, func: ast.Name, node: ast.Call) -> str:
        bindings = self._model.bindings(func)
        if not bindings:
            return {"int": "int", "len": "int", "float": "float", "str": "str", "bool": "bool", "round": "int"}.get(
                func.id, ""
            )
        if len(bindings) == 1:
            found = bindings[0].node
            if isinstance(found, ast.ClassDef):
                return "module" if self.is_module_class(found) else f"class:{found.name}"
            if isinstance(found, ast.FunctionDef):
                return self._returned(found)
        return "tensor" if self.of(func) == "module" else ""

    def _returned(self, node: ast.FunctionDef) -> str:
        if node.returns is not None:
            return self._annotation(node.returns)
        values = [
            item.value
            for item in ast.walk(node)
            if isinstance(item, ast.Return) and item.value is not None and callable_around(item) is node
        ]
        return self._common([self.of(value) for value in values]) if values else ""

    def _method_call(self, func: ast.Attribute) -> str:
        receiver = self.of(func.value)
        if receiver == "tensor":
            return _TENSOR_METHODS_TO_OTHER.get(func.attr, "tensor")
        if receiver == "module":
            return "module" if func.attr in _MODULE_SAME else ""
        if receiver == "device_loader":
            return "device_loader" if func.attr == "per_device_loader" else ""
        if receiver == "parser":
            return "args" if func.attr in ("parse_args", "parse_known_args") else ""
        if receiver.startswith("class:") or receiver in ("device", "device_str", "str"):
            return "str" if receiver == "str" else ""
        if not receiver and func.attr in _TENSOR_ONLY and self._model.root.lookup("torch"):
            return "tensor"
        if self.of(func) == "module":
            return "tensor"
        return ""

    def _binding(self, binding: Binding) -> str:
        node = binding.node
        if binding.kind == "param" and isinstance(node, ast.arg):
            return self._parameter(node)
        if binding.kind == "assign" and binding.value is not None:
            above = parent(node)
            if isinstance(above, ast.AnnAssign):
                annotated = self._annotation(above.annotation)
                if annotated and annotated != "str":
                    return annotated
            return self.of(binding.value)
        if binding.kind == "augment":
            return "none"  # `x += 1` keeps what x was
        if binding.kind == "for" and binding.value is not None:
            return self._iterated(binding.value)
        if binding.kind in ("for-part", "comprehension-part", "with-part"):
            return ""
        if binding.kind == "class":
            return ""
        return ""

    def _iterated(self, node: ast.expr) -> str:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
            return "int" if not self._model.bindings(node.func) else ""
        return "tensor" if self.of(node) == "tensor" else ""

    def _parameter(self, node: ast.arg) -> str:
        if node.annotation is not None:
            kind = self._annotation(node.annotation)
            if kind and kind != "str":
                return kind
        for above in parents(node):
            if isinstance(above, FUNCTIONS):
                default = default_of(above, node)
                if default is not None and self.of(default) != "none":
                    kind = self.of(default)
                    return kind if kind in ("device", "device_str", "int", "float", "bool", "dtype") else ""
                owner = class_of(above)
                args = above.args
                if owner is not None and args.args and args.args[0] is node and node.arg == "self":
                    return "module" if self.is_module_class(owner) else f"class:{owner.name}"
                return ""
        return ""

    def _annotation(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            last = node.value.rpartition(".")[2]
            return {"Tensor": "tensor", "Module": "module", "int": "int", "float": "float"}.get(last, "")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self._common([self._annotation(node.left), self._annotation(node.right)])
        if isinstance(node, ast.Constant) and node.value is None:
            return "none"
        if isinstance(node, ast.Subscript):
            if self._model.qualname(node.value) in ("typing.Optional",):
                return self._annotation(node.slice)
            return ""
        name = self._model.qualname(node)
        if name:
            return _ANNOTATIONS.get(name, "")
        if isinstance(node, ast.Name):
            bindings = self._model.bindings(node)
            if not bindings:
                return node.id if node.id in ("int", "float", "str", "bool") else ""
            if len(bindings) == 1 and isinstance(bindings[0].node, ast.ClassDef):
                found = bindings[0].node
                return "module" if self.is_module_class(found) else f"class:{found.name}"
        return ""

    def _attribute(self, node: ast.Attribute) -> str:
        name = self._model.qualname(node)
        if name:
            last = name.rpartition(".")[2]
            is_dtype = name.startswith("torch.") and name.count(".") == 1 and last in _DTYPES
            return "dtype" if is_dtype else ""
        receiver = self.of(node.value)
        if node.attr == "device" and receiver in ("tensor", ""):
            return "device" if receiver == "tensor" else ""
        if receiver == "tensor":
            return {"dtype": "dtype", "shape": "", "is_cuda": "bool", "ndim": "int", "grad": "tensor", "data": "tensor",
                    "T": "tensor", "mT": "tensor"}.get(node.attr, "")  # fmt: skip
        if receiver == "device":
            return {"type": "device_type", "index": "int"}.get(node.attr, "")
        if node.attr == "type" and isinstance(node.value, ast.Attribute) and node.value.attr == "device":
            return "device_type"
        if receiver == "args" or (isinstance(node.value, ast.Name) and node.value.id in ("args", "opt", "hparams")):
            return "int" if node.attr in self._project.int_options else ""
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            owner = class_of(node)
            if owner is not None:
                values = self.attribute_values(owner, node.attr)
                return self._common([self.of(value) for value in values]) if values else ""
        return ""


_DTYPES = frozenset(
    """float16 half bfloat16 float32 float float64 double int8 int16 short int32 int int64 long uint8 bool complex64
    complex128 cfloat cdouble uint16 uint32 uint64""".split()
)


def _constant_kind(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return "device_str" if value.split(":")[0] in DEVICE_WORD else "str"
    return {bool: "bool", int: "int", float: "float"}.get(type(value), "")
