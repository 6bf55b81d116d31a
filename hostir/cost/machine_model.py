"""The description of a machine: the speeds and latencies from which the cost model
(`hostir.cost.op_costs`) predicts times.

A description is a JSON file. Missing fields have the values of the built-in machine "h200".
`hostir.cost.calibrate` measures a machine once and writes such a file.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fuser.ir.dtypes import DataType
from fuser.support import options
from fuser.support.errors import InputError, warn
from hostir.ir.ops import PEER_COPIES
from multidevice.transports.base.allreduce_model import Way
from multidevice.transports.base.collectives import COLLECTIVES

# The speed of matmuls per dtype, relative to float16. Floats of 8 bits are not measured, float32 is
# without TF32, and float64 uses tensor cores.
_DTYPES = {"Half": 1.0, "BFloat16": 1.0, "Float": 0.07, "Double": 0.08}
# The bus bandwidth of each collective, in bytes per second, which does not depend on the team's
# size.
_NCCL_NAME = "NCCL"
_NCCL = {c.name: c.h200_bandwidth for c in COLLECTIVES.values() if c.h200_bandwidth is not None}

# The seconds of an allreduce that is one kernel, without sending, by its algorithm.
_ALLREDUCE_KERNEL = {
    Way.PACKETS.name: 2.6e-6,
    Way.ONE_SHOT.name: 5.3e-6,
    Way.TWO_SHOTS.name: 12.5e-6,
    Way.ONE_OF_WORDS.name: 3.2e-6,
    Way.TWO_OF_WORDS.name: 4.4e-6,
}
# The possible entries of the tables of a description.
_KEYS: dict[str, Sequence[str]] = {
    "matmul_dtypes": [d.name for d in DataType],
    "nccl": tuple(COLLECTIVES),
    "allreduce_kernel_s": [way.name for way in Way],
}
CPU = "CPU"
_DEVICES = ("GPU", CPU)


def _frozen(values: Mapping[str, float]) -> Mapping[str, float]:
    return MappingProxyType(dict(values))


@dataclass(frozen=True)
class Machine:
    """The description of a machine. Fields that end in `_s` are seconds, and fields that end in
    `_bandwidth` are bytes per second.

    - `device`: "GPU" or "CPU". On a CPU, a rank is one thread, which computes and communicates in
      turns.
    - `matmul`: the speed of float16 matmuls if every multiprocessor computes a tile of the result,
      as points (operations, operations per second). On a GPU, the operations of a point are those
      of all matmuls of a call, because the clock depends on how long the GPU is busy. On a CPU,
      they are those of one matmul. The rate between two points is interpolated in the logarithm of
      the operations, and is constant outside of the points.
    - `matmul_dtypes`: the speed of matmuls in each dtype, relative to float16.
    - `tiles`: for each tile shape that the matmul library (cuBLAS) can choose: rows, columns, and
      relative speed.
    - `nccl`: the bus bandwidth of each type of collective; `nccl_other_bandwidth`: the bandwidth of
      all other collectives and of sends.
    - `nccl_fill_s`: the extra time, beyond `nccl_latency_s`, that a large message needs to reach
      full bandwidth. A message of `nccl_fill_nbytes` needs half of this time.
    - `copy_latency_s`, `pull_bandwidth`: for copies out of another rank's memory.
    - `allreduce_kernel_s`: the time of allreduces that are one kernel, by their algorithm
      (`multidevice.transports.base.allreduce_model`). The time to send data at
      `allreduce_kernel_bandwidth` is not included.
    - `host_*`: the host's time to issue one op (kernel, library call or communication), and at the
      beginning of a run.
    """

    name: str = "h200"
    device: str = "GPU"
    multiprocessors: int = 132
    memory_bandwidth: float = 4.2e12
    launch_s: float = 2e-6
    kernel_fill_nbytes: float = 4e6
    # A busy GPU lowers its clock, after as many operations of one product or of many.
    matmul: tuple[tuple[float, float], ...] = (
        (0.12e12, 800e12),
        (0.3e12, 790e12),
        (1e12, 760e12),
        (2e12, 680e12),
        (9e12, 670e12),
    )
    matmul_launch_s: float = 4e-6
    tiles: tuple[tuple[int, int, float], ...] = (
        (128, 256, 1.0),
        (256, 128, 1.0),
        (256, 160, 1.0),
        (192, 160, 0.97),
        (192, 128, 0.97),
        (128, 128, 0.95),
        (128, 160, 0.95),
    )
    matmul_dtypes: Mapping[str, float] = field(default_factory=lambda: _frozen(_DTYPES))
    copy_latency_s: float = 12e-6
    pull_bandwidth: float = 373e9
    nccl_latency_s: float = 14e-6
    nccl_fill_s: float = 24e-6
    nccl_fill_nbytes: float = 4e6
    nccl_multiprocessors: int = 24
    nccl: Mapping[str, float] = field(default_factory=lambda: _frozen(_NCCL))
    nccl_other_bandwidth: float = 325e9
    allreduce_kernel_s: Mapping[str, float] = field(
        default_factory=lambda: _frozen(_ALLREDUCE_KERNEL)
    )
    allreduce_kernel_bandwidth: float = 360e9
    host_run_s: float = 19e-6
    host_kernel_s: float = 8e-6
    host_library_s: float = 13e-6
    host_post_s: float = 20e-6

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(self, f.name, getattr(self, f.name))

    def numbers_of(self, library: str) -> str:
        """Returns the communication library whose measured numbers stand in for those of `library`.
        Returns "" if the description has numbers for `library` itself.

        Descriptions of GPUs have numbers for NCCL and for peer copies only, so any other library is
        predicted like NCCL.
        """
        is_known = self.device == CPU or library.upper() in (_NCCL_NAME, PEER_COPIES)
        return "" if is_known else _NCCL_NAME

    def to_json(self) -> str:
        """Returns this description as JSON text. `machine_from_json` reads the text back."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps(values, indent=2, default=dict)


