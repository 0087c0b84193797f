"""The command line: what is printed where, with which exit status, and what is written."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tool import run

GOOD = "import torch\n\nx = torch.ones(2).cuda()\n"
FIXED = 'import torch\n\nx = torch.ones(2).to("tpu")\n'
CLEAN = "import torch\n\nx = torch.ones(2)\n"
# `.cuda()` of an object that may be of a class with a `cuda()` of its own: found, not fixed.
CAR = "import torch\n\n\nclass Car:\n    def cuda(self):\n        return 1\n"
UNFIXABLE = f"{CAR}\n\ndef f(thing):\n    return thing.cuda()\n"
SELECT = ("--select", "TPU102", "--target", "torch_tpu")
OPTIONS = (*SELECT, "--isolated")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository of its own, so that nothing above it counts."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.py").write_text(GOOD)
    return tmp_path


def found(folder: Path, *options: str) -> list[str]:
    """The findings as `path:line CODE`, with the settings of the folder."""
    done = run("check", ".", "--output-format", "json", *options, cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    findings = json.loads(done.stdout)["findings"]
    return [f"{item['path']}:{item['line']} {item['code']}" for item in findings]


# -- exit status -------------------------------------------------------------------------------------------


def test_check_exits_1_with_findings_and_0_without(folder: Path) -> None:
    assert run("check", ".", *OPTIONS, cwd=folder).returncode == 1
    assert run("check", ".", *OPTIONS, "--exit-zero", cwd=folder).returncode == 0
    assert run("check", ".", *OPTIONS, "--ignore", "TPU102", cwd=folder).returncode == 0
    (folder / "a.py").write_text(CLEAN)
    done = run("check", ".", *OPTIONS, cwd=folder)
    assert (done.returncode, done.stdout.strip()) == (0, "No findings in 1 file.")


def test_fix_without_apply_shows_and_exits_1(folder: Path) -> None:
    done = run("fix", ".", *OPTIONS, cwd=folder)
    assert done.returncode == 1
    assert "+x = torch.ones(2).to(" in done.stdout
    assert (folder / "a.py").read_text() == GOOD


def test_fix_apply_exits_0_when_all_is_fixed(folder: Path) -> None:
    done = run("fix", ".", *OPTIONS, "--apply", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert (folder / "a.py").read_text() == FIXED
    assert run("fix", ".", *OPTIONS, cwd=folder).returncode == 0


def test_fix_apply_exits_1_when_something_is_left(folder: Path) -> None:
    (folder / "b.py").write_text(UNFIXABLE)
    done = run("fix", ".", *OPTIONS, "--apply", cwd=folder)
    assert done.returncode == 1
    assert re.search(r"^b.py:10:12: TPU102 ", done.stderr, re.MULTILINE)


def test_trouble_wins_over_findings(folder: Path) -> None:
    (folder / "b.py").write_text("x = = y.cuda()\n")
    for command in (("check",), ("check", "--exit-zero"), ("fix",), ("fix", "--apply")):
        assert run(*command, ".", *OPTIONS, cwd=folder).returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("check",),
        ("check", "-", "a.py"),
        ("check", ".", "--target", "torch_gpu"),
        ("check", ".", "--nonsense"),
        ("check", ".", "--output-format", "xml"),
        ("check", ".", "--select", "NOPE1"),
        ("check", ".", "--ignore", "TPU9999"),
        ("fix", ".", "--extend-select", "XYZ"),
        ("check", ".", "--jobs", "-1"),
        ("fix",),
        ("rule", "NOPE"),
        ("rule", "TPU"),
        ("nonsense",),
    ],
)
def test_wrong_usage_exits_2_and_says_why(folder: Path, arguments: tuple[str, ...]) -> None:
    done = run(*arguments, cwd=folder)
    assert done.returncode == 2
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_unknown_code_is_named(folder: Path) -> None:
    done = run("check", ".", "--select", "TPU102,NOPE1", cwd=folder)
    assert "NOPE1" in done.stderr


def test_help_and_version(folder: Path) -> None:
    for arguments in (("--help",), ("check", "-h"), ("fix", "--help"), ("--version",)):
        done = run(*arguments, cwd=folder)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


# -- rule --------------------------------------------------------------------------------------------------


def test_rule_lists_and_explains(folder: Path) -> None:
    listing = run("rule", cwd=folder).stdout.splitlines()
    codes = [row.split()[0] for row in listing]
    assert "TPU102" in codes
    assert codes == sorted(codes)
    for name in ("TPU102", "tpu102"):
        done = run("rule", name, cwd=folder)
        assert done.returncode == 0
        for words in ("TPU102 cuda-method", "## What it does", "## Example", "## Fix safety"):
            assert words in done.stdout


def test_selection_by_prefix(folder: Path) -> None:
    for options in (
        ("--select", "TPU1"),
        ("--select", "tpu102"),
        ("--select", "TPU,TPU1"),
        ("--select", "ALL"),
    ):
        assert "a.py:3 TPU102" in found(folder, "--isolated", *options)
    assert found(folder, "--isolated", "--select", "TPU1", "--ignore", "TPU102") == []
    assert found(folder, "--isolated", "--select", "TPU102", "--ignore", "TPU1") == ["a.py:3 TPU102"]
    assert found(folder, "--isolated", "--ignore", "TPU") == []
    assert found(folder, "--isolated", "--ignore", "TPU", "--extend-select", "TPU102") == ["a.py:3 TPU102"]


# -- configuration -----------------------------------------------------------------------------------------


def configure(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.tpumigrate]\n{text}\n")


def test_target_of_the_configuration(folder: Path) -> None:
    configure(folder, 'target = "torch_tpu"')
    done = run("check", ".", "--select", "TPU102", "--output-format", "json", cwd=folder)
    assert json.loads(done.stdout)["target"] == "torch_tpu"
    done = run("check", ".", "--select", "TPU102", "--target", "torch_xla", "--output-format", "json", cwd=folder)
    assert json.loads(done.stdout)["target"] == "torch_xla"


def test_select_and_ignore_of_the_configuration(folder: Path) -> None:
    configure(folder, 'select = ["TPU102"]')
    assert found(folder) == ["a.py:3 TPU102"]
    configure(folder, 'ignore = ["TPU102"]')
    assert "a.py:3 TPU102" not in found(folder)
    assert "a.py:3 TPU102" in found(folder, "--isolated")
    assert found(folder, "--select", "TPU102", "--extend-select", "TPU102") == []
    configure(folder, 'select = ["TPU103"]\nextend-select = ["TPU102"]')
    assert found(folder) == ["a.py:3 TPU102"]
    configure(folder, 'extend-select = ["TPU102"]\nselect = ["TPU103"]')
    assert found(folder) == ["a.py:3 TPU102"]


def test_exclude_of_the_configuration(folder: Path) -> None:
    for name in ("src/gen/x.py", "src/own/x.py", "src/own/x_pb2.py", "gen/x.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(GOOD)
    configure(folder, 'select = ["TPU102"]\nexclude = ["src/gen", "*_pb2.py"]')
    wanted = ["a.py:3 TPU102", "gen/x.py:3 TPU102", "src/own/x.py:3 TPU102"]
    assert found(folder) == wanted
    done = run("check", "src", "--output-format", "concise", cwd=folder)
    assert [row.split(":")[0] for row in done.stdout.splitlines()] == ["src/own/x.py"]
    done = run("check", "..", "--output-format", "concise", cwd=folder / "src")
    assert [row.split(":")[0] for row in done.stdout.splitlines()] == [
        "../a.py",
        "../gen/x.py",
        "../src/own/x.py",
    ]
    assert found(folder, "--exclude", "own/") == ["a.py:3 TPU102", "gen/x.py:3 TPU102"]


def test_ignores_per_file(folder: Path) -> None:
    for name in ("tests/x.py", "src/tests/x.py", "src/x.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(GOOD)
    configure(folder, 'select = ["TPU102"]\nper-file-ignores = {"tests/*" = ["TPU1"], "src/x.py" = ["TPU102"]}')
    assert found(folder) == ["a.py:3 TPU102", "src/tests/x.py:3 TPU102"]
    # The patterns are relative to the configuration, wherever the command runs and however a path is written.
    for paths, cwd in (
        (["tests/x.py"], "."),
        (["x.py"], "tests"),
        ([str(folder / "tests")], "."),
        (["../tests"], "src"),
    ):
        done = run("check", *paths, cwd=folder / cwd)
        assert done.returncode == 0, done.stdout
    configure(folder, 'select = ["TPU102"]\n[tool.tpumigrate.per-file-ignores]\n"tests/**" = ["ALL"]')
    assert len(found(folder)) == 3


def test_nearest_configuration_counts(folder: Path) -> None:
    configure(folder, 'ignore = ["TPU102"]')
    (folder / "sub").mkdir()
    (folder / "sub" / "b.py").write_text(GOOD)
    (folder / "sub" / "pyproject.toml").write_text("[project]\nname = 'no table of ours'\n")
    assert run("check", "sub", "--select", "TPU102", cwd=folder).returncode == 0
    (folder / "sub" / "pyproject.toml").write_text("[tool.tpumigrate]\nselect = ['TPU102']\n")
    assert run("check", "sub", cwd=folder).returncode == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour = true", "colour"),
        ('target = "cuda"', "target"),
        ("target = 3", "target"),
        ('select = "TPU102"', "select"),
        ("select = [1]", "select"),
        ("ignore = 3", "ignore"),
        ("exclude = {}", "exclude"),
        ("per-file-ignores = []", "per-file-ignores"),
        ('per-file-ignores = {"a" = "TPU102"}', "per-file-ignores"),
        ('select = ["NOPE"]', "NOPE"),
        ('per-file-ignores = {"a" = ["NOPE"]}', "NOPE"),
        ("select = [", ""),
        ("x = 1\nx = 2", ""),
    ],
)
def test_wrong_configuration_exits_2(folder: Path, text: str, words: str) -> None:
    configure(folder, text)
    done = run("check", ".", cwd=folder)
    assert done.returncode == 2
    (message,) = [row for row in done.stderr.splitlines() if row.startswith("error: ")]
    assert words in message
    assert "pyproject.toml" in message or words == "NOPE"
    assert "Traceback" not in done.stderr
    assert run("check", ".", *OPTIONS, cwd=folder).returncode == 1


@pytest.mark.parametrize(
    "text", ["tool = 3\n", "[tool]\ntpumigrate = 3\n", "project = 3\n", "[tool]\npoetry = 1\n", "\xff"]
)
def test_strange_project_file(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_bytes(text.encode("latin-1"))
    done = run("check", ".", "--select", "TPU102", cwd=folder)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


# -- the target --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "target"),
    [
        ("requirements.txt", "numpy\ntorch_tpu==0.2.0\n", "torch_tpu"),
        ("requirements.txt", "torch-xla>=2.9  # not torch_tpu\n", "torch_xla"),
        ("requirements-dev.txt", "torch-tpu\n", "torch_tpu"),
        ("pyproject.toml", '[project]\ndependencies = ["torch_tpu"]\n', "torch_tpu"),
        (
            "pyproject.toml",
            '[project]\nname = "torch_tpu_tools"\ndependencies = ["torch_xla[tpu]"]\n',
            "torch_xla",
        ),
        ("pyproject.toml", '[project.optional-dependencies]\ntpu = ["torch_tpu==0.2"]\n', "torch_tpu"),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch_tpu = "^0.2"\n', "torch_tpu"),
        ("pyproject.toml", '[dependency-groups]\ntpu = ["torch_tpu"]\n', "torch_tpu"),
        ("setup.py", 'setup(install_requires=["torch_tpu"])\n', "torch_tpu"),
    ],
)
def test_target_from_the_dependencies(folder: Path, name: str, text: str, target: str) -> None:
    (folder / name).write_text(text)
    done = run("check", ".", "--select", "TPU102", "--output-format", "json", cwd=folder)
    assert json.loads(done.stdout)["target"] == target
    assert done.stderr.splitlines()[0] == f"target: {target} (from {name})"


def test_target_by_default(folder: Path) -> None:
    done = run("check", ".", "--select", "TPU102", "--output-format", "json", cwd=folder)
    assert json.loads(done.stdout)["target"] == "torch_xla"
    assert done.stderr.startswith("target: torch_xla (the default; ")
    assert run("check", ".", *OPTIONS, "--output-format", "json", cwd=folder).stderr == ""


# -- standard input ----------------------------------------------------------------------------------------


def test_check_of_standard_input(folder: Path) -> None:
    done = run("check", "-", *OPTIONS, "--output-format", "concise", cwd=folder, stdin=GOOD.encode())
    assert done.returncode == 1
    assert done.stdout.startswith("<stdin>:3:5: TPU102 ")
    named = ("--stdin-filename", "pkg/b.py")
    done = run("check", "-", *named, *OPTIONS, "--output-format", "concise", cwd=folder, stdin=GOOD.encode())
    assert done.stdout.startswith("pkg/b.py:3:5: TPU102 ")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (GOOD.encode(), FIXED.encode()),
        (CLEAN.encode(), CLEAN.encode()),
        (b"print('nothing of torch')\n", b"print('nothing of torch')\n"),
        (b"", b""),
        (b"x = 1", b"x = 1"),
        (GOOD.replace("\n", "\r\n").encode(), FIXED.replace("\n", "\r\n").encode()),
        (b"\xef\xbb\xbf" + GOOD.encode(), b"\xef\xbb\xbf" + FIXED.encode()),
        (
            ("# coding: latin-1\n# ü\n" + GOOD).encode("latin-1"),
            ("# coding: latin-1\n# ü\n" + FIXED).encode("latin-1"),
        ),
        (("# ü🎉\n" + GOOD).encode(), ("# ü🎉\n" + FIXED).encode()),
    ],
)
def test_fix_of_standard_input(folder: Path, before: bytes, after: bytes) -> None:
    done = run("fix", "-", *OPTIONS, "--apply", cwd=folder, stdin=before)
    assert done.returncode == 0, done.stderr
    assert done.stdout.encode("utf-8", "surrogateescape") == after


@pytest.mark.parametrize("before", [b"x = = y.cuda()\n", b"s = '\xff'; y.cuda()\n", b"y.cuda()\0\n"])
def test_standard_input_that_cannot_be_read_comes_back(folder: Path, before: bytes) -> None:
    done = run("fix", "-", *OPTIONS, "--apply", cwd=folder, stdin=before)
    assert done.returncode == 2
    assert done.stdout.encode("utf-8", "surrogateescape") == before
    assert done.stderr.startswith("<stdin>:1: error: ")


def test_fix_of_standard_input_without_apply_is_a_diff(folder: Path) -> None:
    done = run("fix", "-", *OPTIONS, cwd=folder, stdin=GOOD.encode())
    assert done.returncode == 1
    assert done.stdout.startswith("--- a/<stdin>\n+++ b/<stdin>\n")


# -- suppression -------------------------------------------------------------------------------------------

CALL = "x = torch.ones(2).cuda()"
SPREAD = "x = torch.ones(\n    2\n).cuda()"
NESTED = "f(\n    1,\n    torch.ones(2).cuda(),\n    2,\n)"


@pytest.mark.parametrize(
    ("code", "suppressed"),
    [
        (f"{CALL}  # tpumigrate: ignore[TPU102]", True),
        (f"{CALL}  # tpumigrate:ignore[TPU102]", True),
        (f"{CALL}  # tpumigrate: ignore[TPU101, TPU102]", True),
        (f"{CALL}  # tpumigrate: ignore[tpu102]", True),
        (f"{CALL}  # tpumigrate: ignore[TPU1]", True),
        (f"{CALL}  # tpumigrate: ignore", True),
        (f"{CALL}  # why not  # tpumigrate: ignore[TPU102]", True),
        (f"{CALL}  # tpumigrate: ignore[TPU101]", False),
        (f"{CALL}  # tpumigrate: ignore[]", False),
        (f"{CALL}  # tpumigrate: please ignore", False),
        (f"{CALL}  # noqa: TPU102", True),
        (f"{CALL}  #noqa:TPU102", True),
        (f"{CALL}  # noqa: E501,TPU102", True),
        (f"{CALL}  # noqa: E501 TPU102", True),
        (f"{CALL}  # noqa: E501", False),
        (f"{CALL}  # noqa", False),
        (f"# tpumigrate: ignore[TPU102]\n{CALL}", True),
        (f"# tpumigrate: ignore\n{CALL}", True),
        (f"# tpumigrate: ignore[TPU102]\n# because\n{CALL}", True),
        (f"# tpumigrate: ignore[TPU102]\ny = 1\n{CALL}", False),
        (f"y = 1  # tpumigrate: ignore[TPU102]\n{CALL}", False),
        (f"{CALL}\n# tpumigrate: ignore[TPU102]", False),
        (f"# noqa: TPU102\n{CALL}", False),
        (f"# tpumigrate: ignore-file\n\n\n{CALL}", True),
        (f"{CALL}\n# tpumigrate: ignore-file[TPU102]", True),
        (f"# tpumigrate: ignore-file[TPU101]\n{CALL}", False),
        (f's = "# tpumigrate: ignore[TPU102]"; {CALL}', False),
        (f's = """\n# tpumigrate: ignore-file\n"""\n{CALL}', False),
        (f's = """\n# tpumigrate: ignore"""; {CALL}', False),
        (f"s = '# noqa: TPU102'; {CALL}", False),
        # A statement of several lines: at the ends of what is found or of the statement, or above it.
        (f"# tpumigrate: ignore[TPU102]\n{SPREAD}", True),
        (f"{SPREAD}  # tpumigrate: ignore[TPU102]", True),
        (SPREAD.replace("ones(", "ones(  # tpumigrate: ignore[TPU102]"), True),
        (f"# tpumigrate: ignore[TPU102]\n{NESTED}", True),
        (f"{NESTED}  # tpumigrate: ignore[TPU102]", True),
        (NESTED.replace("cuda(),", "cuda(),  # tpumigrate: ignore[TPU102]"), True),
        (NESTED.replace("1,\n", "1,\n    # tpumigrate: ignore[TPU102]\n"), True),
        (NESTED.replace("1,", "1,  # tpumigrate: ignore[TPU102]"), False),
        # A comment above a block speaks for its first line, not for what is in it.
        (f"# tpumigrate: ignore[TPU102]\nif y:\n    {CALL}", False),
        (f"# tpumigrate: ignore[TPU102]\nif {CALL[4:]}:\n    pass", True),
        (f"def f():\n    # tpumigrate: ignore[TPU102]\n    {CALL}", True),
        (f"if y:\n    {CALL}\nz = 1  # tpumigrate: ignore[TPU102]", False),
    ],
)
def test_suppression(folder: Path, code: str, suppressed: bool) -> None:
    text = f"import torch\n{code}\n"
    ast.parse(text)
    (folder / "a.py").write_text(text)
    done = run("check", ".", *OPTIONS, cwd=folder)
    assert done.returncode == (0 if suppressed else 1), done.stdout
    if suppressed:
        assert run("fix", ".", *OPTIONS, "--apply", cwd=folder).returncode == 0
        assert (folder / "a.py").read_text() == text


