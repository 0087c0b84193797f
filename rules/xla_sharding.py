"""XLA106: sharding by annotation, for which TorchTPU has processes and DTensor."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.rule import Context, Report, rule

from ._xla_whole import settled


@rule("XLA106", "xla-sharding", anchors=("torch_xla",), targets=("torch_tpu",), keeps_cuda=True)
def xla_sharding(node: ast.Module, ctx: Context) -> Iterator[Report]:
    """Shards tensors with annotations in one process (SPMD).

    ## What it does
    Reports `xr.use_spmd`, meshes, `mark_sharding` and their kin with what to write instead. `xr.is_spmd()` is False.

    ## Why it matters on a TPU
    PyTorch/XLA drives all devices of a host from one process and lets the compiler split the program. TorchTPU runs
    one process for each device: every rank makes the mesh with `init_device_mesh("tpu", shape)`, and
    `distribute_tensor(t, mesh, placements)` gives it its part. Loaders have to give each rank its own data.

    ## Example
    ```python
    import numpy as np
    import torch_xla.runtime as xr
    import torch_xla.distributed.spmd as xs

    def shard(model, n):
        xr.use_spmd()
        mesh = xs.Mesh(np.arange(n), (n, 1), ("data", "model"))
        for p in model.parameters():
            xs.mark_sharding(p, mesh, ("model", None))
    ```

    ## Example: a type of an argument
    ```python
    from torch_xla.distributed.spmd import Mesh

    def size(mesh: Mesh):
        return mesh.size()
    ```

    ## Example: is it SPMD
    ```python
    import torch
    import torch_xla.runtime as xr

    def parts(x):
        return [x] if xr.is_spmd() else x.split(2)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def parts(x):
        return [x] if False else x.split(2)
    ```

    ## Not flagged
    ```python
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("tpu", (4,))
    ```
    ```python
    import matplotlib as xs

    xs.Mesh((1, 2))
    ```
    ```python
    def shard(xs, p, mesh):
        xs.mark_sharding(p, mesh, (0, None))
    ```

    ## Fix safety
    Only `is_spmd` is fixed, which is safe.

    ## References
    torch_xla.distributed.spmd; torch.distributed.device_mesh, torch.distributed.tensor, run on torch_tpu 0.2.
    """
    yield from settled(ctx, "XLA106")
