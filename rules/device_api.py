"""TPU1xx: the functions of torch.cuda (and torch.accelerator for torch_xla), by the tables of rules/targets."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from tpumigrate.edits import Fix, name
from tpumigrate.model import parent
from tpumigrate.rule import Context, Report, rule

from ._common import device_string
from ._devices import is_device_name
from ._table import table_reports

_ANCHORS = ("cuda", "accelerator")


@rule("TPU106", "device-query", anchors=_ANCHORS)
def device_query(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Asks or sets which CUDA device is used.

    ## What it does
    Maps `device_count`, `current_device`, `get_device_name` and their like to the target's function, one by one.
    `set_device` and `with torch.cuda.device(i)` go: a TPU process owns its device.

    ## Why it matters on a TPU
    On a TPU host `device_count()` is 0 without a word and most of the others raise. `torch.tpu.device_count()` and
    `torch.tpu.current_device()` exist but raise in user code (torch_tpu 0.2).

    ## Example
    ```python
    import torch

    def setup(local_rank):
        torch.cuda.set_device(local_rank)
        print(torch.cuda.device_count(), torch.cuda.current_device())
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    def setup(local_rank):
        print(xr.addressable_device_count(), torch_xla.device().index)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def setup(local_rank):
        print(torch.accelerator.device_count(), torch.accelerator.current_device_index())
    ```

    ## Example: a context manager
    ```python
    import torch

    def run(x, i):
        with torch.cuda.device(i), torch.no_grad():
            x = x + 1
        with torch.cuda.device(i):
            text = '''
        stays'''
            return x, text
    ```

    ## Use instead
    ```python
    import torch

    def run(x, i):
        with torch.no_grad():
            x = x + 1
        text = '''
        stays'''
        return x, text
    ```

    ## Example: no equivalent
    ```python
    import torch

    major, _ = torch.cuda.get_device_capability()
    ```

    ## Not flagged
    ```python
    import torch
    from numba import cuda

    print(cuda.current_context())
    ```
    ```python
    import torch

    class Box:
        def device_count(self):
            return 1

    print(Box().device_count())
    ```
    ```python
    def report(torch):
        print(torch.cuda.device_count())
    ```

    ## Fix safety
    Safe. Counts are those of this process; use the world size for the job.

    ## References
    torch_xla.runtime, torch.accelerator; rules/targets.
    """
    for report in table_reports(node, ctx, "TPU106"):
        yield _as_device(report, ctx) if ctx.xla else report


def _as_device(report: Report, ctx: Context) -> Report:
    """What becomes of the number of the current device where it is handed on as a device.

    For torch_xla a number still means a CUDA device, and asking for it when a module is imported starts the runtime.
    """
    node, above = report.node, parent(report.node)
    if not isinstance(node, ast.Call) or ctx.qualname(node.func) not in _CURRENT_DEVICE:
        return report
    if isinstance(above, ast.keyword) and above.arg and is_device_name(above.arg):
        return replace(report, fix=Fix((ctx.edit(node, device_string(ctx)),)))
    if isinstance(above, ast.arguments):
        return replace(report, fix=None, unfixed="a default is computed at import, before processes are launched")
    if not isinstance(above, ast.Call) or node not in above.args:
        return report
    called = above.func.attr if isinstance(above.func, ast.Attribute) else getattr(above.func, "id", "")
    if called in ("print", "str", "int", "format", "range", "info", "debug", "warning"):
        return report
    return replace(report, fix=None, unfixed="pass the device: torch_xla.device()")


_CURRENT_DEVICE = ("torch.cuda.current_device", "torch.accelerator.current_device_index")