# -- annotations in the code -------------------------------------------------------------------------------


def annotated(folder: Path, text: str) -> str:
    """The text with notes, which a second run leaves alone."""
    ast.parse(text)
    path = folder / "a.py"
    path.write_bytes(text.encode())
    done = run("fix", ".", *OPTIONS, "--apply", "--annotate", cwd=folder)
    assert done.returncode == 1, done.stderr
    result = path.read_bytes()
    assert ast.dump(ast.parse(result)) == ast.dump(ast.parse(text))
    assert run("fix", ".", *OPTIONS, "--apply", "--annotate", cwd=folder).returncode == 1
    assert path.read_bytes() == result
    return result.decode()


def test_annotate_writes_one_note(folder: Path) -> None:
    rows = annotated(folder, UNFIXABLE).splitlines()
    assert [row.startswith("    # TODO(tpumigrate): TPU102 ") for row in rows].count(True) == 1
    assert rows[9].startswith("    # TODO(tpumigrate): TPU102 ")
    assert rows[:9] + rows[10:] == UNFIXABLE.splitlines()


HEAD = "import torch\nclass Car:\n    def cuda(self): pass\n"


@pytest.mark.parametrize(
    "code",
    [
        "thing.cuda(); other.cuda()\n",
        "x = 1; thing.cuda()\n",
        "if x: thing.cuda()\n",
        "if x:\n    pass\nelse: thing.cuda()\n",
        "if x:\n    pass\nelif thing.cuda():\n    pass\n",
        "@thing.cuda()\ndef f(): pass\n",
        "@a\n@thing.cuda()\nclass B: pass\n",
        "f(\n    thing.cuda(),\n)\n",
        "s = '''\n'''; thing.cuda()\n",
        "s = 1; \\\nthing.cuda()\n",
        "x = 1 + \\\n    thing.cuda()\n",
        "# about it\nthing.cuda()\n",
        "# tpumigrate: ignore[TPU999]\nthing.cuda()\n",
        "\tx = thing.cuda()\n".replace("\t", "if x:\n\t"),
        "try:\n    pass\nexcept thing.cuda():\n    pass\n",
        "with thing.cuda() as x, thing.cuda() as y:\n    pass\n",
        "match thing.cuda():\n    case 1:\n        thing.cuda()\n",
        "thing.cuda()\r\n",
        "thing.cuda()",
    ],
)
def test_annotate_keeps_the_program(folder: Path, code: str) -> None:
    text = (HEAD.replace("\n", "\r\n") if "\r" in code else HEAD) + code
    result = annotated(folder, text)
    assert "# TODO(tpumigrate): TPU102 " in result
    kept = [row for row in result.split("\n") if "TODO(tpumigrate)" not in row]
    assert "\n".join(kept) == text


