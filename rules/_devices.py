"""How code spells a device: which strings name one, and where a string stands for a device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tpumigrate.model import arguments, default_of, function, parent, parents
from tpumigrate.rule import Context

_LITERAL = re.compile(r"(?P<type>cuda|xla)(?::(?P<index>\d+))?\Z")
_OPEN = re.compile(r"(?P<type>cuda|xla):(?:\{\}|\{0\}|%d|%s|%i)?\Z")
_DEVICE_NAME = re.compile(r"(?:^|_)(?:devices?|dev|device_?type|device_?str|device_?name)(?:_|\d|$)", re.IGNORECASE)
_MOVES = ("to", "to_empty")
# Methods of an operator made by torch.library.custom_op.
_KERNEL_METHODS = frozenset({"register_kernel", "register_autocast", "set_kernel_enabled"})
# Packages whose functions hand `device` on to torch.
TORCH_FAMILY = frozenset(
    """torch torchvision torchaudio torchtext timm transformers diffusers accelerate peft einops lightning
    pytorch_lightning torch_geometric kornia open_clip clip whisper sentence_transformers""".split()
)
# Calls in which another rule looks after the device argument.
SPECIAL_CALLS = frozenset(
    """torch.load torch.autocast torch.cuda.amp.autocast torch.amp.GradScaler torch.amp.custom_fwd
    torch.amp.custom_bwd torch.Generator torch.random.fork_rng torch_xla.amp.autocast""".split()
)


@dataclass(frozen=True)
class DeviceText:
    """An expression whose value is a device string.

    node: the whole expression; type: cuda or xla; index: its literal number, None when absent or computed
    parts: the expressions that compute the index
    """

    node: ast.expr
    type: str
    index: int | None = None
    parts: tuple[ast.expr, ...] = ()


def foreign_types(ctx: Context) -> tuple[str, ...]:
    """Device types that are to become the target's; "xla" stays where a file stays with torch_xla."""
    from ._xla_whole import stays_on_xla  # which asks this module for places of names

    return ("cuda",) if ctx.xla or stays_on_xla(ctx) else ("cuda", "xla")


def device_text(node: ast.AST, ctx: Context) -> DeviceText | None:
    """`node` as a device string to migrate: a literal, an f-string, a format, or a concatenation."""
    found = _device_text(node)
    return found if found is not None and found.type in foreign_types(ctx) else None


def _device_text(node: ast.AST) -> DeviceText | None:
    match node:
        case ast.Constant(value=str(text)):
            match_ = _LITERAL.match(text)
            if match_:
                return DeviceText(node, match_["type"], int(match_["index"]) if match_["index"] else None)
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), ast.FormattedValue() as field]):
            match_ = _OPEN.match(text)
            if match_ and text.endswith(":"):
                return DeviceText(node, match_["type"], parts=(field.value,))
        case ast.JoinedStr(values=[ast.Constant(value=str(text))]):
            match_ = _LITERAL.match(text)
            if match_:
                return DeviceText(node, match_["type"])
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Add() | ast.Mod(), right=right):
            match_ = _OPEN.match(text)
            if match_:
                return DeviceText(node, match_["type"], parts=(right,))
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format"), args=[only], keywords=[]):
            match_ = _OPEN.match(text)
            if match_ and "{" in text:
                return DeviceText(node, match_["type"], parts=(only,))
    return None


def is_device_name(name: str) -> bool:
    """Whether an identifier names a device by the field's habits: device, dev, device_type, DEVICE, my_device."""
    return bool(_DEVICE_NAME.search(name))


def quote(text: str) -> str:
    """The quotation mark with which a string literal is written."""
    return "'" if text.lstrip("fFrRbBuU").startswith("'") else '"'


