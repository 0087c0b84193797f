"""Where code runs once a step: training and inference loops, `forward`, and what these call in the same file."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass

from tpumigrate.model import LOOPS, before, class_of, loops, parent, parents
from tpumigrate.names import FUNCTIONS
from tpumigrate.rule import Context

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While

LOADER_NAME = re.compile(r"loader|batches|(?:^|[._ ])dl\b|data_iter|(?:train|val|valid|test|eval)_(?:data|dl)\b", re.I)
MODEL_NAME = re.compile(
    r"^_?(?:\w+_)?(?:model|net|network|encoder|decoder|unet|backbone|generator|discriminator)$", re.I
)
_OPTIMIZER = re.compile(r"(?:^|[._])(?:\w*opt(?:im(?:izer)?)?s?(?:_\w+)?|optimizer\w*|scaler)(?:\[.*\])?$", re.I)
_OPTIMIZER_STEPS = frozenset({"torch_xla.core.xla_model.optimizer_step"})
# Functions of a model by their names, wherever they are called from.
_PART_OF_MODEL = re.compile(r"^_?(?:attend|attention|\w+_attention|forward_\w+|\w+_forward|\w*_loss|loss_\w+)$")
# Functions for other devices, and classes that work on the host before the loop.
_ELSEWHERE = re.compile(r"npu|cuda|xpu|mps|onnx|numpy|tflite")
_HOST_CLASSES = re.compile(
    r"Transform(?!er)|Augment|Tokenizer|Collat|Dataset|DataModule|Sampler|(?:Pre|Image|Feature|Post)_?[Pp]rocess"
)
# Frameworks whose callers run these methods once a batch.
_STEP_METHODS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})
# Words in a condition which say that what it guards runs rarely, on request, or on another device.
_RARE = re.compile(
    r"%|debug|verbose|should_|every|interval|freq|\blast|first|plot|visuali[sz]|profil|\bsave|dump|\bprint|\blog(?!it)"
    r"|warn|report|check|validate|tracing|scripting|onnx|export|\bcpu\b|mps|is_cuda|numpy|_cache\b|hasattr"
    r"|__debug__|init|dnn|tflite|coreml|openvino|tensorrt|\bmerged",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Hot:
    """A place that runs again and again.

    kind: "train" (a loop that trains, or a function that makes a step), "infer" (a loop over batches without a
        step), "forward" (of a module)
    region: the loop or function
    called: the place is in a function that is called from there
    """

    kind: str
    region: Loop | Function
    called: bool = False

    @property
    def words(self) -> str:
        """How often the place runs, in words for a message."""
        return {"train": "each step", "infer": "each batch", "forward": "each forward pass"}[self.kind]


def hot(node: ast.AST, ctx: Context) -> Hot | None:
    """Where `node` runs again and again unconditionally, None where it does not as far as the file shows.

    None too behind `if step % n == 0` and the like, and in a branch that ends the loop or raises.
    """
    return _paths(ctx).at(node)


def throttled(node: ast.AST, region: ast.AST | None) -> bool:
    """Whether `node` runs only in some rounds of `region` (or of its function): by a counter, a flag, once."""
    child = node
    for above in parents(node):
        if _rare_branch(above, child):
            return True
        if isinstance(child, ast.stmt) and _after_rare_continue(child):
            return True
        if above is region or isinstance(above, FUNCTIONS):
            return False
        child = above
    return False


def trains(loop: ast.AST, ctx: Context) -> bool:
    """Whether a loop (or function) itself is one that trains."""
    found = _paths(ctx).regions.get(loop)
    return found is not None and found.kind == "train"


# -- the hot places of a file ------------------------------------------------------------------------------


class _Paths:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.regions: dict[ast.AST, Hot] = {}
        self._calls = self._calls_by_function()
        self._find_training()
        self._find_inference()
        self._find_forward()
        self._spread()

    def at(self, node: ast.AST) -> Hot | None:
        child = node
        for above in parents(node):
            if isinstance(above, ast.ExceptHandler | ast.Lambda | ast.ClassDef):
                return None
            if isinstance(above, ast.Assert) and child is above.msg:
                return None
            if _rare_branch(above, child) or (isinstance(child, ast.stmt) and _after_rare_continue(child)):
                return None
            found = self.regions.get(above)
            if found is not None and _in_body(above, child):
                return found
            if isinstance(above, FUNCTIONS):
                return None
            child = above
        return None

    def _calls_by_function(self) -> dict[Function, list[ast.Call]]:
        """Calls of functions and methods of this file."""
        found: dict[Function, list[ast.Call]] = {}
        for call in self._ctx.model.nodes(ast.Call):
            target = called_function(call, self._ctx)
            if target is not None:
                found.setdefault(target, []).append(call)
        return found

    def _find_training(self) -> None:
        for call in self._ctx.model.nodes(ast.Call):
            if not (_is_backward(call) or is_optimizer_step(call, self._ctx)) or in_optimizer(call):
                continue
            self._add_training(call)

    def _add_training(self, call: ast.Call) -> None:
        region = _region(call)
        if region is None or region in self.regions:
            return
        self.regions[region] = Hot("train", region)
        if isinstance(region, FUNCTIONS):
            for use in self._calls.get(region, []):  # the loop around a function that makes one step
                self._add_training(use)

    def _find_inference(self) -> None:
        loops: list[Loop] = [*self._ctx.model.nodes(ast.For), *self._ctx.model.nodes(ast.AsyncFor)]
        for loop in loops:
            if loop not in self.regions and over_batches(loop, self._ctx) and runs_model(loop, self._ctx):
                self.regions[loop] = Hot("infer", loop)

    def _find_forward(self) -> None:
        for node in self._ctx.model.nodes(ast.FunctionDef):
            owner = parent(node)
            if node in self.regions or (isinstance(owner, ast.ClassDef) and _HOST_CLASSES.search(owner.name)):
                continue
            named = _PART_OF_MODEL.match(node.name) and not _RARE.search(node.name)
            if named and not isinstance(owner, ast.FunctionDef):
                self.regions[node] = Hot("forward", node, called=True)
            if not isinstance(owner, ast.ClassDef):
                continue
            if node.name == "forward" and self._ctx.kinds.is_module_class(owner):
                self.regions[node] = Hot("forward", node)
            elif node.name in _STEP_METHODS:
                self.regions[node] = Hot("train" if node.name == "training_step" else "infer", node)

    def _spread(self) -> None:
        """Functions that hot code calls are hot."""
        pending = True
        while pending:
            pending = False
            for target, calls in self._calls.items():
                if target in self.regions or target.name in ("__init__", "reset_parameters"):
                    continue
                if _ELSEWHERE.search(target.name):
                    continue
                for call in calls:
                    found = self.at(call)
                    if found is not None:
                        self.regions[target] = Hot(found.kind, target, called=True)
                        pending = True
                        break


@functools.lru_cache(maxsize=1)
def _paths(ctx: Context) -> _Paths:
    return _Paths(ctx)


# -- calls -------------------------------------------------------------------------------------------------


def called_function(call: ast.Call, ctx: Context) -> Function | None:
    """The function or method of this file that a call runs, where that is one."""
    func = call.func
    if isinstance(func, ast.Name):
        bindings = ctx.model.bindings(func)
        if len(bindings) == 1 and isinstance(bindings[0].node, ast.FunctionDef | ast.AsyncFunctionDef):
            return bindings[0].node
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self":
        owner = class_of(call)
        methods = [item for item in owner.body if isinstance(item, ast.FunctionDef)] if owner else []
        named = [item for item in methods if item.name == func.attr]
        if len(named) == 1:
            return named[0]
    return None


def is_optimizer_step(call: ast.Call, ctx: Context) -> bool:
    """Whether a call makes an optimizer step: `opt.step()`, `scaler.step(opt)`, `xm.optimizer_step(opt)`."""
    func = call.func
    if ctx.qualname(func) in _OPTIMIZER_STEPS:
        return True
    if not isinstance(func, ast.Attribute) or func.attr != "step" or ctx.model.qualnames(func):
        return False
    kind = ctx.kind(func.value)
    return kind in ("optimizer", "scaler") or (not kind and bool(_OPTIMIZER.search(ctx.text(func.value))))


def _is_backward(call: ast.Call) -> bool:
    func = call.func
    return isinstance(func, ast.Attribute) and func.attr in ("backward", "manual_backward")


def in_optimizer(call: ast.Call) -> bool:
    """Whether a step is the inside of an optimizer or loss scaler of the project's own."""
    owner = class_of(call)
    methods = {item.name for item in owner.body if isinstance(item, ast.FunctionDef)} if owner else set()
    return {"step", "zero_grad"} <= methods or {"step", "state_dict"} <= methods


