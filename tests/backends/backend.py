"""Getting a backend ready in this process."""

import atexit
import importlib
import os
from pathlib import Path

RECORD_BACKEND = "TPUMIGRATE_TEST_BACKEND"
RECORD_FOLDER = "TPUMIGRATE_TEST_RECORDS"


def load(name: str) -> None:
    """Imports the backend's libraries; creates no device and no thread."""
    if name == "tpu":
        from . import simulator

        simulator.load()
    elif name == "xla":
        importlib.import_module("torch_xla.core.xla_model")
        importlib.import_module("torch_xla.debug.metrics")
    elif name == "cpu":
        importlib.import_module("torch._dynamo")  # the first optimizer step needs it
    else:
        raise ValueError(f"no such backend: {name}")


def leave_quickly(name: str) -> None:
    """Drops the exit handler with which TorchTPU closes its runtime: it takes a second."""
    if name == "tpu":
        import torch

        atexit.unregister(torch.tpu._shutdown_runtime)


def start_recording(name: str) -> None:
    """Watches this process if the environment says where to write to; ``load`` comes first."""
    if folder := os.environ.get(RECORD_FOLDER):
        from .recorder import Recorder

        Recorder(name, Path(folder)).install()
    if name == "cpu":
        from . import cpu_reference

        cpu_reference.install()
