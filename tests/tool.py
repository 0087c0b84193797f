"""Runs the command line as its users do: in a process of its own, on real files."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534

# The tool as another user.  The interpreter and the checkout may be closed to that user, so everything is
# loaded, and used once, before the process gives up its rights for good.
_AS_NOBODY = """
import contextlib, io, os, sys, tempfile
sys.path.insert(0, {root!r})
from tpumigrate.cli import main

def run(*arguments):
    try:
        main(list(arguments), prog_name="tpumigrate")
    except SystemExit as done:
        return done.code
    return 0

silence = io.StringIO()
with (
    tempfile.TemporaryDirectory() as folder,
    contextlib.redirect_stdout(silence),
    contextlib.redirect_stderr(silence),
):
    path = os.path.join(folder, "warm.py")
    for text in ("import torch\\nx = torch.ones(2).cuda()\\n", "x = = 1  # .cuda()\\n"):
        for command in ("check", "check --output-format concise", "fix --diff", "fix --apply"):
            with open(path, "w") as file:
                file.write(text)
            run(*command.split(), path, *{options!r})
os.setgroups([])
os.setgid({nobody})
os.setuid({nobody})
sys.exit(run(*sys.argv[1:]))
"""


def run(
    *arguments: str | Path,
    cwd: Path,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """`tpumigrate ARGUMENTS` of this checkout; output is decoded without any translation of line ends."""
    command = [sys.executable, "-m", "tpumigrate", *map(str, arguments)]
    return _run(command, cwd, stdin, env, timeout)


def run_without_rights(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same by a user whom permissions bind: the present one, or nobody when the present one is root."""
    if os.geteuid() != 0:
        return run(*arguments, cwd=cwd)
    program = _AS_NOBODY.format(root=str(ROOT), nobody=NOBODY, options=["--target", "torch_tpu", "--isolated"])
    return _run([sys.executable, "-c", program, *map(str, arguments)], cwd, b"", None, 120)


def _run(
    command: list[str], cwd: Path, stdin: bytes, env: dict[str, str] | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        **(env or {}),
    }
    done = subprocess.run(command, cwd=cwd, input=stdin, env=environment, capture_output=True, timeout=timeout)
    return subprocess.CompletedProcess(
        command,
        done.returncode,
        done.stdout.decode("utf-8", "surrogateescape"),
        done.stderr.decode("utf-8", "surrogateescape"),
    )
