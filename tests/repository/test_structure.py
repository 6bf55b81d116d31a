"""The structure of the source: package sizes, no import cycles, one module per class name.

import-linter checks the order of the packages (`.importlinter`); ruff checks for lazy imports.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

from hostir.ir.ops import HOST_OPS
from multidevice.transports.base import collectives
from multidevice.transports.base.collectives import COLLECTIVES, Collective
from scripts import document_rooms

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fuser", "multidevice", "hostir")
MAX_MODULES, MAX_IN_FOLDER, SMALL = 305, 25, 60


@cache
def modules() -> dict[str, Path]:
    """Returns the modules of the three packages by dotted name."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


def imports(source: ast.AST, known: Set[str]) -> Iterator[str]:
    """Yields the modules that a source imports: at the top, in functions, and for types only."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def importers() -> dict[str, set[str]]:
    """Returns, for each module, the modules that import it."""
    known = modules().keys()
    found: dict[str, set[str]] = defaultdict(set)
    for module in known:
        for target in imports(tree(module), known):
            if target in known and target != module:
                found[target].add(module)
    return found


def circles(edges: Mapping[str, Set[str]]) -> list[list[str]]:
    """Returns the sets of modules that import each other, each sorted (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for target in edges.get(module, set()):
            if target not in number:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], number[target])
        if low[module] == number[module]:
            at = stack.index(module)
            if len(circle := stack[at:]) > 1:
                found.append(sorted(circle))
            del stack[at:]

    for module in edges:
        if module not in number:
            visit(module)
    return found


def test_circles_of_a_graph_with_two_are_both_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["d", "e"]]


def test_imports_of_functions_and_of_types_count() -> None:
    source = ast.parse(
        "from a import b\n"
        "if TYPE_CHECKING:\n    from a.c import D\n"
        "def f():\n    import a.e\n    from a import f\n"
    )
    assert set(imports(source, {"a", "a.b", "a.c", "a.e"})) == {"a.b", "a.c", "a.e", "a"}


def test_modules_have_no_import_circle() -> None:
    edges: dict[str, set[str]] = defaultdict(set)
    for target, users in importers().items():
        # A package gives the public names of its modules on first use: these look at no package.
        for user in users:
            edges[user].add(target)
    assert circles(edges) == []


def test_a_folder_has_few_modules() -> None:
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in modules().values())
    assert {folder: n for folder, n in counts.items() if n > MAX_IN_FOLDER} == {}
    assert len(modules()) <= MAX_MODULES


def test_a_module_and_a_folder_have_no_name_in_common() -> None:
    both = [path for path in modules().values() if path.with_suffix("").is_dir()]
    assert both == []
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, path in modules().items():
        if path.stem not in ("__init__", "__main__"):
            names[module.split(".")[0], path.stem].append(module)
    assert [alike for alike in names.values() if len(alike) > 1] == []


def test_a_small_module_has_two_importers() -> None:
    users = importers()
    small = {
        module: sorted(users[module])
        for module, path in modules().items()
        if path.stem not in ("__init__", "__main__")
        and len(path.read_text().splitlines()) < SMALL
        and len(users[module]) < 2
    }
    assert small == {}


def test_a_class_name_stands_in_one_module() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def tables_of_host_ops(source: ast.AST) -> list[int]:
    """Returns the lines of dict literals that have two or more classes of host ops as keys."""
    classes = {cls.__name__ for cls in HOST_OPS}
    return [
        node.lineno
        for node in ast.walk(source)
        if isinstance(node, ast.Dict)
        and sum(isinstance(key, ast.Name) and key.id in classes for key in node.keys) > 1
    ]


def test_a_table_of_host_ops_is_found() -> None:
    source = "A = {Wait: 1, 2: Allocate}\n\nB = {**A, Wait: wait, f(x): y, Allocate: allocate}"
    assert tables_of_host_ops(ast.parse(source)) == [3]


def test_facts_of_host_ops_are_slots_of_their_classes() -> None:
    tables = {
        module
        for module in modules()
        if not module.startswith("hostir.ir.ops") and tables_of_host_ops(tree(module))
    }
    assert tables == set(), "a slot of HostOp (hostir/ir/ops/base.py) holds such facts"


def test_a_package_says_its_question() -> None:
    """Each package docstring has a question, the allowed imports, and its files in reading
    order.
    """
    short: list[str] = []
    for module, path in modules().items():
        if path.name == "__init__.py" and "." in module:
            text = ast.get_docstring(tree(module)) or ""
            files = [p.stem for p in path.parent.glob("*.py") if p.stem != "__init__"]
            short += [f"{module}: {name}" for name in files if f"`{name}`" not in text]
    assert short == []


