"""Rebuilds the programs that tests make from their own text, runs the copies and compares.

`repr(fd)` is a Python program. Running it must make an equal fusion with equal text; a cache of
definitions grows by one for the fusion and by none for its copy. From the inputs of a rank's first
run, the copy must compute the same bits with the same strides, also in inputs that are updated.

    pytest --from-text        runs the tests marked `from_text` alone, and does this for each
    pytest --from-text=all    runs all tests that are selected, and does this for each
    pytest                    nothing is watched

During a test, only its programs, inputs, ranks and options are noted. The copies run after it, on
simulated ranks of their own. `from_text(runs=False)` marks tests whose results differ from run to
run: copies of their programs are made but not run. The same holds for tests on a GPU, because
torch's generators and atomic sums give other results in each call. `from_text(watched=False)` marks
tests that plant faults which this check would report. The last lines of the session count what was
left out.

In the same sessions, the plan that a host program records for later runs is compared with what the
program needs on that rank (`tests/support/plan_steps.py`): a step that is there twice, or is
missing, fails the test.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from fuser.ir.fusion import Fusion
    from hostir.runtime.evaluator import ProgramEvaluator
    from hostir.runtime.plan import Plan

CHOICES = ("marked", "all")
# Environment variables that may change results.
_OPTIONS = ("FUSER_ENABLE", "NVFUSER_ENABLE", "FUSER_DISABLE", "NVFUSER_DISABLE", "FUSER_TIMEOUT_S")


# ------------------------------------------------------------------ what a test did
@dataclass
class Seen:
    """A fusion at the time it became executable, its text, and a function to make an equal one run.

    The text may be the exception that says why there is none.
    """

    fusion: Fusion
    text: str | Exception
    make: Callable[[Fusion], Callable[..., list[torch.Tensor]]]
    devices: tuple[int, ...]
    is_new: bool


@dataclass
class Run:
    """A rank's first run of a program: its inputs and results."""

    seen: Seen
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    environment: dict[str, str]
    generator: torch.Tensor
    found: list[object]


