"""PyTorch/XLA programs of fixtures/xla_programs, migrated to torch_tpu as they are and run on its simulator.

The reference is the CUDA program of the same name in fixtures/programs, run on the CPU in float32.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from backends.client import Backend
from backends.compare import losses, max_relative_difference

from tpumigrate.testing import check_text, fix_text

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROGRAMS = FIXTURES / "xla_programs"
FLOAT32, BFLOAT16 = 1e-4, 2e-2
TOLERANCE = {"mnist_amp": BFLOAT16, "lstm_clip": FLOAT32, "vae": FLOAT32}
COUNT = 8

LAUNCHED = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr
from torch.utils.data import DataLoader, TensorDataset


def run(index, lr):
    torch.manual_seed(0)
    device = torch_xla.device()
    model = torch.nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = TensorDataset(torch.arange(12.0).view(4, 3) / 12, torch.ones(4, 1))
    for x, y in pl.MpDeviceLoader(DataLoader(data, batch_size=2), device):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        xm.optimizer_step(optimizer)
        xm.master_print(f"rank {xr.global_ordinal()} of {xr.world_size()} loss {loss.item():.6f}", flush=True)
    xm.rendezvous("end")


if __name__ == "__main__":
    torch_xla.launch(run, args=(0.1,))
"""

HELPERS = """
import os
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.amp import syncfree
from torch_xla.utils.checkpoint import checkpoint

os.environ["PT_XLA_DEBUG"] = "0"


def tell(step, value):
    print("step", step, f"{value.item():.6f}")


def main(path):
    torch.manual_seed(3)
    model = torch.nn.Linear(2, 2).to(xm.xla_device())
    opt = syncfree.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 2, device=torch_xla.device(), requires_grad=True)
    for step in range(2):
        opt.zero_grad()
        loss = checkpoint(model, x).sum()
        loss.backward()
        xm.reduce_gradients(opt)
        opt.step()
        xm.add_step_closure(tell, args=(step, loss,))
        xm.mark_step()
    where = "xla" if x.device.type == "xla" and x.is_xla and str(x.device).startswith("xla") else "host"
    print("on an accelerator", where != "host")
    best = float(loss)
    print("best", f"{xm.mesh_reduce('best', best, max):.6f}", xm.is_master_ordinal(), xr.global_ordinal())
    xm.save(model.state_dict(), path)
    print({key: str(value.device) for key, value in torch.load(path).items()})


if __name__ == "__main__":
    main("model.pt")
"""


def test_every_program_is_listed() -> None:
    assert {path.stem for path in PROGRAMS.glob("*.py")} == set(TOLERANCE)


@pytest.mark.parametrize("name", TOLERANCE)
def test_migrated_program_computes_the_same(name: str, tmp_path: Path, cpu: Backend, tpu: Backend) -> None:
    text = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    migrated = tmp_path / f"{name}.py"
    migrated.write_text(fix_text(text, "torch_tpu"), encoding="utf-8")
    reference = cpu.run(FIXTURES / "programs" / f"{name}.py", timeout=300)
    assert reference.rc == 0, reference.stderr
    result = tpu.run(migrated, timeout=600)
    assert result.rc == 0, f"{result.stdout}\n{result.stderr}"
    expected, found = losses(reference.stdout), losses(result.stdout)
    assert len(expected) == len(found) == COUNT
    assert max_relative_difference(expected, found) <= TOLERANCE[name]
    assert result.steps == reference.steps == COUNT
    assert result.devices == ["tpu"], "the parameters are elsewhere"
    assert result.weights_changed


@pytest.mark.parametrize("name", TOLERANCE)
def test_program_runs_as_it_is_on_torch_xla(name: str, cpu: Backend, xla: Backend) -> None:
    """The fixture is a program of PyTorch/XLA, not of our imagination."""
    reference = cpu.run(FIXTURES / "programs" / f"{name}.py", timeout=300)
    result = xla.run(PROGRAMS / f"{name}.py", timeout=600)
    assert result.rc == 0, f"{result.stdout}\n{result.stderr}"
    expected, found = losses(reference.stdout), losses(result.stdout)
    assert len(expected) == len(found) == COUNT
    assert max_relative_difference(expected, found) <= TOLERANCE[name]


@pytest.mark.parametrize("name", TOLERANCE)
def test_nothing_of_torch_xla_is_left(name: str) -> None:
    once = fix_text((PROGRAMS / f"{name}.py").read_text(encoding="utf-8"), "torch_tpu")
    assert "torch_xla" not in {
        alias.name.partition(".")[0]
        for node in ast.walk(ast.parse(once))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert '"xla"' not in once
    assert fix_text(once, "torch_tpu") == once
    assert not [item for item in check_text(once, "torch_tpu").found if item.rule.code.startswith("XLA")]


def test_launched_program_averages_and_computes_the_same(xla: Backend, tpu: Backend) -> None:
    assert fix_text(LAUNCHED, "torch_tpu") == LAUNCHED, "how replicas are started is for --unsafe"
    migrated = fix_text(LAUNCHED, "torch_tpu", unsafe=True)
    assert "all_reduce(parameter.grad, op=dist.ReduceOp.AVG)" in migrated
    environment = {"TORCH_TPU_TOPOLOGY": "1,1,1", "TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:8473"}
    result = tpu.run(migrated, env=environment, timeout=300)
    assert result.rc == 0, f"{result.stdout}\n{result.stderr}\n{migrated}"
    reference = xla.run(LAUNCHED, timeout=300)
    assert reference.rc == 0, reference.stderr
    first = "rank 0 of 1 loss "
    expected = [line for line in reference.stdout.splitlines() if line.startswith(first)]
    found = [line for line in result.stdout.splitlines() if line.startswith(first)]
    assert len(found) == 2
    assert found == expected


def test_helpers_do_the_same(xla: Backend, tpu: Backend) -> None:
    migrated = fix_text(HELPERS, "torch_tpu")
    assert "torch_xla" not in migrated
    reference = xla.run(HELPERS, timeout=300)
    assert reference.rc == 0, reference.stderr
    result = tpu.run(migrated, timeout=300)
    assert result.rc == 0, f"{result.stdout}\n{result.stderr}\n{migrated}"
    lines = [line for line in result.stdout.splitlines() if not line.startswith("CompilationCache")]
    assert lines == reference.stdout.splitlines()
