"""Runs tpumigrate over pinned public packages: does it hold its promises there, and what does it cost?

    python benchmarks/corpus.py --cache ~/corpus
    python benchmarks/corpus.py --cache ~/corpus --packages timm,peft --sample 20 --seed 7

For each package and target: `check`; then `fix --apply` twice on a copy, with safe fixes and, on a second
copy, with unsafe ones.  Verified: no crash; changed files compile; the second run changes nothing; files
in which nothing could be fixed are as they were, byte for byte; no comment or docstring is different.
Exit status 1 when one of these does not hold.  Then, in the same run, the CPU seconds of `check` beside
those of parsing the same files with libcst, and the time of `tpumigrate --help`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import json
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "timm": "1.0.31",
    "ultralytics": "8.4.190",
    "diffusers": "0.42.1",
    "accelerate": "1.15.0",
    "yolov5": "7.0.14",
    "pytorch-lightning": "2.6.6",
    "kornia": "0.9.0",
    "open-clip-torch": "3.3.0",
    "peft": "0.21.2",
    "sentence-transformers": "6.2.0",
    "x-transformers": "2.31.10",
    "torchtune": "0.6.1",
}
TARGETS = ("torch_xla", "torch_tpu")
# Comments to tools go with the line that they speak of; the second is the tool's own.
PRAGMA = re.compile(r"#\s*(noqa|type:|pylint|pragma|fmt:|pyright|mypy|nosec)", re.IGNORECASE)
HUNK = re.compile(r"^@@ .* @@$")


@dataclass
class Outcome:
    """What came of one package for one target."""

    package: str
    target: str
    files: int = 0
    lines: int = 0
    families: Counter[str] = field(default_factory=Counter)
    fixed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    hunks: list[str] = field(default_factory=list)


# -- the corpus --------------------------------------------------------------------------------------------


def obtain(package: str, cache: Path) -> Path:
    """The folder of an unpacked package; it is downloaded when it is not in the cache."""
    folder = cache / "src" / f"{package}-{PACKAGES[package]}"
    if folder.is_dir():
        return folder
    wheels = cache / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(wheels), f"{package}=={PACKAGES[package]}"], check=True)
    name = re.sub(r"[-_.]+", "[-_.]", package)
    pattern = re.compile(f"{name}-{re.escape(PACKAGES[package])}-.*\\.whl", re.IGNORECASE)
    wheel = next(path for path in wheels.iterdir() if pattern.fullmatch(path.name))
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial)
    partial.rename(folder)
    return folder


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if path.is_file())


# -- running the tool --------------------------------------------------------------------------------------


def tool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run tpumigrate of this checkout in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "tpumigrate", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def crashed(done: subprocess.CompletedProcess[str]) -> str:
    """The last words of a run that went wrong, "" for one that went well."""
    if done.returncode in (0, 1, 2) and "Traceback" not in done.stderr:
        return ""
    return f"exit status {done.returncode}: {done.stderr.strip()[-300:]}"


def examine(package: str, target: str, folder: Path) -> Outcome:
    """Check and fix one package for one target."""
    outcome = Outcome(package, target)
    paths = python_files(folder)
    outcome.files = len(paths)
    outcome.lines = sum(path.read_bytes().count(b"\n") for path in paths)
    began = time.perf_counter()
    done = tool("check", ".", "--target", target, "--isolated", "--output-format", "json", folder=folder)
    outcome.seconds = time.perf_counter() - began
    failure = crashed(done)
    if failure:
        outcome.broken.append(f"check: {failure}")
        return outcome
    report = json.loads(done.stdout)
    outcome.problems = [f"{item['path']}: {item['message']}" for item in report["problems"]]
    outcome.families = Counter(f"{finding['code'][:4]}xx" for finding in report["findings"])
    for options in ((), ("--unsafe",)):
        allowed = ("safe", "unsafe") if options else ("safe",)
        fixable = {finding["path"] for finding in report["findings"] if finding["safety"] in allowed}
        with tempfile.TemporaryDirectory(prefix="tpumigrate-corpus-") as place:
            copy = Path(place, "copy")
            shutil.copytree(folder, copy)
            fix_twice(outcome, folder, copy, options, fixable)
    return outcome


def fix_twice(outcome: Outcome, folder: Path, copy: Path, options: tuple[str, ...], fixable: set[str]) -> None:
    label = "fix --unsafe" if options else "fix"
    command = ("fix", ".", "--target", outcome.target, "--isolated", "--apply", "--quiet", *options)
    done = tool(*command, folder=copy)
    failure = crashed(done)
    if failure:
        outcome.broken.append(f"{label}: {failure}")
        return
    outcome.broken.extend(f"{label}: {row}" for row in done.stderr.splitlines() if "not changed:" in row)
    counted = re.search(r"^Fixed (\d+) ", done.stderr, re.MULTILINE)
    outcome.fixed["unsafe" if options else "safe"] = int(counted[1]) if counted else 0
    first = {path.relative_to(copy): path.read_bytes() for path in python_files(copy)}
    changed = 0
    for relative, after in first.items():
        before = (folder / relative).read_bytes()
        if before == after:
            continue
        changed += 1
        where = f"{label}: {relative}"
        if str(relative) not in fixable:
            outcome.broken.append(f"{where}: changed, though nothing in it is fixable")
        outcome.broken.extend(f"{where}: {trouble}" for trouble in compare(before, after))
        if options:
            outcome.hunks.extend(hunks(f"{outcome.package} ({outcome.target}) {relative}", before, after))
    failure = crashed(tool(*command, folder=copy))
    if failure:
        outcome.broken.append(f"second {label}: {failure}")
    for path in python_files(copy):
        if path.read_bytes() != first.get(path.relative_to(copy)):
            outcome.broken.append(f"second {label}: {path.relative_to(copy)}: changed again")
    outcome.broken.extend(f"{label}: left behind {path.name}" for path in copy.rglob(".tpumigrate-*"))


# -- what a fix must not do --------------------------------------------------------------------------------


# What fixes say beside a line that would look odd without.
OUR_COMMENTS = {"# bf16 on TPU needs no loss scaling", "# .to() split the shared parameter"}


def compare(before: bytes, after: bytes) -> Iterator[str]:
    """Troubles of a changed file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(after)
            compile(after, "<fixed>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            yield f"does not compile: {error}"
            return
        original = ast.parse(before)
    lost, new = comments(before) - comments(after), comments(after) - comments(before)
    new = Counter({text: count for text, count in new.items() if text not in OUR_COMMENTS})
    if lost or new:
        yield f"comments: lost {list(lost)}, new {list(new)}"
    if docstrings(original) != docstrings(tree):
        yield "a docstring is different"


def comments(data: bytes) -> Counter[str]:
    tokens = tokenize.tokenize(io.BytesIO(data).readline)
    found = (token.string.strip() for token in tokens if token.type == tokenize.COMMENT)
    return Counter(text for text in found if not PRAGMA.match(text))


def docstrings(tree: ast.Module) -> Counter[str]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, owners))
    return Counter(text for text in found if text is not None)