def _check(machine: Machine, name: str, value: Any) -> None:
    """Raises `InputError` if `value` has a wrong type for the field `name` of a machine
    description, or is not positive. Latencies may be 0."""
    default = _DEFAULTS[name]
    if isinstance(default, str):
        fits, wanted = isinstance(value, str) and bool(value), "a name"
        if name == "device":
            fits, wanted = value in _DEVICES, f"one of {', '.join(_DEVICES)}"
    elif isinstance(default, Mapping):
        table: Any = value
        fits = isinstance(value, Mapping) and all(map(_is_number, table.values()))
        wanted = 'numbers above 0 by name, such as {"Float": 0.07}'
    elif isinstance(default, tuple):
        rows, width = value, _width(name)
        fits = isinstance(value, tuple) and bool(rows) and all(_is_row(r, width) for r in rows)
        wanted = f"rows of {width} numbers above 0"
        if name == "matmul":
            fits = fits and [r[0] for r in rows] == sorted({r[0] for r in rows})
            wanted += ", sorted by the first number"
    else:
        is_count = isinstance(default, int)
        fits = _is_number(value) or (name.endswith("_s") and value == 0)
        fits = fits and isinstance(value, int if is_count else int | float)
        wanted = "an integer above 0" if is_count else "a number above 0"
    if not fits:
        raise InputError(
            f"machine {machine.name}: the field {name} = {value!r} is wrong: expected {wanted}"
        )


def _width(name: str) -> int:
    return len(_DEFAULTS[name][0])


def _is_row(row: Any, width: int) -> bool:
    return isinstance(row, tuple) and len(row) == width and all(map(_is_number, row))  # pyright: ignore[reportUnknownArgumentType]


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and value > 0


_DEFAULTS: dict[str, Any] = {
    f.name: f.default if f.default is not MISSING else f.default_factory()  # pyright: ignore[reportCallIssue]
    for f in fields(Machine)
}
H200 = Machine()
MACHINES: Mapping[str, Machine] = MappingProxyType({"h200": H200})


