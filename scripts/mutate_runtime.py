"""Faults in the runtime and in the analyses, made one at a time; some test must find each.

    python scripts/mutate.py runtime                 # all faults; prints which test found each
    python scripts/mutate.py runtime --only lost_wait,chunk_zero

A fault is a small edit of the product's text, made in a copy of the tree. Its tests must fail
there, and pass without the fault (`--only none` runs all of them without a fault). An edit whose
old text is not found is an error: the code has changed, and the fault must be adapted.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = (
    "fuser",
    "hostir",
    "multidevice",
    "tests",
    "tools",
    "scripts",
    "benchmarks",
    "pyproject.toml",
)
LIMIT_S = 400
# How long processes have to end after SIGTERM.
GRACE_S = 3

MEANING = "tests/hostir/runtime/test_evaluator_meaning.py"
STEPS = "tests/hostir/runtime/test_plan_steps.py"
ORDER = "tests/hostir/runtime/test_evaluator_order.py"
ARENA = "tests/hostir/runtime/test_plan_arena.py"
SIZES = "tests/hostir/runtime/test_size_generic_plan_new_sizes.py"


@dataclass(frozen=True)
class Edit:
    """Replaces `old`, which the file at `path` contains once, by `new`."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A fault: its description, its edits, and the test files of which one must fail."""

    what: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


def _fault(what: str, *edits: tuple[str, str, str], tests: str) -> Fault:
    return Fault(what, tuple(Edit(*edit) for edit in edits), tuple(tests.split()))


_EXECUTE = "hostir/runtime/execute.py"
_RECORDER = "hostir/runtime/recorder.py"
_OPS = "hostir/ir/ops/local.py"
_TRANSFERS = "hostir/ir/ops/transfers.py"
_FRAME = "hostir/runtime/frame.py"
_PLAN = "hostir/runtime/plan.py"
_STEPS = "hostir/runtime/steps.py"
_CLOCKS = "hostir/analysis/clocks.py"
_RACES = "hostir/analysis/races.py"
_RANKS = "hostir/analysis/collective_matching.py"