def test_annotate_and_fix_together(folder: Path) -> None:
    text = f"{UNFIXABLE}\n\ny = torch.ones(2).cuda()\n"
    (folder / "a.py").write_text(text)
    done = run("fix", ".", *OPTIONS, "--apply", "--annotate", cwd=folder)
    assert done.returncode == 1
    result = (folder / "a.py").read_text()
    assert result.count("TODO(tpumigrate)") == 1
    assert 'y = torch.ones(2).to("tpu")\n' in result


# -- output ------------------------------------------------------------------------------------------------


def test_concise_is_a_line_a_finding(folder: Path) -> None:
    (folder / "b.py").write_text(
        "# ü\nimport torch\nif 1:\n\tßß = torch.ones(2).cuda()\n" + "x = torch.ones(2).cuda(), 1\n" * 2
    )
    done = run("check", ".", *OPTIONS, "--output-format", "concise", cwd=folder)
    rows = done.stdout.splitlines()
    places = [re.fullmatch(r"(.*?):(\d+):(\d+): (TPU102) .+", row) for row in rows]
    assert [match.groups() if match else row for match, row in zip(places, rows, strict=True)] == [
        ("a.py", "3", "5", "TPU102"),
        ("b.py", "4", "7", "TPU102"),
        ("b.py", "5", "5", "TPU102"),
        ("b.py", "6", "5", "TPU102"),
    ]


