"""TPU302: the arguments of DistributedDataParallel that name GPUs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.edits import Fix, add_argument, remove_arguments
from tpumigrate.model import has_stars
from tpumigrate.rule import Context, Report, rule

from ._common import is_pure
from ._distributed import DDP, keyword_of


@rule("TPU302", "ddp-arguments", anchors=("device_ids", "output_device", "DistributedDataParallel"))
def ddp_arguments(node: ast.Call, ctx: Context) -> Iterator[Report]:
    """DistributedDataParallel is told which GPU to use.

    ## What it does
    Takes `device_ids` and `output_device` out of `DistributedDataParallel`; for PyTorch/XLA it asks for
    `gradient_as_bucket_view=True` instead.

    ## Why it matters on a TPU
    Each process owns one TPU device with index 0, whatever its rank. TorchTPU looks for the GPU with that
    index and raises. PyTorch/XLA ignores the index; with gradients as views of the buckets it needs no copy
    at each step.

    ## Example
    ```python
    from torch.nn.parallel import DistributedDataParallel as DDP

    def wrap(model, rank):
        return DDP(model, device_ids=[rank], output_device=rank)
    ```

    ## Use instead (torch_xla)
    ```python
    from torch.nn.parallel import DistributedDataParallel as DDP

    def wrap(model, rank):
        return DDP(model, gradient_as_bucket_view=True)
    ```

    ## Use instead (torch_tpu)
    ```python
    from torch.nn.parallel import DistributedDataParallel as DDP

    def wrap(model, rank):
        return DDP(model)
    ```

    ## Example: over several lines
    ```python
    import torch

    def wrap(model, args):
        return torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[args.gpu] if args.gpu is not None else None,
            find_unused_parameters=True,  # heads that are off
        )
    ```

    ## Use instead (torch_xla)
    ```python
    import torch

    def wrap(model, args):
        return torch.nn.parallel.DistributedDataParallel(
            model,
            find_unused_parameters=True,  # heads that are off
            gradient_as_bucket_view=True,
        )
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def wrap(model, args):
        return torch.nn.parallel.DistributedDataParallel(
            model,
            find_unused_parameters=True,  # heads that are off
        )
    ```

    ## Example: by position, and with options passed on
    ```python
    from torch.nn.parallel import DistributedDataParallel

    def wrap(model, rank, options):
        first = DistributedDataParallel(model, [rank], rank, gradient_as_bucket_view=False)
        return first, DistributedDataParallel(model, device_ids=[rank], **options)
    ```

    ## Use instead
    ```python
    from torch.nn.parallel import DistributedDataParallel

    def wrap(model, rank, options):
        first = DistributedDataParallel(model, gradient_as_bucket_view=False)
        return first, DistributedDataParallel(model, **options)
    ```

    ## Not flagged
    ```python
    from torch.nn.parallel import DistributedDataParallel as DDP

    def wrap(model, options):
        return DDP(model), DDP(model, find_unused_parameters=True), DDP(model, **options)
    ```
    ```python
    class DistributedDataParallel:
        def __init__(self, model, device_ids=None):
            self.model = model

    print(DistributedDataParallel(1, device_ids=[0]))
    ```
    ```python
    from torch.nn.parallel import DistributedDataParallel as DDP

    def unwrap(model):
        device_ids = [0]
        return model.module if isinstance(model, DDP) else model, device_ids
    ```

    ## Fix safety
    Safe.

    ## References
    torch.nn.parallel.DistributedDataParallel; docs/source/perf/ddp.md of PyTorch/XLA; ran on both targets.
    """
    if ctx.qualname(node.func) != DDP:
        return
    gone = [item for name, place in (("device_ids", 1), ("output_device", 2)) if (item := ctx.arg(node, name, place))]
    if not gone:
        return
    message = "each TPU process owns one device: leave out `device_ids` and `output_device`"
    severity = "warning" if ctx.xla else "error"
    if not all(is_pure(item) for item in gone):
        yield Report(node, message, unfixed="computing the device has effects", severity=severity)
        return
    if len(node.args) > 3:
        yield Report(node, message, unfixed="arguments follow by position: write the call by hand", severity=severity)
        return
    if any(_several_devices(item) for item in gone):
        yield Report(node, message, unfixed="it names several GPUs of one process", severity=severity)
        return
    edits = remove_arguments(ctx.source, node, [keyword_of(node, item) for item in gone])
    given = any(item.arg == "gradient_as_bucket_view" for item in node.keywords)
    if ctx.xla and not given and not has_stars(node):
        edits.append(add_argument(ctx.source, node, "gradient_as_bucket_view=True", gone=len(gone)))
    yield Report(node, message, Fix(tuple(edits)), severity=severity)


def _several_devices(node: ast.expr) -> bool:
    return isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1