FAULTS: dict[str, Fault] = {
    # ------------------------------------------------------------ steps
    "doubled_views": _fault(
        "A plan names every view twice: right results, twice the work.",
        (
            _RECORDER,
            "        self._steps.append((as_step(step), self.frame.op))",
            "        self._steps.append((as_step(step), self.frame.op))\n"
            "        if isinstance(step, View):\n"
            "            self._steps.append((step, self.frame.op))",
        ),
        tests=STEPS,
    ),
    "doubled_launches": _fault(
        "A plan launches every kernel twice: right results, twice the work.",
        (
            _RECORDER,
            "        self._steps.append((as_step(step), self.frame.op))",
            "        self._steps.append((as_step(step), self.frame.op))\n"
            "        if isinstance(step, LaunchStep):\n"
            "            self._steps.append((step, self.frame.op))",
        ),
        tests=STEPS,
    ),
    "dropped_releases": _fault(
        "A plan never lets go of a buffer: memory stays until the run ends.",
        (
            _RECORDER,
            "        if not is_made_before or i in self._by_steps:\n",
            "        if False:\n",
        ),
        tests=STEPS,
    ),
    # ------------------------------------------------------------ first run and later ones
    "acts_twice": _fault(
        "A run that is recorded carries out each piece of work twice.",
        (
            _RECORDER,
            "            self._now.take(made, after, ready)\n",
            "            self._now.take(made, after, ready)\n"
            '            if not hasattr(self.frame.op, "number"):\n'
            "                self._now.take(made, None, None)\n",
        ),
        tests=MEANING,
    ),
    "only_kept": _fault(
        "A run that is recorded keeps what the host does at once, and does not do it.",
        (
            _RECORDER,
            "        self._now.run_now(run)\n        self._keep(run)\n",
            "        self._keep(run)\n",
        ),
        tests=ORDER,
    ),
    "only_done": _fault(
        "Later runs leave out what the first one did at once.",
        (
            _RECORDER,
            "        self._now.run_now(run)\n        self._keep(run)\n",
            "        self._now.run_now(run)\n",
        ),
        tests=ORDER,
    ),
    "unkept_wait": _fault(
        "Later runs leave out each Wait; the first one waits.",
        (
            _RECORDER,
            "        kept = made.make_later(execution.slots) if isinstance(made, TwoPhaseStep)",
            '        if type(self.frame.op).__name__ == "Wait":\n'
            "            return\n"
            "        kept = made.make_later(execution.slots) if isinstance(made, TwoPhaseStep)",
        ),
        tests=ORDER,
    ),
    "unkept_mark": _fault(
        "Later runs do not note where a communication stands in its stream.",
        (
            _RECORDER,
            "        self._keep(kept if after is None else Both(kept, Action(after)), generic)",
            "        self._keep(kept, generic)",
        ),
        tests=ORDER,
    ),
    # ------------------------------------------------------------ parts
    "chunk_zero": _fault(
        "ShardByStream names the first chunk in every step.",
        (
            _EXECUTE,
            "            shift = start * strides[axis]\n",
            "            shift = start * strides[axis] if part.chunks is None else 0\n",
        ),
        tests=MEANING,
    ),
    "wrong_element": _fault(
        "HirAliasSelect names the element before, from the second one on.",
        (
            _EXECUTE,
            "            shift = start * strides[axis]\n",
            "            shift = max(start - (part.chunks is None), 0) * strides[axis]\n",
        ),
        tests=MEANING,
    ),
    "slice_from_zero": _fault(
        "LocalSlice copies the first part on every rank.",
        (
            _OPS,
            "return mesh.coordinate(shapes.rank, self.ptype) * length, length",
            "return 0, length",
        ),
        tests=MEANING,
    ),
    "short_block": _fault(
        "The buffer of a step has the size of a full block, also in the last step.",
        (
            _FRAME,
            "        return (*shape[:cut], length, *shape[cut + 1 :])",
            "        length = -(-shape[cut] // self.integer(chunks))\n"
            "        return (*shape[:cut], length, *shape[cut + 1 :])",
        ),
        tests=MEANING,
    ),
    # ------------------------------------------------------------ waits and streams
    "lost_wait": _fault(
        "Runs do not wait for communications.",
        (
            _EXECUTE,
            "            if slots[work] is not None:\n                slots[work].wait()\n",
            "            if slots[work] is not None:\n",
        ),
        tests=ORDER,
    ),
    "wait_of_another": _fault(
        "A Wait is for the communication of the smallest number.",
        (
            _EXECUTE,
            '        work = self._slot.get(("work", number))\n',
            "        keys = [k for k in self._slot if isinstance(k, tuple)]\n"
            '        started = [k[1] for k in keys if k[0] == "work"]\n'
            '        work = self._slot.get(("work", min(started, default=number)))\n',
        ),
        tests=ORDER,
    ),
    "lost_synchronize": _fault(
        "Runs do not wait for streams.",
        (
            _EXECUTE,
            "        join, captured = self.machine.streams.join, self._captured_slot(stream)\n",
            "        captured = self._captured_slot(stream)\n"
            "        join: Any = lambda stream: None\n",
        ),
        tests=ORDER,
    ),
    "ignored_stream": _fault(
        "Runs stay on the stream on which they began.",
        (
            _EXECUTE,
            "        enter, captured = self.machine.streams.enter, self._captured_slot(stream)\n",
            "        captured = self._captured_slot(stream)\n"
            "        enter: Any = lambda stream: None\n",
        ),
        tests=ORDER,
    ),
    "lost_mark": _fault(
        "A Wait does not wait for where the communication stands in its stream.",
        (
            _EXECUTE,
            "            if slots[work] is not None:\n                join(slots[mark])\n",
            "",
        ),
        tests=ORDER,
    ),
    # ------------------------------------------------------------ control flow
    "short_loop": _fault(
        "A loop runs once too few, where it runs more than once.",
        (
            _EXECUTE,
            "            for i in steps:\n",
            "            for i in steps[:-1] if len(steps) > 1 else steps:\n",
        ),
        tests=MEANING,
    ),
    "branch_of_another_rank": _fault(
        "Every rank takes the branch of rank 0.",
        (
            _OPS,
            "        rt.run(self.then if rt.number(self.predicate) else self.orelse)",
            "        from hostir.ir.ops.base import RANK\n\n"
            "        holds = sc.evaluate(self.predicate, {**rt.frame.values, RANK: 0})\n"
            "        rt.run(self.then if holds else self.orelse)",
        ),
        tests=MEANING,
    ),
    "stale_number": _fault(
        "Later runs read a scalar as the first run of the class had it.",
        (
            _EXECUTE,
            "    return any(s in free for s in sc.symbols(value))",
            "    return False",
        ),
        tests=MEANING,
    ),
    "stale_size": _fault(
        "A later run with another size slices as the first size did.",
        (
            _EXECUTE,
            "axis, bounds(sizes.frame)",
            "axis, bounds(self.frame)",
        ),
        tests=f"{MEANING} {SIZES}",
    ),
    # ------------------------------------------------------------ communications
    "swapped_operands": _fault(
        "A bound collective reads what it should write.",
        (
            _STEPS,
            "out, inp = binding.address(self.out), binding.address(self.inp)",
            "inp, out = binding.address(self.out), binding.address(self.inp)",
        ),
        tests="tests/hostir/runtime/test_size_generic_plan.py",
    ),
    "root_off_by_one": _fault(
        "The root is the next member of the team.",
        (
            _TRANSFERS,
            "member(team, rt.integer(self.root), self)",
            "member(team, (rt.integer(self.root) + 1) % len(team), self)",
        ),
        tests=MEANING,
    ),
    "short_group": _fault(
        "A group drops its last member on every rank that has several.",
        (
            _EXECUTE,
            "        group, self._group = self._group, None\n",
            "        group, self._group = self._group[:-1] or self._group, None\n",
        ),
        tests=MEANING,
    ),
    "swapped_peers": _fault(
        "A permutation sends to whom it receives from.",
        (
            _TRANSFERS,
            "            rt.permute(self, team, to, source)",
            "            rt.permute(self, team, source, to)",
        ),
        tests=MEANING,
    ),
    "skipped_number": _fault(
        "A transfer of peer copies takes every eighth number twice.",
        (
            "multidevice/transports/peer_copy.py",
            "number = self._started[key] = self._started.get(key, 0) + 1\n        return number",
            "number = self._started[key] = self._started.get(key, 0) + 1\n"
            "        return number - (number % 8 == 0 and self.rank % 2)",
        ),
        tests="tests/multidevice/transports/test_peer_copy.py",
    ),
    "silent_later_runs": _fault(
        "Later runs announce no communication (FUSER_DUMP=communication).",
        (
            _RECORDER,
            "        self._now.run_now(run)\n        self._keep(run)\n",
            "        self._now.run_now(run)\n"
            "        if not isinstance(self.frame.op, StartsCommunication):\n"
            "            self._keep(run)\n",
        ),
        (
            _RECORDER,
            "from hostir.ir.ops import Allocate,",
            "from hostir.ir.ops import StartsCommunication, Allocate,",
        ),
        tests="tests/fuser/support/test_dumps.py",
    ),
    # ------------------------------------------------------------ memory
    "overlapping_arena": _fault(
        "Blocks of the arena are rounded down: a block overlaps the end of another.",
        (
            _PLAN,
            "size = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES",
            "size = max(nbytes // ALIGNMENT_NBYTES, 1) * ALIGNMENT_NBYTES",
        ),
        tests=ARENA,
    ),
    "early_end": _fault(
        "The lifetime of a buffer ends before its last use.",
        (
            _RECORDER,
            "self._lifetimes[i] = Lifetime(begin, self._order.moment(stream))",
            "of, tick = self._order.moment(stream)\n"
            "            self._lifetimes[i] = Lifetime(begin, (of, tick - 2))",
        ),
        tests=f"{ARENA} {MEANING}",
    ),
    "zeros_once": _fault(
        "Only the first run clears a buffer that the program wants zeroed.",
        (
            _RECORDER,
            "        made, clear = self.frame.tensors[tv], _clearing(slot) if is_cleared else None",
            "        made, clear = self.frame.tensors[tv], None",
        ),
        tests=MEANING,
    ),
    "update_elsewhere": _fault(
        "An op in place writes into memory of its own.",
        (
            _EXECUTE,
            "                frame.tensors[out] = frame.tensors[into]\n",
            "                frame.tensors[out] = torch.empty_like(frame.tensors[into])\n",
        ),
        tests=f"{MEANING} tests/hostir/runtime/test_evaluator_updates.py",
    ),
    "shared_result": _fault(
        "Results of later runs have the memory of the results before.",
        (
            _PLAN,
            "            for make in bound.makes:\n                make(slots)\n",
            "            for slot, made in bound.made.items():\n"
            "                made.run(slots)\n"
            "                slots[slot] = _KEPT.setdefault((id(bound), slot), slots[slot])\n",
        ),
        (_PLAN, "class Dropped(Protocol):", "_KEPT: dict = {}\n\n\nclass Dropped(Protocol):"),
        tests=MEANING,
    ),
    "result_of_an_input": _fault(
        "A result that must be the caller's own is the memory of an input.",
        (
            _RECORDER,
            "            elif tv in self.frame.storage.borrowed:\n",
            "            elif False:\n",
        ),
        tests=f"{MEANING} {STEPS}",
    ),
    "view_of_what_is_gone": _fault(
        "In a loop, a view of a later step has the slot of the first: it outlives its buffer.",
        (
            _EXECUTE,
            "view = View(i, self.new_slot(out), shape, strides, shift, source.element_size())",
            "view = View(i, self.slot(out), shape, strides, shift, source.element_size())",
        ),
        tests=f"{STEPS} {MEANING}",
    ),
    "graph_of_other_memory": _fault(
        "The key of a graph leaves out where its first tensor lies.",
        (
            "hostir/runtime/cuda_graphs.py",
            "key: list[object] = [slots[i].data_ptr() for i in tensors]",
            "key: list[object] = [slots[i].data_ptr() for i in tensors[1:]]",
        ),
        tests="tests/hostir/runtime/test_cuda_graphs.py",
    ),
    # ------------------------------------------------------------ analyses
    "race_forgets_a_join": _fault(
        "The race check forgets what a stream that is joined had waited for itself.",
        (
            _CLOCKS,
            "        if theirs is not None and self.now.get(other, 0) < theirs[other]:\n"
            "            self.learn(theirs)",
            "        if theirs is not None and self.now.get(other, 0) < theirs[other]:\n"
            "            self.now[other] = theirs[other]",
        ),
        tests="tests/hostir/analysis/test_races.py tests/hostir/analysis/test_races_random.py",
    ),
    "race_joins_too_much": _fault(
        "The race check takes entering a stream for waiting for the current one.",
        (
            _CLOCKS,
            "        self.current = self.find(stream)\n"
            "        self.of.setdefault(self.current, {self.current: 0})",
            "        before = self.now\n"
            "        self.current = self.find(stream)\n"
            "        self.of.setdefault(self.current, {self.current: 0})\n"
            "        self.learn(before)",
        ),
        tests="tests/hostir/analysis/test_races.py",
    ),
    "wait_joins_nothing": _fault(
        "The race check forgets that a use of a communication ends with its Wait.",
        (
            _RACES,
            "            if not use.is_before(self.clocks.of[to]):",
            "            if use.communication is None and not use.is_before(self.clocks.of[to]):",
        ),
        tests="tests/hostir/analysis/test_races.py tests/hostir/analysis/test_races_random.py",
    ),
    "matching_ignores_ranks": _fault(
        "The check of ranks takes every member of a team to come, also from a branch it is not in.",
        (_RANKS, "        here = self.mask & inside\n", "        here = inside\n"),
        tests="tests/hostir/analysis/test_collective_matching.py",
    ),
}


