"""Facts that cross files, gathered by a cheap text scan before the files are analysed one by one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_CUDA_METHOD = re.compile(rb"^[ \t]+def[ \t]+cuda[ \t]*\(", re.MULTILINE)
_OPTION = re.compile(rb"""add_argument\(\s*(?:["'][^"']*["']\s*,\s*)*?["']-{0,2}([\w-]+)["']\s*,([^)]*)""", re.DOTALL)
_INT_TYPE = re.compile(rb"\btype\s*=\s*int\b")
_FLAGS = {
    "torch": re.compile(rb"^[ \t]*(?:import|from)[ \t]+torch\b", re.MULTILINE),
    "ddp": re.compile(rb"\bDistributedDataParallel\b|\bFullyShardedDataParallel\b|\bfully_shard\b"),
    "process_group": re.compile(rb"\binit_process_group\b"),
    "launch": re.compile(rb"\btorch_xla\.launch\b|\b(?:xmp|mp|multiprocessing)\.spawn\b"),
    "replicated": re.compile(
        rb"\bxla_multiprocessing\b|\buse_spmd\b|\bmark_sharding\b|\bXLA_USE_SPMD\b|\bAccelerator\(|\bTrainer\("
        rb"|\bnotebook_launcher\b|\bdef _mp_fn\b|^[ \t]*(?:import|from)[ \t]+(?:pytorch_)?lightning\b",
        re.MULTILINE,
    ),
    "compilation_cache": re.compile(
        rb"\binitialize_cache\b|\bXLA_PERSISTENT_CACHE_PATH\b|\bTORCH_TPU_TIER[23]_COMPILATION_CACHE"
    ),
}


@dataclass(frozen=True)
class Project:
    """What is known of all files of a run.

    foreign_cuda: names of classes that define `cuda()` but are no torch modules and offer no `to()`
    int_options: destinations of command line options with type=int
    torch, ddp, process_group, launch: whether any file imports torch, wraps a model, initialises a process group,
        launches replicas
    replicated: whether any file has the program on several devices by other means: SPMD, a trainer of a library
    compilation_cache: whether any file configures a cache of compiled programs that outlives the process
    """

    foreign_cuda: frozenset[str] = frozenset()
    int_options: frozenset[str] = frozenset()
    torch: bool = False
    ddp: bool = False
    process_group: bool = False
    launch: bool = False
    replicated: bool = False
    compilation_cache: bool = False


@dataclass
class _Gathered:
    foreign_cuda: set[str] = field(default_factory=set)
    int_options: set[str] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)


def scan(texts: Iterable[bytes]) -> Project:
    """Build the index from the bytes of the project's files; files that can't be parsed add what text shows."""
    found = _Gathered()
    for data in texts:
        for flag, pattern in _FLAGS.items():
            if flag not in found.flags and pattern.search(data):
                found.flags.add(flag)
        if b"add_argument" in data:
            for match in _OPTION.finditer(data):
                if _INT_TYPE.search(match[2]):
                    found.int_options.add(match[1].decode(errors="replace").replace("-", "_"))
        if _CUDA_METHOD.search(data):
            found.foreign_cuda.update(_foreign_cuda(data))
    return Project(
        frozenset(found.foreign_cuda),
        frozenset(found.int_options),
        **{flag: flag in found.flags for flag in _FLAGS},
    )


def _foreign_cuda(data: bytes) -> Iterable[str]:
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
            if "cuda" in methods and "to" not in methods and not any(_looks_like_module(b) for b in node.bases):
                yield node.name


def _looks_like_module(base: ast.expr) -> bool:
    name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
    return name.endswith(("Module", "Model", "Net", "Tensor")) or name in ("Sequential", "ModuleList")
