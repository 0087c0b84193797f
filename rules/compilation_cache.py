"""TPU320: training scripts that compile everything anew at each start."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpumigrate.model import packages, parent
from tpumigrate.rule import Context, Report, rule

from ._hot import is_optimizer_step

_INSTEAD = {
    "torch_xla": "call `torch_xla.runtime.initialize_cache(path)` in each process before its first computation",
    "torch_tpu": "set TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT to a folder or gs:// URL before torch is imported",
}
_DEVICES = ("cuda", "xla", "tpu")


@rule("TPU320", "no-compilation-cache", anchors=(".backward(",), keeps_cuda=True)
def no_compilation_cache(node: ast.Module, ctx: Context) -> Iterator[Report]:
    """A training script keeps no compiled programs for its next start.

    ## What it does
    Speaks once for a script that trains on a device (an optimizer steps in it, after `backward()`), when nothing in
    the project configures a persistent compilation cache.

    ## Why it matters on a TPU
    Every start, also after a preemption and on every host, compiles all programs again before the first step. A cache
    that outlives the process reads them back.

    ## Example
    ```python
    import torch

    def train(model, loader, opt):
        for x, y in loader:
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()

    if __name__ == "__main__":
        model = torch.nn.Linear(2, 2).to("cuda")
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, torch.utils.data.DataLoader([]), opt)
    ```

    ## Use instead (torch_xla)
    ```python
    import torch
    import torch_xla

    def train(model, loader, opt):
        for x, y in loader:
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            torch_xla.sync()

    if __name__ == "__main__":
        model = torch.nn.Linear(2, 2).to("xla")
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, torch.utils.data.DataLoader([]), opt)
    ```

    ## Use instead (torch_tpu)
    ```python
    import torch

    def train(model, loader, opt):
        for x, y in loader:
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()

    if __name__ == "__main__":
        model = torch.nn.Linear(2, 2).to("tpu")
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, torch.utils.data.DataLoader([]), opt)
    ```

    ## Example: a script of PyTorch/XLA (torch_xla)
    ```python
    import torch
    import torch_xla

    def main():
        model = torch.nn.Linear(2, 2).to("xla")
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            model(torch.ones(1, 2, device="xla")).sum().backward()
            opt.step()
            torch_xla.sync()

    if __name__ == "__main__":
        main()
    ```

    ## Example: a script of TorchTPU (torch_tpu)
    ```python
    import torch

    def main():
        model = torch.nn.Linear(2, 2).to("tpu")
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            model(torch.ones(1, 2, device="tpu")).sum().backward()
            opt.step()

    if __name__ == "__main__":
        main()
    ```

    ## Not flagged
    ```python
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    if __name__ == "__main__":
        xr.initialize_cache("/tmp/cache")
        model = torch.nn.Linear(2, 2).to("xla")
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2, device="xla")).sum().backward()
        opt.step()
        torch_xla.sync()
    ```
    ```python
    import torch

    def step(model, x, opt):
        model(x.to("cuda")).sum().backward()
        opt.step()
    ```
    ```python
    import os

    os.environ["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"] = "/tmp/cache"
    import torch

    if __name__ == "__main__":
        model = torch.nn.Linear(2, 2).to("tpu")
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2, device="tpu")).sum().backward()
        opt.step()
    ```
    ```python
    import torch

    if __name__ == "__main__":
        model = torch.nn.Linear(2, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
    ```

    ## Fix safety
    There is no fix: where the cache may lie is for a person to say.

    ## References
    torch_xla.runtime.initialize_cache of torch_xla 2.9; environment variables of torch_tpu 0.2.
    """
    if ctx.project.compilation_cache:
        return
    guard = next((stmt.test for stmt in node.body if isinstance(stmt, ast.If) and _is_main(stmt.test)), None)
    if guard is None or not _uses_device(ctx):
        return
    calls = ctx.model.nodes(ast.Call)
    backward = any(isinstance(call.func, ast.Attribute) and call.func.attr == "backward" for call in calls)
    if backward and any(is_optimizer_step(call, ctx) for call in calls):
        message = "each start of this script compiles all of its programs anew: nothing keeps them"
        yield Report(guard, message, unfixed=_INSTEAD[ctx.target], severity="info")


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _uses_device(ctx: Context) -> bool:
    """Whether a file puts anything on an accelerator."""
    if any("torch_xla" in packages(node) for node in ctx.model.imports()):
        return True
    if any(node.attr == "cuda" and isinstance(parent(node), ast.Call) for node in ctx.model.nodes(ast.Attribute)):
        return True
    return any(
        isinstance(node.value, str)
        and node.value.partition(":")[0] in _DEVICES
        and not isinstance(parent(node), ast.Dict)
        for node in ctx.model.nodes(ast.Constant)
    )
