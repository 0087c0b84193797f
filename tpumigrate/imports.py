"""Imports that fixes need, and imports that fixes leave without use.

Both are edits like any other: added after the file's own torch imports, never above the docstring or `__future__`;
removed name by name, only when the name had uses before the fix and has none after it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from tpumigrate.deletion import delete_statements
from tpumigrate.edits import MARKER, Edit
from tpumigrate.model import Model, packages, parent, parents, statement
from tpumigrate.source import Source

# How the field spells these modules; any other module is imported under its own name.
ALIASES = {
    "torch_xla.core.xla_model": "xm",
    "torch_xla.runtime": "xr",
    "torch_xla.distributed.parallel_loader": "pl",
    "torch_xla.debug.profiler": "xp",
    "torch.distributed": "dist",
}


_TYPE_COMMENT = re.compile(r"#\s*type:")
_WORD = re.compile(r"[^\W\d]\w*")


class CannotImport(Exception):
    """The name that an import would bind already means something else in the file."""


class Importer:
    """Spells modules for edits of one file and collects the imports this takes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._needed: dict[str, None] = {}  # import statements, in order
        self._loaded: dict[str, None] = {}  # modules imported for what importing them does

    def expand(self, edit: Edit) -> Edit:
        """The edit with its markers spelled.  Raises CannotImport."""
        if "\0" not in edit.text:
            return edit
        text = MARKER.sub(lambda match: self._spell(match[1], edit.start), edit.text)
        return edit._replace(text=text)

    def _spell(self, module: str, position: int) -> str:
        if module.startswith("!"):
            self._refuse_optional(module[1:])
            if not self._imported(module[1:]):
                self._loaded[module[1:]] = None
            return ""
        known = self._local_name(module, position) or self._known_name(module)
        if known and not self._is_local(known.partition(".")[0], module, position):
            return known
        alias = ALIASES.get(module, "")
        if alias and not self._model.binds(alias):
            self._needed[f"import {module} as {alias}"] = None
            return alias
        root = module.partition(".")[0]
        self._refuse_optional(root)
        if self._is_local(root, module, position):
            raise CannotImport(f"the function around this imports {root!r} itself, but later or not always")
        taken = [
            binding
            for scope in self._model.scopes.values()
            for binding in scope.bindings.get(root, [])
            if not (binding.kind == "import" and binding.qualname.partition(".")[0] == root)
        ]
        if taken:
            raise CannotImport(f"the name {root!r} is used for something else in this file")
        self._needed[f"import {module}"] = None
        return module

    def _known_name(self, module: str) -> str:
        """How the file's own module-level imports already spell `module`, "" when they do not."""
        for node in self._top_imports():
            for alias in node.names:
                if isinstance(node, ast.Import):
                    dotted, bound = alias.name, alias.asname or alias.name
                else:
                    dotted, bound = f"{node.module}.{alias.name}", alias.asname or alias.name
                if dotted == module and self._means_only(bound.partition(".")[0], dotted):
                    return bound
        if module == "torch" and self._means_only("torch", "torch") and self._imports("torch"):
            return "torch"  # `import torch.nn as nn` does not bind it, `import torch.cuda` does
        return ""

    def _local_name(self, module: str, position: int) -> str:
        """How an import of the function around `position`, which stands before it, spells `module`; "" for none."""
        source = self._model.source
        for node in self._model.imports():
            owner = parent(node)
            if not isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not source.span(node)[1] <= position < source.span(owner)[1]:
                continue
            for alias in node.names:
                bound = alias.asname or alias.name
                dotted = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
                if isinstance(node, ast.Import) and not alias.asname and dotted.startswith(f"{module}."):
                    bound = dotted = module  # `import torch.nn` binds torch
                if dotted == module and self._means_only(bound.partition(".")[0], dotted):
                    return bound
        return ""

    def _is_local(self, name: str, module: str, position: int) -> bool:
        """Whether a function around `position` binds `name` itself, and not by an import that stands before."""
        if self._local_name(module, position).partition(".")[0] == name:
            return False
        return any(
            name in scope.bindings
            and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not any(binding.kind in ("global", "nonlocal") for binding in scope.bindings[name])
            and self._model.source.span(node.body[0])[0] <= position < self._model.source.span(node)[1]
            for node, scope in self._model.scopes.items()
        )

    def _means_only(self, bound: str, dotted: str) -> bool:
        """Whether `bound` is given a meaning by imports of `dotted` or its parents alone, in every scope."""
        bindings = [item for scope in self._model.scopes.values() for item in scope.bindings.get(bound, [])]
        return bool(bindings) and all(
            item.kind == "import" and (dotted + ".").startswith(item.qualname + ".") for item in bindings
        )

    def _top_imports(self) -> list[ast.Import | ast.ImportFrom]:
        found: list[ast.Import | ast.ImportFrom] = [
            *self._model.nodes(ast.Import),
            *self._model.nodes(ast.ImportFrom),
        ]
        top = [node for node in found if parent(node) is self._model.tree]
        return sorted(top, key=lambda node: self._model.source.span(node))

    def _imports(self, package: str) -> bool:
        """Whether a module-level import binds the top package itself."""
        return any(
            isinstance(node, ast.Import)
            and any(alias.asname is None and alias.name.partition(".")[0] == package for alias in node.names)
            for node in self._top_imports()
        )

    def _imported(self, package: str) -> bool:
        """Whether any module-level import loads the package."""
        return any(package in packages(node) for node in self._top_imports())

    def _refuse_optional(self, package: str) -> None:
        """Raise CannotImport where an import without condition would break who does not have the package."""
        for name in dict.fromkeys([package, "torch"]):
            found = [node for node in self._model.imports() if name in packages(node)]
            guarded = any(isinstance(above, ast.Try | ast.If) for node in found for above in parents(node))
            local = name != "torch" and bool(found)
            if (guarded or local) and not any(parent(node) is self._model.tree for node in found):
                raise CannotImport(f"the file imports {name} only where it is available")

    def edits(self) -> list[Edit]:
        """Edits that add the imports collected by `expand`."""
        lines = sorted(self._needed, key=lambda line: line.split()[1])
        for module in self._loaded:
            if not any(line.split()[1].partition(".")[0] == module for line in lines):
                lines.append(f"import {module}  # noqa: F401  registers the device")
        if not lines:
            return []
        places: dict[int, list[Edit]] = {}
        for line in lines:
            edit = self._insertion(line)
            places.setdefault(edit.start, []).append(edit)
        return [Edit(start, start, "".join(edit.text for edit in same)) for start, same in places.items()]

    def _insertion(self, line: str) -> Edit:
        """Where a new import goes: in order among the file's plain torch imports, else before `from torch...`."""
        source = self._model.source
        text = line + source.newline
        body = self._model.tree.body
        imports = self._top_imports()
        run = _first_run(body)
        module = line.split()[1]
        before = [node for node in run if node.names[0].name < module]
        if before:
            return self._after(before[-1], text)
        from_torch = [
            node
            for node in imports
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch" and not node.level
        ]
        candidates = run or from_torch
        if candidates:
            start = source.line_start(source.span(candidates[0])[0])
            return Edit(start, start, text)
        anchor = _header_end(body)
        if anchor is None:
            start = source.line_start(source.span(body[0])[0]) if body else 0
            decorated = getattr(body[0], "decorator_list", None) if body else None
            if decorated:
                start = source.line_start(source.span(decorated[0])[0])
            return Edit(start, start, text)
        return self._after(anchor, text)

    def _after(self, node: ast.stmt, text: str) -> Edit:
        source = self._model.source
        stop = source.span(node)[1]
        end = source.line_end(stop)
        if _shares_line(source, stop, end):  # what follows may need the import
            lines = [line.partition("#")[0].strip() for line in text.splitlines()]
            return Edit(stop, stop, "".join(f"; {line}" for line in lines))
        if end == len(source.text) and not source.text.endswith(("\n", "\r")):
            return Edit(end, end, source.newline + text.removesuffix(source.newline))
        return Edit(end, end, text)


