"""The distribution: what is in it, that it works without checkout or torch, and who may import whom."""

import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT, copy_to, tracked_files

EXAMPLE = "import torch\n\nx = torch.ones(2).cuda()\n"
# Where the folders of the checkout are in the distribution.
PLACES = {"tpumigrate/": "tpumigrate/", "rules/": "tpumigrate/rules/", "runtime/": "tpumigrate/runtime/"}


def _call(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**clean, **(env or {})}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built from a copy of the working tree."""
    source = copy_to(tmp_path_factory.mktemp("source"))
    products = tmp_path_factory.mktemp("products")
    _call(sys.executable, "-m", "build", "--outdir", products, source, cwd=products)
    return products


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment in which only the wheel and what it requires are installed."""
    folder = tmp_path_factory.mktemp("environment")
    _call(sys.executable, "-m", "venv", folder, cwd=folder)
    _call(folder / "bin" / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    return folder / "bin"


def shipped() -> set[str]:
    """Files that must be in the distribution, by their names there."""
    found = set()
    for name in tracked_files():
        for here, there in PLACES.items():
            if name.startswith(here) and not name.endswith((".md", ".txt")):
                found.add(there + name.removeprefix(here))
    return found


def test_wheel_holds_the_tree(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == shipped()
    assert names >= {
        "tpumigrate/py.typed",
        "tpumigrate/report/text.py",
        "tpumigrate/rules/device_move.py",
        "tpumigrate/rules/targets/torch_xla.toml",
        "tpumigrate/rules/targets/torch_tpu.toml",
        "tpumigrate/rules/targets/aliases.toml",
        "tpumigrate/runtime/__init__.py",
    }


def test_wheel_is_pure_and_small(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 2_000_000


def test_source_distribution_builds_the_same(built: Path, wheel: Path, tmp_path: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    _call(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "again", source, cwd=tmp_path)
    (again,) = (tmp_path / "again").glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_installed_tool_works_without_torch(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EXAMPLE)
    listing = _call(environment / "python", "-m", "pip", "list", "--format", "freeze", cwd=tmp_path).lower()
    assert "torch" not in listing
    options = ("--target", "torch_tpu", "--select", "TPU102")
    done = subprocess.run(
        [environment / "tpumigrate", "check", ".", *options], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "train.py:3:5: TPU102" in done.stdout
    _call(environment / "tpumigrate", "fix", "--apply", "train.py", *options, cwd=tmp_path)
    assert (tmp_path / "train.py").read_text() == EXAMPLE.replace(".cuda()", '.to("tpu")')
    rules = _call(environment / "tpumigrate", "rule", cwd=tmp_path)
    assert rules == _call(sys.executable, "-m", "tpumigrate", "rule", cwd=ROOT)
    assert "tpumigrate" in _call(environment / "python", "-m", "tpumigrate", "--version", cwd=tmp_path)


def test_installed_files_are_those_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    """Nothing at the top level but the one package: no stray `rules` or `runtime`."""
    program = (
        "import tpumigrate, tpumigrate.rules, tpumigrate.runtime, importlib.util;"
        "print(tpumigrate.__path__, importlib.util.find_spec('rules'), importlib.util.find_spec('runtime'))"
    )
    assert _call(environment / "python", "-c", program, cwd=tmp_path).strip().endswith("] None None")


def test_bare_checkout_works(tmp_path: Path) -> None:
    """`python -m tpumigrate` in the root, nothing installed but the requirements."""
    source = copy_to(tmp_path)
    (tmp_path / "train.py").write_text(EXAMPLE)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tpumigrate",
            "check",
            "train.py",
            "--target",
            "torch_tpu",
            "--select",
            "TPU102",
        ],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "train.py:3:5: TPU102" in done.stdout


def test_command_line_imports_no_framework() -> None:
    """Starting must be cheap: neither torch nor what only other commands need."""
    program = "import sys, tpumigrate.cli; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = _call(sys.executable, "-c", program, cwd=ROOT).split()
    assert "tpumigrate" in loaded
    assert (
        set(loaded) & {"torch", "torch_xla", "torch_tpu", "numpy", "libcst", "rich", "pathspec", "multiprocessing"}
        == set()
    )


# -- who may import whom -----------------------------------------------------------------------------------


def _imports(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _offenders(folder: str, package: str, *forbidden: str) -> list[str]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        inner = path.relative_to(ROOT / folder).parent.parts
        for line, name in _imports(path, ".".join([package, *inner])):
            if any(name == item or name.startswith(f"{item}.") for item in forbidden):
                found.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    return found


def test_the_tool_does_not_import_rules_or_runtime() -> None:
    """They are sub-packages only when installed; the tool finds rules when it runs."""
    assert _offenders("tpumigrate", "tpumigrate", "tpumigrate.rules", "tpumigrate.runtime", "rules", "runtime") == []


def test_the_runtime_stands_alone() -> None:
    """It lives in users' programs, where the tool's requirements need not be installed."""
    forbidden = (
        "click",
        "rich",
        "libcst",
        "pathspec",
        "tpumigrate.rules",
        "tpumigrate.cli",
        "tpumigrate.report",
    )
    assert _offenders("runtime", "tpumigrate.runtime", *forbidden) == []


def test_rules_do_not_import_the_runtime_or_the_command_line() -> None:
    forbidden = (
        "tpumigrate.runtime",
        "tpumigrate.cli",
        "tpumigrate.report",
        "click",
        "rich",
        "libcst",
        "torch",
    )
    assert _offenders("rules", "tpumigrate.rules", *forbidden) == []


def test_every_package_is_declared() -> None:
    """A new folder must be named in pyproject.toml, or it would be missing from the wheel."""
    import tomllib

    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    needed = set()
    for name in shipped():
        folder = name.rpartition("/")[0]
        needed.add(folder.replace("/", "."))
    assert declared == needed


# -- pre-commit --------------------------------------------------------------------------------------------


def test_hooks_are_declared() -> None:
    text = (ROOT / ".pre-commit-hooks.yaml").read_text()
    for entry in (
        "id: tpumigrate\n",
        "id: tpumigrate-fix\n",
        "entry: tpumigrate check\n",
        "tpumigrate fix --apply\n",
    ):
        assert text.count(entry) == 1
    assert text.count("require_serial: true") == text.count("types_or: [python, pyi]") == text.count("- id:") == 2
