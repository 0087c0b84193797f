"""The two cases of fixtures/cases that are bytes and not text: TOOL-06 and TOOL-07."""

from pathlib import Path

import pytest
from tool import run

TOOL_06 = (
    b'\xef\xbb\xbfimport torch\r\nif True:\r\n\ttorch.cuda.synchronize()\r\ns = """a\nb"""\r\nx = torch.ones(2).cuda()'
)
REGISTERED = b"import torch_xla\r\n"
FIXED_06 = {
    "torch_xla": (
        b"\xef\xbb\xbfimport torch\r\n" + REGISTERED + b"if True:\r\n\ttorch_xla.sync(wait=True)\r\n"
        b's = """a\nb"""\r\nx = torch.ones(2).to("xla")'
    ),
    "torch_tpu": (
        b"\xef\xbb\xbfimport torch\r\nif True:\r\n\ttorch.accelerator.synchronize()\r\n"
        b's = """a\nb"""\r\nx = torch.ones(2).to("tpu")'
    ),
}
TOOL_07 = {
    "a.py": (
        b'# -*- coding: latin-1 -*-\nimport torch\nname = "M\xfcller"\n'
        b"torch.cuda.empty_cache()\nx = torch.ones(1).cuda()\n"
    ),
    "b.py": b'import torch\nprint "epoch", torch.cuda.device_count()\n',
    "c.py": b"import torch; x = torch.ones(1).to({% cookiecutter.device %})\n",
    "d.py": b"#\x80",
    "e.py": b"import torch; torch.cuda.synchronize()\n",
}


@pytest.mark.parametrize("target", FIXED_06)
def test_tool_06(target: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(TOOL_06)
    done = run("fix", "--apply", "a.py", "--target", target, "--isolated", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == FIXED_06[target]
    run("fix", "--apply", "a.py", "--target", target, "--isolated", cwd=tmp_path)
    assert path.read_bytes() == FIXED_06[target]


def test_tool_07(tmp_path: Path) -> None:
    for name, data in TOOL_07.items():
        (tmp_path / name).write_bytes(data)
    done = run("fix", "--apply", ".", "--target", "torch_xla", "--isolated", cwd=tmp_path)
    assert done.returncode == 2
    for name, line in (("b.py", 2), ("c.py", 1), ("d.py", 1)):
        (message,) = [row for row in done.stderr.splitlines() if row.startswith(f"{name}:")]
        assert message.startswith(f"{name}:{line}: error: ")
        assert (tmp_path / name).read_bytes() == TOOL_07[name]
    assert "mentions cuda 1 time" in next(row for row in done.stderr.splitlines() if row.startswith("b.py"))
    fixed = (tmp_path / "a.py").read_bytes()
    assert b"M\xfcller" in fixed
    assert b'.to("xla")' in fixed
    assert (tmp_path / "e.py").read_bytes() == b"import torch; import torch_xla; torch_xla.sync(wait=True)\n"
