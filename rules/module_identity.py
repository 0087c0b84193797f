"""TPU114, TPU115: what `.to(device)` breaks, because on a TPU it makes new parameters and leaves the old ones."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix
from tpumigrate.model import block, parent, statement
from tpumigrate.rule import Context, Report, rule

from ._devices import device_text


@rule("TPU114", "optimizer-before-move", anchors=("optim", "Optim", "Adam", "SGD"), keeps_cuda=True)
def optimizer_before_move(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Moves a model to the device after its optimizer was built.

    ## What it does
    Finds `opt = Adam(model.parameters())` followed by `model.cuda()` or `model.to(device)` in the same block, and
    moves the move before the optimizer where nothing in between needs the model on the CPU.

    ## Why it matters on a TPU
    CUDA swaps the storage of the same Parameter objects. On torch_xla and torch_tpu `.to()` makes new ones: the
    optimizer keeps the old, nothing is raised, and the weights never change.

    ## Example
    ```python
    import torch
    from torch import nn, optim

    model = nn.Linear(32, 2)
    opt = optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    model = model.to("cuda")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device
    from torch import nn, optim

    model = nn.Linear(32, 2)
    model = model.to("xla")
    opt = optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    from torch import nn, optim

    model = nn.Linear(32, 2)
    model = model.to("tpu")
    opt = optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    ```

    ## Example: something in between uses the model
    ```python
    import torch

    def build(model, probe):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        print(model(probe))
        model.to("cuda")
        return opt
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device

    def build(model, probe):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        print(model(probe))
        model.to("xla")
        return opt
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def build(model, probe):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        print(model(probe))
        model.to("tpu")
        return opt
    ```

    ## Not flagged
    ```python
    import torch

    model = torch.nn.Linear(2, 2).to("cpu")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    ```
    ```python
    import torch

    model = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(torch.bfloat16)
    ```
    ```python
    import torch

    a = torch.nn.Linear(2, 2)
    b = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(a.parameters(), lr=0.1)
    b.to("cpu")
    ```

    ## Fix safety
    Safe: on CUDA and on the CPU both orders do the same.

    ## References
    torch.nn.Module.to; torch.__future__.set_swap_module_params_on_conversion keeps the objects.
    """
    if not (isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "to")) or not _moves(node, ctx):
        return
    stmt = statement(node)
    model = _moved_name(node, stmt, ctx)
    if not model:
        return
    siblings = block(stmt)
    index = siblings.index(stmt)
    for earlier in range(index - 1, -1, -1):
        if _binds(siblings[earlier], model):
            return
        if _builds_optimizer(siblings[earlier], model, ctx):
            fix = _reordered(siblings, earlier, index, model, ctx)
            unfixed = "" if fix else "what stands between them uses the model; move the model first"
            line = ctx.source.position(ctx.source.span(siblings[earlier])[0])[0]
            yield Report(
                node.func,
                f"the optimizer of line {line} holds the parameters of before this move: it trains nothing on a TPU, "
                "without an error",
                fix,
                unfixed,
            )
            return


def _moves(node: ast.Call, ctx: Context) -> bool:
    """Whether a call of `.to` or `.cuda` names a device."""
    assert isinstance(node.func, ast.Attribute)
    if node.func.attr == "cuda":
        return True
    target = ctx.arg(node, "device", 0)
    if target is None:
        return False
    if isinstance(target, ast.Constant):
        return target.value in ("xla", "tpu") or device_text(target, ctx) is not None
    if ctx.qualname(target):
        return False
    kind = ctx.kind(target)
    return kind in ("device", "device_str", "int") or (
        not kind and isinstance(target, ast.Name | ast.Attribute) and "dev" in ctx.text(target).lower()
    )


