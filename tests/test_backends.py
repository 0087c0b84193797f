"""The harness itself: programs really run on the backends, and nothing they do is lost."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from backends.client import Backend, MissingBackendError, Result, interpreter
from backends.compare import losses, max_relative_difference

PROGRAMS = Path(__file__).parents[1] / "fixtures" / "programs"

TRAINING = textwrap.dedent("""
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 4).to(DEVICE)
    for step in range(3):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")
""")


@pytest.fixture(scope="session", params=["xla", "tpu", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    found: Backend = request.getfixturevalue(request.param)
    return found


def train(backend: Backend, device: str, **settings: str) -> Result:
    """The tiny training program on a device."""
    return backend.run(f"DEVICE = {device!r}\n{TRAINING}", env=settings)


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_training_runs_on_the_device(name: str, request: pytest.FixtureRequest) -> None:
    result = train(request.getfixturevalue(name), name)
    assert result.rc == 0, result.stderr
    assert result.devices == [name]
    assert result.executions >= 3
    assert 0 < result.compiles <= result.executions
    assert result.steps == 3
    assert result.weights_changed


def test_reference_runs_a_cuda_program_on_the_cpu(cpu: Backend) -> None:
    result = train(cpu, "cuda")
    assert result.rc == 0, result.stderr
    assert (result.devices, result.steps, result.weights_changed) == (["cpu"], 3, True)
    assert (result.executions, result.compiles) == (0, 0)


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_losses_agree_with_the_reference(name: str, cpu: Backend, request: pytest.FixtureRequest) -> None:
    reference = losses(train(cpu, "cuda").stdout)
    measured = losses(train(request.getfixturevalue(name), name).stdout)
    assert len(reference) == 3
    assert reference[0] > reference[-1]
    assert max_relative_difference(reference, measured) < 1e-5


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_reference_runs_every_cuda_fixture(program: Path, cpu: Backend) -> None:
    result = cpu.run(program)
    assert result.rc == 0, result.stderr
    assert losses(result.stdout)
    assert result.devices in ([], ["cpu"])


def test_a_step_that_changes_nothing_is_seen(backend: Backend) -> None:
    device = "cuda" if backend.name == "cpu" else backend.name
    result = backend.run(f"DEVICE = {device!r}\n{TRAINING}".replace("lr=0.1", "lr=0.0"))
    assert result.steps == 3
    assert result.weights_changed is False


def test_a_program_without_training_has_nothing_to_compare(backend: Backend) -> None:
    result = backend.run("print('hello')\n")
    assert (result.rc, result.stdout) == (0, "hello\n")
    assert (result.executions, result.steps, result.weights_changed) == (0, 0, None)
    assert result.recorded


def test_exit_code_and_streams_come_back(backend: Backend) -> None:
    result = backend.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(7)\n")
    assert (result.rc, result.stdout, result.signal) == (7, "out\n", None)
    assert result.stderr.endswith("err\n")


def test_exit_message_goes_to_stderr(backend: Backend) -> None:
    result = backend.run("raise SystemExit('no data')\n")
    assert result.rc == 1
    assert "no data" in result.stderr


def test_traceback_is_the_programs_own(backend: Backend) -> None:
    result = backend.run("def f():\n    raise KeyError('weights')\nf()\n")
    assert result.rc == 1
    assert "KeyError: 'weights'" in result.stderr
    assert "line 2, in f" in result.stderr
    assert "server.py" not in result.stderr


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_work_before_an_error_is_counted(name: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(name)
    result = backend.run(f"DEVICE = {name!r}\n{TRAINING}\nraise RuntimeError('late')\n")
    assert result.rc == 1
    assert result.steps == 3
    assert result.executions >= 3


def test_timeout_kills_the_program_and_its_children(backend: Backend, tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys, time
        child = subprocess.Popen(["sleep", "60"])
        print(child.pid, flush=True)
        time.sleep(60)
    """
    result = backend.run(textwrap.dedent(code), timeout=2)
    assert result.timed_out
    assert (result.rc, result.signal) == (-9, "SIGKILL")
    assert result.seconds < 10
    assert not result.recorded
    assert not _runs(int(result.stdout))


