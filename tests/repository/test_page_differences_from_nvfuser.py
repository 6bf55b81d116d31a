"""The page of differences from nvFuser: names said to raise do raise, and differences are
real.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

import fuser
import hostir
from fuser import DataType, FusionDefinition, ParallelType, TensorView, multidevice
from fuser.support import options
from fuser.support.errors import INSTEAD_OF_NVFUSER
from scripts import document_ops
from tests.fuser.nvfuser.test_module_aliases import REFUSED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "differences-from-nvfuser.md").read_text()
# How the page calls the objects of `test_nvfuser_members`.
OBJECTS = {"a tensor": "tv", "a scalar": "scalar", "fuser.schedule": "fd.sched"}


def table(title: str) -> list[list[str]]:
    """Returns the rows of the table in a section."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    heads = ("---", "what |", "name |", "member |")
    return [re.split(r"(?<!\\) \| ", row) for row in rows if not row.startswith(heads)]


def test_names_that_raise_are_those_of_the_code() -> None:
    told = document_ops.differences() == PAGE
    assert told, "python scripts/document_ops.py"
    names = {n for row in table("Names that raise") for n in re.findall(r"`fuser\.(\w+)`", row[0])}
    refused = {name for of, name in REFUSED if of == "fuser"}
    assert refused <= names == {*INSTEAD_OF_NVFUSER["fuser"]}


def test_members_that_raise_are_those_of_the_code() -> None:
    told = {row[0].strip("`") for row in table("Names that raise")}
    told = {name for name in told if name.rpartition(".")[0] in OBJECTS.values()}
    found = {f"{OBJECTS[of]}.{name}" for of, name in REFUSED if of != "fuser"}
    assert told - found == set(), "they are there by now: take them off the page"
    assert found - told == set(), "they raise: put them on the page"


# ------------------------------------------------------------------ differences
def written(*, dtype: DataType = DataType.Float) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True, dtype=dtype)
        fd.add_output(fd.ops.sum(fd.ops.exp(x), dim=1))
    return fd


def keeps_the_order_of_ops() -> bool:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        late, early, _ = fd.ops.sin(x), fd.ops.exp(x), fd.ops.cos(x)
        fd.add_output(early)
        fd.add_output(late)
    return re.findall(r"fd\.ops\.(\w+)", repr(fd)) == ["sin", "exp", "cos"]


def ran() -> FusionDefinition:
    fd = written()
    fd.execute([torch.ones(2, 8)], _enable_options=["host_ir_lowering"])
    return fd


def shares_kernels_of_other_sizes() -> bool:
    cache = ran().fec
    return cache.is_compiled([torch.ones(3, 8)]) and refuses(
        (fuser.NotCompiledError,), lambda: cache.get_cuda_kernel([torch.ones(0, 8)])
    )


def sharded(*, first: bool) -> FusionDefinition:
    """Returns a program that is annotated before its ops, or after them."""
    mesh = multidevice.DeviceMesh([0, 1])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)

        def annotate() -> None:
            x.set_device_mesh(mesh)
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)

        if first:
            annotate()
        fd.add_output(fd.ops.exp(fd.ops.neg(x)))
        if not first:
            annotate()
    return fd


def cuts(fd: FusionDefinition) -> list[int]:
    with multidevice.simulate(2) as world:
        world.run(lambda: fd.execute([torch.ones(2, 3)]))
        found = world.run(lambda: fd.fec.get_output_shardings())[0]
    return [s.axis_sharded_on(ParallelType.mesh_x) for s in found]


def placed(*, reshaped: bool = False, summed: bool = False) -> FusionDefinition:
    """Returns a program on [2, 6], cut along axis 1, or with a cut sum over axis 0 if
    `summed`.
    """
    mesh, cut = [0, 1], [fuser.Replicate() if summed else fuser.Shard(1)]
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, -1], contiguity=True, mesh=mesh, placements=cut)
        y = fd.ops.reshape(x, [-1]) if reshaped else fd.ops.neg(x)
        if summed:
            y = fd.ops.sum(y, dim=0)
            y.set_device_mesh(mesh)
            y.axis(0).parallelize(ParallelType.mesh_x)
        fd.add_output(y)
    return fd


