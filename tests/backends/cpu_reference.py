"""Runs an unmodified CUDA program on the CPU in float32, for numbers to compare with.

``install`` replaces the CUDA side of torch in this process. A device named "cuda", or an ordinal,
becomes the CPU wherever torch accepts one; half precision becomes float32; autocast and gradient
scaling are off; the distributed world is this process alone; ``torch.compile`` compiles nothing.

Known differences: ``Tensor.cuda`` returns the tensor itself, never a copy; the type of a device is
"cpu", while ``is_cuda`` is true of every tensor; a captured CUDA graph cannot be replayed.
"""

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.multiprocessing
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

CUDA_DEVICE = re.compile(r"cuda(:\d+)?")
LOW_PRECISION = (torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
MEMORY_BYTES = 80 * 2**30

NO_OPERATION = [
    *("set_device", "synchronize", "empty_cache", "ipc_collect", "init", "set_stream", "set_sync_debug_mode"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
]

ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": "CPU reference",
    "get_device_capability": (8, 0),
    "get_arch_list": ["sm_80"],
    "can_device_access_peer": False,
    "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
    "memory_allocated": 0,
    "memory_reserved": 0,
    "memory_cached": 0,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "max_memory_cached": 0,
    "memory_stats": {},
    "memory_summary": "",
    "memory_snapshot": [],
    "utilization": 0,
    "initial_seed": 0,
    "get_device_properties": SimpleNamespace(
        name="CPU reference", major=8, minor=0, total_memory=MEMORY_BYTES, multi_processor_count=108
    ),
}


def install() -> None:
    """Replaces the CUDA side of torch in this process, for good."""
    _replace_queries()
    _replace_streams()
    _replace_types()
    _replace_modules()
    _replace_precision()
    _replace_loading()
    _replace_optimizers()
    _replace_distributed()
    torch.compile = lambda model=None, **_kwargs: model if model is not None else lambda f: f
    Redirect().__enter__()
    _enter_in_threads()


def to_cpu(value: Any) -> Any:
    """The CPU for a CUDA device, float32 for a half precision type, anything else as it is."""
    if isinstance(value, str):
        if CUDA_DEVICE.fullmatch(value):
            return "cpu"
        return value.replace("torch.cuda.", "torch.").replace("HalfTensor", "FloatTensor")
    if isinstance(value, torch.dtype) and value in LOW_PRECISION:
        return torch.float32
    return value


def _device(value: Any) -> Any:
    is_ordinal = isinstance(value, int) and not isinstance(value, bool)
    return CPU if is_ordinal else to_cpu(value)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    new_kwargs = {key: to_cpu(value) for key, value in kwargs.items()}
    if "device" in new_kwargs:
        new_kwargs["device"] = _device(new_kwargs["device"])
    if new_kwargs.get("pin_memory"):
        new_kwargs["pin_memory"] = False
    return [to_cpu(value) for value in args], new_kwargs


class Redirect(TorchFunctionMode):
    """Translates the arguments of every function of torch that is implemented in C."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in UNCHANGED:
            return args[0]
        if func in TO_FLOAT:
            return args[0].float()
        if func == IS_CUDA:  # a new object at each access
            return True
        new_args, new_kwargs = _arguments(args, kwargs or {})
        if func is torch.Tensor.to and len(new_args) > 1:
            new_args[1] = _device(new_args[1])
        return func(*new_args, **new_kwargs)


UNCHANGED = (torch.Tensor.cuda, torch.Tensor.pin_memory)
TO_FLOAT = (torch.Tensor.half, torch.Tensor.bfloat16)
IS_CUDA = torch.Tensor.is_cuda.__get__


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _replace_queries() -> None:
    for name, value in {**dict.fromkeys(NO_OPERATION), **ANSWERS}.items():
        setattr(torch.cuda, name, _answer(value))
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, _answer(value))
    # A CUDA build of torch would find its accelerator "available" now, and ask it.
    torch.accelerator.current_accelerator = _answer(None)
    torch.accelerator.is_available = _answer(False)
    torch.accelerator.device_count = _answer(0)
    torch.cuda.get_rng_state = _answer(torch.zeros(16, dtype=torch.uint8))
    torch.cuda.get_rng_state_all = _answer([torch.zeros(16, dtype=torch.uint8)])
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, _answer(None))
    torch.cuda.nvtx.range = _answer(contextlib.nullcontext())


class Stream:
    """A stream on which everything has already happened; ``with stream:`` works too."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = CPU
        self.cuda_stream = 0

    def query(self) -> bool:
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record()
        return event

    def _nothing(self, *_args: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = __exit__ = _nothing

    def __enter__(self) -> "Stream":
        return self


class Event:
    """An event that happens when it is recorded."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._time = 0.0

    def record(self, _stream: Any = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return (end._time - self._time) * 1000

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, _stream: Any = None) -> None:
        pass


def _replace_streams() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.ExternalStream = Stream
    cuda.Event = Event
    cuda.current_stream = cuda.default_stream = _answer(Stream())
    cuda.stream = cuda.device = cuda.device_of = _answer(contextlib.nullcontext())
    torch.Tensor.record_stream = _answer(None)


class _Proxy(type):
    """Stands for a class of torch that cannot be subclassed: calls are translated."""

    real: type
    convert: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.convert(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)


def _proxy(real: Any, convert: Callable[..., Any]) -> Any:
    return _Proxy(real.__name__, (), {"real": real, "convert": staticmethod(convert)})


def _replace_types() -> None:
    real_device, real_generator = torch.device, torch.Generator

    def device(type: Any = None, index: int | None = None, **kwargs: Any) -> torch.device:
        kind = _device(kwargs.get("device", type))
        if isinstance(kind, real_device):
            return kind
        return CPU if kind == "cpu" else real_device(kind, *([] if index is None else [index]))

    torch.device = _proxy(real_device, device)
    torch.Generator = _proxy(real_generator, lambda device=CPU: real_generator(_device(device)))
    for name in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"):
        kind = "Float" if name in ("Half", "BFloat16") else name
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{kind}Tensor"))
    torch.set_default_device = _translated(torch.set_default_device)
    torch.set_default_dtype = _translated(torch.set_default_dtype)
    torch.set_default_tensor_type = _translated(torch.set_default_tensor_type)


def _translated(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        new_args, new_kwargs = _arguments(args, kwargs)
        return function(*new_args, **new_kwargs)

    return call


def _replace_modules() -> None:
    module: Any = nn.Module
    real_to = module.to

    @functools.wraps(real_to)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        new_args, new_kwargs = _arguments(args, kwargs)
        return real_to(self, *map(_device, new_args[:1]), *new_args[1:], **new_kwargs)

    module.to = to
    module.to_empty = _translated(module.to_empty)
    module.cuda = lambda self, device=None: self
    module.half = module.bfloat16 = module.float
    module.compile = _answer(None)


def _replace_precision() -> None:
    autocast: Any = torch.amp.autocast_mode.autocast
    scaler: Any = torch.amp.grad_scaler.GradScaler
    real_autocast, real_scaler = autocast.__init__, scaler.__init__

    def disabled_autocast(self: Any, *_args: Any, **_kwargs: Any) -> None:
        real_autocast(self, "cpu", enabled=False)

    def disabled_scaler(self: Any, *_args: Any, **_kwargs: Any) -> None:
        real_scaler(self, "cpu", enabled=False)

    autocast.__init__ = disabled_autocast
    scaler.__init__ = disabled_scaler


def _replace_loading() -> None:
    real_load, loader = torch.load, _class(DataLoader)
    real_loader = loader.__init__

    @functools.wraps(real_load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real_load(f, "cpu", *args, **kwargs)

    @functools.wraps(real_loader)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real_loader(self, *args, **kwargs | {"pin_memory": False, "pin_memory_device": ""})

    torch.load = torch.serialization.load = load
    loader.__init__ = init


def _class(cls: Any) -> Any:
    """The same class for the type checker's blind eye: its methods are about to be replaced."""
    return cls


def _replace_optimizers() -> None:
    for optimizer in map(_class, (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)):
        optimizer.__init__ = _without(optimizer.__init__, "fused", "capturable")


def _without(function: Callable[..., Any], *names: str) -> Any:
    """The function with the same signature that ignores some keywords."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: value for key, value in kwargs.items() if key not in names})

    return call


def _replace_distributed() -> None:
    data_parallel, distributed = _class(nn.DataParallel), _class(nn.parallel.DistributedDataParallel)
    real_start, real_group = dist.init_process_group, dist.new_group

    def start(*_args: Any, **_kwargs: Any) -> None:
        real_start("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def group(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return real_group(*args, **kwargs)

    def wrap(self: Any, module: nn.Module, *_args: Any, **_kwargs: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids = module, []

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_args: Any, **_kwargs: Any) -> None:
        fn(0, *args)

    dist.init_process_group = start
    dist.new_group = group
    dist.is_nccl_available = _answer(True)
    dist.barrier = _without(dist.barrier, "device_ids")
    dist.device_mesh.init_device_mesh = _translated(dist.device_mesh.init_device_mesh)
    dist.init_device_mesh = dist.device_mesh.init_device_mesh
    data_parallel.__init__ = wrap
    distributed.__init__ = _without_positional_devices(distributed.__init__)
    torch.multiprocessing.spawn = spawn
    _class(nn.SyncBatchNorm).convert_sync_batchnorm = staticmethod(lambda module, process_group=None: module)


def _without_positional_devices(init: Callable[..., Any]) -> Any:
    without = _without(init, "device_ids", "output_device")

    @functools.wraps(init)
    def call(self: Any, module: nn.Module, *_devices: Any, **kwargs: Any) -> None:
        without(self, module, **kwargs)

    return call


def _enter_in_threads() -> None:
    """Modes belong to a thread, so each new one enters its own."""
    thread: Any = threading.Thread
    real_run = thread.run

    @functools.wraps(real_run)
    def run(self: threading.Thread) -> None:
        with Redirect():
            real_run(self)

    thread.run = run
