"""A fork server: ``python server.py xla|tpu|cpu`` with the python of the backend's environment.

It imports the backend once, says ``{"ready": ...}``, then reads one JSON request a line and answers
each with one JSON line. Every program runs in a forked child, so it starts at once, ends like any
python, and takes nothing but itself down when the backend aborts.

A request has ``path`` or ``module``, ``argv``, ``env``, ``cwd``, ``timeout``, ``collect`` and
``folder``, a scratch folder of its own.
"""

import contextlib
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from backends import backend, program

Message = dict[str, Any]

POLL_SECONDS = 0.005


def main() -> None:
    """Serves until the input ends; in a child, runs the program and returns."""
    name = sys.argv[1]
    quick_exit = program.QuickExit()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries print when they are imported
    started = time.monotonic()
    backend.load(name)
    backend.leave_quickly(name)
    del sys.path[1]
    gc.collect()
    gc.freeze()
    _reply(replies, {"ready": name, "seconds": time.monotonic() - started})
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            replies.close()
            _record(name, request)
            program.run(request, quick_exit)
            return
        _reply(replies, {"id": request["id"]} | _watch(pid, request))


def _reply(replies: TextIO, message: Message) -> None:
    print(json.dumps(message), file=replies, flush=True)


def _record(name: str, request: Message) -> None:
    """In the child: a process group of its own, and everything in it watched."""
    os.setsid()
    os.environ[backend.RECORD_BACKEND] = name
    if request["collect"]:
        os.environ[backend.RECORD_FOLDER] = request["folder"]
    backend.start_recording(name)


def _watch(pid: int, request: Message) -> Message:
    """In the server: waits for the child, stops it at the timeout, collects what it left."""
    started = time.monotonic()
    timed_out = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        seconds = time.monotonic() - started
        if ended:
            break
        if seconds > request["timeout"] and not timed_out:
            timed_out = True
            _kill_group(pid)
        time.sleep(POLL_SECONDS)
    _kill_group(pid)
    code = os.waitstatus_to_exitcode(status)
    folder = Path(request["folder"])
    return {
        "rc": code,
        "signal": signal.Signals(-code).name if code < 0 else None,
        "timed_out": timed_out,
        "seconds": seconds,
        "stdout": _read(folder / "stdout"),
        "stderr": _read(folder / "stderr"),
    } | _merge([json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))])


def _kill_group(leader: int) -> None:
    """The program with all it started, also what it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _merge(records: list[Message]) -> Message:
    """One record of all processes of a program."""
    changed = [flag for record in records for flag in record["weights_changed"]]
    return {
        "recorded": bool(records),
        "executions": sum(record["executions"] for record in records),
        "compiles": sum(record["compiles"] for record in records),
        "devices": sorted({device for record in records for device in record["devices"]}),
        "steps": sum(record["steps"] for record in records),
        "weights_changed": all(changed) if changed else None,
    }


if __name__ == "__main__":
    main()