def _runs(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


def test_abort_is_reported_and_the_server_lives_on(backend: Backend) -> None:
    result = backend.run("import os\nprint('before')\nos.abort()\n")
    assert (result.rc, result.signal) == (-6, "SIGABRT")
    assert result.stdout == "before\n"
    assert not result.recorded
    assert backend.run("print('after')\n").stdout == "after\n"


def test_program_sees_what_python_would_give_it(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("answer = 42\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, __main__, helper\n"
        "print(__name__, __file__ == sys.argv[0], sys.argv[1:], helper.answer)\n"
        "print(os.environ['GREETING'], sys.stdin.read() == '', __main__.__file__ == __file__)\n"
    )
    result = backend.run(script, ["--epochs", "1"], {"GREETING": "hi"})
    assert result.stdout.splitlines() == ["__main__ True ['--epochs', '1'] 42", "hi True True"]


def test_program_starts_in_an_empty_folder_or_in_the_one_given(backend: Backend, tmp_path: Path) -> None:
    assert backend.run("import os\nprint(os.listdir())\n").stdout == "[]\n"
    inside = backend.run("import os\nprint(os.getcwd())\n", cwd=tmp_path)
    assert inside.stdout.strip() == os.path.realpath(tmp_path)


def test_module_runs_like_python_m(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    assert backend.run_module("tool", ["x"], cwd=tmp_path).stdout == "__main__ ['x']\n"


def test_programs_do_not_see_each_other(backend: Backend) -> None:
    backend.run("import torch\ntorch.leftover = 1\n")
    assert backend.run("import torch\nprint(hasattr(torch, 'leftover'))\n").stdout == "False\n"


def test_fresh_server_reads_the_environment_while_importing(tpu: Backend) -> None:
    code = "import torch\nprint(torch.tpu.eager_mode)\n"
    fused = tpu.run(code, env={"TORCH_TPU_DEFER_AND_FUSE": "1"}, fresh=True)
    assert fused.stdout == "EagerMode.DEFER_AND_FUSE\n"
    assert tpu.run(code).stdout == "EagerMode.DEFER_NEVER\n"


def test_helper_of_multiprocessing_loads_no_backend(tpu: Backend) -> None:
    code = """\
import os, time
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
tracker = f"/proc/{resource_tracker._resource_tracker._pid}/maps"
time.sleep(2)
with open(tracker) as maps:
    print("libtorch" in maps.read())
"""
    result = tpu.run(code)
    assert result.stdout == "False\n", result.stderr


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_forked_processes_are_watched_too(name: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(name)
    code = f"""\
import torch.multiprocessing
def main(index):
    DEVICE = {name!r}
{textwrap.indent(TRAINING, "    ")}
torch.multiprocessing.start_processes(main, nprocs=1, start_method="fork")
"""
    result = backend.run(code)
    assert result.rc == 0, result.stderr
    assert (result.devices, result.steps, result.weights_changed) == ([name], 3, True)
    assert result.executions >= 3


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_loader_workers_do_not_disturb_the_device(name: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(name)
    code = f"""\
import torch
from torch.utils.data import DataLoader
total = torch.zeros(2).to({name!r})
for batch in DataLoader([torch.ones(2)] * 4, num_workers=1):
    total += batch[0].to({name!r})
print(total.cpu().tolist())
"""
    result = backend.run(code)
    assert result.stdout == "[4.0, 4.0]\n", result.stderr
    assert result.executions > 0


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_spawned_processes_are_watched_too(name: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(name)
    body = textwrap.indent(TRAINING, "    ")
    code = f"""\
import torch.multiprocessing
def main(index):
    DEVICE = {name!r}
{body}
if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=1)
"""
    result = backend.run(code)
    assert result.rc == 0, result.stderr
    assert (result.devices, result.steps, result.weights_changed) == ([name], 3, True)
    assert result.executions >= 3


def test_missing_interpreter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPUMIGRATE_PYTHON_XLA", raising=False)
    with pytest.raises(MissingBackendError, match="TPUMIGRATE_PYTHON_XLA"):
        interpreter("xla")


@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 failed")])
def test_missing_backend_skips_unless_required(required: str, outcome: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPUMIGRATE_", "PYTEST_"))}
    environment["TPUMIGRATE_REQUIRE_BACKENDS"] = required
    test = f"{__file__}::test_training_runs_on_the_device[xla]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert outcome in run.stdout
    assert "TPUMIGRATE_PYTHON_XLA does not name" in run.stdout


@pytest.mark.parametrize(
    ("printed", "numbers"),
    [
        ("step 3 loss 1.234567", [1.234567]),
        ("loss=1.23", [1.23]),
        ("[d_loss: 0.5] [g_loss: 0.7]", [0.5, 0.7]),
        ("Train Epoch: 1 [0/64 (0%)]\tLoss: 2.302585", [2.302585]),
        ("train_loss 1e-3, lr 0.1", [1e-3]),
        ("batch 0 mean -0.25 max .5", [-0.25, 0.5]),
        ("a lossless format, version 2", []),
        ("no loss\n3", []),
    ],
)
def test_losses_reads_what_programs_print(printed: str, numbers: list[float]) -> None:
    assert losses(printed) == numbers


def test_max_relative_difference() -> None:
    assert max_relative_difference([1.0, 2.0], [1.0, 2.02]) == pytest.approx(0.02 / 2.02)
    assert max_relative_difference([], []) == 0
    assert max_relative_difference([float("nan")], [1.0]) == float("inf")
    with pytest.raises(ValueError, match="1 numbers against 2"):
        max_relative_difference([1.0], [1.0, 2.0])