def hunks(title: str, before: bytes, after: bytes) -> list[str]:
    """The changes of a file, each as a text of its own."""
    old, new = (data.decode("utf-8", "replace").splitlines() for data in (before, after))
    found: list[list[str]] = []
    for row in difflib.unified_diff(old, new, lineterm="", n=4):
        if HUNK.match(row):
            found.append([f"### {title} {row}"])
        elif found:
            found[-1].append(row)
    return ["\n".join(rows) for rows in found]


# -- what it costs -----------------------------------------------------------------------------------------

FLOOR = """
import sys, libcst
for path in open(sys.argv[1]).read().splitlines():
    with open(path, "rb") as file:
        try:
            libcst.parse_module(file.read())
        except libcst.ParserSyntaxError:
            pass
"""


def cpu_seconds(command: list[str]) -> float:
    """CPU time of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def prefiltered(folders: list[Path]) -> list[Path]:
    """The files that `check` parses: those that hold a word for which some rule looks."""
    sys.path.insert(0, str(ROOT))
    from tpumigrate.registry import all_rules

    anchors = sorted({anchor for rule in all_rules() for anchor in rule.anchors})
    wanted = re.compile(b"|".join(re.escape(anchor.encode()) for anchor in anchors))
    return [path for folder in folders for path in python_files(folder) if wanted.search(path.read_bytes())]


def cost(folders: list[Path]) -> None:
    """Print the CPU seconds of `check` beside those of libcst's parser, and how long `--help` takes."""
    paths = prefiltered(folders)
    lines = sum(path.read_bytes().count(b"\n") for path in paths)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listing:
        listing.write("\n".join(map(str, paths)))
        listing.flush()
        floor = cpu_seconds([sys.executable, "-c", FLOOR, listing.name])
    check = [sys.executable, "-m", "tpumigrate", "check", *map(str, folders), "--isolated", "--jobs", "1"]
    print(f"\nfiles parsed: {len(paths)} of {sum(len(python_files(f)) for f in folders)}, {lines:,} lines")
    print(f"libcst.parse_module on them, bare:  {floor:7.2f} CPU s")
    for target in TARGETS:
        seconds = cpu_seconds([*check, "--target", target, "--output-format", "json"])
        print(f"check --target {target}, cold:    {seconds:7.2f} CPU s   ratio {seconds / floor:.2f}")
    times = []
    for _ in range(5):
        began = time.perf_counter()
        tool("--help", folder=ROOT)
        times.append(time.perf_counter() - began)
    print(f"tpumigrate --help:                  {statistics.median(times):7.3f} s (median of 5)")


