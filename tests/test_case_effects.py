"""The cases' expected texts on the real backends: each has the effect that its case asks for."""

import functools
import socket
from pathlib import Path

import pytest
from backends.client import Backend, Result
from cases import Case, folders, parameters

from tpumigrate.tables import TARGETS
from tpumigrate.testing import fix_text

DEVICES = {"torch_xla": "xla", "torch_tpu": "tpu"}

PROGRAM = """{text}

if __name__ == "__main__":
    DEVICE = {device!r}
    with open({effect!r}, encoding="utf-8") as file:
        exec(compile(file.read(), file.name, "exec"))
"""


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port: int = server.getsockname()[1]
        return port


def one_process() -> dict[str, str]:
    """The variables of a job of one process."""
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCH_TPU_TOPOLOGY": "1,1,1",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": f"localhost:{free_port()}",
    }


def stub(names: list[str]) -> str:
    """A module whose functions must not be called."""
    functions = [f"def {name}(*_, **__): raise AssertionError('{name} was called')" for name in names]
    return "\n".join(functions) + "\n"


def run(text: str, case: Case, backend: Backend, folder: Path, timeout: float = 120) -> Result:
    """Runs a text with the case's effect after it, in one module."""
    for module, names in case.stubs.items():
        (folder / f"{module}.py").write_text(stub(names), encoding="utf-8")
    program = folder / "program.py"
    effect = str(case.folder / "effect.py")
    device = DEVICES[case.target]
    program.write_text(PROGRAM.format(text=text, device=device, effect=effect), encoding="utf-8")
    return backend.run(program, env=one_process(), timeout=timeout)


each_case = pytest.mark.parametrize("case", parameters(lambda case: case.effect))


@each_case
def test_effect(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    backend: Backend = request.getfixturevalue(DEVICES[case.target])
    result = run(case.expected, case, backend, tmp_path)
    assert result.rc == 0, f"{result.stdout}\n{result.stderr}"
    if case.printed is not None:
        assert case.printed in result.stdout.splitlines()


@each_case
def test_no_effect_without_fix(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The effect is the fix's: it fails, or its line is not printed, where the text stays as it is."""
    if case.expected == case.text or case.target in case.findings.get("harmless", ()):
        pytest.skip("nothing to fix, or the text as it is does no harm")
    backend: Backend = request.getfixturevalue(DEVICES[case.target])
    result = run(case.text, case, backend, tmp_path, timeout=20)
    assert result.rc != 0 or (case.printed is not None and case.printed not in result.stdout.splitlines())
