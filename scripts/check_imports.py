"""Decide who may import whom, from the import statements of the source.

Prints one line per violation and exits 1 if there is any:

- direction: a module imports only from its own row of `ORDER` and from rows above it, also under
  `TYPE_CHECKING` and inside functions;
- what the direction allows and the design does not: the rows of `FORBIDDEN`;
- lazy modules (`mpi4py`, `cupy`, `cuda`, ...) are imported inside functions, so that importing a
  package needs neither CUDA nor MPI.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# From left to right. The longest prefix that a module has decides its row; `fuser` itself,
# which gives the public names of all on first use, sees everything.
ORDER = (
    "fuser.support.version",
    "fuser.support.record",
    "fuser.support.errors",
    "fuser.support.arguments",
    "fuser.support.inputs",
    "fuser.support.device",
    "fuser.support.kernel_source",
    "fuser.support.torch_calls",
    "fuser.support.locks",
    "fuser.support.gc_pause",
    "fuser.support.lru",
    "fuser.support.options",
    "fuser.support.options",
    "fuser.support.dumps",
    "fuser.support.progress",
    "fuser.ir.pointwise_table",
    "fuser.ir",
    "fuser.ops",
    "fuser.passes",
    "fuser.schedule",
    "fuser.lower",
    "fuser.codegen",
    "fuser.runtime",
    "fuser.kernels",
    "multidevice",
    "hostir",
    "fuser.frontend",
    "fuser",
)
_FUSION = ("fuser.ir", "fuser.ops", "fuser.passes", "fuser.schedule", "fuser.lower")

# importer -> what it must not import although the direction allows it, and why
FORBIDDEN = {
    "fuser.runtime": ((*_FUSION, "fuser.codegen"), "the runtime takes text and arguments only"),
    "multidevice": (
        ("fuser.schedule", "fuser.lower", "fuser.codegen", "fuser.kernels"),
        "shardings are decided before kernels",
    ),
    "multidevice.backends": (_FUSION, "backends take buffers, teams and streams only"),
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

PACKAGES = ("fuser", "multidevice", "hostir")


@dataclass(frozen=True)
class Import:
    """One module that a file asks for; `is_eager` when importing the file imports it too."""

    target: str
    line: int
    is_eager: bool


def row_of(module: str) -> int | None:
    """Return the row of `module` in `ORDER`, or None for one that is not ours."""
    rows = [prefix for prefix in ORDER if is_within(module, prefix)]
    return ORDER.index(max(rows, key=len)) if rows else None


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


def violations_of(source: str, *, module: str, is_package: bool = False) -> list[str]:
    """Return what is wrong with the imports in `source`, each as `line N: ...`."""
    found: dict[str, None] = {}
    own = row_of(module)
    assert own is not None, f"{module} belongs to no package of ours"
    forbidden = [row for importer, row in FORBIDDEN.items() if is_within(module, importer)]
    for item in imports_of(source, module=module, is_package=is_package):
        row = row_of(item.target)
        where = f"line {item.line}: {module} imports {item.target}"
        if row is not None and row > own:
            found[f"{where}, which is to its right"] = None
        for banned, reason in forbidden:
            if any(is_within(item.target, prefix) for prefix in banned):
                found[f"{where}; {reason}"] = None
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
                )
            ]
    return found


def main() -> int:
    found = check(Path(__file__).resolve().parents[1])
    print("\n".join(found) if found else "imports point to the left only")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
