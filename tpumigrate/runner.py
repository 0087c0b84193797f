"""Runs the engine over many files, in several processes, with results in the order of the paths."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pathspec

from tpumigrate import files, fixer
from tpumigrate.config import Settings
from tpumigrate.engine import Analysis, analyse, as_finding
from tpumigrate.finding import FileResult, Finding, Problem
from tpumigrate.project import Project, scan
from tpumigrate.registry import all_rules, selected
from tpumigrate.rule import Rule
from tpumigrate.source import CannotRead, Source

# Below this many bytes to analyse, starting processes costs more than it saves.
PARALLEL_FROM = 400_000
CHUNK = 150_000


@dataclass(frozen=True)
class Job:
    """What to do with each file; sent once to each process."""

    target: str
    settings: Settings
    project: Project
    fix: bool = False
    unsafe: bool = False
    annotate: bool = False
    apply: bool = False


def run(paths: Sequence[str], settings: Settings, target: str, *, jobs: int = 0, **what: bool) -> Iterator[FileResult]:
    """Check (or fix) files and yield one result for each, in the order given.

    jobs: number of processes, 0 for one a core
    what: fix, unsafe, annotate, apply
    """
    sizes, project = _survey(paths)
    job = Job(target, settings, project, **what)
    workers = jobs or os.cpu_count() or 1
    if workers == 1 or sum(sizes) < PARALLEL_FROM:
        yield from _process_all(paths, job)
        return
    with ProcessPoolExecutor(min(workers, len(paths))) as pool:
        for results in pool.map(_process_chunk, ((chunk, job) for chunk in _chunks(paths, sizes))):
            yield from results


def run_text(path: str, data: bytes, settings: Settings, target: str, **what: bool) -> FileResult:
    """Check or fix one text that is not a file; `path` is its name in findings."""
    job = Job(target, settings, scan([data]), **what)
    rules = selected(all_rules(), target, settings.select, settings.ignore)
    return _process(path, data, rules, _prefilter(rules), job)


def _survey(paths: Iterable[str]) -> tuple[list[int], Project]:
    """Bytes to analyse in each file (0 where the prefilter drops it) and the project index."""
    sizes: list[int] = []
    prefilter = _prefilter(all_rules())

    def texts() -> Iterator[bytes]:
        for path in paths:
            data = files.read(path)
            wanted = isinstance(data, bytes) and bool(prefilter.search(data))
            sizes.append(len(data) if isinstance(data, bytes) and wanted else 0)
            if isinstance(data, bytes):
                yield data

    project = scan(texts())
    return sizes, project


def _chunks(paths: Sequence[str], sizes: Sequence[int]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for path, length in zip(paths, sizes, strict=True):
        chunk.append(path)
        size += length
        if size >= CHUNK or len(chunk) >= 500:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _process_chunk(work: tuple[list[str], Job]) -> list[FileResult]:
    paths, job = work
    return list(_process_all(paths, job))


def _process_all(paths: Iterable[str], job: Job) -> Iterator[FileResult]:
    # Trees are deep in generated code, and `ast` itself recurses.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    rules = selected(all_rules(), job.target, job.settings.select, job.settings.ignore)
    prefilter = _prefilter(rules)
    ignores = [
        (pathspec.PathSpec.from_lines("gitwildmatch", [pattern]), codes)
        for pattern, codes in job.settings.per_file_ignores.items()
    ]
    for path in paths:
        data = files.read(path)
        if isinstance(data, Problem):
            yield FileResult(path, problem=data)
            continue
        name = os.path.relpath(path, job.settings.root or os.curdir) if ignores else path
        ignored = tuple(code for spec, codes in ignores if spec.match_file(name) for code in codes)
        own = selected(rules, job.target, ("ALL",), ignored) if ignored else rules
        yield _process(path, data, own, prefilter, job)


def _prefilter(rules: Iterable[Rule]) -> re.Pattern[bytes]:
    """Matches the bytes of every file on which some rule might speak."""
    anchors = sorted({anchor for rule in rules for anchor in rule.anchors})
    return re.compile(b"|".join(re.escape(anchor.encode()) for anchor in anchors) or rb"(?!)")


def _process(path: str, data: bytes, rules: Sequence[Rule], prefilter: re.Pattern[bytes], job: Job) -> FileResult:
    wanted = prefilter.search(data)
    if not wanted and data.isascii() and b"\0" not in data:
        return FileResult(path)
    try:
        source = Source.decode(data)  # whatever it holds: what is no text must not be taken for clean
        if not wanted:
            return FileResult(path)
        result = process_source(path, source, rules, job)
        if job.apply and result.after != result.before:
            files.write(path, data, source.encode(result.after))
            result.written = True
        return result
    except CannotRead as error:
        message = error.message + (_hidden(data) if "cannot parse" in error.message else "")
        return FileResult(path, problem=Problem(path, message, error.line))
    except fixer.FixFailed as error:
        return FileResult(path, problem=Problem(path, f"not changed: {error}; please report this file as a bug"))
    except files.FileChanged:
        return FileResult(path, problem=Problem(path, "not changed: the file was written to while it was being fixed"))
    except UnicodeEncodeError as error:
        return FileResult(path, problem=Problem(path, f"not changed: the fix does not fit the encoding: {error}"))
    except OSError as error:
        return FileResult(path, problem=Problem(path, f"cannot write: {error.strerror}"))
    except RecursionError:
        return FileResult(path, problem=Problem(path, "cannot analyse: nested too deeply" + _hidden(data)))
    except Exception as error:  # a mistake of ours in one file must not take the others with it
        return FileResult(path, problem=Problem(path, _internal(error)))


def _internal(error: Exception) -> str:
    """What went wrong in the tool itself, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(f"{type(error).__name__}: {error}".split())
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"internal error at {place}: {what}; please report this file as a bug"


def _hidden(data: bytes) -> str:
    """How much CUDA a file that can't be parsed mentions, so that nobody takes it for clean."""
    count = len(re.findall(rb"\bcuda\b", data))
    return f" (not checked; it mentions cuda {count} times)" if count else " (not checked)"


def process_source(path: str, source: Source, rules: Sequence[Rule], job: Job) -> FileResult:
    """Check or fix one text.  Raises CannotRead and FixFailed."""
    if not job.fix:
        analysis = analyse(source, rules, job.target, job.project)
        return FileResult(path, _findings(analysis, path), before=source.text, after=source.text)
    is_package = os.path.basename(path) == "__init__.py"
    fixed = fixer.fix(
        source,
        rules,
        job.target,
        job.project,
        unsafe=job.unsafe,
        annotate=job.annotate,
        is_package=is_package,
    )
    return FileResult(
        path,
        _findings(fixed.left, path),
        before=source.text,
        after=fixed.text,
        applied=[as_finding(analysis, item, path) for analysis, item in fixed.applied],
    )


def _findings(analysis: Analysis, path: str) -> list[Finding]:
    return [as_finding(analysis, item, path) for item in analysis.found]
