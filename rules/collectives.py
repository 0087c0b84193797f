"""TPU306 and TPU312: barriers that name devices, and code that asks whether the backend is NCCL."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Fix, remove_arguments
from tpumigrate.model import has_stars
from tpumigrate.rule import Context, Report, rule

from ._backends import BACKEND, NCCL_AVAILABLE, migrated
from ._common import is_pure
from ._devices import in_test_decorator
from ._distributed import keyword_of

_BARRIER = ("torch.distributed.barrier", "torch.distributed.distributed_c10d.barrier")


@rule("TPU306", "barrier-device-ids", anchors=("device_ids",))
def barrier_device_ids(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """A barrier names the GPU on which it waits.

    ## What it does
    Takes `device_ids` out of `torch.distributed.barrier`.

    ## Why it matters on a TPU
    Each process owns one device, with index 0. TorchTPU raises for any other index ("device_ids in barrier
    options is not supported, except device_ids=[0]"); PyTorch/XLA ignores the argument.

    ## Example
    ```python
    import torch.distributed as dist

    def wait(rank, group):
        dist.barrier(device_ids=[rank])
        dist.barrier(group, device_ids=[rank], async_op=False)
    ```

    ## Use instead
    ```python
    import torch.distributed as dist

    def wait(rank, group):
        dist.barrier()
        dist.barrier(group, async_op=False)
    ```

    ## Example: imported by name
    ```python
    from torch.distributed import barrier

    def wait(rank):
        barrier(
            device_ids=[int(rank)],
        )
    ```

    ## Use instead
    ```python
    from torch.distributed import barrier

    def wait(rank):
        barrier()
    ```

    ## Example: what is passed has effects
    ```python
    import torch.distributed as dist

    def wait():
        dist.barrier(device_ids=pick_devices())
    ```

    ## Not flagged
    ```python
    import torch.distributed as dist

    dist.barrier()
    dist.barrier(group=None)
    ```
    ```python
    import threading

    threading.Barrier(2).wait(timeout=3)
    ```
    ```python
    import mylib

    mylib.barrier(device_ids=[0])
    ```

    ## Fix safety
    Safe.

    ## References
    torch.distributed.barrier; ran on torch_tpu 0.2.
    """
    if ctx.qualname(node.func) not in _BARRIER or has_stars(node):
        return
    devices = ctx.arg(node, "device_ids", 2)
    if devices is None:
        return
    message = "each TPU process owns one device: a barrier names none"
    severity = "warning" if ctx.xla else "error"
    if not is_pure(devices):
        yield Report(node, message, unfixed="computing `device_ids` has effects", severity=severity)
        return
    edits = remove_arguments(ctx.source, node, [keyword_of(node, devices)])
    yield Report(node, message, Fix(tuple(edits)), severity=severity)


@rule("TPU312", "backend-comparison", anchors=("nccl", "NCCL"))
def backend_comparison(node: ast.Compare | ast.Call, ctx: Context) -> Iterator[Report]:
    """Code asks whether the backend is NCCL, and takes the other way on a TPU.

    ## What it does
    Finds comparisons with "nccl", such as `dist.get_backend() == "nccl"` and `backend in ("nccl", "gloo")`,
    and `torch.distributed.is_nccl_available()`.

    ## Why it matters on a TPU
    The backend is "xla" or "tpu_dist", so the arm for other backends runs: usually the one that moves tensors
    to the host for gloo, or the one that raises.

    ## Example
    ```python
    import torch.distributed as dist

    def place(t):
        if dist.get_backend() == "nccl":
            t = t.contiguous()
        return t
    ```

    ## Example: membership
    ```python
    import torch.distributed as dist

    def check(backend):
        if backend not in ("gloo", "nccl"):
            raise ValueError(backend)
    ```

    ## Example: availability
    ```python
    import torch.distributed as dist

    def pick():
        return "fast" if dist.is_nccl_available() or dist.get_backend() == dist.Backend.NCCL else "slow"
    ```

    ## Not flagged
    ```python
    import torch.distributed as dist

    if dist.get_backend() == "gloo":
        print("on the host")
    ```
    ```python
    def check(backend):
        return backend in ("gloo", "nccl", "xla", "tpu_dist")
    ```
    ```python
    name = "nccl"
    print(name == "mpi", name + "nccl")
    ```

    ## Fix safety
    There is no fix: which arm the TPU needs depends on what the arms do. (TPU301 rewrites the choice of a
    backend.)

    ## References
    torch.distributed.get_backend.
    """
    backend = BACKEND[ctx.target]
    if isinstance(node, ast.Call):
        if ctx.qualname(node.func) == NCCL_AVAILABLE:
            why = f'ask for the backend "{backend}" too'
            yield Report(node, "there is no NCCL on a TPU host", unfixed=why, severity="warning")
        return
    if in_test_decorator(node):
        return
    sides = [node.left, *node.comparators]
    options = [item for side in sides for item in (_elements(side) or [side])]
    if not any(migrated(item, ctx) for item in options):
        return
    if any(isinstance(item, ast.Constant) and item.value == backend for item in options):
        return
    message = f'on a TPU the backend is "{backend}", so this takes the way for backends other than NCCL'
    yield Report(node, message, unfixed=f'decide which way "{backend}" goes, and name it here', severity="warning")


def _elements(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
