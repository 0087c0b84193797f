"""Copies of this checkout as git would have them, for tests that build or install it."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tracked_files() -> list[str]:
    """Files of the working tree that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = done.stdout.decode().split("\0")
    return sorted({name for name in names if name and (ROOT / name).is_file()})


def copy_to(folder: Path) -> Path:
    """A copy of the working tree, without its history and its products."""
    for name in tracked_files():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, path)
    return folder
