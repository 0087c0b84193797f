"""Files and folders that can't be processed: each is named in one line, and nothing else suffers from it."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tool import NOBODY, ROOT, run, run_without_rights

from tpumigrate import files

GOOD = "import torch\n\nx = torch.ones(2).cuda()\n"
FIXED = 'import torch\n\nx = torch.ones(2).to("tpu")\n'
CUDA = b"import torch\nx = torch.ones(2).cuda()\n"
LADDER = b"".join(b" " * depth + b"if x:\n" for depth in range(200)) + b" " * 200
# Another rule's finding must not change what these tests see.
OPTIONS = ("--target", "torch_tpu", "--select", "TPU102", "--isolated")


@dataclass(frozen=True)
class Bad:
    """A content that can't be processed, words of the message about it, and the line that it names."""

    data: bytes
    words: str
    line: int | None = None


BAD = {
    "syntax_error": Bad(CUDA + b"y = = torch.ones(2).cuda()\n", "cannot parse", 3),
    "python2": Bad(CUDA + b"print 'moved', x\n", "cannot parse", 3),
    "python2_except": Bad(CUDA + b"try:\n    pass\nexcept E, e:\n    pass\n", "cannot parse", 5),
    "merge_conflict": Bad(CUDA + b"<<<<<<< HEAD\ny = 1\n=======\ny = 2\n>>>>>>> x\n", "cannot parse", 3),
    "template": Bad(b"{% if cookiecutter.gpu %}\nx = {{ cookiecutter.x }}.cuda()\n{% endif %}\n", "parse", 1),
    "template_name": Bad(b"import {{ cookiecutter.package }}\nx = y.cuda()\n", "cannot parse", 1),
    "notebook_magic": Bad(b"%matplotlib inline\n" + CUDA, "cannot parse", 1),
    "unclosed": Bad(CUDA + b"y = (1,\n", "cannot parse", 3),
    "unclosed_string": Bad(CUDA + b"y = '''\n", "cannot parse", 3),
    "bad_indentation": Bad(CUDA + b"    y = 1\n", "cannot parse", 3),
    "tab_mix": Bad(b"if x:\n\ty.cuda()\n        z.cuda()\n", "cannot parse", 3),
    "undecodable": Bad(b"#\x80\n" + CUDA, "not valid utf-8", 1),
    "undecodable_without_cuda": Bad(b"#\x80", "not valid utf-8", 1),
    "undecodable_later": Bad(CUDA + b"s = '\xff'\n", "not valid utf-8", 3),
    "undecodable_after_bom": Bad(b"\xef\xbb\xbf" + CUDA + b"s = '\xff'\n", "not valid utf-8", 3),
    "nul": Bad(CUDA + b"s = '\0'\n", "NUL", 3),
    "utf16": Bad(CUDA.decode().encode("utf-16"), "NUL", None),
    "utf16_be": Bad(CUDA.decode().encode("utf-16-be"), "NUL", None),
    "utf32": Bad(CUDA.decode().encode("utf-32"), "NUL", None),
    "unknown_cookie": Bad(b"# -*- coding: klingon -*-\n" + CUDA, "klingon", 1),
    "cookie_of_no_text": Bad(b"# -*- coding: base64 -*-\n" + CUDA, "base64", 1),
    "cookie_against_bom": Bad(b"\xef\xbb\xbf# -*- coding: klingon -*-\n" + CUDA, "klingon", 1),
    "parentheses": Bad(CUDA + b"y = " + b"(" * 5000 + b"1" + b")" * 5000 + b"\n", "cannot parse", 3),
    "blocks": Bad(b"import torch\n" + LADDER + b"y.cuda()\n", "cannot parse", None),
    "too_large": Bad(CUDA + b"y = [\n" + b"    0,\n" * 800_000 + b"]\n", "too large", None),
}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Good files before, beside and after whatever a test puts into `m/`."""
    for name in ("a.py", "m/a.py", "m/z.py", "z.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(GOOD)
    return tmp_path


def lines_about(text: str, path: str) -> list[str]:
    return [row for row in text.splitlines() if path in row]


def assert_good_files(tree: Path, content: str) -> None:
    for name in ("a.py", "m/a.py", "m/z.py", "z.py"):
        assert (tree / name).read_text() == content, name
    assert [path for path in tree.rglob("*") if path.name.startswith(".tpumigrate-")] == []


def assert_named_once(done: "subprocess.CompletedProcess[str]", path: str, words: str, line: int | None = None) -> None:
    """One clear line on standard error: the path, the line where there is one, what is wrong."""
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    (message,) = lines_about(done.stderr, path)
    where = path if line is None else f"{path}:{line}"
    assert message.startswith(f"{where}: error: ") or (line is None and message.startswith(f"{path}:"))
    assert words in message
    assert len(message) < 250
    assert lines_about(done.stdout, f"{path}:") == []


@pytest.mark.parametrize("name", BAD)
def test_bad_content(tree: Path, name: str) -> None:
    bad = BAD[name]
    path = tree / "m" / "bad.py"
    path.write_bytes(bad.data)
    done = run("check", ".", *OPTIONS, "--output-format", "concise", cwd=tree)
    assert_named_once(done, "m/bad.py", bad.words, bad.line)
    assert len(done.stdout.splitlines()) == 4  # the findings of the good files
    assert_good_files(tree, GOOD)
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree)
    assert_named_once(done, "m/bad.py", bad.words, bad.line)
    assert_good_files(tree, FIXED)
    assert path.read_bytes() == bad.data


def test_bad_content_in_several_processes(tree: Path) -> None:
    """The same in worker processes: what is wrong with a file comes back in its place."""
    for name, bad in BAD.items():
        (tree / f"m/{name}.py").write_bytes(bad.data)
    for number in range(30):
        (tree / f"filler{number}.py").write_text(GOOD + "# filler\n" * 2000)
    runs = [run("check", ".", *OPTIONS, "--jobs", jobs, cwd=tree) for jobs in ("1", "2")]
    assert runs[0].returncode == runs[1].returncode == 2
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stderr == runs[1].stderr
    assert "Traceback" not in runs[0].stderr
    for name in BAD:
        assert len(lines_about(runs[0].stderr, f"m/{name}.py")) == 1


@pytest.mark.parametrize(
    "expression",
    [
        "-" * 3000 + "1",
        "x" + ".a" * 2500,
        "x" + ".to()" * 2500,
        "x" + "[0]" * 2500,
        "x" + " + x" * 5000,
        "x" + " and x" * 5000,
        "not " * 3000 + "x",
        "[" * 150 + "]" * 150,
        "lambda: " * 500 + "x",
        "x if y else " * 1000 + "z",
        "f'{x}'" * 1000,
        "(x := " * 90 + "y" + ")" * 90,
        "x ** " * 500 + "y",
        "x < " * 5000 + "y",
    ],
    ids=lambda text: text[:8].strip(),
)
def test_deep_code(tree: Path, expression: str) -> None:
    """Either processed or named in one line, never a crash."""
    path = tree / "m" / "deep.py"
    text = f"import torch\nx = torch.ones(2).cuda()\ny = {expression}\nz = ({expression}).cuda()\n"
    path.write_text(text)
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2)
    assert_good_files(tree, FIXED)
    if done.returncode == 2:
        assert_named_once(done, "m/deep.py", "")
        assert "nested too deeply" in done.stderr or "cannot parse" in done.stderr
        assert path.read_text() == text
    else:
        assert path.read_text().startswith('import torch\nx = torch.ones(2).to("tpu")\n')


def test_deep_else_ladder(tree: Path) -> None:
    ladder = "if x == 0:\n    x.cuda()\n" + "".join(f"elif x == {n}:\n    x.cuda()\n" for n in range(1, 900))
    (tree / "m" / "deep.py").write_text("import torch\n" + ladder)
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)
    assert_good_files(tree, FIXED)


def test_huge_line(tree: Path) -> None:
    path = tree / "m" / "huge.py"
    start = "import torch\ndata = [" + "0, " * 300_000 + "]; x = torch.ones(2)"
    path.write_text(f"{start}.cuda()\n")
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree)
    assert done.returncode == 0, done.stderr
    assert path.read_text() == f'{start}.to("tpu")\n'


def test_many_findings(tree: Path) -> None:
    """A generated file does not take for ever."""
    path = tree / "m" / "many.py"
    path.write_text("import torch\n" + "x = torch.ones(2).cuda()\n" * 10_000)
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree, timeout=60)
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "import torch\n" + 'x = torch.ones(2).to("tpu")\n' * 10_000


# -- encodings and line ends -------------------------------------------------------------------------------


def fixed_bytes(tree: Path, data: bytes, target: str = "torch_tpu") -> bytes:
    path = tree / "m" / "case.py"
    path.write_bytes(data)
    done = run("fix", ".", *OPTIONS, "--target", target, "--apply", cwd=tree)
    assert done.returncode == 0, done.stderr
    return path.read_bytes()


def test_latin1_is_written_back_as_latin1(tree: Path) -> None:
    data = b"# -*- coding: latin-1 -*-\nimport torch\ns = '\xfc'; x = torch.ones(2).cuda()  # \xfc\xe4\n"
    expected = b"# -*- coding: latin-1 -*-\nimport torch\ns = '\xfc'; x = torch.ones(2).to(\"tpu\")  # \xfc\xe4\n"
    assert fixed_bytes(tree, data) == expected


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "iso-8859-15", "shift_jis", "utf-8", "gbk", "koi8-r"])
def test_every_encoding_is_kept(tree: Path, encoding: str) -> None:
    words = {"shift_jis": "漢字", "gbk": "汉字", "koi8-r": "привет"}.get(encoding, "üäß")
    text = f"# coding: {encoding}\nimport torch\ns = '{words}'; x = torch.ones(2).cuda()  # {words}\n"
    expected = text.replace(".cuda()", '.to("tpu")')
    assert fixed_bytes(tree, text.encode(encoding)) == expected.encode(encoding)


def test_bom_crlf_tabs_lone_lf_and_no_final_newline(tree: Path) -> None:
    """Case TOOL-06: exactly the edits that are needed, every other byte as it was."""
    data = (
        b"\xef\xbb\xbfimport torch\r\nif True:\r\n\ty = torch.ones(2).cuda()\r\n"
        b's = """a\nb"""\r\nx = torch.ones(2).cuda()'
    )
    tpu = data.replace(b".cuda()", b'.to("tpu")')
    assert fixed_bytes(tree, data) == tpu
    line = b"import torch_xla  # noqa: F401  registers the device\r\n"
    xla = data.replace(b".cuda()", b'.to("xla")').replace(b"import torch\r\n", b"import torch\r\n" + line)
    for name in ("a.py", "m/a.py", "m/z.py", "z.py"):
        (tree / name).write_text(GOOD)
    assert fixed_bytes(tree, data, "torch_xla") == xla


@pytest.mark.parametrize(
    "data",
    [
        CUDA.replace(b"\n", b"\r"),
        CUDA + b"\x0c\n\x0cy = 1\n",
        CUDA + b"s = '\x0b\x1c\x1d\xc2\x85\xe2\x80\xa8'\n" + b"y = x.cuda()\n",
        CUDA + b"   \n\t\n",
        CUDA.rstrip(b"\n") + b"   # trailing  \t\n",
        CUDA + b"\x1a" if sys.platform == "win32" else CUDA + b"#\x1a",
        b"#!/usr/bin/env python\n# coding: utf-8\n" + CUDA,
        CUDA + b"if True:\n\tx.cuda()\n\n\n\n",
        CUDA + "größe = 'ß'; x = maß.cuda() # 日本 🎉\n".encode(),
    ],
)
def test_other_bytes_stay(tree: Path, data: bytes) -> None:
    assert fixed_bytes(tree, data) == data.replace(b".cuda()", b'.to("tpu")')


def test_empty_files_and_folders(tree: Path) -> None:
    for name in ("empty.py", "m/empty.py", "m/__init__.py"):
        (tree / name).touch()
    (tree / "m" / "space.py").write_bytes(b"\r\n \t\x0c\r\n")
    (tree / "m" / "bom.py").write_bytes(b"\xef\xbb\xbf")
    (tree / "nothing").mkdir()
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree)
    assert (done.returncode, lines_about(done.stderr, "empty")) == (0, [])
    assert (tree / "m" / "bom.py").read_bytes() == b"\xef\xbb\xbf"
    assert (tree / "empty.py").read_bytes() == b""
    for path in ("nothing", "empty.py"):
        done = run("check", path, *OPTIONS, cwd=tree)
        assert done.returncode == 0, done.stderr


def test_name_that_is_no_text(tree: Path) -> None:
    try:
        with open(os.fsencode(tree / "m") + b"/\xff\xfe.py", "wb") as file:
            file.write(CUDA)
    except OSError:
        pytest.skip("this file system has no such names")
    for form in ("concise", "full", "json", "github"):
        done = run("check", ".", *OPTIONS, "--output-format", form, cwd=tree)
        assert "Traceback" not in done.stderr
        assert done.returncode == 1
    done = run("fix", ".", *OPTIONS, "--diff", cwd=tree)
    assert "Traceback" not in done.stderr
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
    assert_good_files(tree, FIXED)


# -- links and things that are no files --------------------------------------------------------------------


def test_dangling_link(tree: Path) -> None:
    (tree / "m" / "gone.py").symlink_to("nowhere.py")
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree)
    assert_named_once(done, "m/gone.py", "broken symbolic link")
    assert_good_files(tree, FIXED)
    assert_named_once(run("check", "m/gone.py", *OPTIONS, cwd=tree), "m/gone.py", "broken symbolic link")


def test_links_in_a_circle(tree: Path) -> None:
    (tree / "m" / "one.py").symlink_to("two.py")
    (tree / "m" / "two.py").symlink_to("one.py")
    (tree / "m" / "up").symlink_to(tree)
    (tree / "m" / "self.py").symlink_to(".")
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree)
    assert_named_once(done, "m/one.py", "symbolic link")
    assert_named_once(done, "m/two.py", "symbolic link")
    assert_good_files(tree, FIXED)


def test_link_is_written_through(tree: Path) -> None:
    (tree / "elsewhere").mkdir()
    real = tree / "elsewhere" / "real.txt"
    real.write_text(GOOD)
    link = tree / "m" / "link.py"
    link.symlink_to("../elsewhere/real.txt")
    done = run("fix", "m", *OPTIONS, "--apply", cwd=tree)
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert real.read_text() == FIXED


def test_folder_named_like_a_file(tree: Path) -> None:
    (tree / "m" / "folder.py").mkdir()
    (tree / "m" / "folder.py" / "inner.py").write_text(GOOD)
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree)
    assert done.returncode == 0, done.stderr
    assert (tree / "m" / "folder.py" / "inner.py").read_text() == FIXED


def test_fifo_does_not_block(tree: Path) -> None:
    os.mkfifo(tree / "m" / "pipe.py")
    done = run("fix", ".", *OPTIONS, "--apply", cwd=tree, timeout=30)
    assert_named_once(done, "m/pipe.py", "not a regular file")
    assert_good_files(tree, FIXED)
    done = run("check", "m/pipe.py", "/dev/zero", *OPTIONS, cwd=tree, timeout=30)
    assert_named_once(done, "m/pipe.py", "not a regular file")
    assert_named_once(done, "/dev/zero", "not a regular file")


def test_path_that_does_not_exist(tree: Path) -> None:
    done = run("fix", "nowhere", "m", "nowhere.py", "a.py", "z.py", *OPTIONS, "--apply", cwd=tree)
    assert len([row for row in done.stderr.splitlines() if row.startswith("nowhere")]) == 2
    assert_named_once(done, "nowhere.py", "no such file")
    assert_good_files(tree, FIXED)


# -- permissions -------------------------------------------------------------------------------------------


@pytest.fixture
def open_tree() -> Iterator[Path]:
    """Good files in a folder that anybody may enter, owned by the user who runs the tool there."""
    place = Path(tempfile.mkdtemp(prefix="tpumigrate-test-"))
    place.chmod(0o755)
    for name in ("a.py", "m/a.py", "m/z.py", "z.py"):
        path = place / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(GOOD)
    _give(place)
    yield place
    for folder, _, _ in os.walk(place):
        os.chmod(folder, 0o755)
    shutil.rmtree(place)


def _give(place: Path) -> None:
    if os.geteuid() == 0:
        for path in (place, *place.rglob("*")):
            os.chown(path, NOBODY, NOBODY)


def _owned(path: Path, mode: int) -> None:
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    path.chmod(mode)


def test_the_other_user_can_work(open_tree: Path) -> None:
    """Otherwise the tests below would show nothing."""
    done = run_without_rights("fix", ".", *OPTIONS, "--apply", cwd=open_tree)
    assert done.returncode == 0, done.stderr
    assert_good_files(open_tree, FIXED)


def test_unreadable_file(open_tree: Path) -> None:
    path = open_tree / "m" / "secret.py"
    path.write_text(GOOD)
    _owned(path, 0o000)
    for command in (("check",), ("fix", "--apply")):
        done = run_without_rights(*command, ".", *OPTIONS, cwd=open_tree)
        assert_named_once(done, "m/secret.py", "cannot read: Permission denied")
    assert_good_files(open_tree, FIXED)
    path.chmod(0o600)
    assert path.read_text() == GOOD


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o200])
def test_folder_that_cannot_be_listed(open_tree: Path, mode: int) -> None:
    folder = open_tree / "m" / "closed"
    folder.mkdir()
    (folder / "x.py").write_text(GOOD)
    _owned(folder, mode)
    done = run_without_rights("fix", ".", *OPTIONS, "--apply", cwd=open_tree)
    assert_named_once(done, "m/closed", "cannot list the directory: Permission denied")
    assert_good_files(open_tree, FIXED)


def test_folder_that_can_be_listed_but_not_entered(open_tree: Path) -> None:
    folder = open_tree / "m" / "closed"
    folder.mkdir()
    (folder / "x.py").write_text(GOOD)
    _owned(folder, 0o444)
    done = run_without_rights("fix", ".", *OPTIONS, "--apply", cwd=open_tree)
    assert_named_once(done, "m/closed/x.py", "Permission denied")
    assert_good_files(open_tree, FIXED)


def test_read_only_file(open_tree: Path) -> None:
    path = open_tree / "m" / "fixed.py"
    path.write_text(GOOD)
    _owned(path, 0o444)
    assert run_without_rights("check", ".", *OPTIONS, cwd=open_tree).returncode == 1
    done = run_without_rights("fix", ".", *OPTIONS, "--apply", cwd=open_tree)
    assert_named_once(done, "m/fixed.py", "cannot write: read-only file")
    assert_good_files(open_tree, FIXED)
    assert path.read_text() == GOOD
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_read_only_folder(open_tree: Path) -> None:
    folder = open_tree / "m" / "closed"
    folder.mkdir()
    (folder / "x.py").write_text(GOOD)
    _owned(folder / "x.py", 0o644)
    _owned(folder, 0o555)
    done = run_without_rights("fix", ".", *OPTIONS, "--apply", cwd=open_tree)
    assert_named_once(done, "m/closed/x.py", "cannot write: Permission denied")
    assert_good_files(open_tree, FIXED)
    assert (folder / "x.py").read_text() == GOOD
    assert [path.name for path in folder.iterdir()] == ["x.py"]


@pytest.mark.parametrize("mode", [0o644, 0o755, 0o600, 0o664, 0o4755])
def test_mode_is_kept(tree: Path, mode: int) -> None:
    path = tree / "m" / "script.py"
    path.write_text(GOOD)
    path.chmod(mode)
    assert run("fix", ".", *OPTIONS, "--apply", cwd=tree).returncode == 0
    assert path.read_text() == FIXED
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owner_is_kept(tree: Path) -> None:
    path = tree / "m" / "theirs.py"
    path.write_text(GOOD)
    os.chown(path, NOBODY, NOBODY)
    assert run("fix", ".", *OPTIONS, "--apply", cwd=tree).returncode == 0
    assert path.read_text() == FIXED
    assert (path.stat().st_uid, path.stat().st_gid) == (NOBODY, NOBODY)


def test_files_without_changes_are_not_written(tree: Path) -> None:
    path = tree / "m" / "clean.py"
    path.write_text("import torch\nx = torch.ones(2)  # cuda .cuda() of old\n")
    before = path.stat()
    assert run("fix", ".", *OPTIONS, "--apply", cwd=tree).returncode == 0
    after = path.stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


# -- files that change meanwhile ---------------------------------------------------------------------------


def test_write_refuses_what_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_bytes(b"changed by somebody")
    with pytest.raises(files.FileChanged):
        files.write(str(path), b"what was read", b"what was made of it")
    assert path.read_bytes() == b"changed by somebody"
    assert list(tmp_path.iterdir()) == [path]


def test_write_refuses_what_is_gone(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        files.write(str(tmp_path / "x.py"), b"what was read", b"what was made of it")
    assert list(tmp_path.iterdir()) == []


def test_write_leaves_nothing_half_done(tmp_path: Path) -> None:
    """Whoever reads while it is written sees the old text or the new one."""
    path = tmp_path / "x.py"
    texts = [b"old" * 100_000, b"new" * 100_000]
    path.write_bytes(texts[0])
    seen: set[bytes] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(50):
        files.write(str(path), texts[number % 2], texts[(number + 1) % 2])
    done.set()
    watcher.join()
    assert seen <= set(texts)
    assert list(tmp_path.iterdir()) == [path]


def test_file_that_changes_while_it_is_fixed(tree: Path) -> None:
    """Somebody saves the file after it was read and before it is written: their text stays."""
    path = tree / "m" / "busy.py"
    errors = _errors_of_fix(path, lambda: path.write_bytes(b"import torch\n# saved by somebody\n"))
    (message,) = lines_about(errors, "busy.py")
    assert "not changed: the file was written to while it was being fixed" in message
    assert path.read_bytes() == b"import torch\n# saved by somebody\n"
    assert (tree / "m" / "a.py").read_text() == (tree / "m" / "z.py").read_text() == FIXED
    assert sorted(item.name for item in path.parent.iterdir()) == ["a.py", "busy.py", "z.py"]


def test_file_that_vanishes_while_it_is_fixed(tree: Path) -> None:
    path = tree / "m" / "busy.py"
    errors = _errors_of_fix(path, path.unlink)
    assert len(lines_about(errors, "busy.py")) == 1
    assert sorted(item.name for item in path.parent.iterdir()) == ["a.py", "z.py"]
    assert (tree / "m" / "a.py").read_text() == (tree / "m" / "z.py").read_text() == FIXED


def _errors_of_fix(path: Path, meanwhile: Callable[[], object]) -> str:
    """Standard error of `fix --apply` on a folder in which `meanwhile` happens to a file that takes long to fix."""
    path.write_bytes(CUDA + b"y = 1\n" * 200_000)
    command = [sys.executable, "-m", "tpumigrate", "fix", path.parent.name, *OPTIONS, "--apply"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=path.parents[1], env=environment, stderr=subprocess.PIPE, text=True)
    _wait_until_busy(path.parent)
    meanwhile()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    return errors


def _wait_until_busy(folder: Path) -> None:
    """Wait until the tool has finished `a.py`, and so is busy with the file after it, for seconds."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (folder / "a.py").read_text() != FIXED:
        time.sleep(0.01)
    time.sleep(0.3)
