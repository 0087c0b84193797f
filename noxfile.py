"""Every check of the project: ``python -m nox``. Environments are reused; ``nox -R`` installs nothing at all.

The tests run in an environment of their own, without torch, and reach PyTorch/XLA and TorchTPU through fork
servers in the environments of the sessions ``xla`` and ``tpu``.
"""

from pathlib import Path

import nox

nox.needs_version = ">=2024.3.2"
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.stop_on_first_error = True

BACKENDS = ("xla", "tpu")
HARNESS = ("noxfile.py", "tests/conftest.py", "tests/test_backends.py", "tests/backends")


@nox.session
def xla(session: nox.Session) -> None:
    """The environment of PyTorch/XLA, which runs on its CPU device."""
    session.install("torch==2.9.0", "torch_xla==2.9.0", "numpy")
    session.install("--editable", ".")


@nox.session
def tpu(session: nox.Session) -> None:
    """The environment of TorchTPU, with the plug-in that takes a TPU's place."""
    session.install("torch==2.13.0", "torch_tpu==0.2.0", "numpy")
    session.install("--no-deps", "--require-hashes", "--requirement", "tests/backends/plugin.txt")
    session.install("--editable", ".")


@nox.session(requires=BACKENDS)
def tests(session: nox.Session) -> None:
    """Lint, formatting, types and all tests. Arguments go to pytest."""
    session.install("--editable", ".[test]", "nox")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("mypy", "--ignore-missing-imports", "--allow-subclassing-any", *HARNESS)
    environments = Path(session.virtualenv.location).parent
    pythons = {f"TPUMIGRATE_PYTHON_{name.upper()}": str(environments / name / "bin" / "python") for name in BACKENDS}
    session.run("pytest", *session.posargs, env={**pythons, "TPUMIGRATE_REQUIRE_BACKENDS": "1"})
