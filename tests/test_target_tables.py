"""The tables of API facts hold against what is installed: complete, well spelled, and what they emit runs."""

import ast
import functools
import json
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backends.client import Backend

from tpumigrate.tables import TARGETS, canonical, table

TARGETS_FOLDER = Path(__file__).parents[1] / "rules" / "targets"
PUBLIC_NAMES = Path(__file__).with_name("public_names.py")
TEXTS = {"rule", "call", "ref", "note", "unless_fixed", "source"}
CHOICES = {
    "verdict": {"exact", "approximate", "none"},
    "statement": {"delete"},
    "context": {"unwrap"},
    "safety": {"unsafe"},
}
PLACE = re.compile(r"\{([^{}]*)\}")
DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)*")
ROOTS = {"torch_xla": {"torch", "torch_xla"}, "torch_tpu": {"torch", "os"}}
NAME_IN_TEXT = re.compile(r"(?<![\w.@/-])@?((?:torch|torch_xla)(?:\.[A-Za-z_]\w*)+)")

# Arguments with which emitted calls are tried; any other call is tried without.
ARGUMENTS = {
    "torch.cuda.Event": ["enable_timing=True"],
    "torch.cuda.get_device_name": ["0"],
    "torch.cuda.get_device_properties": ["0"],
    "torch.cuda.manual_seed": ["3"],
    "torch.cuda.manual_seed_all": ["3"],
    "torch.cuda.nvtx.range": ["'region'"],
    "torch_xla.amp.GradScaler": ["enabled=True"],
    "torch_xla.amp.syncfree.Adam": ["[torch.nn.Parameter(torch.ones(2))]", "lr=0.1"],
    "torch_xla.amp.syncfree.AdamW": ["[torch.nn.Parameter(torch.ones(2))]", "lr=0.1"],
    "torch_xla.amp.syncfree.SGD": ["[torch.nn.Parameter(torch.ones(2))]", "lr=0.1"],
    "torch_xla.compile": ["torch.sin"],
    "torch_xla.core.xla_model.is_xla_tensor": ["torch.ones(2)"],
    "torch_xla.core.xla_model.mark_step": ["wait=True"],
    "torch_xla.core.xla_model.master_print": ["''"],
    "torch_xla.core.xla_model.optimizer_step": ["torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])"],
    "torch_xla.core.xla_model.set_rng_state": ["3"],
    "torch_xla.core.xla_model.xla_device": ["0"],
    "torch_xla.debug.profiler.StepTrace": ["'region'", "step_num=1"],
    "torch_xla.debug.profiler.Trace": ["'region'"],
    "torch_xla.debug.profiler.trace_me": ["'region'"],
    "torch_xla.experimental.compile": ["torch.sin"],
    "torch_xla.experimental.pjrt.broadcast_master_param": ["torch.nn.Linear(1, 1).to('xla')"],
    "torch_xla.experimental.pjrt.rendezvous": ["'here'"],
    "torch_xla.experimental.pjrt.set_device_type": ["'CPU'"],
    "torch_xla.manual_seed": ["3"],
    "torch_xla.utils.checkpoint.checkpoint": ["torch.sin", "torch.ones(2)", "use_reentrant=False"],
}
# Their use changes how the whole process shards, so only their names are checked.
NOT_TRIED = ("torch_xla.experimental.xla_sharding.",)
NEEDS_JAX = {"torch.tpu.pallas.jax_op"}  # absent without it
STATES = {"torch_xla": "3", "torch_tpu": "torch.tpu.default_generators[0].get_state()"}
# What cannot work here, with the reason the backend gives.
FAILS = {
    "torch_xla": {
        "torch.cuda.memory_allocated": "GetAllocatorStats is not supported",
        "torch.cuda.max_memory_allocated": "GetAllocatorStats is not supported",
        "torch.cuda.device_memory_used": "GetAllocatorStats is not supported",
        "torch.accelerator.memory_allocated": "GetAllocatorStats is not supported",
        "torch.accelerator.max_memory_allocated": "GetAllocatorStats is not supported",
    },
    "torch_tpu": {"torch.cuda.get_device_properties": "unrecognized TPU"},
}