def test_concise_lines_are_not_wrapped(folder: Path) -> None:
    done = run("check", ".", *OPTIONS, "--output-format", "concise", cwd=folder, env={"COLUMNS": "20"})
    assert len(done.stdout.splitlines()) == 1


def test_full_shows_the_change(folder: Path) -> None:
    (folder / "b.py").write_text(UNFIXABLE)
    done = run("check", ".", *OPTIONS, cwd=folder)
    assert "    -x = torch.ones(2).cuda()\n" in done.stdout
    assert '    +x = torch.ones(2).to("tpu")\n' in done.stdout
    assert "      10 |     return thing.cuda()\n" in done.stdout
    assert "         |            ^^^^^^^^^^^^\n" in done.stdout
    assert "    = no fix: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Found 2 in 2 of 2 files. [*] 1 fixable")


@pytest.mark.parametrize(
    "before",
    [
        "# filler\n" * 3000 + CALL + "\n" + "# filler\n" * 3000,
        "s = 1\n\x0c\ns = '\x0c\x1c\u2028'\n" + CALL + "\n",
        "s = 1\r\n" + CALL + "\r\n",
        "s = 1\r" + CALL + "\r",
        CALL,
    ],
)
def test_full_shows_only_the_lines_that_change(folder: Path, before: str) -> None:
    (folder / "a.py").write_bytes(f"import torch\n{before}".encode())
    done = run("check", ".", *OPTIONS, cwd=folder)
    changes = [row for row in done.stdout.splitlines() if row.startswith(("    +", "    -"))]
    assert changes == [f"    -{CALL}", '    +x = torch.ones(2).to("tpu")']