def _shares_line(source: Source, stop: int, end: int) -> bool:
    """Whether another statement follows on the line of the one that ends at `stop`."""
    rest = [token for token in source.tokens(stop, end) if token.kind not in ("space", "newline", "comment")]
    return len(rest) > 1 and rest[0].text == ";"


def _first_run(body: list[ast.stmt]) -> list[ast.Import]:
    """The first plain imports of torch or torch_xla that stand together."""
    run: list[ast.Import] = []
    for node in body:
        if isinstance(node, ast.Import) and node.names[0].name.partition(".")[0] in ("torch", "torch_xla"):
            run.append(node)
        elif run:
            break
    return run


def _header_end(body: list[ast.stmt]) -> ast.stmt | None:
    """The statement after which imports may stand: the last of the first imports, else docstring or __future__."""
    anchor: ast.stmt | None = None
    for node in body:
        is_docstring = (
            node is body[0]
            and isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
            anchor = node
        else:
            break
    return anchor


def drop_unused(before: Model, after: Model, *, is_package: bool = False) -> list[Edit]:
    """Edits on `after` that remove module-level and local imports whose last use a fix took away.

    `import torch` stays in any case: it costs nothing, and other packages may count on its being loaded.
    """
    if is_package:
        return []  # names of an __init__.py are its interface
    exported = _exported(after)
    used_before, used_after = _used_names(before), _used_names(after)
    orphans = {name for name in used_before - used_after if name not in exported}
    edits: list[Edit] = []
    whole: list[ast.stmt] = []
    imports: list[ast.Import | ast.ImportFrom] = [*after.nodes(ast.Import), *after.nodes(ast.ImportFrom)]
    for node in imports:
        if _is_guarded(node) or _is_meant_to_stay(after.source, node):
            continue
        gone = [
            alias
            for alias in node.names
            if _bound(node, alias) in orphans
            and alias.name != "torch"
            and alias.name != alias.asname  # `x as x` offers x to others
        ]
        if gone and len(gone) == len(node.names):
            whole.append(node)
        elif gone:
            edits.extend(_remove_aliases(after, node, gone))
    return [*edits, *delete_statements(after, whole)]


def _used_names(model: Model) -> set[str]:
    return {node.id for node in model.nodes(ast.Name) if not isinstance(node.ctx, ast.Store)} | _annotation_words(model)


def _annotation_words(model: Model) -> set[str]:
    """Names inside string annotations and type comments."""
    texts = [node.value for node in model.nodes(ast.Constant) if isinstance(node.value, str) and _is_annotation(node)]
    source = model.source
    if _TYPE_COMMENT.search(source.text):
        tokens = source.tokens(0, len(source.text))
        texts.extend(token.text for token in tokens if token.kind == "comment" and _TYPE_COMMENT.match(token.text))
    return {word for text in texts for word in _WORD.findall(text)}


def _is_annotation(node: ast.Constant) -> bool:
    """Whether a string may be a type, or a part of one."""
    for above in parents(node):
        if isinstance(above, ast.Subscript | ast.arg | ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef):
            return True
        if isinstance(above, ast.Call):
            return getattr(above.func, "attr", getattr(above.func, "id", "")) in ("cast", "TypeVar", "NewType")
        if not isinstance(above, ast.Tuple | ast.List | ast.BinOp):
            return False
    return False


def _exported(model: Model) -> set[str]:
    """Names listed in `__all__`, however it is put together."""
    listing = [statement(node) for node in model.nodes(ast.Name) if node.id == "__all__"]
    statements = {id(found): found for found in listing}
    return {
        item.value
        for found in statements.values()
        for item in ast.walk(found)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }


def _is_meant_to_stay(source: Source, node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return True
    start, end = source.span(node)
    return "F401" in source.text[start : source.line_end(end)]


def _bound(node: ast.AST, alias: ast.alias) -> str:
    if alias.asname:
        return alias.asname
    return alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name


def _is_guarded(node: ast.AST) -> bool:
    return any(isinstance(above, ast.Try | ast.If | ast.ExceptHandler) for above in parents(node))


def _remove_aliases(model: Model, node: ast.Import | ast.ImportFrom, gone: Iterable[ast.alias]) -> list[Edit]:
    """Take some names out of an import statement, of which at least one stays; comments stay."""
    source = model.source
    going = {id(alias) for alias in gone}
    names = node.names
    last_kept = max(index for index, alias in enumerate(names) if id(alias) not in going)
    edits: list[Edit] = []
    for index, alias in enumerate(names[:last_kept]):
        if id(alias) in going:
            start, stop = source.span(alias)[0], source.span(names[index + 1])[0]
            edits.append(Edit(start, _first_comment(source, start, stop), ""))
    if last_kept + 1 < len(names):
        start, stop = source.span(names[last_kept])[1], source.span(names[-1])[1]
        if _first_comment(source, start, stop) == stop:
            edits.append(Edit(start, stop, ""))
        else:
            for alias in names[last_kept + 1 :]:
                first, end = source.span(alias)
                comma = next((t.end for t in source.tokens(end, source.span(node)[1]) if t.kind != "space"), end)
                edits.append(Edit(first, comma if source.text[comma - 1] == "," else end, ""))
    return edits


def _first_comment(source: Source, start: int, stop: int) -> int:
    return next((token.start for token in source.tokens(start, stop) if token.kind == "comment"), stop)