def _region(call: ast.AST) -> Loop | Function | None:
    """What repeats a step: the innermost loop that is not over optimizers, else the function."""
    child = call
    for above in parents(call):
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef):
            return above
        if isinstance(above, ast.Lambda | ast.ClassDef):
            return None
        if isinstance(above, LOOPS) and _in_body(above, child):
            over = ast.unparse(above.iter).lower() if isinstance(above, ast.For) else ""
            if "optim" not in over and "scaler" not in over:
                return above
        child = above
    return None


def over_batches(loop: Loop, ctx: Context) -> bool:
    """Whether a loop is over the batches of a loader, by itself or inside `enumerate` and progress bars."""
    return isinstance(loop, ast.For | ast.AsyncFor) and is_loader(loop.iter, ctx)


def is_loader(node: ast.expr, ctx: Context, depth: int = 4) -> bool:
    """Whether an expression gives the batches of a loader."""
    if ctx.kind(node) in ("loader", "device_loader"):
        return True
    if isinstance(node, ast.Call):
        inside = node.args[:1] if not isinstance(node.func, ast.Attribute) else [*node.args[:1], node.func.value]
        name = ctx.text(node.func).rpartition(".")[2]
        if name in ("enumerate", "tqdm", "iter", "track", "prefetch", "log_every", "trange", "prepare", "islice"):
            return bool(depth) and any(is_loader(item, ctx, depth - 1) for item in inside)
        return False
    if isinstance(node, ast.Name) and depth:
        values = [item.value for item in ctx.model.bindings(node) if item.kind == "assign" and item.value is not None]
        if any(isinstance(value, ast.Call) and is_loader(value, ctx, depth - 1) for value in values):
            return True
    return isinstance(node, ast.Name | ast.Attribute) and bool(LOADER_NAME.search(ctx.text(node)))