def test_statistics(folder: Path) -> None:
    (folder / "b.py").write_text(UNFIXABLE)
    done = run("check", ".", *OPTIONS, "--statistics", cwd=folder)
    assert done.returncode == 1
    assert re.search(r"^\s+2  TPU102  cuda-method  \(1 fixable\)$", done.stdout, re.MULTILINE)


def test_json_document(folder: Path) -> None:
    (folder / "b.py").write_text(UNFIXABLE)
    (folder / "c.py").write_text("x = = y.cuda()\n")
    done = run("check", ".", *OPTIONS, "--output-format", "json", cwd=folder)
    document = json.loads(done.stdout)
    assert set(document) >= {"schema_version", "tool", "target", "files", "findings", "fixed", "problems"}
    assert (document["schema_version"], document["target"], document["files"]) == (1, "torch_tpu", 3)
    assert document["tool"]["name"] == "tpumigrate"
    first, second = document["findings"]
    keys = {
        "code", "name", "path", "line", "column", "end_line", "end_column", "message", "severity", "safety",
        "unfixed", "fix",
    }  # fmt: skip
    assert set(first) >= keys
    assert (first["path"], first["line"], first["column"], first["end_column"]) == ("a.py", 3, 5, 25)
    assert (first["safety"], first["unfixed"], first["severity"]) == ("safe", "", "error")
    assert first["fix"]
    assert all(set(edit) >= {"line", "column", "end_line", "end_column", "text"} for edit in first["fix"])
    assert (second["safety"], second["fix"]) == ("advice", [])
    assert second["unfixed"]
    assert document["problems"] == [{"path": "c.py", "line": 1, "message": document["problems"][0]["message"]}]