def _moved_name(node: ast.Call, stmt: ast.stmt, ctx: Context) -> str:
    """The module that a statement moves as a whole: `m.to(d)` or `m = m.to(d)`."""
    assert isinstance(node.func, ast.Attribute)
    receiver = ctx.text(node.func.value)
    if ctx.kind(node.func.value) in ("tensor", "optimizer") or not receiver.replace(".", "").isidentifier():
        return ""
    alone = isinstance(stmt, ast.Expr) and stmt.value is node
    same = isinstance(stmt, ast.Assign) and stmt.value is node and [ctx.text(t) for t in stmt.targets] == [receiver]
    return receiver if alone or same else ""


def _binds(stmt: ast.stmt, model: str) -> bool:
    return isinstance(stmt, ast.Assign) and any(ast.unparse(target) == model for target in stmt.targets)


def _builds_optimizer(stmt: ast.stmt, model: str, ctx: Context) -> bool:
    if not isinstance(stmt, ast.Assign) or ctx.kind(stmt.value) != "optimizer":
        return False
    return any(
        isinstance(item, ast.Call)
        and isinstance(item.func, ast.Attribute)
        and item.func.attr in ("parameters", "named_parameters")
        and ctx.text(item.func.value) == model
        for item in ast.walk(stmt.value)
    )


def _reordered(siblings: list[ast.stmt], optimizer: int, move: int, model: str, ctx: Context) -> Fix | None:
    source = ctx.source
    for stmt in siblings[optimizer + 1 : move]:
        if any(isinstance(item, ast.Name | ast.Attribute) and ctx.text(item) == model for item in ast.walk(stmt)):
            return None
    needed = {item.id for item in ast.walk(siblings[move]) if isinstance(item, ast.Name) and item.id != model}
    for stmt in siblings[optimizer:move]:
        stored = {n.id for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if stored & needed:
            return None
    start, end = source.span(siblings[move])
    line_start, line_end = source.line_start(start), source.line_end(end)
    target = source.line_start(source.span(siblings[optimizer])[0])
    whole_line = not source.text[line_start:start].strip() and not source.text[end:line_end].strip().startswith(";")
    if not whole_line or source.text[target : source.span(siblings[optimizer])[0]].strip():
        return None
    text = source.text[line_start:line_end]
    if not text.endswith(("\n", "\r")):
        return None
    return Fix((Edit(target, target, text), Edit(line_start, line_end, "")))


@rule("TPU115", "tied-weights", anchors=(".weight",), keeps_cuda=True)
def tied_weights(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Moves a model with tied weights, which come apart.

    ## What it does
    Finds `.to(device)` or `.cuda()` of a model whose class assigns one submodule's parameter to another, and ties
    them again after the move.

    ## Why it matters on a TPU
    `.to()` makes a new Parameter for each place: one shared weight becomes two that train apart, the checkpoint
    grows, no message. Building the model under `with torch.device(...)` keeps the tie.

    ## Example
    ```python
    import torch
    from torch import nn

    class LM(nn.Module):
        def __init__(self, vocab=100, dim=8):
            super().__init__()
            self.emb = nn.Embedding(vocab, dim)
            self.head = nn.Linear(dim, vocab, bias=False)
            self.head.weight = self.emb.weight

    lm = LM()
    lm.to("cuda")
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla  # noqa: F401  registers the device
    from torch import nn

    class LM(nn.Module):
        def __init__(self, vocab=100, dim=8):
            super().__init__()
            self.emb = nn.Embedding(vocab, dim)
            self.head = nn.Linear(dim, vocab, bias=False)
            self.head.weight = self.emb.weight

    lm = LM()
    lm.to("xla")
    lm.head.weight = lm.emb.weight  # .to() split the shared parameter
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    from torch import nn

    class LM(nn.Module):
        def __init__(self, vocab=100, dim=8):
            super().__init__()
            self.emb = nn.Embedding(vocab, dim)
            self.head = nn.Linear(dim, vocab, bias=False)
            self.head.weight = self.emb.weight

    lm = LM()
    lm.to("tpu")
    lm.head.weight = lm.emb.weight  # .to() split the shared parameter
    ```

    ## Not flagged
    ```python
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.a.weight = nn.Parameter(torch.zeros(2, 2))

    Net().to("cpu")
    ```
    ```python
    from torch import nn

    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(4, 2)
            self.head = nn.Linear(2, 4, bias=False)
            self.head.weight = self.emb.weight

    lm = LM()
    ```

    ## Fix safety
    Safe: on other devices the assignment changes nothing.

    ## References
    torch.nn.Module.to.
    """
    func = node.func
    if not (isinstance(func, ast.Attribute) and func.attr in ("cuda", "to")) or not _moves(node, ctx):
        return
    owner = _class_of_value(func.value, ctx)
    if owner is None:
        return
    ties = list(_ties(owner, ctx))
    if not ties:
        return
    message = "moving this model splits its tied weights: " + ", ".join(f"{a} and {b}" for a, b in ties)
    stmt = statement(node)
    variable = _variable(node, stmt, ctx)
    siblings = block(stmt)
    after = siblings[siblings.index(stmt) + 1 :]
    if variable and any(_is_tie(item, variable, ties, ctx) for item in after):
        return
    end = ctx.source.line_end(ctx.source.span(stmt)[1])
    start = ctx.source.span(stmt)[0]
    alone = not ctx.source.text[ctx.source.line_start(start) : start].strip()
    if not variable or not alone:
        yield Report(func, message, unfixed="tie them again after the move")
        return
    indent, newline = ctx.source.indent(start), ctx.source.newline
    lines = [f"{indent}{variable}.{a} = {variable}.{b}  # .to() split the shared parameter{newline}" for a, b in ties]
    text = "".join(lines)
    if not ctx.source.text[:end].endswith(("\n", "\r")):
        text = newline + text.removesuffix(newline)
    yield Report(func, message, Fix((Edit(end, end, text),)))


def _class_of_value(node: ast.expr, ctx: Context) -> ast.ClassDef | None:
    """The class of this file that an expression is an instance of."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda", "train", "eval", "float"):
            return _class_of_value(node.func.value, ctx)
        if isinstance(node.func, ast.Name):
            found = [b.node for b in ctx.model.bindings(node.func)]
            return found[0] if len(found) == 1 and isinstance(found[0], ast.ClassDef) else None
        return None
    if isinstance(node, ast.Name):
        classes = {
            _class_of_value(binding.value, ctx)
            for binding in ctx.model.bindings(node)
            if binding.value is not None and not _mentions(binding.value, node.id)
        }
        return classes.pop() if len(classes) == 1 else None
    return None


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(item, ast.Name) and item.id == name for item in ast.walk(node))