def quote_in(node: ast.AST, ctx: Context) -> str:
    """The quotation mark that the strings inside an expression are written with."""
    strings = [item for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return quote(ctx.text(strings[0])) if strings else '"'


def in_device_position(node: ast.expr, ctx: Context) -> bool | None:
    """Whether a string at this place is used as a device: True, None when it may be, False when it is not."""
    place: ast.AST = node
    above = parent(node)
    while isinstance(above, ast.IfExp) and place is not above.test:
        place, above = above, parent(above)
    while isinstance(above, ast.BoolOp):
        place, above = above, parent(above)
    match above:
        case ast.keyword():
            return _keyword_position(above, ctx)
        case ast.Call():
            return _positional(place, above, ctx)
        case ast.Assign():
            return _any([_target_position(target, ctx) for target in above.targets])
        case ast.AnnAssign() | ast.NamedExpr():
            return _target_position(above.target, ctx)
        case ast.arguments():
            return _default_position(place, above)
        case ast.Return():
            owner = function(above)
            return True if owner is not None and is_device_name(owner.name) else None
        case ast.Dict():
            return _dict_position(place, above)
    return False


def _any(answers: list[bool | None]) -> bool | None:
    return True if True in answers else None if None in answers else False


def _keyword_position(keyword: ast.keyword, ctx: Context) -> bool | None:
    call = parent(keyword)
    if not isinstance(call, ast.Call) or keyword.arg is None:
        return False
    name = ctx.qualname(call.func)
    if name in SPECIAL_CALLS:
        return False
    if keyword.arg == "default" and _is_device_option(call):
        return True
    if name.startswith("torch.cuda."):
        return False  # the call speaks, and if another one takes its place its arguments are looked at again
    if not is_device_name(keyword.arg) and not (keyword.arg == "type" and name == "torch.device"):
        return False
    root = name.partition(".")[0]
    if not name or name.startswith(".") or root in TORCH_FAMILY:
        return True
    return None  # another library's idea of a device


def registers_kernel(node: ast.AST, ctx: Context) -> bool:
    """Whether a text tells for which device an operator of the project's own gets a kernel (torch.library)."""
    above = parent(node)
    call = parent(above) if isinstance(above, ast.keyword) else above
    if not isinstance(call, ast.Call) or node is call.func:
        return False
    last = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return ctx.qualname(call.func).startswith("torch.library.") or last in _KERNEL_METHODS


def is_option(call: ast.Call) -> bool:
    """Whether a call declares an option of a command line."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("add_argument", "add_option", "option")


def _is_device_option(call: ast.Call) -> bool:
    return is_option(call) and any(
        is_device_name(arg.value.strip("-").replace("-", "_"))
        for arg in call.args
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    )


def _positional(node: ast.AST, call: ast.Call, ctx: Context) -> bool | None:
    if node is call.func or node not in call.args:
        return False
    position = call.args.index(node)
    name = ctx.qualname(call.func)
    if name in SPECIAL_CALLS:
        return False
    if name in ("torch.device", "torch.set_default_device", "torch.get_autocast_dtype", "torch.is_autocast_enabled"):
        return position == 0
    if name == "torch.distributed.device_mesh.init_device_mesh":
        return position == 0
    if name.startswith(("torch.tpu.", "torch.accelerator.")):
        return position == 0
    func = call.func
    if isinstance(func, ast.Attribute):
        if func.attr in _MOVES and position == 0 and not name:
            return True
        if func.attr == "get" and position == 1:
            return _names_device(call.args[0])
    if isinstance(func, ast.Name):
        if func.id in ("getattr",) and position == 2:
            return _names_device(call.args[1])
        for binding in ctx.model.bindings(func):
            if isinstance(binding.node, ast.FunctionDef):
                names = [arg.arg for arg in [*binding.node.args.posonlyargs, *binding.node.args.args]]
                return position < len(names) and is_device_name(names[position])
            if isinstance(binding.node, ast.ClassDef):
                return _constructor_position(binding.node, position)
    return False


def _constructor_position(node: ast.ClassDef, position: int) -> bool:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            names = [arg.arg for arg in item.args.args][1:]
            return position < len(names) and is_device_name(names[position])
    return False


def _names_device(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and is_device_name(node.value)


def _target_position(target: ast.expr, ctx: Context) -> bool | None:
    match target:
        case ast.Name():
            return True if is_device_name(target.id) or _flows_to_device(target, ctx) else None
        case ast.Attribute():
            return True if is_device_name(target.attr) else None
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return True if is_device_name(key) else None
    return None


def _flows_to_device(target: ast.Name, ctx: Context) -> bool:
    """Whether a variable is passed where only a device can stand."""
    for use in ctx.model.uses(target.id):
        above = parent(use)
        if isinstance(above, ast.keyword) and above.arg == "device":
            return True
        if isinstance(above, ast.Call) and use in above.args:
            func = above.func
            if isinstance(func, ast.Attribute) and func.attr == "to" and above.args[0] is use:
                return True
            if ctx.qualname(func) == "torch.device":
                return True
    return False


def _default_position(node: ast.AST, args: ast.arguments) -> bool:
    owner = parent(args)
    if owner is None:
        return False
    return any(default_of(owner, arg) is node and is_device_name(arg.arg) for arg in arguments(owner))


def _dict_position(node: ast.AST, dictionary: ast.Dict) -> bool | None:
    for key, value in zip(dictionary.keys, dictionary.values, strict=True):
        if value is node:
            return bool(key is not None and _names_device(key)) or None
    return False


_TEST_WORDS = ("skip", "mark", "parametrize", "require", "patch")


def in_test_decorator(node: ast.AST) -> bool:
    """Whether a node is part of a test's decorator or skip condition: tests select devices there."""
    child = node
    for above in parents(node):
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return child in above.decorator_list and _is_of_tests(child)
        if isinstance(above, ast.Call) and child is not above.func:
            func = above.func
            called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if called in ("skipif", "skipIf", "skipUnless", "skip_if", "parametrize"):
                return True
        child = above
    return False


def _is_of_tests(decorator: ast.AST) -> bool:
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator).lower()
    return any(word in name for word in _TEST_WORDS)


def is_annotation(node: ast.AST) -> bool:
    """Whether a node stands inside a type annotation."""
    child = node
    for above in parents(node):
        if isinstance(above, ast.arg | ast.AnnAssign):
            return child is above.annotation
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef):
            return child is above.returns
        if isinstance(above, ast.stmt):
            return False
        child = above
    return False


def option_choices(call: ast.Call) -> Iterator[ast.expr]:
    """The elements of the `choices` of an add_argument call."""
    for keyword in call.keywords:
        if keyword.arg == "choices" and isinstance(keyword.value, ast.List | ast.Tuple | ast.Set):
            yield from keyword.value.elts
