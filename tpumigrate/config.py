"""Settings: defaults, `[tool.tpumigrate]` of the nearest pyproject.toml, then the command line."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpumigrate.tables import TARGETS

DEFAULT_TARGET = "torch_xla"


class BadConfig(Exception):
    """The configuration can't be used; the message names the file and the key."""


@dataclass(frozen=True)
class Settings:
    """What a run is to do.

    target: torch_xla, torch_tpu, or auto (read from the project's dependencies)
    select, ignore: code prefixes ("ALL" for every rule)
    exclude: gitignore patterns, relative to the folders checked
    per_file_ignores: gitignore pattern, relative to `root`, to code prefixes
    root: the folder of the configuration; "" for the working directory
    """

    target: str = "auto"
    select: tuple[str, ...] = ("ALL",)
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    per_file_ignores: dict[str, tuple[str, ...]] = field(default_factory=dict)
    root: str = ""


def load(start: Path) -> tuple[Settings, Path | None]:
    """Settings of the nearest pyproject.toml with a [tool.tpumigrate] table at or above `start`, and its path.

    Raises BadConfig.
    """
    folder = start if start.is_dir() else start.parent
    for above in (folder.absolute(), *folder.absolute().parents):
        path = above / "pyproject.toml"
        if path.is_file():
            try:
                document = tomllib.loads(path.read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
                raise BadConfig(f"{path}: {error}") from None
            tool = document.get("tool", {})
            table = tool.get("tpumigrate") if isinstance(tool, dict) else None
            if table is not None:
                return _settings(path, table), path
        if (above / ".git").exists():
            break
    return Settings(), None


def _settings(path: Path, table: object) -> Settings:
    if not isinstance(table, dict):
        raise BadConfig(f"{path}: [tool.tpumigrate] must be a table")
    settings = Settings(root=str(path.parent))
    more: tuple[str, ...] = ()
    for key, value in table.items():
        match key:
            case "target":
                if value not in (*TARGETS, "auto"):
                    raise BadConfig(f"{path}: target must be one of {', '.join(TARGETS)}, auto; not {value!r}")
                settings = replace(settings, target=value)
            case "select" | "ignore" | "exclude":
                lists: dict[str, Any] = {key: _strings(path, key, value)}
                settings = replace(settings, **lists)
            case "extend-select":
                more = _strings(path, key, value)
            case "per-file-ignores":
                if not isinstance(value, dict):
                    raise BadConfig(f"{path}: {key} must be a table of pattern = [codes]")
                settings = replace(
                    settings,
                    per_file_ignores={pattern: _strings(path, key, codes) for pattern, codes in value.items()},
                )
            case _:
                raise BadConfig(f"{path}: unknown key {key!r} in [tool.tpumigrate]")
    return replace(settings, select=(*settings.select, *more))


def _strings(path: Path, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadConfig(f"{path}: {key} must be a list of strings")
    return tuple(value)


_NAMED = {
    "torch_tpu": re.compile(r"\btorch[-_]tpu\b"),
    "torch_xla": re.compile(r"\btorch[-_]xla\b"),
}


def infer_target(start: Path) -> tuple[str, str]:
    """The target that the dependencies of the project around `start` name, and where that was read ("" if nowhere)."""
    folder = start if start.is_dir() else start.parent
    for above in (folder.absolute(), *folder.absolute().parents):
        names = ["pyproject.toml", "setup.cfg", "setup.py", *sorted(p.name for p in above.glob("requirements*.txt"))]
        for name in names:
            text = _dependencies(above / name)
            named = [target for target, pattern in _NAMED.items() if pattern.search(text)]
            if len(named) == 1:
                return named[0], name
            if named:
                return DEFAULT_TARGET, ""  # the project supports both
        if (above / ".git").exists() or (above / "pyproject.toml").exists():
            break
    return DEFAULT_TARGET, ""


def _dependencies(path: Path) -> str:
    """The part of a file that lists dependencies."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if path.name != "pyproject.toml":
        return "\n".join(line.partition("#")[0] for line in text.splitlines())
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return ""
    project = _table(document, "project")
    poetry = _table(_table(document, "tool"), "poetry")
    listed = [project.get("dependencies"), project.get("optional-dependencies"), poetry.get("dependencies")]
    return repr([*listed, document.get("dependency-groups")])


def _table(document: dict[str, Any], key: str) -> dict[str, Any]:
    """A table of a document, empty when there is none or something else in its place."""
    found = document.get(key)
    return found if isinstance(found, dict) else {}