# -- reporting ---------------------------------------------------------------------------------------------


def table(outcomes: list[Outcome]) -> str:
    families = sorted({family for outcome in outcomes for family in outcome.families})
    head = ["package", "target", "files", "lines", *families, "fixed", "+unsafe", "seconds"]
    rows = [
        [
            outcome.package,
            outcome.target,
            str(outcome.files),
            f"{outcome.lines:,}",
            *(str(outcome.families[family]) for family in families),
            str(outcome.fixed.get("safe", "-")),
            str(outcome.fixed.get("unsafe", "-")),
            f"{outcome.seconds:.1f}",
        ]
        for outcome in outcomes
    ]
    widths = [max(len(row[index]) for row in [head, *rows]) for index in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(w) if index < 2 else cell.rjust(w)
            for index, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "tpumigrate-corpus"))
    parser.add_argument("--packages", default=",".join(PACKAGES), help="names, separated by commas")
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, separated by commas")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="write N random fixes for reading")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--sample-to", type=Path, metavar="FILE", help="default: sample.txt in the cache")
    parser.add_argument("--no-cost", action="store_true", help="leave the measurements out")
    parser.add_argument("--cost-only", action="store_true", help="only measure")
    options = parser.parse_args()
    cache: Path = options.cache.expanduser().resolve()
    if cache.is_relative_to(ROOT):
        parser.error("the cache must be outside of the repository")
    folders = {package: obtain(package, cache) for package in options.packages.split(",")}
    outcomes = []
    for package, folder in folders.items() if not options.cost_only else ():
        for target in options.targets.split(","):
            outcomes.append(examine(package, target, folder))
            print(
                f"{package} {target}: {'BROKEN' if outcomes[-1].broken else 'ok'}",
                file=sys.stderr,
                flush=True,
            )
    if outcomes:
        print(table(outcomes))
    for outcome in outcomes:
        for text in outcome.problems:
            print(f"not checked: {outcome.package} ({outcome.target}) {text}")
        for text in outcome.broken:
            print(f"BROKEN: {outcome.package} ({outcome.target}) {text}")
    if options.sample:
        every = [hunk for outcome in outcomes for hunk in outcome.hunks]
        chosen = random.Random(options.seed).sample(every, min(options.sample, len(every)))
        target_file = options.sample_to or cache / "sample.txt"
        target_file.write_text("\n\n".join(chosen) + "\n", encoding="utf-8")
        print(f"{len(chosen)} of {len(every)} changes in {target_file}")
    if not options.no_cost:
        cost(list(folders.values()))
    return any(outcome.broken for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