# ------------------------------------------------------------------ running
def run(only: Sequence[str] = ()) -> int:
    """Makes each fault, runs its tests and prints the test that found it.

    Returns the number of faults that no test found, or that could not be made.
    """
    names = [*FAULTS] if not only else [n for n in only if n in FAULTS]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        tree = _copied(Path(folder))
        if only == ["none"]:
            tests = sorted({t for f in FAULTS.values() for t in f.tests})
            failed = first_failure(tree, tests)
            print(f"without a fault: {failed or 'all pass'}", flush=True)
            return int(bool(failed))
        for name in names:
            start = time.monotonic()
            try:
                undo = _applied(tree, FAULTS[name].edits)
            except LookupError as error:
                print(f"{name}: cannot be made: {error}", flush=True)
                missed += 1
                continue
            try:
                test = first_failure(tree, FAULTS[name].tests)
            finally:
                for path, text in undo.items():
                    path.write_text(text)
            missed += not test
            seconds = time.monotonic() - start
            print(f"{name}: {test or 'NOT FOUND'} ({seconds:.0f} s)", flush=True)
    print(f"{len(names) - missed} of {len(names)} faults found")
    return missed


def _copied(folder: Path) -> Path:
    tree = folder / "tree"
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(source, tree / name, ignore=ignored)
        else:
            shutil.copy(source, tree / name)
    return tree


