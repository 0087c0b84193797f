"""The cases' expected texts on the real backends: each has the effect that its case asks for."""

import socket
from pathlib import Path

import pytest
from backends.client import Backend, Result
from cases import Case, folders, parameters

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


def assert_effect(text: str, case: Case, backend: Backend, folder: Path) -> None:
    result = run(text, case, backend, folder)
    assert result.rc == 0, f"{result.stdout}\n{result.stderr}"
    assert case.printed is None or case.printed in result.stdout.splitlines()


each_case = pytest.mark.parametrize("case", parameters(lambda case: case.effect))


@each_case
def test_effect(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    backend: Backend = request.getfixturevalue(DEVICES[case.target])
    assert_effect(case.expected, case, backend, tmp_path)


@each_case
def test_no_effect_without_fix(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The effect is the fix's: it fails, or its line is not printed, where the text stays as it is."""
    if case.expected == case.text or case.target in case.findings.get("harmless", ()):
        pytest.skip("nothing to fix, or the text as it is does no harm")
    backend: Backend = request.getfixturevalue(DEVICES[case.target])
    result = run(case.text, case, backend, tmp_path, timeout=10)
    assert result.rc != 0 or (case.printed is not None and case.printed not in result.stdout.splitlines())


# -- CUDA to torch_xla to torch_tpu -------------------------------------------------------------------------

# The way by torch_xla leads to another text with the same effect: why.
ANOTHER_TEXT = {
    "AMP-04": "a scaler that is off takes any device",
    "CKPT-03": "torch_xla's checkpoint is reentrant, so torch's is afterwards",
    "DEV-01": "an XLA device is always there, so the question for one is gone",
    "DEV-02": "an XLA device is always there, so the question for one is gone",
    "DEV-04": "the name of an XLA device is TPU, without a generation",
    "DEV-05": "sets and tables by device type keep every type",
    "DEV-09": "torch_xla is seeded on its own, and TorchTPU can be too",
    "DEV-10": "torch_xla has no peak to reset and no cache to empty",
    "DIST-01": "gradient_as_bucket_view stays",
    "DIST-02": "rank and world size are left to the launcher",
    "DIST-04": "gradient_as_bucket_view stays",
    "DIST-09": "rank and world size are left to the launcher",
    "DYN-02": "TorchTPU needs no masked_fill_ for numbers",
    "TOOL-03": "gradient_as_bucket_view stays",
    "TOOL-08": "torch_xla has no cache to empty",
}

# The way by torch_xla leads elsewhere: why.
NO_WAY = {
    "CKPT-01": "a checkpoint is loaded to the host for torch_xla, and stays there",
    "CKPT-02": "xm.save also chooses who writes: for a person",
    "CKPT-04": "torch_xla's state is a number, and TorchTPU's can't be read: for a person",
    "DEV-06": "a test for the type of another accelerator is no CUDA code, and nothing else in the file is torch_xla's",
    "DIST-03": "xm.save also chooses who writes: for a person",
    "DIST-06": "torch_xla.launch knows the number of processes, mp.spawn is told: for a person",
    "DIST-07": "code of torch_xla, reported only",
}


def by_torch_xla(case: Case) -> str:
    """What the fix for torch_tpu makes of the fix for torch_xla."""
    text = fix_text(case.text, "torch_xla", unsafe=case.unsafe)
    return fix_text(text, "torch_tpu", unsafe=case.unsafe)


def test_reasons_are_of_cases() -> None:
    names = {folder.name for folder in folders()}
    assert names >= ANOTHER_TEXT.keys() | NO_WAY.keys()
    assert not ANOTHER_TEXT.keys() & NO_WAY.keys()


@pytest.mark.parametrize("case", parameters(lambda case: case.target == "torch_tpu"))
def test_by_torch_xla(case: Case) -> None:
    same = by_torch_xla(case) == case.expected
    assert same == (case.name not in ANOTHER_TEXT.keys() | NO_WAY.keys())


@pytest.mark.parametrize("case", parameters(lambda case: case.target == "torch_tpu" and case.name in ANOTHER_TEXT))
def test_effect_by_torch_xla(case: Case, tpu: Backend, tmp_path: Path) -> None:
    text = by_torch_xla(case)
    assert "torch_xla" not in text
    assert_effect(text, case, tpu, tmp_path)


@pytest.mark.parametrize("case", parameters(lambda case: case.target == "torch_tpu" and case.name in NO_WAY))
def test_no_half_way(case: Case) -> None:
    """What needs a person stays a program of torch_xla."""
    text = by_torch_xla(case)
    assert '"tpu"' not in text or "torch_xla" not in text
