"""TPU110: seeding the device's random numbers and keeping their state."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Fix, name, replace
from tpumigrate.model import before, block, parent
from tpumigrate.rule import Context, Report, rule

from ._devices import device_text
from ._table import table_reports

_SEEDS = ("torch.cuda.manual_seed", "torch.cuda.manual_seed_all")
_GENERATOR = "torch.Generator"
_FORK = "torch.random.fork_rng"


@rule("TPU110", "cuda-rng", anchors=("cuda", "Generator", "fork_rng"))
def cuda_rng(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Seeds the GPU's random numbers, or reads or sets their state.

    ## What it does
    Turns `torch.cuda.manual_seed` and `manual_seed_all` into one seed of the device, or drops them where
    `torch.manual_seed` with the same value already does it. Random states and device generators are mapped where the
    target has them.

    ## Why it matters on a TPU
    Without a GPU these calls do nothing, without a word. On torch_xla 2.9 `torch.manual_seed(0)` does not seed the
    device: two draws differ. On torch_tpu it does. `get_rng_state_all()` returns [], so a resumed run replays other
    dropout masks.

    ## Example
    ```python
    import torch

    def seed_everything(seed):
        torch.manual_seed(seed)
        torch.cuda.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla

    def seed_everything(seed):
        torch.manual_seed(seed)
        torch_xla.manual_seed(seed)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def seed_everything(seed):
        torch.manual_seed(seed)
    ```

    ## Example: alone
    ```python
    import torch

    torch.cuda.manual_seed(0)
    x = torch.ones(2)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla

    torch_xla.manual_seed(0)
    x = torch.ones(2)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    torch.tpu.manual_seed(0)
    x = torch.ones(2)
    ```

    ## Example: a generator on the device
    ```python
    import torch

    g = torch.Generator(device="cuda").manual_seed(0)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    g = torch.Generator(device="tpu").manual_seed(0)
    ```

    ## Example (unsafe): the state in a checkpoint
    ```python
    import torch

    def rng():
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla.core.xla_model as xm

    def rng():
        return {"cpu": torch.get_rng_state(), "cuda": xm.get_rng_state()}
    ```

    ## Not flagged
    ```python
    import torch

    torch.manual_seed(0)
    ```
    ```python
    import torch

    g = torch.Generator().manual_seed(0)
    ```
    ```python
    import torch

    g = torch.Generator(device="cpu")
    ```

    ## Fix safety
    Safe. Values drawn on the device differ from the GPU's and the CPU's for the same seed. The state of torch_xla is
    one integer, so checkpoints written on CUDA do not fit it.

    ## References
    torch_xla.manual_seed, torch_xla.core.xla_model.get_rng_state, torch.tpu.manual_seed.
    """
    if isinstance(node, ast.Call):
        called = ctx.qualname(node.func)
        if called in _SEEDS:
            yield from _seed(node, ctx)
            return
        if called in (_GENERATOR, _FORK):
            yield from _device_argument(node, called, ctx)
            return
    yield from table_reports(node, ctx, "TPU110")


def _seed(node: ast.Call, ctx: Context) -> Iterator[Report]:
    message = "without a GPU this seeds nothing, without a word"
    stmt = parent(node)
    if isinstance(stmt, ast.Expr) and len(node.args) == 1 and not node.keywords:
        value = ctx.text(node.args[0])
        siblings = block(stmt)
        others = {ctx.qualname(call.func) for call in _seed_calls(siblings) if ctx.text(call.args[0]) == value}
        earlier = {ctx.qualname(call.func) for call in _seed_calls(before(stmt)) if ctx.text(call.args[0]) == value}
        seeded = "torch.manual_seed" in others if not ctx.xla else "torch_xla.manual_seed" in others
        if seeded or earlier & set(_SEEDS):
            yield Report(node, message, Fix(deletes=(stmt,)))
            return
    if len(node.args) != 1 or node.keywords:
        yield Report(node, message, unfixed="seed the device by hand")
        return
    seed = f"{name('torch_xla')}.manual_seed" if ctx.xla else f"{name('torch')}.tpu.manual_seed"
    yield Report(node, message, Fix((replace(ctx.source, node.func, seed),)))


def _seed_calls(statements: list[ast.stmt]) -> Iterator[ast.Call]:
    for stmt in statements:
        if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call) and len(stmt.value.args) == 1:
            yield stmt.value


def _device_argument(node: ast.Call, called: str, ctx: Context) -> Iterator[Report]:
    if called == _FORK:
        kind = ctx.arg(node, "device_type", 4)
        named = isinstance(kind, ast.Constant) and kind.value == "cuda"
        if named or (kind is None and ctx.arg(node, "devices", 0) is not None):
            yield Report(
                node,
                "fork_rng looks after the states of CUDA devices unless told otherwise",
                unfixed="use xm.fork_rng()" if ctx.xla else 'pass devices=[0], device_type="tpu"',
                severity="warning",
                claims=(node,),
            )
        return
    device = ctx.arg(node, "device", 0)
    if device is None or device_text(device, ctx) is None:
        return
    if ctx.xla:
        yield Report(
            node,
            'there are no generators on an XLA device: `torch.Generator(device="xla")` raises',
            unfixed='make it on the CPU: `torch.Generator()` works with torch.randn(..., generator=g, device="xla")',
            claims=(device,),
        )
    else:
        message = "a generator on a CUDA device raises on a TPU host"
        yield Report(device, message, Fix((replace(ctx.source, device, f'"{ctx.device}"'),)))