def apply_edits(text: str, edits: list[dict[str, object]]) -> str:
    """What an editor does with the edits of one finding: 1-based lines and columns in characters."""
    starts = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", text))]
    for edit in sorted(edits, key=lambda item: (item["line"], item["column"]), reverse=True):
        begin = starts[edit["line"] - 1] + edit["column"] - 1  # type: ignore[operator, call-overload]
        end = starts[edit["end_line"] - 1] + edit["end_column"] - 1  # type: ignore[operator, call-overload]
        text = f"{text[:begin]}{edit['text']}{text[end:]}"
    return text


@pytest.mark.parametrize("target", ["torch_xla", "torch_tpu"])
def test_edits_of_each_finding_stand_alone(folder: Path, target: str) -> None:
    """All rules, on real programs: the fix of every single finding gives a file that parses."""
    programs = Path(__file__).resolve().parents[1] / "fixtures" / "programs"
    for path in programs.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "odd.py").write_bytes(
        "# ü\r\nimport torch\r\nif 1:\r\n\tß = (torch.ones(2).cuda(), f'{torch.ones(2).cuda()}')".encode()
    )
    done = run("check", ".", "--target", target, "--isolated", "--output-format", "json", cwd=folder)
    count = 0
    for finding in json.loads(done.stdout)["findings"]:
        text = (folder / finding["path"]).read_bytes().decode()
        if finding["fix"]:
            count += 1
            result = apply_edits(text, finding["fix"])
            assert result != text
            ast.parse(result)
    assert count > 10


