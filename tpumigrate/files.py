"""Files on disk: which to look at, how to read one, how to write one without ever leaving half of it."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pathspec

from tpumigrate.finding import Problem

if TYPE_CHECKING:
    Spec = pathspec.PathSpec[Any]  # subscripting is new in pathspec 1.0

SUFFIXES = (".py", ".pyi")
ALWAYS_SKIPPED = frozenset(
    ".git .hg .svn .nox .tox .venv venv __pycache__ .mypy_cache .ruff_cache .pytest_cache .eggs node_modules build "
    "dist site-packages .ipynb_checkpoints".split()
)
MAX_BYTES = 2_000_000  # a larger file is generated; parsing it would take longer than all the others


class FileChanged(Exception):
    """Somebody wrote the file after it was read."""


@dataclass
class Discovered:
    """paths: files to process, in stable order; problems: what could not be looked into"""

    paths: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def discover(roots: Iterable[str], exclude: Iterable[str] = (), base: str = "") -> Discovered:
    """Python files below `roots`; a file named explicitly is always taken, whatever its suffix.

    Honours .gitignore files of the folders walked, and `exclude` (gitignore patterns, relative to the folder walked
    or to `base`).  Symbolic links to folders
    are not followed, so that a loop can't trap the walk.
    """
    found = Discovered()
    seen: set[str] = set()
    excluded = _spec(exclude)
    for root in roots:
        if os.path.isdir(root):
            for path in _walk(root, excluded, base or os.curdir, found.problems):
                _add(found, seen, path)
        elif os.path.lexists(root):
            _add(found, seen, root)
        else:
            found.problems.append(Problem(root, "no such file or directory"))
    return found


def _add(found: Discovered, seen: set[str], path: str) -> None:
    real = os.path.normpath(path)
    if real not in seen:
        seen.add(real)
        found.paths.append(real)


def _walk(root: str, excluded: Spec, base: str, problems: list[Problem]) -> Iterator[str]:
    """Files below `root`, folders and files in alphabetical order."""
    ignored: dict[str, list[tuple[str, Spec]]] = {}

    def unreadable(error: OSError) -> None:
        problems.append(Problem(os.path.normpath(str(error.filename)), f"cannot list the directory: {error.strerror}"))

    for folder, folders, names in os.walk(root, onerror=unreadable):
        specs = ignored.get(os.path.dirname(folder), _inherited(folder) if folder == root else [])
        own = _gitignore(folder)
        if own is not None:
            specs = [*specs, (folder, own)]
        ignored[folder] = specs

        def skipped(path: str, specs: list[tuple[str, Spec]] = specs) -> bool:
            relative = os.path.relpath(path, root)
            slash = "/" if os.path.isdir(path) else ""
            return any(excluded.match_file(name + slash) for name in (relative, os.path.relpath(path, base))) or any(
                spec.match_file(os.path.relpath(path, base) + slash) for base, spec in specs
            )

        folders[:] = sorted(
            name for name in folders if name not in ALWAYS_SKIPPED and not skipped(os.path.join(folder, name))
        )
        for name in sorted(names):
            if name.endswith(SUFFIXES):
                path = os.path.join(folder, name)
                if not skipped(path):
                    yield path


def _inherited(folder: str) -> list[tuple[str, Spec]]:
    """The .gitignore files above `folder`, up to the root of its repository."""
    found: list[tuple[str, Spec]] = []
    current = Path(folder).absolute()
    if (current / ".git").exists():
        return found
    for above in current.parents:
        spec = _gitignore(str(above))
        if spec is not None:
            found.append((str(above), spec))
        if (above / ".git").exists():
            return [(os.path.relpath(base), spec) for base, spec in reversed(found)]
    return []


def _gitignore(folder: str) -> Spec | None:
    try:
        lines = Path(folder, ".gitignore").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return _spec(lines)


def _spec(lines: Iterable[str]) -> Spec:
    return pathspec.PathSpec.from_lines("gitwildmatch", lines)


def read(path: str) -> bytes | Problem:
    """The bytes of a file, or one sentence that says why there are none."""
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            return Problem(path, "not a regular file")
        if info.st_size > MAX_BYTES:
            return Problem(path, f"too large to be written by hand ({info.st_size / 1e6:.1f} MB): not checked")
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        if os.path.islink(path):
            return Problem(path, f"broken symbolic link: {error.strerror}")
        return Problem(path, f"cannot read: {error.strerror}")


def write(path: str, before: bytes, after: bytes) -> None:
    """Replace the file's content at once, keeping its mode.

    Raises FileChanged when it no longer holds `before`, OSError when it can't be written.
    """
    target = os.path.realpath(path)
    with open(target, "rb") as file:
        if file.read() != before:
            raise FileChanged(path)
    if not os.access(target, os.W_OK):
        raise PermissionError(13, "read-only file", target)
    folder = os.path.dirname(target)
    descriptor, temporary = tempfile.mkstemp(prefix=".tpumigrate-", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        _dress_like(temporary, os.stat(target))
        with open(target, "rb") as file:
            if file.read() != before:
                raise FileChanged(path)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _dress_like(path: str, info: os.stat_result) -> None:
    """Give a new file the owner (where that is allowed) and the mode of another."""
    own = os.stat(path)
    if (own.st_uid, own.st_gid) != (info.st_uid, info.st_gid):
        with contextlib.suppress(OSError):
            os.chown(path, info.st_uid, info.st_gid)
    os.chmod(path, stat.S_IMODE(info.st_mode))  # last: a change of owner clears some bits
