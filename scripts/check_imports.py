"""Decide who may import whom, from the import statements of the source.

Prints one line per violation and exits 1 if there is any:

- direction: `fuser.* (not frontend) <- multidevice <- hostir <- fuser.frontend`; a package imports
  only to its left, also under `TYPE_CHECKING` and inside functions;
- communicator backends take buffers, teams and streams: they never import the IR;
- lazy modules (`mpi4py`, `cupy`, `cuda`, ...) are imported inside functions, so that importing a
  package needs neither CUDA nor MPI.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Longest prefix first: the first match gives the layer of a module.
LAYERS = (("fuser.frontend", 3), ("hostir", 2), ("multidevice", 1), ("fuser", 0))

# importer prefix -> prefixes that it must not import although the direction allows them
FORBIDDEN = {
    "multidevice.backends": ("fuser.ir", "fuser.ops", "fuser.schedule", "fuser.lower"),
}

LAZY = (
    "mpi4py",
    "cupy",
    "cuda",
    "nccl",
    "torch.distributed",
    "transformers",
    "tokenizers",
    "safetensors",
    "hypothesis",
)

# file -> why its imports are not checked for direction
EXEMPT = {
    "fuser/__init__.py": "gives the public names of all layers, on first use only",
    "fuser/multidevice.py": "is the public name of the package multidevice, replaced by it",
}

PACKAGES = ("fuser", "multidevice", "hostir")


@dataclass(frozen=True)
class Import:
    """One module that a file asks for; `is_eager` when importing the file imports it too."""

    target: str
    line: int
    is_eager: bool


def layer_of(module: str) -> int | None:
    """Return the layer of `module`, or None for one that is not ours."""
    for prefix, layer in LAYERS:
        if is_within(module, prefix):
            return layer
    return None


def is_within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of the module at `path`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, *, module: str, is_package: bool = False) -> Iterator[Import]:
    """Yield the imports in `source`: statements, and `import_module("literal")` calls."""
    package = module if is_package else module.rpartition(".")[0]
    yield from _walk(ast.parse(source), package=package, is_eager=True)


def _walk(node: ast.AST, *, package: str, is_eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, is_eager)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, package)
            # `from a import b`: b may be a module, so both a and a.b are asked for.
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, is_eager)
        elif isinstance(child, ast.Call) and _is_import_call(child):
            argument = child.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(argument.value, child.lineno, is_eager)
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.body:
                yield from _walk_statement(statement, package=package, is_eager=False)
            for statement in child.orelse:
                yield from _walk_statement(statement, package=package, is_eager=is_eager)
            continue
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, package=package, is_eager=is_eager and not is_function)


def _walk_statement(statement: ast.stmt, *, package: str, is_eager: bool) -> Iterator[Import]:
    wrapper = ast.Module(body=[statement], type_ignores=[])
    yield from _walk(wrapper, package=package, is_eager=is_eager)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    base = parents[: len(parents) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _is_import_call(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__") and bool(node.args)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def violations_of(
    source: str, *, module: str, is_package: bool = False, is_exempt: bool = False
) -> list[str]:
    """Return what is wrong with the imports in `source`, each as `line N: ...`."""
    found: dict[str, None] = {}
    own = layer_of(module)
    assert own is not None, f"{module} belongs to no package of ours"
    forbidden = [
        banned
        for importer, targets in FORBIDDEN.items()
        if is_within(module, importer)
        for banned in targets
    ]
    for item in imports_of(source, module=module, is_package=is_package):
        layer = layer_of(item.target)
        where = f"line {item.line}: {module} imports {item.target}"
        if layer is not None and layer > own and not is_exempt:
            found[f"{where}, which is to its right"] = None
        if any(is_within(item.target, banned) for banned in forbidden):
            found[f"{where}; backends take buffers, teams and streams only"] = None
        if item.is_eager and any(is_within(item.target, lazy) for lazy in LAZY):
            found[f"{where} when it is imported; do it inside the function that needs it"] = None
    return list(found)


def check(root: Path) -> list[str]:
    """Return every violation under `root`, as `path: line N: ...`."""
    found: list[str] = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            relative = path.relative_to(root).as_posix()
            found += [
                f"{relative}: {text}"
                for text in violations_of(
                    path.read_text(),
                    module=module_name(path, root),
                    is_package=path.name == "__init__.py",
                    is_exempt=relative in EXEMPT,
                )
            ]
    return found


def main() -> int:
    found = check(Path(__file__).resolve().parents[1])
    print("\n".join(found) if found else "imports point to the left only")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