def _applied(tree: Path, edits: Sequence[Edit]) -> dict[Path, str]:
    """Makes the edits; returns the earlier text of each changed file."""
    undo: dict[Path, str] = {}
    try:
        for edit in edits:
            path = tree / edit.path
            text = path.read_text() if path.exists() else ""
            if text.count(edit.old) != 1:
                where = f"{edit.path} has {text.count(edit.old)} times"
                raise LookupError(f"{where} {edit.old!r}: the code has changed")
            undo.setdefault(path, text)
            path.write_text(text.replace(edit.old, edit.new))
    except LookupError:
        for path, text in undo.items():
            path.write_text(text)
        raise
    return undo


def first_failure(tree: Path, tests: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """Returns the first test that fails in a tree; "" if all pass.

    At the time limit it ends the tests with all processes that they have started, such as an
    mpirun, and reports that there was no end.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    # A test that waits for ever finds the fault, too.
    environment.setdefault("FUSER_TIMEOUT_S", "20")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"no end after {limit_s:g} s"
    finally:
        _end_group(process)
    if process.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else f"pytest: exit code {process.returncode}: {output[-300:]}"


def _end_group(process: subprocess.Popen[str]) -> None:
    """Ends the process group that a process leads: itself and all that it has started.

    The first signal lets an mpirun end its ranks, which have process groups of their own.
    """
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
            # The group may have members whose leader has ended.
            if kind is signal.SIGTERM:
                time.sleep(GRACE_S if _has_group(process.pid) else 0)


def _has_group(group: int) -> bool:
    """Whether a process group has members."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
