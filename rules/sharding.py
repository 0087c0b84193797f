"""TPU304 and TPU308: sharded models and synchronised batch norms."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.rule import Context, Report, rule

_FSDP1 = frozenset(
    {
        "torch.distributed.fsdp.FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    }
)
_FSDP2 = frozenset(
    {
        "torch.distributed.fsdp.fully_shard", "torch.distributed._composable.fsdp.fully_shard",
        "torch.distributed._composable.fsdp.fully_shard.fully_shard",
        "torch.distributed._composable.fully_shard",
    }
)  # fmt: skip
_SYNC_NORM = ("torch.nn.SyncBatchNorm", "torch.nn.modules.batchnorm.SyncBatchNorm")


@rule("TPU304", "fsdp", anchors=("FullyShardedDataParallel", "fully_shard"))
def fsdp(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """A model is sharded with torch's FSDP.

    ## What it does
    Finds `FullyShardedDataParallel`, and for PyTorch/XLA `fully_shard` too.

    ## Why it matters on a TPU
    On TorchTPU `FullyShardedDataParallel` raises ("aten::record_stream is not implemented"); `fully_shard`,
    its successor, works. On PyTorch/XLA both raise; it has `XlaFullyShardedDataParallel` with options of its
    own, and SPMD sharding.

    ## Example
    ```python
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    def wrap(model, rank):
        return FSDP(model, sync_module_states=True)
    ```

    ## Example: the successor (torch_xla)
    ```python
    from torch.distributed.fsdp import fully_shard

    def shard(model):
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)
    ```

    ## Not flagged
    ```python
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP

    def wrap(model):
        return FSDP(model)
    ```
    ```python
    from torch.distributed.fsdp import FullyShardedDataParallel

    def is_sharded(model):
        return isinstance(model, FullyShardedDataParallel)
    ```
    ```python
    def fully_shard(model):
        return model

    fully_shard(3)
    ```

    ## Fix safety
    There is no fix: the options of the successors differ.

    ## References
    torch.distributed.fsdp.fully_shard; torch_xla.distributed.fsdp; ran on torch_xla 2.9 and torch_tpu 0.2.
    """
    called = ctx.qualname(node.func)
    if called in _FSDP1 and not ctx.xla:
        message = "FullyShardedDataParallel raises on TorchTPU (aten::record_stream)"
        why = "use `torch.distributed.fsdp.fully_shard` on the layers and then on the model"
        yield Report(node, message, unfixed=why)
    elif called in _FSDP1 or (called in _FSDP2 and ctx.xla):
        message = f"`{called.rpartition('.')[2]}` of torch raises on XLA devices"
        why = (
            "use `torch_xla.distributed.fsdp.XlaFullyShardedDataParallel` (compute_dtype=torch.bfloat16 for "
            "mixed precision; no device_id; keep `optimizer.step()`), or SPMD sharding"
        )
        yield Report(node, message, unfixed=why)


@rule("TPU308", "sync-batch-norm", anchors=("SyncBatchNorm", "convert_sync_batchnorm"))
def sync_batch_norm(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Batch norms are synchronised over the processes.

    ## What it does
    Finds `SyncBatchNorm(...)` and `SyncBatchNorm.convert_sync_batchnorm(...)`.

    ## Why it matters on a TPU
    With PyTorch/XLA the conversion works and the first forward raises: "SyncBatchNorm expected input tensor
    to be on GPU or XPU or privateuseone". With TorchTPU one process works; several need operators that are
    missing (`aten::batch_norm_stats`).

    ## Example
    ```python
    from torch import nn

    def build(net, world_size):
        if world_size > 1:
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        return net
    ```

    ## Example: a layer
    ```python
    import torch

    norm = torch.nn.SyncBatchNorm(8)
    ```

    ## Not flagged
    ```python
    from torch import nn

    def is_norm(layer):
        return isinstance(layer, (nn.BatchNorm2d, nn.SyncBatchNorm))
    ```
    ```python
    from apex.parallel import convert_syncbn_model

    net = convert_syncbn_model(make())  # no SyncBatchNorm of torch
    ```
    ```python
    class SyncBatchNorm:
        pass

    SyncBatchNorm()
    ```

    ## Fix safety
    There is no fix: leaving it out changes the statistics, and with them the accuracy at small batches per
    device.

    ## References
    pytorch/xla#2223; torch.nn.SyncBatchNorm; ran on torch_xla 2.9 and torch_tpu 0.2.
    """
    called = ctx.qualname(node.func)
    if called not in _SYNC_NORM and called not in [f"{item}.convert_sync_batchnorm" for item in _SYNC_NORM]:
        return
    why = "leave it out, use GroupNorm or LayerNorm, or average mean and variance by hand"
    if ctx.xla:
        yield Report(node, "SyncBatchNorm raises in its first forward on XLA devices", unfixed=why)
    else:
        message = "SyncBatchNorm works in one process of TorchTPU; for several, operators are missing"
        yield Report(node, message, unfixed=why, severity="warning")
