"""What a program did on its device, written to a file when the process ends.

The counts are the backend's own. The optimizers are watched through torch's global step hooks;
to see whether a step changed anything, a few small parameters are copied to the CPU before an
optimizer's first step and compared at the end. Device executions of those copies are not counted.
"""

import atexit
import json
import multiprocessing.util
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer as optimizers

SAMPLED_PARAMETERS = 4


class Counts(NamedTuple):
    """Device executions and compilations so far."""

    executions: int = 0
    compiles: int = 0

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(self.executions - other.executions, self.compiles - other.compiles)


def xla_counts() -> Counts:
    """Torch_xla: every graph that runs is a cached or an uncached one."""
    import torch_xla
    import torch_xla.debug.metrics as metrics

    if not metrics.counter_names():
        return Counts()  # asking further would create the device
    torch_xla._XLAC._xla_wait_device_ops(devices=[])
    uncached = metrics.counter_value("UncachedCompile") or 0
    cached = metrics.counter_value("CachedCompile") or 0
    return Counts(uncached + cached, uncached)


def tpu_counts() -> Counts:
    """TorchTPU: every execution asks the compilation cache for its program."""
    from torch_tpu._internal.device import _device_ops_backend as device

    if not device._is_initialized():
        return Counts()  # asking further would create the device
    torch.accelerator.synchronize()
    stats = device._get_cache_stats()
    return Counts(stats.num_cache_reqs, stats.num_compilations)


COUNTERS = {"xla": xla_counts, "tpu": tpu_counts, "cpu": Counts}


@dataclass
class Watched:
    """An optimizer with copies of some of its parameters, made before its first step."""

    optimizer: optimizers.Optimizer  # kept alive, lest another one get its id
    before: list[tuple[torch.Tensor, torch.Tensor]]
    steps: int = 0

    def changed(self) -> bool:
        """Whether any copied parameter has another value now."""
        return any(not torch.equal(old, _to_cpu(new)) for new, old in self.before)


@dataclass
class Recorder:
    """Watches this process and those forked from it; each writes its own file into ``folder``."""

    backend: str
    folder: Path
    watched: dict[int, Watched] = field(default_factory=dict)
    devices: set[str] = field(default_factory=set)
    own: Counts = field(default_factory=Counts)

    def install(self) -> None:
        """Starts recording."""
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        atexit.register(self.write)
        multiprocessing.util.register_after_fork(self, Recorder._after_fork)

    def counts(self) -> Counts:
        """The backend's counts without what recording caused."""
        return COUNTERS[self.backend]() - self.own

    def _after_fork(self) -> None:
        self.watched.clear()
        self.devices.clear()
        # Forked children of multiprocessing leave without atexit.
        multiprocessing.util.Finalize(None, self._write_if_trained, exitpriority=-1000)

    def _write_if_trained(self) -> None:
        """Leaves the device alone in workers of a data loader: it is their parent's."""
        if self.watched:
            self.write()

    def _before_step(self, optimizer: optimizers.Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.devices.update(p.device.type for p in parameters)
        if id(optimizer) not in self.watched:
            before = COUNTERS[self.backend]()
            copies = [(p, _to_cpu(p).clone()) for p in _sample(parameters)]
            self.watched[id(optimizer)] = Watched(optimizer, copies)
            extra = COUNTERS[self.backend]() - before
            self.own = Counts(*map(sum, zip(self.own, extra, strict=True)))

    def _after_step(self, optimizer: optimizers.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.watched[id(optimizer)].steps += 1

    def write(self) -> None:
        """Writes what was seen; comparing the weights comes last, for it may run the device."""
        counts = self.counts()
        record = {
            "executions": counts.executions,
            "compiles": counts.compiles,
            "devices": sorted(self.devices),
            "steps": sum(watched.steps for watched in self.watched.values()),
            "weights_changed": [watched.changed() for watched in self.watched.values()],
        }
        unfinished = self.folder / f"{os.getpid()}.part"  # the process may be killed while it writes
        unfinished.write_text(json.dumps(record))
        unfinished.replace(unfinished.with_suffix(".json"))


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().cpu()


def _sample(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The smallest parameters that have a gradient, weights before biases.

    On torch_xla those already in device memory come first: copying them runs nothing.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    with_gradient.sort(key=lambda p: (_is_pending(p), p.dim() < 2, p.numel()))
    return with_gradient[:SAMPLED_PARAMETERS]


def _is_pending(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "xla":
        return False
    import torch_xla

    return bool(torch_xla._XLAC._check_tensor_need_materialization([tensor])[0])