def is_scalar_of(value: object) -> DataType:
    with FusionDefinition() as fd:
        return fd.define_scalar(value).dtype  # pyright: ignore[reportArgumentType]


def takes_whole_floats() -> bool:
    """Returns whether 2.0 is accepted as an extent, 2.5 is refused, and 2.5 cast to Int is
    accepted.
    """
    found: list[list[int]] = []
    for is_cast in (False, True):
        with FusionDefinition() as fd:
            s = fd.define_scalar(dtype=DataType.Float)
            extent = fd.ops.cast(s, DataType.Int) if is_cast else s
            fd.add_output(fd.ops.full([extent], 1.0, DataType.Float))
        found.append([*fd.execute([2.5 if is_cast else 2.0])[0].shape])
        if not is_cast and not refuses((fuser.FuserError,), partial(fd.execute, [2.5])):
            return False
    return found == [[2], [2]]


def refuses(kinds: tuple[type[BaseException], ...], call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception as error:
        return all(isinstance(error, kind) for kind in kinds)
    return False


def takes_numbers_of_numpy() -> bool:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, numpy.int64(8)], dtype=torch.float32)
        return fd.ops.sum(x, dim=numpy.int64(1)).ndim == 1  # pyright: ignore[reportArgumentType]


def takes_numbers_as_torch() -> bool:
    dtypes: list[DataType] = []
    for is_double in (None, True):
        with FusionDefinition(double_numbers=is_double) as fd:
            x = fd.define_tensor([-1], dtype=DataType.Int)
            dtypes += [tv.dtype() for tv in (x + 0.5, fd.ops.where(x > 0, 1, 0.5), x * 2j)]
    narrow = [DataType.Float, DataType.Float, DataType.ComplexFloat]
    return dtypes == [*narrow, DataType.Double, DataType.Double, DataType.ComplexDouble]


def warns_of_gradients() -> bool:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        (out,) = written().execute([torch.ones(2, 8, requires_grad=True)])
    return not out.requires_grad and any("requires grad" in str(w.message) for w in told)


def is_one_group_of_transfers() -> bool:
    with FusionDefinition() as fd:
        old = multidevice.DeviceMesh([0, 1])
        x = fd.define_tensor([4, 8], contiguity=True, mesh=old, placements=[fuser.Shard(0)])
        y = fd.ops.set(x)
        fuser.shard(y, multidevice.DeviceMesh([[2], [3]]), [fuser.Replicate(), fuser.Replicate()])
        fd.add_output(y)
    text = str(hostir.program_for(fd, rank=2).program)
    return text.count("StartCoalescing") == 1 and "type=send" in text


def copies_what_is_set() -> bool:
    x = torch.ones(2, 8)
    with FusionDefinition() as fd:
        given = fd.define_tensor([-1, 8], contiguity=True)
        fd.add_output(fd.ops.set(given))
        fd.add_output(fd.ops.permute(given, [1, 0]))
    copy, view = fd.execute([x])
    return copy.data_ptr() != x.data_ptr() == view.data_ptr()


