"""Facts that rules rest on and no table holds, seen on the real backends; when one changes, its rule must."""

from backends.client import Backend

BATCH_NORM = """
import torch
norm = torch.nn.BatchNorm1d(4).to(DEVICE)
norm(torch.full((8, 4), 5.0).to(DEVICE))
print("mean", float(norm.running_mean.cpu()[0]))
"""
INFERENCE = """
import torch, torch_xla
layer = torch.nn.Linear(2, 2).to("xla")
x = torch.ones(1, 2).to("xla")
with torch.inference_mode():
    print("sum", float(layer(x).sum().cpu()))
"""
OPTIMIZER = """
import torch
layer = torch.nn.Linear(2, 2)
before = list(layer.parameters())
layer.to(DEVICE)
print("same", [a is b for a, b in zip(before, layer.parameters())])
"""


def test_batch_norm_keeps_its_first_statistics_on_torch_tpu(tpu: Backend, xla: Backend) -> None:
    """TPU123"""
    result = tpu.run(f"DEVICE = 'tpu'\n{BATCH_NORM}")
    assert result.rc == 0, result.stderr
    assert "mean 0.0" in result.stdout
    result = xla.run(f"import torch_xla\nDEVICE = 'xla'\n{BATCH_NORM}")
    assert result.rc == 0, result.stderr
    assert "mean 0.5" in result.stdout


def test_a_linear_layer_refuses_inference_mode_on_torch_xla(xla: Backend) -> None:
    """TPU121"""
    result = xla.run(INFERENCE)
    assert result.rc != 0
    assert "version_counter for inference tensor" in result.stderr


def test_moving_makes_new_parameters(xla: Backend, tpu: Backend) -> None:
    """TPU114"""
    for backend, device, load in ((xla, "xla", "import torch_xla"), (tpu, "tpu", "")):
        result = backend.run(f"{load}\nDEVICE = {device!r}\n{OPTIMIZER}")
        assert "same [False, False]" in result.stdout, result.stderr