def _ties(owner: ast.ClassDef, ctx: Context) -> Iterator[tuple[str, str]]:
    """Pairs of attribute paths below self that the constructor makes one parameter."""
    for item in ast.walk(owner):
        if isinstance(item, ast.Assign) and len(item.targets) == 1:
            target, value = ctx.text(item.targets[0]), ctx.text(item.value)
            paths = (target, value)
            if all(path.startswith("self.") and path.endswith(".weight") for path in paths) and all(
                path.replace(".", "").replace("[", "").replace("]", "").replace('"', "").replace("'", "").isidentifier()
                for path in paths
            ):
                yield target.removeprefix("self."), value.removeprefix("self.")


def _variable(node: ast.Call, stmt: ast.stmt, ctx: Context) -> str:
    """The variable that holds the moved model after the statement."""
    if isinstance(stmt, ast.Expr) and stmt.value is node and isinstance(node.func, ast.Attribute):
        return node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    above = parent(node)
    if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Name):
        return stmt.targets[0].id if above is stmt else ""
    return ""


def _is_tie(stmt: ast.stmt, variable: str, ties: list[tuple[str, str]], ctx: Context) -> bool:
    if isinstance(stmt, ast.Assign):
        return ctx.text(stmt.targets[0]) in {f"{variable}.{a}" for a, _ in ties}
    return "tie_weights" in ctx.text(stmt)
