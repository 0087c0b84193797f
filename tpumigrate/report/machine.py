"""Findings as data: JSON, and the annotations of GitHub Actions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tpumigrate import __version__
from tpumigrate.finding import FileResult

SCHEMA_VERSION = 1


def as_json(results: Iterable[FileResult], target: str) -> str:
    """One document; `schema_version` grows when a field changes meaning or goes."""
    results = list(results)
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "tpumigrate", "version": __version__},
        "target": target,
        "files": len(results),
        "findings": [finding.as_dict() for result in results for finding in result.findings],
        "fixed": [finding.as_dict() for result in results for finding in result.applied],
        "problems": [
            {"path": result.problem.path, "line": result.problem.line, "message": result.problem.message}
            for result in results
            if result.problem
        ],
    }
    return json.dumps(document, indent=2)


_LEVEL = {"error": "error", "warning": "warning", "info": "notice"}


def as_github(results: Iterable[FileResult]) -> Iterable[str]:
    """Workflow commands that GitHub shows beside the lines of a pull request."""
    for result in results:
        if result.problem:
            line = f",line={result.problem.line}" if result.problem.line else ""
            yield f"::error file={_property(result.problem.path)}{line}::{_data(result.problem.message)}"
        for finding in result.findings:
            place = f"file={_property(finding.path)},line={finding.line},col={finding.column}"
            end = f",endLine={finding.end_line},endColumn={finding.end_column}"
            yield f"::{_LEVEL[finding.severity]} title={finding.code},{place}{end}::{_data(finding.message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
