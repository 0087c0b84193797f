"""What the fixes of TPU402, TPU403 and TPU404 compute: the original's values, without its programs for each count."""

import json
import math

import pytest
from backends.client import Backend

from tpumigrate.tables import TARGETS
from tpumigrate.testing import fix_text

DEVICES = {"torch_xla": "xla", "torch_tpu": "tpu"}

# Functions of scores, of a mask of their shape, of a mask of their rows, and of other scores.
TEXT = """
import torch
import torch.nn.functional as F
from torch import Tensor


def fill_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    y = x.clone()
    y[y > 0] = -1.5
    return y


def fill_view_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    y = x.clone()
    y[:, :2][y[:, :2] < 0] = 2
    return y


def fill_named_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    y = x.abs()
    small = torch.isfinite(y) & (y < 0.5)
    y[small] = float("inf")
    return y


def fill_integers_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    y = (x * 3).long()
    y[y == 0] = -100
    return y


def fill_mask_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    y, chosen = x.clone(), mask.bool()
    y[chosen] = 7.0
    return y


def fill_rows_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    y, chosen = x.clone(), rows.bool()
    y[~chosen] = 7.0
    return y


def copy_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    y, chosen = x.clone(), mask.bool()
    y[chosen] = other[chosen]
    return y


def copy_rows_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    y, chosen = x.clone(), rows.bool()
    y[chosen] = other[chosen]
    return y


def sum_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    return x[x > 0].sum()


def mean_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    far = x > 0.1
    return 2 * x[far].mean() - 1


def sum_rows_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    chosen = rows.bool()
    return x[chosen].sum() + torch.masked_select(x, mask).sum()


def cross_entropy_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    labels = other.argmax(-1).masked_fill(rows, -100)
    return F.cross_entropy(x[labels != -100], labels[labels != -100], reduction="sum")


def mean_cross_entropy_loss(x: Tensor, mask: Tensor, rows: Tensor, other: Tensor):
    labels = other.argmax(-1).masked_fill(rows, -100)
    keep = labels != -100
    per_row = F.cross_entropy(x[keep], labels[keep], reduction="none", label_smoothing=0.1)
    return per_row.mean()
"""

PROGRAM = """
import json

functions = [value for name, value in sorted(globals().items()) if name.endswith("_loss") and callable(value)]


def compilations():
    if DEVICE == "tpu":
        return torch.tpu._get_cache_stats().num_compilations
    if DEVICE == "cpu":
        return 0
    import torch_xla
    from torch_xla.debug import metrics

    torch_xla.sync()
    return (metrics.counter_value("UncachedCompile") or 0, metrics.counter_value("aten::nonzero") or 0)


found = {}
for function in functions:
    torch.manual_seed(0)
    values, programs = [], []
    for share in (0.5, 0.3, 0.6, 0.0, 1.0):
        x = torch.rand(4, 3) - share + (share in (0.0, 1.0)) * (0.5 - share)  # all above, all below, or mixed
        x[x == 0] = 0.01
        mask, rows, other = torch.rand(4, 3) < share, torch.rand(4) < share, torch.randn(4, 3)
        moved = [item.to(DEVICE) for item in (x, mask, rows, other)]
        result = function(*moved)
        programs.append(compilations())
        values.append([float(item) for item in result.cpu().flatten()])
        compilations()
    found[function.__name__] = {"values": values, "programs": programs}
print(json.dumps(found))
"""


def run(backend: Backend, text: str, device: str) -> dict[str, dict[str, list[object]]]:
    result = backend.run(f"{text}\nDEVICE = {device!r}\n{PROGRAM}", timeout=300)
    assert result.rc == 0, result.stderr
    found: dict[str, dict[str, list[object]]] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def reference(cpu: Backend) -> dict[str, dict[str, list[object]]]:
    """What the text as it is computes on the CPU."""
    return run(cpu, TEXT, "cpu")


@pytest.mark.parametrize("target", TARGETS)
def test_everything_is_fixed(target: str) -> None:
    fixed = fix_text(TEXT, target, unsafe=True)
    left = ["x[", "other[chosen"] + ["y["] * (target == "torch_xla")  # TorchTPU fills in place by itself
    for subscript in left:
        assert subscript not in fixed.replace("y[:, :2]", "")
    assert "masked_select" not in fixed


@pytest.mark.parametrize("target", TARGETS)
def test_same_values_and_one_program(
    target: str, reference: dict[str, dict[str, list[object]]], request: pytest.FixtureRequest
) -> None:
    device = DEVICES[target]
    found = run(request.getfixturevalue(device), fix_text(TEXT, target, unsafe=True), device)
    assert found.keys() == reference.keys()
    for name, result in found.items():
        assert _same(reference[name]["values"], result["values"]), name
        programs = result["programs"]
        assert programs[1:] == [programs[1]] * len(programs[1:]), (name, programs)


@pytest.mark.parametrize("target", TARGETS)
def test_more_programs_as_it_is(target: str, request: pytest.FixtureRequest) -> None:
    device = DEVICES[target]
    found = run(request.getfixturevalue(device), TEXT, device)
    for name, result in found.items():
        programs = result["programs"]
        fills = name.startswith("fill") and target == "torch_tpu"  # why nothing is found there
        assert (programs[-1] == programs[1]) == fills, (name, programs)


@pytest.mark.parametrize("target", TARGETS)
def test_fix_keeps_cuda(target: str, reference: dict[str, dict[str, list[object]]], cpu: Backend) -> None:
    found = run(cpu, fix_text(TEXT, target, unsafe=True), "cpu")
    assert all(_same(reference[name]["values"], found[name]["values"]) for name in reference)


def _same(expected: object, found: object) -> bool:
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(_same, expected, found))
    assert isinstance(expected, float)
    assert isinstance(found, float)
    if math.isnan(expected) or math.isnan(found):
        return math.isnan(expected) and math.isnan(found)
    return math.isclose(expected, found, rel_tol=1e-4, abs_tol=1e-5)