def test_github_annotations(folder: Path) -> None:
    (folder / "a,b:c%.py").write_text(GOOD)
    (folder / "broken.py").write_text("x = = y.cuda()\n")
    done = run("check", ".", *OPTIONS, "--output-format", "github", cwd=folder)
    rows = done.stdout.splitlines()
    assert rows[0].startswith("::error title=TPU102,file=a%2Cb%3Ac%25.py,line=3,col=5,endLine=3,endColumn=25::")
    assert rows[1].startswith("::error title=TPU102,file=a.py,line=3,col=5")
    assert rows[2].startswith("::error file=broken.py,line=1::cannot parse")


def test_output_is_the_same_from_several_processes(folder: Path) -> None:
    for number in range(40):
        (folder / f"f{number}.py").write_text(GOOD + "y = torch.ones(2).cuda()\n" * 20 + "z = 1\n" * 2000)
    assert sum(path.stat().st_size for path in folder.glob("*.py")) > 400_000
    for form in ("json", "concise"):
        runs = [
            run("check", ".", *OPTIONS, "--output-format", form, "--jobs", jobs, cwd=folder) for jobs in ("1", "2", "1")
        ]
        assert runs[0].stdout == runs[1].stdout == runs[2].stdout
        assert runs[0].stderr == runs[1].stderr
    copies = []
    for jobs in ("1", "2"):
        copy = folder / f"copy{jobs}"
        copy.mkdir()
        for path in folder.glob("*.py"):
            shutil.copy(path, copy)
        done = run("fix", ".", *OPTIONS, "--apply", "--jobs", jobs, cwd=copy)
        assert done.returncode == 0
        copies.append((done.stdout, done.stderr, {path.name: path.read_bytes() for path in copy.glob("*.py")}))
    assert copies[0] == copies[1]