def raw(name: str) -> dict[str, Any]:
    """A table as it stands in its file."""
    return tomllib.loads((TARGETS_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def templates(target: str) -> Iterator[tuple[str, str]]:
    """Name and text of everything that a table puts into programs."""
    for name, row in table(target).items():
        yield from ((name, text) for text in (row.call, row.ref) if text)


def render(template: str, arguments: list[str]) -> str:
    """The text that a template gives, with modules by their full names."""

    def place(match: re.Match[str]) -> str:
        key = match[1]
        if key == "args":
            return ", ".join(arguments)
        if key == ", args":
            return "".join(f", {argument}" for argument in arguments)
        number, _, default = key.partition("=")
        if number.isdecimal():
            return arguments[int(number)] if int(number) < len(arguments) else default
        return key

    return PLACE.sub(place, template)


def modules(template: str) -> set[str]:
    """The modules that a template needs."""
    return {key for key in PLACE.findall(template) if DOTTED.fullmatch(key) and key != "args"}


def answer(backend: Backend, program: str, *values: object) -> Any:
    """What a program prints as JSON when it starts with VALUES."""
    text = f"import json\nVALUES = json.loads({json.dumps(json.dumps(values))})\n{textwrap.dedent(program)}"
    result = backend.run(text, collect=False)
    assert result.rc == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


FIND = """
import importlib, inspect, json, warnings
warnings.simplefilter("ignore")

def find(name):
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for end in range(1, len(parts)):
        if hasattr(found, parts[end]):
            found = getattr(found, parts[end])
        else:
            found = importlib.import_module(".".join(parts[:end + 1]))
    return found

def finds(name):
    above, _, last = name.rpartition(".")
    ways = (
        lambda: find(name),
        lambda: importlib.import_module(name),
        lambda: getattr(importlib.import_module(above), last),
    )
    for way in ways:
        try:
            yield inspect.unwrap(way())
        except (AttributeError, ImportError):
            pass

def missing(names):
    return [name for name in names if not list(finds(name))]
"""


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    """Each target in turn."""
    found: str = request.param
    return found


@pytest.fixture
def installed(target: str, request: pytest.FixtureRequest) -> Backend:
    """The environment that has the target's package."""
    found: Backend = request.getfixturevalue(target.removeprefix("torch_"))
    return found


# -- the files themselves ----------------------------------------------------------------------------------


def test_rows_follow_the_schema(target: str) -> None:
    for name, row in raw(target).items():
        assert set(row) <= TEXTS | set(CHOICES), name
        assert {"verdict", "note", "source"} <= set(row), name
        for key, allowed in CHOICES.items():
            assert row.get(key) in {*allowed, None}, name
        assert all(isinstance(row[key], str) and row[key].strip() == row[key] != "" for key in row), name
        assert re.fullmatch(r"(TPU|XLA)\d{3}", row.get("rule", "TPU000")), name
        assert row["note"].endswith("."), name
        assert row.get("unless_fixed", ".").endswith("."), name


def test_rules_report_their_own_names(target: str) -> None:
    own = {"torch_xla": {"XLA101"}, "torch_tpu": {f"XLA10{number}" for number in (2, 3, 4, 5, 6, 8)}}[target]
    for name, row in table(target).items():
        if name.startswith("torch_xla."):
            assert row.rule in own, name
        else:
            assert row.rule == "" or row.rule.startswith("TPU"), name


def test_a_name_that_is_fine_is_left_alone(target: str) -> None:
    for name, row in table(target).items():
        if not row.rule:
            assert row.verdict != "none", name
            assert not any((row.call, row.ref, row.statement, row.context, row.unless_fixed)), name


def test_a_name_without_edit_says_what_to_write(target: str) -> None:
    harmless = {"TPU206", "TPU211"}  # no effect, nothing to write
    advised = {"TPU201", "TPU205"}  # the note says it
    for name, row in table(target).items():
        if row.rule and not (row.call or row.ref or row.statement or row.context):
            assert row.unless_fixed or row.rule in harmless | advised, name


def test_templates_are_expressions(target: str) -> None:
    for name, text in templates(target):
        for module in modules(text):
            assert module.partition(".")[0] in ROOTS[target], name
        for key in PLACE.findall(text):
            assert re.fullmatch(r"(, )?args|\d+(=[^{}]*)?", key) or DOTTED.fullmatch(key), name
        ast.parse(render(text, ["a", "b", "c"]), mode="eval")
        assert "cuda" not in render(text, []), name


def test_references_take_no_arguments(target: str) -> None:
    for name, row in table(target).items():
        assert "args" not in PLACE.findall(row.ref), name
        assert not any(key[:1].isdecimal() for key in PLACE.findall(row.ref)), name


def test_both_tables_know_the_same_names_of_torch() -> None:
    xla, tpu = ({name for name in table(target) if not name.startswith("torch_xla.")} for target in TARGETS)
    assert xla == tpu


def test_aliases_lead_straight_to_names_of_the_tables() -> None:
    aliases: dict[str, str] = raw("aliases")["aliases"]
    rows = set(table("torch_xla")) | set(table("torch_tpu"))
    for path, name in aliases.items():
        assert name not in aliases, path
        assert path not in rows
        if name.startswith(("torch.cuda.", "torch.accelerator.", "torch_xla.")):
            assert name in rows | {"torch_xla." + path.rpartition(".")[2]}, path


# -- against what is installed -----------------------------------------------------------------------------


@pytest.mark.parametrize("environment", ["xla", "tpu"])
def test_every_public_name_has_a_row(environment: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(environment)
    result = backend.run(PUBLIC_NAMES, collect=False)
    assert result.rc == 0, result.stderr
    names = result.stdout.split()
    assert len(names) > 250
    for target in TARGETS:
        assert [name for name in names if canonical(name) not in table(target)] == []


def test_emitted_names_exist(target: str, installed: Backend) -> None:
    wanted = set()
    for _, text in templates(target):
        wanted |= {module + rest for module, rest in re.findall(r"\{([a-z_][\w.]*)\}((?:\.\w+)*)", text)}
    wanted -= {"args"}
    assert len(wanted) > 15
    missing = answer(installed, FIND + "print(json.dumps(missing(VALUES[0])))", sorted(wanted))
    assert missing == []


def test_advised_names_exist(target: str, installed: Backend) -> None:
    advice = {name: row.unless_fixed for name, row in table(target).items()}
    wanted = {found: name for name, text in advice.items() for found in NAME_IN_TEXT.findall(text)}
    missing = answer(installed, FIND + "print(json.dumps(missing(VALUES[0])))", sorted(wanted))
    assert {name: wanted[name] for name in missing if name not in NEEDS_JAX} == {}


def test_aliases_are_the_same_object(xla: Backend, tpu: Backend) -> None:
    """Somewhere at least: torch_xla replaces a few functions, and some names are newer than torch 2.9."""
    aliases: dict[str, str] = raw("aliases")["aliases"]
    program = f"""{FIND}
print(json.dumps([path for path, name in VALUES[0].items()
                  if not any(one == other for one in finds(path) for other in finds(name))]))
"""
    not_xla = answer(xla, program, aliases)
    not_tpu = answer(tpu, program, {path: aliases[path] for path in not_xla if not path.startswith("torch_xla.")})
    assert [path for path in not_xla if path.startswith("torch_xla.")] == []
    assert not_tpu == []


@functools.cache
def expressions(target: str) -> dict[str, str]:
    """Everything a table emits, as Python with arguments, by name; a reference has an ampersand before it."""
    found = {}
    for name, row in table(target).items():
        if name.startswith(NOT_TRIED):
            continue
        is_state = name.startswith("torch.cuda.set_rng_state")
        arguments = [STATES[target]] if is_state else ARGUMENTS.get(name, [])
        if row.call:
            found[name] = render(row.call, arguments)
        if row.ref:
            found["&" + name] = render(row.ref, [])
    return found


def test_what_is_emitted_runs(target: str, installed: Backend) -> None:
    program = f"""{FIND}
import os, torch, torch.distributed, torch.optim, torch.utils.checkpoint
for module in VALUES[1]:
    importlib.import_module(module)
torch_xla = importlib.import_module("torch_xla") if {target == "torch_xla"} else None
if torch_xla is None:
    torch.ones(2, device="tpu").cpu()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
errors = {{}}
for name, expression in VALUES[0].items():
    try:
        eval(expression)
    except Exception as error:
        errors[name] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(errors))
"""
    needed = sorted({module for _, text in templates(target) for module in modules(text)})
    errors = answer(installed, program, expressions(target), needed)
    expected = FAILS[target]
    assert {name: error for name, error in errors.items() if name not in expected} == {}
    assert {name for name, reason in expected.items() if reason not in errors.get(name, "")} == set()


def test_a_seed_reaches_the_device(target: str, installed: Backend) -> None:
    device = target.removeprefix("torch_")
    seed = expressions(target)["torch.cuda.manual_seed"]
    program = f"""
    import torch
    {"import torch_xla" if target == "torch_xla" else ""}
    def draw():
        {seed}
        return torch.rand(4, device="{device}").cpu().tolist()
    print(json.dumps(draw() == draw()))
    """
    assert answer(installed, program) is True


def test_events_measure_milliseconds(tpu: Backend) -> None:
    event = expressions("torch_tpu")["torch.cuda.Event"]
    program = f"""
    import time, torch
    torch.ones(2, device="tpu").cpu()
    start, end = {event}, {event}
    start.record()
    time.sleep(0.05)
    end.record()
    torch.accelerator.synchronize()
    print(json.dumps(start.elapsed_time(end)))
    """
    assert 50 <= answer(tpu, program) < 5000


def test_marked_regions_are_context_managers(target: str, installed: Backend) -> None:
    program = f"""
    import torch
    {"import torch_xla.debug.profiler" if target == "torch_xla" else ""}
    with {expressions(target)["torch.cuda.nvtx.range"]}:
        pass
    print(json.dumps(True))
    """
    assert answer(installed, program) is True


@pytest.mark.parametrize("name", ["torch.cuda.amp.custom_fwd", "torch.cuda.amp.custom_bwd"])
def test_custom_functions_are_decorators(name: str, target: str, installed: Backend) -> None:
    program = f"""
    import torch
    @{expressions(target)["&" + name]}
    def double(ctx, x):
        return 2 * x
    class Context: _fwd_used_autocast = False; _dtype = None
    print(json.dumps(double(Context(), 2)))
    """
    assert answer(installed, program) == 4


def test_disabled_scaler_keeps_a_training_step(target: str, installed: Backend) -> None:
    device = target.removeprefix("torch_")
    program = f"""
    import torch
    {"import torch_xla" if target == "torch_xla" else ""}
    model = torch.nn.Linear(2, 1).to("{device}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = {expressions(target)["torch.cuda.amp.GradScaler"]}
    before = model.weight.detach().cpu().clone()
    scaler.scale(model(torch.ones(3, 2, device="{device}")).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    print(json.dumps(((before - model.weight.detach().cpu()) / 0.1).round(decimals=3).tolist()))
    """
    assert answer(installed, program) == [[3.0, 3.0]]
