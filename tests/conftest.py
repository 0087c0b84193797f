"""The backends as session fixtures: ``xla`` and ``tpu`` run programs, ``cpu`` runs CUDA programs.

A test that asks for a backend is skipped where its environment is missing, unless
``TPUMIGRATE_REQUIRE_BACKENDS=1`` says that it must be there.
"""

import os
from collections.abc import Iterator

import pytest
from backends.client import Backend, MissingBackendError


def _backend(name: str) -> Iterator[Backend]:
    try:
        backend = Backend(name)
    except MissingBackendError as error:
        if os.environ.get("TPUMIGRATE_REQUIRE_BACKENDS") == "1":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    yield backend
    backend.stop()


@pytest.fixture(scope="session")
def xla() -> Iterator[Backend]:
    """PyTorch/XLA on its CPU device."""
    yield from _backend("xla")


@pytest.fixture(scope="session")
def tpu() -> Iterator[Backend]:
    """TorchTPU on the simulator."""
    yield from _backend("tpu")


@pytest.fixture(scope="session")
def cpu() -> Iterator[Backend]:
    """Unmodified CUDA programs on the CPU, in float32."""
    yield from _backend("cpu")