def test_order_is_that_of_names(folder: Path) -> None:
    for name in ("b/z.py", "b/a.py", "c.py", "B/x.py", "b.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(GOOD)
    paths = [row.split(":")[0] for row in found(folder, *OPTIONS)]
    assert sorted(paths) == sorted(["a.py", "b.py", "c.py", "B/x.py", "b/a.py", "b/z.py"])
    assert paths == [row.split(":")[0] for row in found(folder, *OPTIONS)]
    assert paths.index("b/a.py") < paths.index("b/z.py")
    done = run("check", "c.py", "a.py", "b", "b/a.py", "./c.py", *OPTIONS, "--output-format", "concise", cwd=folder)
    assert [row.split(":")[0] for row in done.stdout.splitlines()] == ["c.py", "a.py", "b/a.py", "b/z.py"]


# -- which files -------------------------------------------------------------------------------------------


def test_gitignore_is_honoured(folder: Path) -> None:
    names = ("gen/x.py", "src/gen/x.py", "src/x_old.py", "src/keep_old.py", "src/sub/local.py", "venv/x.py")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(GOOD)
    (folder / ".gitignore").write_text("# generated\n/gen/\n*_old.py\n!keep_old.py\n")
    (folder / "src" / ".gitignore").write_text("local.py\n")
    expected = ["a.py", "src/gen/x.py", "src/keep_old.py"]
    assert sorted(row.split(":")[0] for row in found(folder, *OPTIONS)) == expected
    # The same from below the folder with the .gitignore, and for a folder named by itself.
    done = run("check", ".", *OPTIONS, "--output-format", "concise", cwd=folder / "src")
    assert sorted(row.split(":")[0] for row in done.stdout.splitlines()) == ["gen/x.py", "keep_old.py"]
    done = run("check", "gen/x.py", "src/x_old.py", *OPTIONS, "--output-format", "concise", cwd=folder)
    assert [row.split(":")[0] for row in done.stdout.splitlines()] == ["gen/x.py", "src/x_old.py"]


def test_only_python_files_are_taken_from_folders(folder: Path) -> None:
    for name in ("script", "data.txt", "stub.pyi"):
        (folder / name).write_text(GOOD)
    assert [row.split(":")[0] for row in found(folder, *OPTIONS)] == ["a.py", "stub.pyi"]
    done = run("check", "script", *OPTIONS, "--output-format", "concise", cwd=folder)
    assert done.stdout.startswith("script:3:5: TPU102 ")


# -- diffs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_diff_is_a_patch(folder: Path, tmp_path_factory: pytest.TempPathFactory, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    texts = {
        "a.py": GOOD,
        "sub/no newline.py": GOOD.rstrip("\n"),
        "sub/crlf.py": GOOD.replace("\n", "\r\n"),
        "sub/feed.py": f"import torch\n\x0c\ns = '\x0c\u2028\x1c'\n{CALL}  # \x0c end\n\x0c\nx = 1\n",
        "sub/both.py": f"{GOOD}y = '''\r\n'''\n" + "# far\n" * 50 + f"{CALL}\n{CALL}",
        "sub/ü.py": f"{GOOD}# ü\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    shutil.rmtree(folder / ".git")
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    done = run("fix", ".", *OPTIONS, "--diff", cwd=folder)
    diff = done.stdout.encode()
    command = ["git", "apply", "-p1"] if tool == "git" else ["patch", "-p1", "--binary", "--silent"]
    applied = subprocess.run(command, cwd=copy, input=diff, capture_output=True)
    assert applied.returncode == 0, (applied.stdout, applied.stderr)
    assert run("fix", ".", *OPTIONS, "--apply", cwd=folder).returncode == 0
    for name in texts:
        assert (copy / name).read_bytes() == (folder / name).read_bytes() != texts[name].encode()


def test_device_constants_in_files_without_torch(folder: Path) -> None:
    settings = folder / "settings.py"
    settings.write_text('DEVICE = "cuda:0"\nPARAMS = {"device": "cuda"}\nNAME = "cuda"\n')
    (folder / "a.py").write_text("import torch\nfrom settings import DEVICE\nx = torch.ones(2, device=DEVICE)\n")
    target = ("--target", "torch_tpu", "--isolated")
    assert run("check", "settings.py", *target, cwd=folder).returncode == 0, "alone it may be about anything"
    assert run("fix", ".", "--apply", *target, cwd=folder).returncode == 0
    assert settings.read_text() == 'DEVICE = "tpu"\nPARAMS = {"device": "cuda"}\nNAME = "cuda"\n'
