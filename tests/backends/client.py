"""The tests' side of the fork servers."""

import atexit
import itertools
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

INTERPRETERS = {
    "xla": "TPUMIGRATE_PYTHON_XLA",
    "tpu": "TPUMIGRATE_PYTHON_TPU",
    "cpu": "TPUMIGRATE_PYTHON_TPU",
}
ENVIRONMENTS = {
    "xla": {"PJRT_DEVICE": "CPU"},
    "tpu": {"PYTHONWARNINGS": "ignore:<TorchTpu/Performance/TcMalloc/"},
    "cpu": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
}
COMMON = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
}


class MissingBackendError(RuntimeError):
    """The environment variable that names a backend's interpreter is not set, or is wrong."""


class ServerError(RuntimeError):
    """A fork server ended, which no program can make it do."""


@dataclass(frozen=True)
class Result:
    """What a program did.

    ``recorded`` is false when the program ended so suddenly (a signal, ``os._exit``) that the
    fields below it could not be counted.
    """

    rc: int
    stdout: str
    stderr: str
    seconds: float
    signal: str | None = None
    timed_out: bool = False
    recorded: bool = False
    executions: int = 0
    compiles: int = 0
    devices: list[str] = field(default_factory=list)
    steps: int = 0
    weights_changed: bool | None = None


class Backend:
    """Programs on ``"xla"`` or ``"tpu"``, or CUDA programs on ``"cpu"`` for reference numbers.

    The server starts with the first program and stops when the session ends. ``env`` is for what
    libraries read only while they are imported.
    """

    def __init__(self, name: str, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._interpreter = interpreter(name)
        self._environment = server_environment(name) | dict(env or {})
        self._server: subprocess.Popen[str] | None = None
        self._log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self.startup_seconds = 0.0

    def run(
        self,
        program: Path | str,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        *,
        cwd: Path | str | None = None,
        collect: bool = True,
        fresh: bool = False,
    ) -> Result:
        """Runs a file (a path, or a string that is one) or source code like ``python`` would.

        The program starts in an empty folder unless ``cwd`` says otherwise. Libraries read some
        variables only while they are imported; ``fresh`` lets them see ``env`` then, for the price of
        starting another server.
        """
        with tempfile.TemporaryDirectory(prefix="tpumigrate-test-") as folder:
            path = _as_file(program, Path(folder))
            request = {"path": str(path.resolve()), "folder": folder, "collect": collect}
            return self._send(request, argv, env, timeout, cwd, fresh)

    def run_module(
        self,
        module: str,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        *,
        cwd: Path | str | None = None,
        collect: bool = True,
        fresh: bool = False,
    ) -> Result:
        """Runs ``python -m module``, otherwise like ``run``."""
        with tempfile.TemporaryDirectory(prefix="tpumigrate-test-") as folder:
            request = {"module": module, "folder": folder, "collect": collect}
            return self._send(request, argv, env, timeout, cwd, fresh)

    def _send(
        self,
        request: dict[str, Any],
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        timeout: float,
        cwd: Path | str | None,
        fresh: bool,
    ) -> Result:
        work = Path(request["folder"]) / "cwd"
        work.mkdir()
        request |= {
            "argv": [str(argument) for argument in argv],
            "env": dict(env or {}),
            "cwd": str(cwd or work),
            "timeout": timeout,
        }
        if fresh:
            other = Backend(self.name, env)
            try:
                return other._request(request)
            finally:
                other.stop()
        return self._request(request)

    def _request(self, request: dict[str, Any]) -> Result:
        with self._lock:
            request["id"] = next(self._ids)
            reply = self._exchange(self._started(), request)
        assert reply.pop("id") == request["id"]
        return Result(**reply)

    def _started(self) -> subprocess.Popen[str]:
        if self._server is None:
            server = Path(__file__).with_name("server.py")
            self._server = subprocess.Popen(
                [self._interpreter, str(server), self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=self._environment,
                text=True,
                encoding="utf-8",
            )
            atexit.register(self.stop)
            self.startup_seconds = self._exchange(self._server)["seconds"]
        return self._server

    def _exchange(self, server: subprocess.Popen[str], request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        assert server.stdin
        assert server.stdout
        if request is not None:
            print(json.dumps(request), file=server.stdin, flush=True)
        line = server.stdout.readline()
        if not line:
            self._log.seek(0)
            log = self._log.read()[-4000:]
            raise ServerError(f"the {self.name} server ended with {server.wait()}:\n{log}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def stop(self) -> None:
        """Stops the server; the next program starts another."""
        if self._server:
            assert self._server.stdin
            assert self._server.stdout
            self._server.stdin.close()
            self._server.wait(timeout=30)
            self._server.stdout.close()
            self._server = None
            atexit.unregister(self.stop)


def interpreter(name: str) -> str:
    """The python of a backend's environment."""
    variable = INTERPRETERS[name]
    path = os.environ.get(variable)
    if not path:
        raise MissingBackendError(f"{variable} does not name the python of the {name} environment")
    if not Path(path).is_file():
        raise MissingBackendError(f"{variable} names {path}, which does not exist")
    return path


def server_environment(name: str) -> dict[str, str]:
    """The environment of a server: what is the tests' own stays out."""
    kept = {key: value for key, value in os.environ.items() if not _is_foreign(key)}
    return kept | COMMON | ENVIRONMENTS[name]


def _is_foreign(key: str) -> bool:
    return key.startswith(("PYTHON", "PYTEST_", "COV_", "TPUMIGRATE_", "VIRTUAL_ENV"))


def _as_file(program: Path | str, folder: Path) -> Path:
    if isinstance(program, Path) or ("\n" not in program and program.endswith(".py")):
        return Path(program)
    file = folder / "program.py"
    file.write_text(program, encoding="utf-8")
    return file