def runs_model(loop: ast.AST, ctx: Context) -> bool:
    """Whether a loop calls a model."""
    head = getattr(loop, "iter", None)
    return any(is_model_call(item, ctx) for item in ast.walk(loop) if isinstance(item, ast.Call) and item is not head)


def is_model_call(call: ast.Call, ctx: Context) -> bool:
    """Whether a call runs a module, by its kind or its usual name."""
    kind = ctx.kind(call.func)
    if kind:
        return kind == "module"
    func = call.func
    if ctx.model.qualnames(func):
        return False
    last = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    if isinstance(func, ast.Attribute) and not (isinstance(func.value, ast.Name) and func.value.id == "self"):
        return False
    return bool(MODEL_NAME.match(last)) and called_function(call, ctx) is None


# -- how often ---------------------------------------------------------------------------------------------


def _in_body(region: ast.AST, child: ast.AST) -> bool:
    """Whether `child` is in the part of a loop or function that runs again and again."""
    if isinstance(region, ast.While) and child is region.test:
        return True
    return any(item is child for item in getattr(region, "body", []))


def _rare_branch(above: ast.AST, child: ast.AST) -> bool:
    """Whether `child` is a branch of `above` that does not run each time."""
    if isinstance(above, ast.If):
        if child is above.test:
            return False
        branch = above.body if any(item is child for item in above.body) else above.orelse
        return is_rare(above.test) or _ends(branch[-1])
    if isinstance(above, ast.IfExp):
        return child is not above.test and is_rare(above.test)
    if isinstance(above, ast.BoolOp) and child is not above.values[0]:
        before = above.values[: above.values.index(child)] if isinstance(child, ast.expr) else []
        return any(is_rare(value) for value in before)
    return isinstance(above, LOOPS) and any(item is child for item in above.orelse)


def _ends(stmt: ast.stmt) -> bool:
    """Whether a statement ends the loop that it is in, or all."""
    return isinstance(stmt, ast.Raise | ast.Break) or (isinstance(stmt, ast.Return) and bool(loops(stmt)))


def is_rare(test: ast.expr) -> bool:
    """Whether a condition holds in few rounds only: a counter, the first or last round, a flag of debugging."""
    for item in ast.walk(test):
        if isinstance(item, ast.Compare) and any(_is_number(value) for value in item.comparators):
            names = {name.id for name in ast.walk(item.left) if isinstance(name, ast.Name)}
            if names & {"i", "step", "it", "idx", "iter", "iteration", "batch_idx", "ni", "epoch", "rank", "itr", "n"}:
                return True
    return bool(_RARE.search(ast.unparse(test)))


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _after_rare_continue(stmt: ast.stmt) -> bool:
    """Whether `if step % n: continue` stands before a statement in its block."""
    return any(_skips(item) for item in before(stmt))


def _skips(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.If) and isinstance(stmt.body[-1], ast.Continue | ast.Return) and is_rare(stmt.test)