@rule("TPU108", "cuda-graph", anchors=("cuda",))
def cuda_graph(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Captures a CUDA graph.

    ## What it does
    Reports `CUDAGraph`, `torch.cuda.graph` and `make_graphed_callables`.

    ## Why it matters on a TPU
    Nothing there captures a stream. torch_xla compiles whole graphs anyway; on torch_tpu `torch.compile(step)`
    gives what the capture gave.

    ## Example
    ```python
    import torch

    g = torch.cuda.CUDAGraph()
    ```

    ## Not flagged
    ```python
    import torch

    def f(graph: torch.cuda.CUDAGraph):
        return graph
    ```
    ```python
    import torch

    class CUDAGraph:
        pass

    g = CUDAGraph()
    ```

    ## Fix safety
    No fix: the captured function has to be named and compiled.

    ## References
    torch_xla.compile, torch.compile.
    """
    yield from table_reports(node, ctx, "TPU108")


@rule("TPU109", "cuda-memory", anchors=_ANCHORS)
def cuda_memory(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Reads or manages the memory of the GPU.

    ## What it does
    Maps memory statistics where the target has them, removes `empty_cache()` where it does nothing.

    ## Why it matters on a TPU
    Without a GPU `memory_allocated()` and `max_memory_allocated()` return 0 without a word, while
    `reset_peak_memory_stats()` and `mem_get_info()` raise: logs lie before they fail.

    ## Example
    ```python
    import gc
    import torch

    def clean():
        gc.collect()
        torch.cuda.empty_cache()
    ```

    ## Use instead (torch_xla)
    ```python
    import gc
    import torch

    def clean():
        gc.collect()
    ```

    ## Use instead (torch_tpu)
    ```python
    import gc
    import torch

    def clean():
        gc.collect()
        torch.accelerator.empty_cache()
    ```

    ## Example: an f-string
    ```python
    import torch

    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    print(f"peak {torch.accelerator.max_memory_allocated() / 2**30:.1f} GiB")
    ```

    ## Not flagged
    ```python
    import torch

    MESSAGE = "call torch.cuda.empty_cache() first"
    ```
    ```python
    class Pool:
        def empty_cache(self):
            return 0

    Pool().empty_cache()
    ```

    ## Fix safety
    Safe. torch_xla has no peak since a reset, so those calls are reported only.

    ## References
    torch_xla.core.xla_model.get_memory_info, torch.accelerator.memory.
    """
    yield from table_reports(node, ctx, "TPU109")


@rule("TPU113", "cuda-profiling", anchors=("cuda", "nvtx", "ProfilerActivity"))
def cuda_profiling(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Marks ranges for NVIDIA's profilers, or drives them.

    ## What it does
    Maps `torch.cuda.nvtx.range` to the target's named range; reports the rest.

    ## Why it matters on a TPU
    NVTX raises "NVTX functions not installed" on a CPU build of torch and shows nowhere on a TPU. The profiler
    there is XProf.

    ## Example
    ```python
    import torch

    def step(x):
        with torch.cuda.nvtx.range("forward"):
            return x * 2
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla.debug.profiler as xp

    def step(x):
        with xp.Trace("forward"):
            return x * 2
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def step(x):
        with torch.profiler.record_function("forward"):
            return x * 2
    ```

    ## Example: a function
    ```python
    import torch
    from torch.cuda.nvtx import range as nvtx_range

    @nvtx_range("forward")
    def step(x):
        return torch.relu(x)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla.debug.profiler as xp

    @xp.trace_me("forward")
    def step(x):
        return torch.relu(x)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    @torch.profiler.record_function("forward")
    def step(x):
        return torch.relu(x)
    ```

    ## Not flagged
    ```python
    import nvtx

    nvtx.mark("start")
    ```
    ```python
    import torch

    with torch.profiler.record_function("forward"):
        pass
    ```

    ## Fix safety
    Safe.

    ## References
    torch_xla.debug.profiler.Trace, torch.profiler.record_function.
    """
    decorated = parent(node)
    if (
        ctx.xla
        and isinstance(node, ast.Call)
        and ctx.qualname(node.func) == "torch.cuda.nvtx.range"
        and isinstance(decorated, ast.FunctionDef | ast.AsyncFunctionDef)
    ):
        message = "NVTX shows nowhere on a TPU; the range of XProf for a function is `trace_me`"
        yield Report(node, message, Fix((ctx.edit(node.func, name("torch_xla.debug.profiler") + ".trace_me"),)))
        return
    yield from table_reports(node, ctx, "TPU113")


@rule("TPU118", "cuda-other", anchors=("cuda",))
def cuda_other(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Uses a part of torch.cuda that has no counterpart on a TPU.

    ## What it does
    Reports `torch.cuda.comm`, `nccl`, `tunable`, `jiterator`, `cudart`, `torch.version.cuda` and the like.

    ## Why it matters on a TPU
    They talk to NVIDIA's driver and libraries.

    ## Example
    ```python
    import torch

    torch.cuda.cudart().cudaProfilerStart()
    ```

    ## Not flagged
    ```python
    import torch

    print(torch.version.git_version)
    ```

    ## Fix safety
    No fix.

    ## References
    rules/targets.
    """
    yield from table_reports(node, ctx, "TPU118")


@rule("TPU206", "cuda-backend-flag", anchors=("backends", "cudnn", "allow_tf32"))
def cuda_backend_flag(node: ast.Call | ast.Attribute | ast.Name, ctx: Context) -> Iterator[Report]:
    """Sets a flag of cuDNN or cuBLAS, which a TPU does not have.

    ## What it does
    Reports `torch.backends.cudnn.benchmark`, `.deterministic`, `allow_tf32` and their like.

    ## Why it matters on a TPU
    They have no effect, without a word. The precision of float32 matrix products is set elsewhere, see TPU207; its
    default on a TPU is one bfloat16 pass.

    ## Example
    ```python
    import torch

    torch.backends.cudnn.benchmark = True
    ```

    ## Example: through another name
    ```python
    import torch.backends.cudnn as cudnn

    cudnn.deterministic = True
    ```

    ## Not flagged
    ```python
    import torch

    torch.backends.mps.benchmark = True
    ```
    ```python
    class Cfg:
        benchmark = True

    cudnn = Cfg()
    cudnn.benchmark = True
    ```

    ## Fix safety
    No fix: the line is harmless.

    ## References
    torch.backends.cudnn, torch.backends.cuda.
    """
    for report in table_reports(node, ctx, "TPU206"):
        yield Report(report.node, report.message, unfixed="it does no harm", severity="info")