class Watch:
    """The programs that one test made, and their runs."""

    def __init__(self, *, has_runs: bool) -> None:
        self.has_runs = has_runs
        self.programs = 0
        self.seen: list[Seen] = []
        # Where ranks are simulated: the baton of their world -> rank -> its runs, in their order.
        self.worlds: dict[Any, dict[int, list[Run]]] = {}
        self.left_out: Counter[str] = Counter()
        # How many plans were recorded, and how some differ from what their programs need.
        self.plans = 0
        self.wrong_plans: list[str] = []
        self._lock = threading.Lock()

    def see_plan(self, evaluator: ProgramEvaluator, plan: Plan, inputs: Sequence[Any]) -> None:
        """Compares a recorded plan with the steps that its program needs."""
        from tests.support.plan_steps import faults, values_of

        try:
            wrong = faults(plan, *values_of(evaluator, inputs))
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        with self._lock:
            self.plans += 1
            self.wrong_plans += [f"{line}, in the plan of\n{plan.program}" for line in wrong]

    def see(
        self, fusion: Fusion, make: Callable[[Fusion], Any], key: str, known: set[int]
    ) -> Seen | None:
        """Notes a fusion that became executable.

        Returns None if the copy of an equal fusion was already checked and runs are not compared;
        `key` is the full text.
        """
        from fuser import translate_fusion
        from multidevice.sharding.queries import requested_devices

        with self._lock:
            self.programs += 1
            is_new = hash(key) not in known
            known.add(hash(key))
        if not (is_new or self.has_runs):
            return None
        try:
            text = translate_fusion(fusion)
        except Exception as error:
            text = error
        seen = Seen(fusion.copy()[0], text, make, requested_devices(fusion), is_new)
        self.seen.append(seen)
        return seen

    def begin(self, seen: Seen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
        """Notes the arguments of a run; returns None, and counts why, if they cannot be
        copied.
        """
        import torch

        try:
            args, kwargs = _copied((args, kwargs))
        except _CannotCopyError as error:
            self.left_out[str(error)] += 1
            return None
        environment = {name: os.environ[name] for name in _OPTIONS if name in os.environ}
        return Run(seen, args, kwargs, environment, torch.get_rng_state(), [])

    def end(self, run: Run, outputs: list[torch.Tensor], inputs: object) -> None:
        """Notes the results of a run."""
        run.found = _copied([outputs, inputs if run.seen.fusion.aliases else ()])
        world, rank = _place_of(run.seen)
        if isinstance(world, str):
            self.left_out[world] += 1
            return
        with self._lock:
            self.worlds.setdefault(world, {}).setdefault(rank, []).append(run)

    def settle(self, counts: Counter[str]) -> None:
        """Leaves out programs that not all ranks ran in the same order, for example after an error.

        Otherwise the ranks that run the copies would wait for each other. Counts the runs that are
        left.
        """
        for baton, runs in self.worlds.items():
            for team in {run.seen.devices for some in runs.values() for run in some}:
                members = [r for r in team if r < baton.size] if baton is not None else [0]
                orders = [
                    [str(run.seen.text) for run in runs.get(r, ()) if run.seen.devices == team]
                    for r in members
                ]
                if any(order != orders[0] for order in orders):
                    for r, some in runs.items():
                        runs[r] = [run for run in some if run.seen.devices != team]
                    self.left_out["some ranks did not run the program"] += 1
            counts["runs"] += sum(map(len, runs.values()))
        counts.update({f"runs left out: {why}": n for why, n in self.left_out.items()})


class _CannotCopyError(Exception):
    pass


def _copied(value: Any, made: dict[int, torch.Tensor] | None = None) -> Any:
    """Returns a deep copy with equal strides, in which the same tensors share memory as
    before.
    """
    import torch

    made = {} if made is None else made
    if type(value) in (list, tuple):
        return type(value)(_copied(v, made) for v in value)
    if type(value) is dict:
        return {k: _copied(v, made) for k, v in value.items()}
    if not isinstance(value, torch.Tensor):
        return copy.copy(value) if dataclasses.is_dataclass(value) else value
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_nested
    if not is_plain or value.layout != torch.strided or value.device.type == "meta":
        raise _CannotCopyError("tensors that are no plain ones")
    with torch.no_grad(), torch.inference_mode(False):
        storage = value.untyped_storage()
        key = storage.data_ptr()
        if key not in made:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            made[key] = whole.clone()
        twin = torch.empty(0, dtype=value.dtype, device=value.device)
        place = value.storage_offset(), value.shape, value.stride()
        twin.set_(made[key].untyped_storage(), *place)
        if value.is_conj():
            twin = twin.conj()
        if value.is_neg():
            twin = torch._C._VariableFunctions._neg_view(twin)  # pyright: ignore[reportAttributeAccessIssue]
    return twin.requires_grad_(value.requires_grad)


def _place_of(seen: Seen) -> tuple[Any, int]:
    """Returns the world of simulated ranks that runs here (None: no ranks), and the rank.

    Instead of a world, a text says why the program cannot be run again.
    """
    from multidevice import Communicator

    communicator = Communicator.instance()
    if not communicator.is_real():
        baton = getattr(communicator._control, "baton", None)
        return baton, communicator.rank()
    if communicator.size() > 1 and seen.devices:
        return "ranks are processes", communicator.rank()
    return None, 0


# ------------------------------------------------------------------ watching
class Watcher:
    """Watches fusions that become executable; the original methods still run, and run once."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.known: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.is_installed = False

    @contextmanager
    def installed(self) -> Generator[None]:
        from tests.support.plan_steps import watched_plans

        with watched_plans(self._see_plan), self._watched_programs():
            self.is_installed = True
            yield

    def _see_plan(self, evaluator: ProgramEvaluator, plan: Plan, inputs: Sequence[Any]) -> None:
        if self.watch is not None:
            self.watch.see_plan(evaluator, plan, inputs)

    @contextmanager
    def _watched_programs(self) -> Generator[None]:
        from fuser.frontend.executor_cache import FusionExecutorCache
        from fuser.frontend.manual_kernels import KernelExecutor
        from tests.support.plan_steps import as_product_code

        init, compile_ = FusionExecutorCache.__init__, KernelExecutor.compile
        watcher = self

        def made(self: Any, fusion: Any, *args: Any, **kwargs: Any) -> None:
            init(self, fusion, *args, **kwargs)
            watcher._see_cache(self, fusion, args, kwargs)

        def compiled(self: Any, fusion: Any, *args: Any, **kwargs: Any) -> None:
            seen = watcher._see_kernel(fusion)
            compile_(self, fusion, *args, **kwargs)
            if seen is not None:
                _FirstRuns(watcher, seen, self, ("run",))

        FusionExecutorCache.__init__, KernelExecutor.compile = map(
            as_product_code, (made, compiled)
        )
        yield
        FusionExecutorCache.__init__, KernelExecutor.compile = init, compile_

    def _see_cache(self, cache: Any, fusion: Any, args: Any, kwargs: Any) -> None:
        from fuser.frontend.executor_cache import FusionExecutorCache

        if self.watch is None:
            return

        def make(twin: Fusion) -> Callable[..., list[torch.Tensor]]:
            return FusionExecutorCache(twin, *args, **kwargs).execute

        # The text by which programs are found, too.
        seen = self.watch.see(fusion, make, cache._text, self.known)
        if seen is not None and self.watch.has_runs:
            names = ("prepare",) if cache.devices else ("execute", "prepare")
            _FirstRuns(self, seen, cache, names)

    def _see_kernel(self, fusion: Any) -> Seen | None:
        from fuser.frontend.manual_kernels import KernelExecutor
        from fuser.ir.fusion import Fusion
        from fuser.ir.text.printer import fusion_text

        if self.watch is None or not isinstance(fusion, Fusion):
            return None

        def make(twin: Fusion) -> Callable[..., list[torch.Tensor]]:
            executor = KernelExecutor()
            executor.compile(twin)
            return executor.run

        seen = self.watch.see(fusion, make, fusion_text(fusion), self.known)
        return seen if self.watch.has_runs else None


class _FirstRuns:
    """Wraps the methods of an executor until each of its ranks has run it once."""

    def __init__(self, watcher: Watcher, seen: Seen, of: Any, names: Sequence[str]) -> None:
        from tests.support.plan_steps import as_product_code

        assert watcher.watch is not None
        self._watch, self._seen = watcher.watch, seen
        self._watcher, self._names = watcher, names
        # An executor is given back as soon as nobody has it.
        self._executor = weakref.ref(of)
        self._ranks: set[object] = set()
        self._world: object = self
        for name in names:
            watched = as_product_code(getattr(_FirstRuns, f"_{name}"))
            of.__dict__[name] = partial(watched, self, getattr(type(of), name))

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
        """Notes the arguments of this rank's first run; returns None for later runs."""
        import torch.utils._python_dispatch as torch_dispatch

        world, rank = _place_of(self._seen)
        is_first = self._world in (self, world) and rank not in self._ranks
        if self._watcher.watch is not self._watch or not is_first:
            return None
        with torch_dispatch._disable_current_modes():
            return self._watch.begin(self._seen, args, kwargs)

    def _end(self, run: Run | None, outputs: Any, args: Any, kwargs: Any) -> None:
        import torch.utils._python_dispatch as torch_dispatch

        world, rank = _place_of(self._seen)
        if run is None or rank in self._ranks:
            return
        self._world = world
        self._ranks.add(rank)
        if len(self._ranks) >= len(self._seen.devices):
            self._leave()
        with torch_dispatch._disable_current_modes():
            self._watch.end(run, outputs, _inputs_of(args, kwargs))

    def _leave(self) -> None:
        executor = self._executor()
        for name in self._names if executor is not None else ():
            executor.__dict__.pop(name, None)

    def _execute(self, plain: Any, *args: Any, **kwargs: Any) -> Any:
        executor = self._executor()
        run = self._begin(args, kwargs)
        outputs = plain(executor, *args, **kwargs)
        self._end(run, outputs, args, kwargs)
        return outputs

    _run = _execute

    def _prepare(self, plain: Any, *args: Any, **kwargs: Any) -> Any:
        executor = self._executor()
        begun = self._begin(args, kwargs)
        run_signature, numbers, run = plain(executor, *args, **kwargs)

        def noted() -> Any:
            outputs = run()
            self._end(begun, outputs, args, kwargs)
            return outputs

        return run_signature, numbers, run if begun is None else noted


def _inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the first argument of a call, positional or by name."""
    return args[0] if args else next(iter(kwargs.values()))


# ------------------------------------------------------------------ copies
def check_copies(watch: Watch, counts: Counter[str]) -> list[str]:
    """Copies the programs of a test; returns the differences."""
    wrong: list[str] = []
    counts["programs"] += watch.programs
    for seen in watch.seen:
        if not seen.is_new:
            continue
        counts["different ones"] += 1
        try:
            _check_copy(seen, is_whole=watch.has_runs)
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}\n{seen.text}")
    return wrong


def check_runs(watch: Watch) -> list[str]:
    """Runs copies of the programs that a test ran; returns the differences."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [w for baton, runs in watch.worlds.items() for w in _check_runs(baton, runs)]


def _check_copy(seen: Seen, *, is_whole: bool) -> None:
    """Checks that a copy has equal text and shares a cache entry with the original.

    If `is_whole`, fusion and hash must be equal too, and the full text is parsed and printed again.
    """
    from fuser import FusionDefinition, LruFusionCache
    from fuser.ir.text.parser import parse_fusion
    from fuser.ir.text.printer import fusion_text
    from tests.support.definition_copies import again, defined_by

    if isinstance(seen.text, Exception):
        raise seen.text
    fd = FusionDefinition()
    fd._fusion = seen.fusion
    made = defined_by(seen.text)
    found = repr(made)
    assert found == seen.text, f"its copy has another text:\n{found}"
    if is_whole:
        again(fd)
        full = fusion_text(seen.fusion)
        assert fusion_text(parse_fusion(full)) == full, f"its full text is read as another:\n{full}"
    cached: Any = LruFusionCache(max_fusions=4)(lambda fd: fd)
    grown: list[int] = []
    for one in (fd, made):
        cached(one)
        grown.append(cached.num_fusions())
    if grown != [1, 1]:
        again(fd)  # tells in what they differ
    assert grown == [1, 1], f"a cache that gets the fusion, then its copy, holds {grown}"
    assert fd.fec is made.fec


def _check_runs(baton: Any, runs: dict[int, list[Run]]) -> list[str]:
    """Runs the copies, on simulated ranks if the programs did; returns the differences."""
    from multidevice import simulate

    wrong: list[str] = []
    if baton is None:
        for run in runs[0]:
            with _environment(run.environment):
                wrong += _check_run(run)
        return wrong

    def on_a_rank(environment: dict[str, str]) -> None:
        from multidevice import Communicator

        for run in runs.get(Communicator.instance().rank(), ()):
            if run.environment == environment:
                wrong.extend(_check_run(run))

    # The ranks are threads: they have one environment.
    environments = {str(run.environment): run.environment for r in runs.values() for run in r}
    for environment in environments.values():
        try:
            with _environment(environment), simulate(baton.size) as world:
                world.run(on_a_rank, environment)
        except Exception as error:
            wrong.append(f"on {baton.size} ranks: {type(error).__name__}: {error}")
    return wrong


def _check_run(run: Run) -> list[str]:
    """Runs the copy of a program with the arguments of this rank; returns differences in
    results.
    """
    import torch

    from tests.support.definition_copies import assert_same, defined_by

    assert isinstance(run.seen.text, str)
    args, kwargs = _copied((run.args, run.kwargs))
    before = torch.get_rng_state()
    try:
        made = defined_by(run.seen.text)
        torch.set_rng_state(run.generator)
        outputs = run.seen.make(made.fusion)(*args, **kwargs)
    except Exception as error:
        if len(run.seen.devices) > 1:
            raise  # as an error of all ranks
        return [f"its copy raises {type(error).__name__}: {error}\n{run.seen.text}"]
    finally:
        torch.set_rng_state(before)
    updated = _inputs_of(args, kwargs) if run.seen.fusion.aliases else ()
    try:
        assert_same([*_tensors((outputs, updated))], [*_tensors(run.found)])
    except AssertionError as error:
        return [f"its copy has other results: {error}\n{run.seen.text}"]
    return []


def _tensors(value: object) -> Iterable[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)


@contextmanager
def _environment(options: dict[str, str]) -> Generator[None]:
    before = {name: os.environ.pop(name) for name in _OPTIONS if name in os.environ}
    os.environ.update(options)
    try:
        yield
    finally:
        for name in options:
            del os.environ[name]
        os.environ.update(before)


# ------------------------------------------------------------------ pytest
class Plugin:
    """The pytest hooks, and the last lines of the session."""

    def __init__(self, chosen: str) -> None:
        self._chosen = chosen
        self._watcher = Watcher()
        self._installed = ExitStack()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselects unmarked tests if only the marked ones are to run."""
        if self._chosen != "marked":
            return
        dropped = [item for item in items if item.get_closest_marker("from_text") is None]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item.get_closest_marker("from_text") is not None]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        self._watcher.watch = self._watch_for(item)
        yield

    def _watch_for(self, item: pytest.Item) -> Watch | None:
        if not self._watcher.is_installed:
            self._installed.enter_context(self._watcher.installed())
        mark = item.get_closest_marker("from_text")
        asked = {"runs": True, "watched": True, **(mark.kwargs if mark is not None else {})}
        if not asked["watched"]:
            return None
        has_runs = asked["runs"] and "gpu" not in item.keywords
        if not has_runs:
            self._watcher.counts["tests without runs"] += 1
        return Watch(has_runs=has_runs)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None]:
        """Checks the programs of a test with its patches in place; if that fails, again without
        them.
        """
        watch, self._watcher.watch = self._watcher.watch, None
        wrong: list[str] = []
        if watch is not None:
            watch.settle(self._watcher.counts)
            self._watcher.counts["plans"] += watch.plans
            wrong = check_runs(watch)
        yield
        if watch is None:
            return
        if watch.wrong_plans:
            shown = "\n\n".join(watch.wrong_plans[:3])
            pytest.fail(f"{len(watch.wrong_plans)} faults of plans:\n{shown}", pytrace=False)
        wrong = check_copies(watch, self._watcher.counts) + (wrong and check_runs(watch))
        if wrong:
            shown = "\n\n".join(wrong[:3])
            pytest.fail(f"{len(wrong)} programs differ from their text:\n{shown}", pytrace=False)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._installed.close()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["programs"] = dict(self._watcher.counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._watcher.counts.update(getattr(node, "workeroutput", {}).get("programs", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        counts = self._watcher.counts
        if counts["programs"]:
            told = ", ".join(f"{n} {what}" for what, n in counts.items())
            terminalreporter.write_line(f"made again from their text: {told}")


def add_option(parser: pytest.Parser) -> None:
    """Adds the option that chooses which tests are watched."""
    parser.addoption(
        "--from-text",
        nargs="?",
        const="marked",
        choices=CHOICES,
        help="make and run the programs of tests again from their text: of the tests marked "
        "from_text, which run alone, or of all",
    )


def register(config: pytest.Config) -> None:
    """Adds the checks to a session that asks for them."""
    chosen = config.getoption("from_text")
    if chosen is not None:
        config.pluginmanager.register(Plugin(chosen), "every_program")
