"""XLA107: environment variables of PyTorch/XLA, which TorchTPU does not read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpumigrate.rule import Context, Report, rule

from ._xla_whole import deleted, finds, imports_xla, settled
from .environment import in_environment, setting_of

_IGNORED = re.compile(
    r"(?:PJRT_DEVICE|PJRT_LOCAL_PROCESS_\w+|XRT_\w+|TPU_NUM_DEVICES|PT_XLA_DEBUG\w*|XLA_IR_DEBUG|XLA_HLO_DEBUG"
    r"|XLA_DYNAMO_DEBUG|XLA_SAVE_TENSORS_\w+|XLA_USE_EAGER_DEBUG_MODE|XLA_STABLEHLO_COMPILE|XLA_NO_SPECIAL_SCALARS"
    r"|XLA_USE_32BIT_LONG|XLA_DISABLE_FUNCTIONALIZATION|XLA_PERSISTENT_CACHE_PATH"
    r"|XLA_USE_BF16|XLA_DOWNCAST_BF16|XLA_USE_FP16|XLA_DOWNCAST_FP16|XLA_USE_SPMD|ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB)\Z"
)
_DECIDES = {
    "XLA_USE_BF16": "where it is 1, floating point numbers were bfloat16: move the model with `.to(torch.bfloat16)`, "
    'or use `torch.autocast("tpu", dtype=torch.bfloat16)`, then delete this',
    "XLA_USE_SPMD": "launch one process for each device and shard with DTensor, then delete this",
    "XLA_PERSISTENT_CACHE_PATH": "set TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT before torch is imported",
}
_DECIDES |= dict.fromkeys(("XLA_DOWNCAST_BF16", "XLA_USE_FP16", "XLA_DOWNCAST_FP16"), _DECIDES["XLA_USE_BF16"])


@rule(
    "XLA107", "xla-environment", anchors=("PJRT_", "XRT_", "XLA_", "TPU_NUM_", "BUCKET_SIZE_MB"),
    targets=("torch_tpu",), keeps_cuda=True,
)  # fmt: skip
def xla_environment(node: ast.Module, ctx: Context) -> Iterator[Report]:
    """Sets or reads an environment variable of PyTorch/XLA.

    ## What it does
    Reports variables of PyTorch/XLA in `os.environ`, `os.getenv` and `os.putenv`. In a file that is migrated, a
    statement that only sets one goes, unless the variable changes numbers or how the program is sharded.

    ## Why it matters on a TPU
    TorchTPU reads none of them, without a word. After `XLA_USE_BF16=1` the program trained in bfloat16; with torch_tpu
    it trains in float32, with twice the memory.

    ## Example
    ```python
    import os
    import torch
    import torch_xla

    os.environ["PJRT_DEVICE"] = "TPU"
    os.environ.setdefault("PT_XLA_DEBUG_LEVEL", "1")

    def step(opt):
        opt.step()
        torch_xla.sync()
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch


    def step(opt):
        opt.step()
    ```

    ## Example: what decides numbers, or the program's structure
    ```python
    import os
    import torch_xla

    os.environ["XLA_USE_BF16"] = "1"
    os.environ["XLA_USE_SPMD"] = "1"
    torch_xla.sync()
    ```

    ## Example: outside of the program
    ```python
    import os
    import subprocess

    os.environ["PJRT_DEVICE"] = "TPU"
    if os.environ.get("XRT_TPU_CONFIG"):
        subprocess.run(["python", "train.py"])
    ```

    ## Not flagged
    ```python
    import os

    os.environ["XLA_FLAGS"] = "--xla_dump_to=/tmp/dump"
    os.environ["LIBTPU_INIT_ARGS"] = ""
    ```
    ```python
    HELP = "PJRT_DEVICE"
    TABLE = {"XLA_USE_BF16": 1}
    ```
    ```python
    settings = {}
    settings["PJRT_DEVICE"] = "TPU"
    ```

    ## Fix safety
    Safe: nothing reads them. XLA_FLAGS and LIBTPU_INIT_ARGS are read and stay.

    ## References
    Environment variables read by torch_xla 2.9 and torch_tpu 0.2.
    """
    yield from settled(ctx, "XLA107")


@finds("XLA107")
def _variables(ctx: Context) -> Iterator[Report]:
    for node in ctx.model.nodes(ast.Constant):
        if not isinstance(node.value, str) or not _IGNORED.match(node.value) or not in_environment(node, ctx):
            continue
        message = f"torch_tpu does not read {node.value}"
        stmt = setting_of(node)
        decides = _DECIDES.get(node.value)
        if decides:
            yield Report(node, message, unfixed=decides, severity="warning")
        elif stmt is None:
            yield Report(node, message, unfixed="what depends on it needs another condition", severity="warning")
        elif imports_xla(ctx):
            yield Report(node, message, deleted(stmt), severity="info")
        else:
            yield Report(node, message, unfixed="delete it where nothing else runs PyTorch/XLA", severity="info")