def test_the_page_of_the_architecture_has_the_tree() -> None:
    assert document_rooms.page() == document_rooms.PAGE.read_text(), document_rooms.__doc__
    rooms = {p.parent.relative_to(ROOT).as_posix() for p in modules().values()}
    assert set(document_rooms.ROOMS) == rooms - set(PACKAGES)


# ------------------------------------------------------------------ one row per collective
_ROWS = {name: row for name, row in vars(collectives).items() if isinstance(row, Collective)}
_NAMES = {word: row for row in COLLECTIVES.values() for word in (row.name, row.method)}
# Which transport carries out which collective, and how; and words of torch and NCCL that users try
# as ops, with what to do instead.
_CARRIED_OUT = {"base.p2p_collectives", "gloo", "mpi", "nccl", "simulated"}
_ALLOWED = {"fuser.ops.rows", *(f"multidevice.transports.{name}" for name in _CARRIED_OUT)}


def named_collective(node: ast.AST | None) -> Collective | None:
    """Returns the collective that a literal, a name or an attribute stands for, if any."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _NAMES.get(node.value)
    if isinstance(node, ast.Name):
        return _ROWS.get(node.id)
    return _ROWS.get(node.attr) if isinstance(node, ast.Attribute) else None


def collective_tables(source: ast.AST) -> list[tuple[int, list[str]]]:
    """Returns the places in the code that list several collectives.

    These are literals with two or more of them, and functions that compare a value with two or
    more.
    """
    found: dict[int, set[Collective | None]] = defaultdict(set)
    for node in ast.walk(source):
        if isinstance(node, ast.Dict):
            found[node.lineno] |= {named_collective(x) for x in (*node.keys, *node.values)}
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            found[node.lineno] |= {named_collective(x) for x in node.elts}
        elif isinstance(node, ast.FunctionDef):
            sides = (x for c in ast.walk(node) if isinstance(c, ast.Compare) for x in c.comparators)
            found[node.lineno] |= {named_collective(x) for x in sides}
    names = {line: sorted(row.name for row in rows if row) for line, rows in found.items()}
    return sorted((line, rows) for line, rows in names.items() if len(rows) > 1)


def test_tables_of_collectives_are_found() -> None:
    tables = (
        'X = {"Allgather": 1, "Reduce": 2}',
        "X = frozenset({ALLGATHER, rows.GATHER})",
        'if kind in ("Broadcast", "Scatter"):\n    pass',
        'X = {"gather": "Allgather", "scatter": "ReduceScatter"}',
        'Kind = Literal["Allgather", "Allreduce"]',
        'def f(kind):\n    if kind == "Reduce":\n        return 1\n    return row is ALLGATHER',
    )
    assert all(collective_tables(ast.parse(text)) for text in tables)
    others = (
        'f("Allgather", x)',
        "def f(row):\n    return row is ALLREDUCE",
        'X = ("send", "recv")',
    )
    assert not any(collective_tables(ast.parse(text)) for text in others)


def test_facts_about_collectives_stand_in_their_rows() -> None:
    """A new collective needs only a row in the table, and a line in each transport that supports
    it.
    """
    found = {
        module: tables
        for module in modules()
        if module not in _ALLOWED
        if (tables := collective_tables(tree(module)))
    }
    assert found == {}


# ------------------------------------------------------------------ one walk
# Functions of hostir that look into the regions of loops and branches; all others take the walk.
REGIONS = {"body", "then", "orelse", "regions"}
READ_REGIONS = {
    # The walk, and the symbolic one of the structural verifier.
    "hostir.analysis.walker": {"_loop", "_branch"},
    "hostir.ir.verifier": {"_loop", "_branch"},
    # A loop and a branch give the runtime the ops of a region, which it carries out.
    "hostir.ir.ops.local": {"emit"},
    # Regions are written, numbered, or made again with other ops in them.
    "hostir.ir.builder": {"otherwise"},
    "hostir.passes.deallocation": {"_inserted", "_places", "_only_waits"},
    # Whether there are any.
    "hostir.ir.queries": {"has_streams"},
}


def readers_of_regions(source: ast.AST, inside: str = "") -> Iterator[str]:
    """Yields the innermost function around each use of a region of an op."""
    for node in ast.iter_child_nodes(source):
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else inside
        if isinstance(node, ast.Attribute) and node.attr in REGIONS:
            yield name
        yield from readers_of_regions(node, name)


def test_one_walk_goes_through_loops_and_branches() -> None:
    found = {m: set(readers_of_regions(tree(m))) for m in modules() if m.startswith("hostir.")}
    assert {m: names for m, names in found.items() if names} == READ_REGIONS