def divides_rows_once() -> bool:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        fd.add_output(fd.ops.div(x, fd.ops.max(x, dims=[1], keepdim=True)))
    x = torch.rand(500, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    (out,) = fd.execute([x], _enable_options=["schedules_for(h200)"])
    # A unit of the last place, at most 1 here, is 2^-24 from 0.5 on.
    off = (out.double() - x.double() / x.double().amax(1, keepdim=True)).abs()
    return not torch.equal(out, x / x.amax(1, keepdim=True)) and bool((off <= 1.5 * 2.0**-24).all())


def refuses_ucc() -> bool:
    params = multidevice.MultiDeviceExecutorParams()
    params.use_allocation_cache = True
    params.backend_type = fuser.CommunicatorBackend.ucc
    make = lambda: multidevice.MultiDeviceExecutor(written().fusion, params)  # noqa: E731
    return refuses((fuser.UnsupportedError,), make)


def has_a_profile() -> bool:
    fd, inputs = written(), [torch.ones(2, 8)]
    with fuser.PythonProfiler() as prof:
        fd.execute(inputs)
    rows = prof.profile.kernel_profiles
    return rows[0].registers is None and bool(fd.trace(inputs).summary())


def keeps_variances_of_large_means() -> bool:
    x = 1e4 + torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    with fuser.FusionDefinition() as fd:
        fd.add_output(fd.ops.var(fd.from_pytorch(x), [1]))
    (out,) = fd.execute([x])
    return bool(((out.double() / x.double().var(1)) - 1).abs().max() < 1e-6)


def refuses_threads_beyond_the_device() -> bool:
    with fuser.FusionDefinition() as fd:
        y = fd.ops.relu(fd.define_tensor([4096]))
        fd.add_output(y)
    y.axis(0).parallelize(fuser.ParallelType.block_x)
    return refuses((fuser.DefinitionError,), lambda: fd.manual_execute([torch.ones(4096)]))


def scans_one_element() -> bool:
    x = torch.tensor(3.0)
    with fuser.FusionDefinition() as fd:
        tv = fd.define_tensor([])
        for name in ("cumsum", "cumprod", "cummax", "cummin"):
            fd.add_output(getattr(fd.ops, name)(tv, 0))
    return all(torch.equal(out, x) for out in fd.execute([x]))


def leaves_the_table_as_it_is() -> bool:
    table = torch.full((4, 4), 3.0)
    with fuser.FusionDefinition() as fd:
        index, weight = fd.define_tensor([-1], dtype=DataType.Int), fd.define_tensor([-1, 4])
        fd.add_output(fd.ops.embedding_fwd(index, weight, None, fd.define_scalar(1.0)))
    (out,) = fd.execute([torch.tensor([0, 2]), table])
    return bool((table == 3.0).all()) and torch.allclose(out, torch.full((2, 4), 0.5))


def rounds_complex_numbers_once() -> bool:
    x = torch.complex(torch.randn(64), torch.randn(64))
    with fuser.FusionDefinition() as fd:
        tv = fd.define_tensor([-1], dtype=DataType.ComplexFloat)
        fd.add_output(fd.ops.log2(tv))
        fd.add_output(fd.ops.sigmoid(tv))
    exact = [f(x.to(torch.complex128)).to(x.dtype) for f in (torch.log2, torch.sigmoid)]
    found = zip(fd.execute([x]), exact, strict=True)
    return all(torch.allclose(ours, best, rtol=1.2e-7, atol=0) for ours, best in found)


def fills_no_memory() -> object:
    with fuser.FusionDefinition() as fd:
        fd.add_output(fd.ops.full([fd.define_scalar(None, DataType.Int)], 1.0, DataType.Float))
    return fd.execute([2**60])


# The page's name of a difference -> a check that it is one.
DIFFERENCES: dict[str, Callable[[], object]] = {
    "devices": lambda: ran().fec.get_cuda_kernel([torch.ones(2, 8)]),
    "ranks without a launcher": lambda: cuts(sharded(first=False)) == [0],
    "`version()`": lambda: fuser.version() == fuser.__version__,
    "errors": lambda: refuses((fuser.FuserError, RuntimeError), lambda: written().execute([])),
    "no memory on the device": lambda: refuses(
        (fuser.OutOfMemoryError, fuser.ExecutionError, torch.OutOfMemoryError), fills_no_memory
    ),
    "wrong arguments": lambda: (
        takes_numbers_of_numpy()
        and refuses((fuser.FuserError, TypeError), lambda: is_scalar_of("text"))
    ),
    "operators": lambda: TensorView.__add__ and TensorView.__matmul__ and TensorView.__getitem__,
    "numbers beside integers or booleans alone": takes_numbers_as_torch,
    "`define_scalar(True)`": lambda: is_scalar_of(True) is DataType.Bool,
    "a floating scalar as an extent (also of `slice`, `pad`, `topk`)": takes_whole_floats,
    "equal fusions": lambda: (
        written().fusion == written().fusion and hash(written().fusion) == hash(written().fusion)
    ),
    "a copy to another mesh": is_one_group_of_transfers,
    "equal meshes": lambda: multidevice.DeviceMesh([0, 1]) == multidevice.DeviceMesh([0, 1]),
    "`repr(fd)`": lambda: "set_device_mesh" in repr(sharded(first=True)),
    "order of ops in `repr(fd)`": keeps_the_order_of_ops,
    "when to annotate": lambda: cuts(sharded(first=True)) == cuts(sharded(first=False)) == [0],
    "`host_ir_lowering`": lambda: "LaunchKernel" in str(ran().fec.host_program()),
    "`fd.fec.host_program()`": lambda: ran().fec.host_program().full_text(),
    "`fd.fec.is_compiled(inputs)`": shares_kernels_of_other_sizes,
    "placing a tensor": lambda: cuts(placed()) == [1],
    "a reshape that does not keep a cut (`[b, s/d, h]` to `[b*s, h]`)": lambda: (
        cuts(placed(reshaped=True)) == [-1]
    ),
    "device types on an axis that an op sums over": lambda: refuses(
        (fuser.ShardingError,), lambda: cuts(placed(summed=True))
    ),
    "streams in host programs": lambda: "0x" not in ran().fec.host_program().full_text(),
    "overlap": lambda: "auto_overlap" in options.known_names("DISABLE"),
    "matmuls": lambda: not options.EFFECTS["ENABLE"].keys() & {"fuse_matmul", "cutlass_scheduler"},
    "a Float row divided by one value": divides_rows_once,
    "variances (`var`, `var_mean`, `welford`)": keeps_variances_of_large_means,
    "a schedule by hand with more blocks or threads than the device takes": (
        refuses_threads_beyond_the_device
    ),
    "text of kernels": lambda: "__global__" in ran().fec.get_cuda_kernel([torch.ones(2, 8)]),
    "`MemoryType`, `LoadStoreOpType`, `CacheOp`": lambda: all(
        isinstance(member.value, str)
        for kind in (fuser.MemoryType, fuser.LoadStoreOpType, fuser.CacheOp)
        for member in kind
    ),
    "`MultiDeviceExecutorParams.use_allocation_cache`": refuses_ucc,
    "`CommunicatorBackend.ucc`": refuses_ucc,
    "parameters of `compile` and `run`": lambda: refuses(
        (fuser.FuserError,),
        lambda: fuser.KernelExecutor().compile(
            written().fusion, [torch.ones(2, 8)], fuser.LaunchParams(7, 7, 7, 7, 7, 7)
        ),
    ),
    "profiles": has_a_profile,
    "parameters of a scheduler": lambda: refuses((fuser.UnsupportedError,), fuser.PointwiseParams),
    "`idm.IdModel`": lambda: refuses(
        (fuser.UnsupportedError,),
        lambda: fuser.idm.IdModel(written().fusion).maybe_build_graph(fuser.IdMappingMode.loop),
    ),
    "`execute_with_dtensors`": lambda: refuses(
        (fuser.DTensorError, AssertionError),
        lambda: written().execute_with_dtensors([torch.ones(2, 8)]),
    ),
    "an unknown option": lambda: refuses(
        (fuser.OptionError, RuntimeError),
        lambda: written().execute([torch.ones(2, 8)], _enable_options=["no_option"]),
    ),
    "a program that waits for ever": lambda: options.timeout_s() > 0,
    "`cumsum`, `cumprod`, `cummax`, `cummin` of a tensor without axes": scans_one_element,
    "`embedding_fwd(max_norm=)`": leaves_the_table_as_it_is,
    "`log2`, `sigmoid` of complex numbers": rounds_complex_numbers_once,
    "gradients": warns_of_gradients,
    "`ops.set` of an input, as an output": copies_what_is_set,
}


def test_every_difference_is_checked() -> None:
    assert sorted(row[0] for row in table("Differences")) == sorted(DIFFERENCES)


@pytest.mark.finding("float constants")
def test_the_order_of_ops_in_a_text_is_a_difference_of_the_page() -> None:
    assert "order of ops in `repr(fd)`" in [row[0] for row in table("Differences")]
    assert keeps_the_order_of_ops()


@pytest.mark.finding("cumsum rank 0")
def test_scans_of_tensors_without_axes_are_a_difference_of_the_page() -> None:
    rows = [row[0] for row in table("Differences") if "tensor without axes" in row[0]]
    assert rows == ["`cumsum`, `cumprod`, `cummax`, `cummin` of a tensor without axes"]
    assert scans_one_element()


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_one(what: str) -> None:
    assert DIFFERENCES[what](), what
