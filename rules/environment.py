"""TPU112: environment variables of CUDA and NCCL."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpumigrate.edits import Fix
from tpumigrate.model import parent
from tpumigrate.rule import Context, Report, rule

_IGNORED = re.compile(
    r"(?:CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|CUDA_DEVICE_ORDER|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_MODULE_LOADING"
    r"|PYTORCH_CUDA_ALLOC_CONF|PYTORCH_NO_CUDA_MEMORY_CACHING|CUBLAS_WORKSPACE_CONFIG|TORCH_CUDNN_\w+|CUDNN_\w+"
    r"|NCCL_\w+|TORCH_NCCL_\w+|NVIDIA_TF32_OVERRIDE|TORCH_CUDA_ARCH_LIST|NVIDIA_VISIBLE_DEVICES|NVTE_\w+)\Z"
)
_INSTEAD = {
    "CUDA_VISIBLE_DEVICES": {"torch_xla": "TPU_VISIBLE_CHIPS", "torch_tpu": "TPU_VISIBLE_DEVICES"},
    "CUDA_LAUNCH_BLOCKING": {"torch_tpu": "TORCH_TPU_LAUNCH_BLOCKING"},
}


@rule("TPU112", "cuda-environment", anchors=("CUDA", "NCCL", "CUBLAS", "CUDNN", "NVIDIA", "NVTE"))
def cuda_environment(node: ast.Constant, ctx: Context) -> Iterator[Report]:
    """Sets or reads an environment variable of CUDA or NCCL.

    ## What it does
    Reports variables that nothing reads on a TPU host, in `os.environ`, `os.getenv` and `os.putenv`. Removes the
    statement that sets one where it is a statement of its own.

    ## Why it matters on a TPU
    They have no effect. `CUDA_VISIBLE_DEVICES` in particular no longer chooses devices; the TPU's variable is read
    when the runtime starts and takes chip numbers.

    ## Example
    ```python
    import os

    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch
    ```

    ## Use instead
    ```python

    import torch
    ```

    ## Example: what chooses devices
    ```python
    import os
    import torch

    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    ```

    ## Not flagged
    ```python
    import torch

    HELP = "set CUDA_VISIBLE_DEVICES first"
    ```
    ```python
    import os
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    ```
    ```python
    import torch

    flags = {"NCCL_DEBUG": "INFO"}
    ```

    ## Fix safety
    Safe for what nothing reads; which devices are visible is for a person to say.

    ## References
    Environment variables of libtpu and of torch_tpu 0.2.
    """
    if not isinstance(node.value, str) or not _IGNORED.match(node.value) or not in_environment(node, ctx):
        return
    instead = _INSTEAD.get(node.value, {}).get(ctx.target, "")
    message = f"nothing reads {node.value} on a TPU host" + (f"; there it is {instead}" if instead else "")
    stmt = setting_of(node)
    if instead or node.value in _INSTEAD:
        yield Report(node, message, unfixed="say which chips the program may use", severity="warning")
    elif stmt is not None:
        yield Report(node, message, Fix(deletes=(stmt,)), severity="info")
    else:
        yield Report(node, message, unfixed="its value decides something here", severity="info")


def in_environment(node: ast.Constant, ctx: Context) -> bool:
    """Whether a string names an environment variable."""
    above = parent(node)
    if isinstance(above, ast.Subscript):
        return ctx.qualname(above.value) == "os.environ"
    if isinstance(above, ast.Call) and above.args and above.args[0] is node:
        name = ctx.qualname(above.func)
        return name in ("os.getenv", "os.putenv", "os.unsetenv") or name.startswith("os.environ.")
    return isinstance(above, ast.Compare) and any(ctx.qualname(item) == "os.environ" for item in above.comparators)


def setting_of(node: ast.Constant) -> ast.stmt | None:
    """The statement that only sets the variable, to a constant."""
    above = parent(node)
    stmt = parent(above) if above is not None else None
    if isinstance(stmt, ast.Assign) and stmt.targets == [above] and isinstance(stmt.value, ast.Constant):
        return stmt
    if isinstance(stmt, ast.Expr) and isinstance(above, ast.Call):
        return stmt if all(isinstance(arg, ast.Constant) for arg in above.args) else None
    return None
