"""Runs a program in this process the way ``python`` would."""

import atexit
import io
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any


class QuickExit:
    """Ends the process after the last exit handler, sparing a second of taking modules apart.

    Make one before anything registers an exit handler: the last to register is the first to run.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


def run(request: Mapping[str, Any], quick_exit: QuickExit) -> None:
    """Runs the program of a request; errors and ``SystemExit`` go on to the interpreter."""
    _use_streams(request["folder"])
    _use_environment(request)
    sys.excepthook = _print_without_harness
    quick_exit.code = 1
    try:
        _run_main(request)
    except SystemExit as exit_:
        quick_exit.code = _exit_code(exit_.code)
        raise
    quick_exit.code = 0


def _exit_code(code: str | int | None) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    return 1


def _run_main(request: Mapping[str, Any]) -> None:
    if module := request.get("module"):
        sys.argv = [module, *request["argv"]]
        sys.path[0] = os.getcwd()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        path = Path(request["path"])
        sys.argv = [str(path), *request["argv"]]
        sys.path[0] = str(path.parent)
        _run_file(path)


def _run_file(path: Path) -> None:
    """Like ``runpy.run_path``, but the module stays ``__main__`` until the process ends.

    Exit handlers and spawned processes look for it there.
    """
    main = ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)


def _use_streams(folder: str) -> None:
    """Input from nowhere, output into files, written line by line lest a crash lose them."""
    for descriptor, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{folder}/stdout", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, f"{folder}/stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        file = os.open(name, flags, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # loaded libraries keep it, for instance xm.master_print
            stream.reconfigure(line_buffering=True)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)


def _use_environment(request: Mapping[str, Any]) -> None:
    environment = dict(request["env"])
    given_path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [entry for entry in given_path if entry]
    children_path = [str(Path(__file__).with_name("site")), *given_path]
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in children_path if entry)
    os.environ.update(environment)
    os.chdir(request["cwd"])


def _print_without_harness(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    own = {__file__, str(Path(__file__).with_name("server.py"))}
    while trace and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)