def machine_from_json(text: str, *, where: str = "a machine") -> Machine:
    """Returns the machine that a JSON text describes. Missing fields have the values of "h200".

    `where` names the text in messages, such as the path of its file. Raises `InputError` for an
    unknown field, or a value of a wrong type.
    """
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(
            f"{where}: expected a JSON object with the fields of a machine, but found {text[:40]!r}"
        )
    values: dict[str, Any] = found  # pyright: ignore[reportUnknownVariableType]
    for name in values:
        if name not in _DEFAULTS:
            near = difflib.get_close_matches(name, _DEFAULTS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"{where}: a machine has no field {name!r}{hint}")
    try:
        return replace(H200, **{k: _read(k, v) for k, v in values.items()})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _read(name: str, value: Any) -> Any:
    """Converts the JSON value of the field `name` of a machine description to the Python value.
    Lists become tuples, and missing entries of a table get the values of the built-in machine
    "h200".
    """
    default = _DEFAULTS[name]
    if isinstance(default, tuple) and isinstance(value, list):
        rows: Any = value  # pyright: ignore[reportUnknownVariableType]
        return tuple(tuple(row) if isinstance(row, list) else row for row in rows)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(default, Mapping) and isinstance(value, dict):
        table: Any = value  # pyright: ignore[reportUnknownVariableType]
        for key in table:
            if key not in _KEYS[name]:
                expected = ", ".join(_KEYS[name])
                raise InputError(
                    f"the table {name} cannot have an entry {key!r}: its entries are {expected}"
                )
        return _frozen({**default, **table})  # pyright: ignore[reportUnknownArgumentType]
    return value


# ------------------------------------------------------------------ finding one
MEASURED = "measured"


def measured_file(device: torch.device | None = None) -> Path:
    """Returns the path of the file to which `python -m hostir calibrate` writes the description of
    this machine. The file may not exist.

    The file describes this machine's GPUs or its CPU, as `device` says. If `device` is None, the
    file describes the GPUs if there are any.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device.type
    if kind == "cuda":
        name, count = torch.cuda.get_device_name(device), torch.cuda.device_count()
    else:
        name, count = f"{platform.machine()} cpu", os.cpu_count() or 1
    key = re.sub(r"[^A-Za-z0-9.]+", "_", f"{name}_x{count}_torch{torch.__version__}")
    return options.cache_dir() / "machines" / f"{key}.json"


@functools.cache
def read_once(file: Path) -> Machine | None:
    """Returns the machine that a JSON file describes, or None if the file does not exist.

    Each process reads a file only once. A calibration during a job therefore does not change later
    predictions, and inputs of equal sizes always get equal programs.
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    return machine_from_json(text, where=str(file))


def machine_of(device: torch.device) -> Machine | None:
    """Returns the description with which times on `device` are predicted: the measured one, or else
    the built-in one for an H200. Returns None if there is neither. An unreadable file causes a
    warning."""
    found = None
    try:
        found = read_once(measured_file(device))
    except (InputError, OSError, UnicodeDecodeError) as error:
        warn(
            f"the description of this machine cannot be used: {error}. To measure the machine "
            "again, run python -m hostir calibrate"
        )
    if found is None and device.type == "cuda" and "H200" in torch.cuda.get_device_name(device):
        return H200
    return found


def usual_machine() -> str:
    """Returns the name of the machine that a command predicts for by default: "measured" if this
    machine's GPUs were calibrated, and "h200" otherwise."""
    is_measured = torch.cuda.is_available() and measured_file().exists()
    return MEASURED if is_measured else H200.name


def find_machine(name: str, device: torch.device | None = None) -> Machine:
    """Returns the machine description with a given name, for the option `--machine`.

    `name` is a built-in machine, "measured", or a file `*.json`. `device` selects which measured
    file is read; see `measured_file`. Raises `InputError` for an unknown name, an unreadable file,
    or "measured" without a calibration.
    """
    if name in MACHINES:
        return MACHINES[name]
    if name == MEASURED:
        file = measured_file(device)
        found = read_once(file)
        if found is None:
            raise InputError(
                f"this machine is not measured (no {file}): run python -m hostir calibrate"
            )
        return found
    if name.endswith(".json"):
        try:
            found = read_once(Path(name).resolve())
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"the description of machine {name!r} cannot be read: {error}"
            ) from error
        if found is None:
            raise InputError(
                f"machine {name!r}: the file {Path(name).resolve()} with its description does not "
                "exist"
            )
        return found
    raise InputError(
        f"there is no machine {name!r}: expected {', '.join(MACHINES)}, {MEASURED}, or a file "
        "NAME.json"
    )
