"""The command line."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from tpumigrate import __version__
from tpumigrate.config import BadConfig, Settings, infer_target, load
from tpumigrate.tables import TARGETS

FORMATS = ("full", "concise", "json", "github")
# Exit statuses, as ruff has them.
CLEAN, FINDINGS, TROUBLE = 0, 1, 2


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="tpumigrate")
def main() -> None:
    """Find and rewrite CUDA-centric PyTorch code for TPUs.

    Exit status: 0 nothing found (or all fixed), 1 findings, 2 the job could not be done for some file.
    """


def _shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that reads code."""
    options = [
        click.argument("paths", nargs=-1, type=click.Path()),
        click.option(
            "--target",
            type=click.Choice([*TARGETS, "auto"]),
            help="What to migrate to; auto reads the project's dependencies.",
        ),
        click.option("--select", multiple=True, metavar="CODES", help="Rule codes or prefixes, separated by commas."),
        click.option("--extend-select", multiple=True, metavar="CODES", help="More codes beside the selected ones."),
        click.option("--ignore", multiple=True, metavar="CODES", help="Codes or prefixes to leave out."),
        click.option("--exclude", multiple=True, metavar="PATTERN", help="More files to leave out (gitignore syntax)."),
        click.option("--isolated", is_flag=True, help="Ignore pyproject.toml."),
        click.option("--jobs", "-j", type=click.IntRange(min=0), default=0, help="Processes; 0 for one a core."),
        click.option("--stdin-filename", metavar="PATH", default="<stdin>", help="Name for the text read from `-`."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@_shared
@click.option("--output-format", type=click.Choice(FORMATS), default="full", show_default=True)
@click.option("--statistics", is_flag=True, help="Count findings by rule instead of listing them.")
@click.option("--exit-zero", is_flag=True, help="Exit 0 even when there are findings.")
def check(output_format: str, statistics: bool, exit_zero: bool, **shared: Any) -> None:
    """Report what will not work, or not well, on a TPU.  PATHS are files and folders, or `-` for standard input."""
    from tpumigrate.report import machine, text

    run = _Run(**shared)
    results = run.process()
    console = _console()
    if statistics:
        text.statistics(results, console)
    elif output_format == "json":
        click.echo(machine.as_json(results, run.target))
    elif output_format == "github":
        for line in machine.as_github(results):
            click.echo(line)
    else:
        {"full": text.full, "concise": text.concise}[output_format](results, console)
    run.report_problems(results)
    if output_format in ("full", "concise"):
        click.echo(text.summary(results, unsafe=False), err=output_format == "concise")
    found = any(result.findings for result in results)
    sys.exit(TROUBLE if run.trouble else FINDINGS if found and not exit_zero else CLEAN)


@main.command()
@_shared
@click.option("--apply", is_flag=True, help="Write the changes; without it they are only shown.")
@click.option("--diff", is_flag=True, help="Show the changes as a diff (the default without --apply).")
@click.option("--unsafe", is_flag=True, help="Also make changes that alter numerics, shapes or checkpoints.")
@click.option("--annotate", is_flag=True, help="Leave a TODO comment where a person must look.")
@click.option("--quiet", "-q", is_flag=True, help="Do not list what is left.")
def fix(apply: bool, diff: bool, unsafe: bool, annotate: bool, quiet: bool, **shared: Any) -> None:
    """Rewrite code for the target.  Shows a diff unless --apply is given."""
    from tpumigrate.report import text

    run = _Run(**shared)
    results = run.process(fix=True, apply=apply, unsafe=unsafe, annotate=annotate)
    changed = [result for result in results if result.before != result.after]
    stdin = run.paths == ("-",)
    if stdin and apply:
        click.echo(run.fixed_stdin(results[0]), nl=False)
    elif diff or not apply:
        for result in changed:
            _echo_diff(result.path, result.before, result.after)
    run.report_problems(results)
    left = [finding for result in results for finding in result.findings]
    if left and not quiet:
        text.concise(results, _console(stderr=True))
    count = sum(len(result.applied) for result in results)
    words = "Fixed" if apply else "Would fix"
    click.echo(f"{words} {count} in {len(changed)} file{'s' * (len(changed) != 1)}; {len(left)} left.", err=True)
    pending = left or (changed and not apply)
    sys.exit(TROUBLE if run.trouble else FINDINGS if pending else CLEAN)


@main.command()
@click.argument("code", required=False)
def rule(code: str | None) -> None:
    """Explain the rule CODE: what it finds, why it matters on a TPU, what to write instead.  Lists all without CODE."""
    from tpumigrate.registry import all_rules

    rules = all_rules()
    if code is None:
        for known in rules:
            click.echo(f"{known.code}  {known.name:<28} {known.summary}")
        return
    for known in rules:
        if known.code == code.upper():
            click.echo(f"{known.code} {known.name}\n\n{known.doc}")
            return
    raise click.UsageError(f"there is no rule {code}; `tpumigrate rule` lists all")


class _Run:
    """Options resolved to settings, a target and paths; processes them and knows whether something went wrong."""

    def __init__(
        self,
        paths: tuple[str, ...],
        target: str | None,
        select: tuple[str, ...],
        extend_select: tuple[str, ...],
        ignore: tuple[str, ...],
        exclude: tuple[str, ...],
        isolated: bool,
        jobs: int,
        stdin_filename: str,
    ) -> None:
        if not paths:
            raise click.UsageError("name files or folders to work on, or - for standard input")
        if "-" in paths and len(paths) > 1:
            raise click.UsageError("`-` stands alone: standard input is one file")
        self.paths = paths
        self.jobs = jobs
        self.stdin_filename = stdin_filename
        self.stdin = b""
        self.trouble = False
        start = Path(stdin_filename if paths == ("-",) and stdin_filename != "<stdin>" else paths[0])
        start = start if start.exists() else Path.cwd()
        try:
            settings = Settings() if isolated else load(start)[0]
        except BadConfig as error:
            _fail(str(error))
        self.settings = _override(settings, target, select, extend_select, ignore, exclude)
        self.target = self.settings.target
        if self.target == "auto":
            self.target, where = infer_target(start)
            reason = f"from {where}" if where else "the default; --target or [tool.tpumigrate] sets another"
            click.echo(f"target: {self.target} ({reason})", err=True)

    def process(self, **what: bool) -> list[Any]:
        from tpumigrate import files
        from tpumigrate.finding import FileResult
        from tpumigrate.registry import all_rules
        from tpumigrate.rule import BadRule
        from tpumigrate.runner import run

        try:
            codes = [rule.code for rule in all_rules()]
        except BadRule as error:
            _fail(str(error))
        per_file = (code for listed in self.settings.per_file_ignores.values() for code in listed)
        for prefix in (*self.settings.select, *self.settings.ignore, *per_file):
            if prefix != "ALL" and not any(code.startswith(prefix) for code in codes):
                _fail(f"no rule has the code or prefix {prefix!r}; `tpumigrate rule` lists all")
        if self.paths == ("-",):
            return [self._process_stdin(**what)]
        found = files.discover(self.paths, self.settings.exclude, self.settings.root)
        results = list(run(found.paths, self.settings, self.target, jobs=self.jobs, **what))
        return [*results, *(FileResult(problem.path, problem=problem) for problem in found.problems)]

    def _process_stdin(self, **what: bool) -> Any:
        from tpumigrate.runner import run_text

        self.stdin = sys.stdin.buffer.read()
        return run_text(self.stdin_filename, self.stdin, self.settings, self.target, **{**what, "apply": False})

    def fixed_stdin(self, result: Any) -> bytes:
        """What goes to standard output: the fixed text in the encoding of the original, which stays when that fails."""
        from tpumigrate.finding import Problem
        from tpumigrate.source import Source

        if result.problem or result.before == result.after:
            return self.stdin
        try:
            return Source.decode(self.stdin).encode(result.after)
        except UnicodeEncodeError as error:
            result.problem = Problem(result.path, f"not changed: the fix does not fit the encoding: {error}")
            return self.stdin

    def report_problems(self, results: Iterable[Any]) -> None:
        for result in results:
            if result.problem:
                self.trouble = True
                click.echo(str(result.problem), err=True)


def _override(
    settings: Settings,
    target: str | None,
    select: tuple[str, ...],
    extend_select: tuple[str, ...],
    ignore: tuple[str, ...],
    exclude: tuple[str, ...],
) -> Settings:
    """Settings of the file with those of the command line on top."""
    if target:
        settings = replace(settings, target=target)
    if select:
        settings = replace(settings, select=_codes(select))
    return replace(
        settings,
        select=(*settings.select, *_codes(extend_select)),
        ignore=(*settings.ignore, *_codes(ignore)),
        exclude=(*settings.exclude, *exclude),
    )


def _codes(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(code.strip().upper() for value in values for code in value.split(",") if code.strip())


def _console(*, stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def _echo_diff(path: str, before: str, after: str) -> None:
    name = path.lstrip("/") + ("\t" if " " in path else "")  # as git and diff do, so that patch finds its end
    # Only \n ends a line of a patch; `str.splitlines` knows more line ends.
    rows = difflib.unified_diff(
        re.findall(r"[^\n]*\n|[^\n]+", before), re.findall(r"[^\n]*\n|[^\n]+", after), f"a/{name}", f"b/{name}"
    )
    for row in rows:
        click.echo(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n", nl=False)


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(TROUBLE)
