"""TPU123: batch normalisation on torch_tpu, which never updates the running statistics."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.rule import Context, Report, rule

_LAYERS = frozenset(f"torch.nn.{name}" for name in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"))


@rule("TPU123", "batch-norm-statistics", anchors=("BatchNorm",), targets=("torch_tpu",), keeps_cuda=True)
def batch_norm_statistics(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """Builds a batch normalisation whose running statistics stay as they were initialised.

    ## What it does
    Reports `nn.BatchNorm1d`, `2d` and `3d` that track running statistics, for torch_tpu.

    ## Why it matters on a TPU
    torch_tpu 0.2 lowers `native_batch_norm` to a program that returns the output and the batch's statistics, and
    leaves `running_mean` and `running_var` at 0 and 1, without an error. Training is right; `model.eval()` then
    normalises with the wrong numbers, and so does everybody who loads the checkpoint.

    ## Example
    ```python
    from torch import nn

    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    ```

    ## Example: one dimension
    ```python
    import torch.nn as nn

    norm = nn.BatchNorm1d(16, momentum=0.05)
    ```

    ## Example: for sequences of volumes
    ```python
    import torch

    norm = torch.nn.BatchNorm3d(4, affine=False)
    ```

    ## Not flagged
    ```python
    from torch import nn

    norm = nn.BatchNorm2d(8, track_running_stats=False)
    ```
    ```python
    from torch import nn

    norm = nn.GroupNorm(4, 8)
    ```
    ```python
    class BatchNorm2d:
        pass

    norm = BatchNorm2d()
    ```

    ## Fix safety
    No fix: another normalisation, or `track_running_stats=False` (the batch's statistics at evaluation too), changes
    the model; updating the statistics by hand in training changes the loop.

    ## References
    Seen in a run of torch_tpu 0.2.0: eager, no_grad and compiled.
    """
    if ctx.qualname(node.func) not in _LAYERS:
        return
    tracks = ctx.arg(node, "track_running_stats", 4)
    if isinstance(tracks, ast.Constant) and tracks.value is False:
        return
    yield Report(
        node.func,
        "torch_tpu 0.2 never updates running_mean and running_var: a trained model evaluates with 0 and 1",
        unfixed="use GroupNorm, or track_running_stats=False, or update the statistics by hand",
    )
