"""TorchTPU's real ``tpu`` device on a machine without a TPU.

TorchTPU drives whatever PJRT plug-in ``TPU_LIBRARY_PATH`` names. XLA's plug-in for CPUs can stand
in for a TPU's, but for two things: it refuses a TPU's client options, and it does not say in which
memory a program's outputs live, which ``torch.compile`` asks. A plug-in is reached through one
table of function pointers per process, so both are mended by replacing two pointers before
TorchTPU loads the same file.

Dispatch, operator coverage, eager modes, compilation cache, autograd and ``torch.compile`` are the
real ones. Numbers, speed and memory are a CPU's, the world is one process.
"""

import ctypes
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

# Of the two CPU plug-ins on PyPI that compute rightly, the other, lammps-jax-pjrt-cpu, aborts the process on
# cumsum, cumprod, masked_scatter and repeat_interleave, where this one raises; it also compiles more slowly.
DISTRIBUTION = "fastatomstruct-xla-cpu"
LIBRARY = "libpjrt_cpu.so"

ENVIRONMENT = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch must not load TorchTPU before the plug-in is mended
    "TPU_SKIP_MDS_QUERY": "1",  # no search for Google's metadata server
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes at once
    "ENABLE_PJRT_COMPATIBILITY": "1",  # the plug-in's API is a little older than TorchTPU's
}

Call = Callable[[int], int | None]
PjrtFunction = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

# PJRT_Api: struct_size, extension_start and a 24-byte version, then the functions in the order of
# pjrt_c_api.h.
FIRST_FUNCTION = 40
CLIENT_CREATE = 10
EXECUTABLE_NUM_OUTPUTS = 44
EXECUTABLE_OUTPUT_MEMORY_KINDS = 47

# Offsets in the argument structs, which all start with struct_size and extension_start.
CREATE_OPTIONS, CREATE_NUM_OPTIONS = 16, 24
PJRT_INT64 = 1
KINDS_EXECUTABLE, KINDS_NUM_OUTPUTS, KINDS_NAMES, KINDS_SIZES = 16, 24, 32, 40

MAX_OUTPUTS = 4096
MEMORY_KIND = b"device"

_alive: list[object] = []  # what C code points to must never be collected


class NumOutputs(ctypes.Structure):
    """``PJRT_Executable_NumOutputs_Args``."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("executable", ctypes.c_void_p),
        ("num_outputs", ctypes.c_size_t),
    ]


class NamedValue(ctypes.Structure):
    """``PJRT_NamedValue`` with an integer value."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("name_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", ctypes.c_int64),
        ("value_size", ctypes.c_size_t),
    ]


class Table:
    """The function table of a loaded plug-in."""

    def __init__(self, library: Path) -> None:
        plugin = ctypes.CDLL(str(library), mode=os.RTLD_NOW)
        plugin.GetPjrtApi.restype = ctypes.c_void_p
        self.address: int = plugin.GetPjrtApi()
        self._make_writable()

    def _make_writable(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        start = self.address // page * page
        end = self.address + _word(self.address).value
        read_and_write = 3
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), read_and_write):
            raise OSError(ctypes.get_errno(), "cannot make the plug-in's function table writable")

    def _slot(self, index: int) -> ctypes.c_size_t:
        return _word(self.address + FIRST_FUNCTION + ctypes.sizeof(ctypes.c_void_p) * index)

    def function(self, index: int) -> Call:
        """The function now at ``index``."""
        function = PjrtFunction(self._slot(index).value)
        _alive.append(function)
        return function

    def replace(self, index: int, function: Call) -> None:
        """Puts a Python function at ``index``."""
        callback = PjrtFunction(function)
        _alive.append(callback)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        assert address is not None
        self._slot(index).value = address


def _word(address: int) -> ctypes.c_size_t:
    return ctypes.c_size_t.from_address(address)


def _with_one_device(create: Call) -> Call:
    """``PJRT_Client_Create`` that hides the TPU-only options and asks for one device, as a TPU process has."""
    name = b"cpu_device_count"
    option = NamedValue(ctypes.sizeof(NamedValue), None, name, len(name), PJRT_INT64, 1, 1)
    _alive.append(option)

    def call(args: int) -> int | None:
        _word(args + CREATE_OPTIONS).value = ctypes.addressof(option)
        _word(args + CREATE_NUM_OPTIONS).value = 1
        return create(args)

    return call


def _one_memory_kind(num_outputs: Call) -> Call:
    """``PJRT_Executable_OutputMemoryKinds`` that answers "device" for every output."""
    kind = ctypes.create_string_buffer(MEMORY_KIND)
    names = (ctypes.c_void_p * MAX_OUTPUTS)(*[ctypes.addressof(kind)] * MAX_OUTPUTS)
    sizes = (ctypes.c_size_t * MAX_OUTPUTS)(*[len(MEMORY_KIND)] * MAX_OUTPUTS)
    _alive.extend((kind, names, sizes))

    def call(args: int) -> int | None:
        executable = _word(args + KINDS_EXECUTABLE).value
        query = NumOutputs(ctypes.sizeof(NumOutputs), None, executable, 0)
        if error := num_outputs(ctypes.addressof(query)):
            return error
        _word(args + KINDS_NUM_OUTPUTS).value = query.num_outputs
        _word(args + KINDS_NAMES).value = ctypes.addressof(names)
        _word(args + KINDS_SIZES).value = ctypes.addressof(sizes)
        return None

    return call


def find_library(distribution: str = DISTRIBUTION, name: str = LIBRARY) -> Path:
    """The plug-in inside an installed distribution."""
    for file in importlib.metadata.files(distribution) or ():
        if file.name == name:
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(f"{distribution} is installed, but has no file named {name}")


def load(library: Path | None = None) -> None:
    """Makes ``tpu`` a working device. Call it before anything imports torch.

    No client and no thread is made yet: a process may fork after this and use the device in its
    children.
    """
    library = library or find_library()
    os.environ.update(ENVIRONMENT, TPU_LIBRARY_PATH=str(library))
    table = Table(library)
    table.replace(CLIENT_CREATE, _with_one_device(table.function(CLIENT_CREATE)))
    memory_kinds = _one_memory_kind(table.function(EXECUTABLE_NUM_OUTPUTS))
    table.replace(EXECUTABLE_OUTPUT_MEMORY_KINDS, memory_kinds)

    from torch_tpu import _loader
    from torch_tpu._internal.utils import hardware

    # Both look at the PCI bus.
    hardware.get_tpu_device_count = lambda: 1
    hardware.get_tpu_topology = lambda *_args: "1,1,1"
    _loader.load()
