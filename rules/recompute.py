"""TPU803: activation checkpointing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Edit, Fix, name
from tpumigrate.model import call_of
from tpumigrate.rule import Context, Report, rule

_CHECKPOINT = "torch.utils.checkpoint.checkpoint"
_SEQUENTIAL = "torch.utils.checkpoint.checkpoint_sequential"
_OTHER = frozenset(
    {
        "torch.utils.checkpoint.create_selective_checkpoint_contexts",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper",
    }
)
_ACCEPTED = frozenset({"use_reentrant", "preserve_rng_state"})


@rule("TPU803", "activation-checkpointing", anchors=("checkpoint",), targets=("torch_xla",))
def activation_checkpointing(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Activations are recomputed with torch.utils.checkpoint, which does not know XLA devices.

    ## What it does
    Finds `torch.utils.checkpoint.checkpoint` and writes PyTorch/XLA's function of that name, which is
    reentrant. What has no twin there, such as `checkpoint_sequential`, is reported.

    ## Why it matters on a TPU
    `torch.utils.checkpoint` saves the random state through `torch.xla`, which does not exist: "module 'torch'
    has no attribute 'xla'". Without the optimization barrier of PyTorch/XLA's version the compiler merges the
    recomputation with the forward pass, and no memory is saved. TorchTPU works with torch's own.

    ## Example
    ```python
    import torch
    from torch.utils.checkpoint import checkpoint

    class Block(torch.nn.Module):
        def forward(self, x):
            return checkpoint(self.f, x, use_reentrant=True)
    ```

    ## Use instead
    ```python
    import torch
    import torch_xla.utils.checkpoint

    class Block(torch.nn.Module):
        def forward(self, x):
            return torch_xla.utils.checkpoint.checkpoint(self.f, x, use_reentrant=True)
    ```

    ## Example: not reentrant (unsafe)
    ```python
    import torch.utils.checkpoint as cp

    def block(f, x, flag):
        y = cp.checkpoint(f, x, use_reentrant=False)
        return cp.checkpoint(f, y, preserve_rng_state=False, use_reentrant=flag)
    ```

    ## Use instead
    ```python
    import torch_xla.utils.checkpoint

    def block(f, x, flag):
        y = torch_xla.utils.checkpoint.checkpoint(f, x, use_reentrant=True)
        return torch_xla.utils.checkpoint.checkpoint(f, y, preserve_rng_state=False, use_reentrant=True)
    ```

    ## Example: no twin
    ```python
    import functools
    from torch.utils import checkpoint
    from transformers import TrainingArguments

    def stack(mods, x, mask, model):
        x = checkpoint.checkpoint_sequential(mods, 2, x, use_reentrant=False)
        x = checkpoint.checkpoint(mods[0], x, mask=mask, use_reentrant=False)
        again = functools.partial(checkpoint.checkpoint, use_reentrant=False)
        model.gradient_checkpointing_enable()
        return again(mods[1], x), TrainingArguments("out", gradient_checkpointing=True)
    ```

    ## Not flagged
    ```python
    import torch_xla.utils.checkpoint as cp

    def block(f, x):
        return cp.checkpoint(f, x)
    ```
    ```python
    def checkpoint(f, x):
        return f(x)

    print(checkpoint(abs, -1))
    ```
    ```python
    import torch
    from torch.distributed import checkpoint

    def load(state, path):
        checkpoint.load(state, checkpoint_id=path)
        return torch.load(path, map_location="cpu")["checkpoint"]
    ```

    ## Fix safety
    Safe where the call is reentrant. Changing `use_reentrant=False` is unsafe: the reentrant kind gives
    parameters no gradient unless an input requires one (after a frozen embedding none does), and does not
    support `torch.autograd.grad`.

    ## References
    torch_xla.utils.checkpoint; ran on torch_xla 2.9.
    """
    if isinstance(node, ast.Call):
        yield from _called(node, ctx)
        return
    if call_of(node) or not isinstance(node.ctx, ast.Load):
        return
    found = ctx.qualname(node)
    if found in (_CHECKPOINT, _SEQUENTIAL):
        why = "it is handed on: use `torch_xla.utils.checkpoint.checkpoint`, which is always reentrant"
        yield Report(node, f"`{found}` raises with XLA tensors", unfixed=why)


def _called(node: ast.Call, ctx: Context) -> Iterator[Report]:
    found = ctx.qualname(node.func)
    message = f"`{found}` raises with XLA tensors"
    if found == _CHECKPOINT:
        fix = _rewritten(node, ctx)
        if isinstance(fix, str):
            yield Report(node, message, unfixed=fix)
        else:
            yield Report(node, message, fix)
    elif found == _SEQUENTIAL or found in _OTHER:
        why = "torch_xla has no such function: call `torch_xla.utils.checkpoint.checkpoint` on each part"
        yield Report(node, message, unfixed=why)
    elif _is_of_transformers(node, found):
        message = "transformers recomputes activations with torch.utils.checkpoint, which raises with XLA tensors"
        why = "wrap the layers with `torch_xla.utils.checkpoint.checkpoint`, or train without recomputation"
        yield Report(node, message, unfixed=why, severity="warning")


def _is_of_transformers(node: ast.Call, found: str) -> bool:
    if isinstance(node.func, ast.Attribute) and node.func.attr == "gradient_checkpointing_enable":
        return True
    return found.startswith("transformers.") and any(
        item.arg == "gradient_checkpointing" and isinstance(item.value, ast.Constant) and item.value.value is True
        for item in node.keywords
    )


def _rewritten(node: ast.Call, ctx: Context) -> Fix | str:
    """The fix that calls torch_xla's function, or why there is none."""
    others = [item.arg for item in node.keywords if item.arg not in _ACCEPTED]
    if None in others:
        return "it has stars; torch_xla's function takes `use_reentrant` and `preserve_rng_state` only"
    if others:
        return f"torch_xla's function does not accept {', '.join(map(str, others))}: pass by position"
    edits = [ctx.edit(node.func, name("torch_xla.utils.checkpoint") + ".checkpoint")]
    reentrant = ctx.arg(node, "use_reentrant")
    same = reentrant is None or (isinstance(reentrant, ast.Constant) and reentrant.value is True)
    if reentrant is not None and not same:
        edits.append(Edit(*ctx.source.span(reentrant), "True"))
    return Fix(tuple(edits), safe=same)
