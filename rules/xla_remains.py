"""XLA108: helpers of PyTorch/XLA around training, and questions whether a device is an XLA device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, call_parentheses, name
from tpumigrate.model import has_stars, parent
from tpumigrate.rule import Context, Report, rule

from ._common import imports_torch
from ._devices import in_test_decorator, quote
from ._worker import is_simple_line
from ._xla_whole import XM, Use, finds, handles, imports_xla, processes, settled
from .predicates import is_device_text, is_device_type

_QUESTION = 'on torch_tpu a device is a "tpu", so this is always {}'


@rule("XLA108", "xla-remains", anchors=("torch_xla", "xla"), targets=("torch_tpu",), keeps_cuda=True)
def xla_remains(node: ast.Module, ctx: Context) -> Iterator[Report]:
    """Uses helpers of PyTorch/XLA around training, or asks whether a device is an XLA device.

    ## What it does
    Writes plain Python for `xm.master_print`, `xm.add_step_closure` and, in a program of one process, for
    `xm.mesh_reduce` and `xm.save`; torch's own optimizers and checkpointing for those of torch_xla. In a file that is
    migrated, `device.type == "xla"` asks for "tpu". In other files such questions are reported.

    ## Why it matters on a TPU
    The helpers are gone with torch_xla. The questions raise nothing: their answer is False, and the arm that was meant
    for the TPU is dead.

    ## Example: one process
    ```python
    import torch
    import torch_xla.core.xla_model as xm

    def log(step, loss):
        xm.master_print("step", step, loss.item(), flush=True)

    def train(model, loss, x):
        xm.add_step_closure(log, args=((3), loss,), run_async=True)
        if x.device.type == "xla" and "xla" in str(loss.device):
            xm.mark_step()
        accuracy = float(model(x).mean())
        return xm.mesh_reduce("accuracy", accuracy, max)

    if __name__ == "__main__":
        train(torch.nn.Linear(1, 1), torch.ones(1), torch.ones(1))
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def log(step, loss):
        print("step", step, loss.item(), flush=True)

    def train(model, loss, x):
        log((3), loss)
        if x.device.type == "tpu" and "tpu" in str(loss.device):
            pass
        accuracy = float(model(x).mean())
        return max([accuracy])

    if __name__ == "__main__":
        train(torch.nn.Linear(1, 1), torch.ones(1), torch.ones(1))
    ```

    ## Example: saving
    ```python
    import torch
    import torch_xla.core.xla_model as xm

    def main(path):
        model = torch.nn.Linear(2, 2).to(xm.xla_device())
        xm.save(model.state_dict(), path)

    if __name__ == "__main__":
        main("model.pt")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def main(path):
        model = torch.nn.Linear(2, 2).to(torch.device("tpu"))
        torch.save({key: value.cpu() for key, value in model.state_dict().items()}, path)

    if __name__ == "__main__":
        main("model.pt")
    ```

    ## Example: several processes
    ```python
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm

    def main(loss):
        dist.init_process_group("xla", init_method="xla://")
        xm.master_print(
            "loss", loss
        )
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch.distributed as dist

    def main(loss):
        dist.init_process_group("tpu_dist")
        if dist.get_rank() == 0:
            print(
            "loss", loss
        )
    ```

    ## Example: torch's own
    ```python
    import torch
    from torch_xla.amp import syncfree
    from torch_xla.utils.checkpoint import checkpoint

    def run(model, x):
        opt = syncfree.SGD(model.parameters(), lr=0.1)
        return opt, checkpoint(model, x, use_reentrant=True)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch
    import torch.optim
    import torch.utils.checkpoint

    def run(model, x):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        return opt, torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
    ```

    ## Example: a question in a file without torch_xla
    ```python
    import torch

    def step(x: torch.Tensor):
        if x.device.type == "xla" or x.is_xla:
            return x.bfloat16()
        return x
    ```

    ## Not flagged
    ```python
    import torch

    def compiler(name, args):
        return name == "xla" or args.backend == "xla"
    ```
    ```python
    import torch

    def place(x):
        return x.device.type in ("cuda", "tpu")
    ```
    ```python
    class Options:
        is_xla = True

    print(Options().is_xla)
    ```

    ## Fix safety
    Safe. Saving anything but the state of a module is unsafe: tensors in the file are then on the TPU.

    ## References
    torch_xla.core.xla_model of torch_xla 2.9; torch.save, torch.distributed.get_rank.
    """
    yield from settled(ctx, "XLA108")


# -- helpers -----------------------------------------------------------------------------------------------


@handles("XLA108", f"{XM}.master_print")
def _master_print(use: Use, ctx: Context) -> Report | None:
    message = "`xm.master_print` prints in the first process"
    if not isinstance(use, ast.Call):
        return None
    if {keyword.arg for keyword in use.keywords} - {"flush"}:
        return Report(use, message, unfixed="write `print` with `file=` behind a test of the rank")
    printing = ctx.edit(use.func, "print")
    if processes(ctx) == "one":
        return Report(use, message, Fix((printing,)))
    stmt = parent(use)
    if processes(ctx) != "many" or not isinstance(stmt, ast.Expr) or not is_simple_line(stmt, ctx):
        why = "write `print` behind `if torch.distributed.get_rank() == 0:` where there are several processes"
        return Report(use, message, unfixed=why)
    start = ctx.source.span(stmt)[0]
    indent = ctx.source.indent(start)
    inner = "\t" if indent.endswith("\t") else "    "
    guard = f"if {name('torch.distributed')}.get_rank() == 0:{ctx.source.newline}{indent}{inner}"
    return Report(use, message, Fix((Edit(start, start, guard), printing)))


@handles("XLA108", f"{XM}.add_step_closure")
def _step_closure(use: Use, ctx: Context) -> Report | None:
    """`xm.add_step_closure(f, args=(a, b))` as a call."""
    message = "`xm.add_step_closure` waits for the end of a step, which torch_tpu has not: call the function"
    args = ctx.arg(use, "args", 1) if isinstance(use, ast.Call) else None
    if not isinstance(use, ast.Call) or not isinstance(parent(use), ast.Expr) or has_stars(use):
        return None
    if not use.args or not isinstance(use.args[0], ast.Name | ast.Attribute):
        return None
    if args is not None and (not isinstance(args, ast.Tuple) or not args.elts):
        return None
    opening, closing = call_parentheses(ctx.source, use)
    edits = [ctx.edit(use.func, ctx.text(use.args[0]))]
    if not isinstance(args, ast.Tuple):
        edits.append(Edit(opening + 1, closing - 1, ""))
        return Report(use, message, Fix(tuple(edits)))
    start, end = ctx.source.span(args)
    inner = ctx.source.text[start + 1 : end - 1].rstrip().removesuffix(",")
    if any(token.kind == "comment" for token in ctx.source.tokens(opening, closing)):
        return Report(use, message, unfixed=f"write `{ctx.text(use.args[0])}({inner})`")
    edits += [Edit(opening + 1, start + 1, ""), Edit(start + 1 + len(inner), closing - 1, "")]
    return Report(use, message, Fix(tuple(edits)))


@handles("XLA108", f"{XM}.mesh_reduce")
def _mesh_reduce(use: Use, ctx: Context) -> Report | None:
    """In one process, and of a plain number: `fn([value])`."""
    if not isinstance(use, ast.Call) or processes(ctx) != "one" or len(use.args) != 3 or use.keywords:
        return None
    tag, data, reduce = use.args
    if ctx.kind(data) not in ("int", "float", "number") or not isinstance(reduce, ast.Name | ast.Attribute):
        return None
    if not isinstance(tag, ast.Constant | ast.Name):
        return None
    start, end = ctx.source.span(use)
    first, last = ctx.source.span(data)
    edits = (Edit(start, first, f"{ctx.text(reduce)}(["), Edit(last, end, "])"))
    return Report(use, "this program has one process, whose value is the only one", Fix(edits))


@handles("XLA108", f"{XM}.save")
def _save(use: Use, ctx: Context) -> Report | None:
    """In one process: `torch.save`, of what is on the CPU."""
    if not isinstance(use, ast.Call) or processes(ctx) != "one" or len(use.args) != 2 or use.keywords:
        return None
    message = "`xm.save` copies tensors to the CPU before it saves them"
    data = use.args[0]
    save = ctx.edit(use.func, f"{name('torch')}.save")
    if _is_state_dict(data, ctx):
        start, end = ctx.source.span(data)
        edits = (save, Edit(start, start, "{key: value.cpu() for key, value in "), Edit(end, end, ".items()}"))
        return Report(use, message, Fix(edits))
    return Report(use, message, Fix((save,), safe=False))


def _is_state_dict(node: ast.expr, ctx: Context) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "state_dict"
        and not node.args
        and not node.keywords
        and ctx.kind(node.func.value) == "module"
    )


# -- questions ---------------------------------------------------------------------------------------------


@finds("XLA108")
def _questions(ctx: Context) -> Iterator[Report]:
    if not imports_torch(ctx):
        return
    for compare in ctx.model.nodes(ast.Compare):
        text = _asked_text(compare, ctx)
        if text is not None and not in_test_decorator(compare):
            mark = quote(ctx.text(text))
            yield _question(compare, ctx.edit(text, f"{mark}{ctx.device}{mark}"), ctx)
    for call in ctx.model.nodes(ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "startswith" and len(call.args) == 1:
            text = call.args[0]
            if _is_xla(text) and is_device_text(call.func.value, ctx):
                mark = quote(ctx.text(text))
                yield _question(call, ctx.edit(text, f"{mark}{ctx.device}{mark}"), ctx)
    for attribute in ctx.model.nodes(ast.Attribute):
        if attribute.attr == "is_xla" and isinstance(attribute.ctx, ast.Load) and ctx.kind(attribute.value) == "tensor":
            end = ctx.source.span(attribute)[1]
            edit = ctx.edit(attribute, f'{ctx.text(attribute.value)}.device.type == "{ctx.device}"')
            small = not edit.text.startswith("(")
            yield _question(attribute, Edit(end - 6, end, f'device.type == "{ctx.device}"') if small else edit, ctx)


def _question(node: ast.expr, edit: Edit, ctx: Context) -> Report:
    unequal = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotEq | ast.NotIn)
    message = _QUESTION.format(unequal)
    if imports_xla(ctx):
        return Report(node, message, Fix((edit,)))
    return Report(node, message, unfixed='decide whether what it guards holds for a "tpu" too', severity="warning")


def _asked_text(node: ast.Compare, ctx: Context) -> ast.expr | None:
    """The text "xla" that a device is compared with."""
    if len(node.ops) != 1:
        return None
    left, right = node.left, node.comparators[0]
    if isinstance(node.ops[0], ast.Eq | ast.NotEq):
        for one, other in ((left, right), (right, left)):
            if _is_xla(one) and is_device_type(other, ctx):
                return one
    elif isinstance(node.ops[0], ast.In | ast.NotIn) and _is_xla(left) and is_device_text(right, ctx):
        return left
    return None


def _is_xla(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == "xla"
