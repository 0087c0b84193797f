"""The pre-commit hooks, run by pre-commit itself in a repository of a user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import copy_to

TRAIN = "import torch\n\nmodel = torch.nn.Linear(2, 2).cuda()\n"
FIXED = 'import torch\n\nmodel = torch.nn.Linear(2, 2).to("tpu")\n'
SETTINGS = '[tool.tpumigrate]\ntarget = "torch_tpu"\nselect = ["TPU102"]\n'


class Repository:
    """A git repository in which commits need no global settings."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PRE_COMMIT"))}
        kept.pop("PYTHONPATH", None)
        self.env = {
            **kept,
            "PRE_COMMIT_HOME": str(home),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            **{f"GIT_{who}_NAME": "nobody" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "nobody@example.org" for who in ("AUTHOR", "COMMITTER")},
            # Hooks of pre-commit find it by the interpreter that installed them.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
        }
        self.git("init", "--quiet", "--initial-branch", "main")

    def run(self, *command: str, status: int = 0) -> str:
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True)
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def git(self, *arguments: str, status: int = 0) -> str:
        return self.run("git", *arguments, status=status)

    def hook(self, name: str, *, status: int) -> str:
        return self.run(sys.executable, "-m", "pre_commit", "run", name, "--all-files", "--verbose", status=status)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A project of a user whose pre-commit configuration names a commit of this checkout."""
    home = tmp_path_factory.mktemp("home")
    hooks = Repository(copy_to(tmp_path_factory.mktemp("hooks")), home)
    hooks.git("add", "--all")
    hooks.git("commit", "--quiet", "--message", "the working tree")
    revision = hooks.git("rev-parse", "HEAD").strip()
    project = Repository(tmp_path_factory.mktemp("project"), home)
    (project.folder / ".pre-commit-config.yaml").write_text(
        f"repos:\n- repo: {hooks.folder}\n  rev: {revision}\n  hooks:\n  - id: tpumigrate\n  - id: tpumigrate-fix\n"
    )
    (project.folder / "pyproject.toml").write_text(SETTINGS)
    (project.folder / "notes.txt").write_text("x.cuda()\n")
    return project


def test_hooks_find_and_fix(user: Repository) -> None:
    train = user.folder / "train.py"
    train.write_text(TRAIN)
    user.git("add", "--all")

    said = user.hook("tpumigrate", status=1)
    assert "train.py:3:9: TPU102" in said
    assert "notes.txt" not in said
    assert train.read_text() == TRAIN

    said = user.hook("tpumigrate-fix", status=1)  # pre-commit fails a hook that changes files
    assert "files were modified by this hook" in said
    assert train.read_text() == FIXED

    user.git("add", "--all")
    for name in ("tpumigrate", "tpumigrate-fix"):
        assert "Passed" in user.hook(name, status=0)
    assert train.read_text() == FIXED


def test_hooks_guard_a_commit(user: Repository) -> None:
    """`git commit` is refused, then let through once the fix is staged."""
    user.run(sys.executable, "-m", "pre_commit", "install")
    model = user.folder / "model.py"
    model.write_text(TRAIN)
    user.git("add", "--all")
    assert "TPU102" in user.git("commit", "--message", "moves to a GPU", status=1)
    assert model.read_text() == FIXED
    user.git("add", "--all")
    user.git("commit", "--quiet", "--message", "moves to a TPU")
    assert user.git("status", "--porcelain") == ""


def test_check_hook_honours_suppression(user: Repository) -> None:
    (user.folder / "kept.py").write_text(TRAIN.replace("cuda()", "cuda()  # noqa: TPU102"))
    user.git("add", "--all")
    user.hook("tpumigrate", status=0)
