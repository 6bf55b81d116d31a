"""Every code block of the documents runs, or says why it does not."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from multidevice import simulate
from tests.repository.documents import (
    LANGUAGES,
    NOT_RUN,
    PAGES,
    WALKED,
    Block,
    blocks,
    first_program,
    make_folder,
    run_commands,
    run_python,
    walk,
)
from tests.support.jobs import MPIRUN
from tests.support.printed_lines import missing_lines

_ALL = [block for page in PAGES for block in blocks(page)]
# The worked examples are performed on a copy of the tree, by test_contributing.
_ELSEWHERE = ("CONTRIBUTING.md",)
_SECTIONS = list(
    dict.fromkeys(
        (b.page, b.section) for b in _ALL if b.is_run and b.page not in (*_ELSEWHERE, *WALKED)
    )
)

_OPEN = """
from fuser import DataType, FusionDefinition, TensorView
fd = FusionDefinition()
fd.__enter__()
def real(*shape, dtype=DataType.Float):
    return fd.define_tensor(list(shape), contiguity=True, dtype=dtype)
"""
_CLOSE = """
given = fd.fusion.inputs()
made = [v for v in dict(globals()).values() if isinstance(v, TensorView)]
for made in [v for v in made if not any(v is g for g in given)]:
    fd.add_output(made)
fd.__exit__(None, None, None)
results = fd.execute(inputs)
assert results and not any(t.float().isnan().any() for t in results if t.is_floating_point())
"""
_HEADS = (
    "q, k, v = real(2, 3, 8, 16), real(2, 3, 8, 16), real(2, 3, 8, 16)\ngrad = real(2, 3, 8, 16)"
)
_AS_NVFUSER = """
import nvfuser_direct
import nvfuser_direct.multidevice as theirs
from nvfuser_direct import FusionDefinition as Definition, ops
from nvfuser_direct.multidevice import DeviceMesh

assert theirs is multidevice and Definition is FusionDefinition and nvfuser_direct.ops is ops
with Definition() as fd:
    x = fd.define_tensor([-1], contiguity=True)
    fd.add_output(ops.neg(x))
    x.set_device_mesh(DeviceMesh([0]))
assert torch.equal(fd.execute([torch.ones(3)])[0], -torch.ones(3))
for name in [name for name in sys.modules if name.startswith("nvfuser_direct")]:
    del sys.modules[name]
"""
# Section -> what is around its blocks, where these are parts of a program.
AROUND = {
    "Random numbers": (
        f"""{_OPEN}
n, seed, offset = (fd.define_scalar(dtype=DataType.Int) for _ in range(3))
x, keep = real(-1, 8), fd.define_scalar()
inputs = [5, 1, 2, torch.randn(3, 8), 0.75]""",
        _CLOSE,
    ),
    "Lookups": (
        f"""{_OPEN}
ids, weight, log_p = real(4, dtype=DataType.Int), real(9, 8), real(4, 6)
target, y = real(4, 1, dtype=DataType.Int), real(4, 8)
index, src = real(2, 8, dtype=DataType.Int), real(2, 8)
rows, added = real(3, dtype=DataType.Int), real(3, 8)
# The block scatters into what it has looked up.
whole, places = torch.randn(4, 8), torch.tensor([[0], [3], [1], [5]])
inputs = [torch.arange(4), torch.randn(9, 8), torch.randn(4, 6), places, whole,
          torch.arange(2)[:, None].expand(2, 8).contiguous(), torch.randn(2, 8),
          torch.tensor([3, 0, 3]), torch.randn(3, 8)]""",
        _CLOSE,
    ),
    "Scans, sorts and groups": (
        f"""{_OPEN}
x, scores, tokens = real(4, 8), real(4, 8), real(6, 4)
experts, ends = real(2, 4, 3), real(2, dtype=DataType.Int32)
inputs = [torch.rand(4, 8), torch.rand(4, 8), torch.rand(6, 4), torch.rand(2, 4, 3),
          torch.tensor([2, 6], dtype=torch.int32)]""",
        _CLOSE,
    ),
    "Floats of one byte": (
        f"""{_OPEN}
x, a, b, bias = real(4, 64), real(4, 16), real(16, 8), real(8)
scale_a, scale_b = real(4, 1), real(1, 8)
tokens8 = real(6, 4, dtype=DataType.Float8_e4m3fn)
experts8 = real(2, 4, 3, dtype=DataType.Float8_e4m3fn)
ends, scale_rows, scale_columns = real(2, dtype=DataType.Int32), real(6, 1), real(2, 1, 3)
inputs = [torch.randn(4, 64), torch.randn(4, 16), torch.randn(16, 8), torch.randn(8),
          torch.rand(4, 1), torch.rand(1, 8),
          torch.rand(6, 4).to(torch.float8_e4m3fn), torch.rand(2, 4, 3).to(torch.float8_e4m3fn),
          torch.tensor([2, 6], dtype=torch.int32), torch.rand(6, 1), torch.rand(2, 1, 3)]""",
        _CLOSE,
    ),
    "Attention": (
        f"{_OPEN}\n{_HEADS}\ninputs = [torch.randn(2, 3, 8, 16) for _ in range(4)]",
        _CLOSE,
    ),
    "The import": ("", _AS_NVFUSER),
    "Variables": (
        f"{_OPEN}\nx = real(4, 8)\nfd.add_output(fd.ops.exp(x))\nfd.__exit__(None, None, None)\n"
        "inputs = [torch.randn(4, 8)]",
        "",
    ),
    "Measured timelines": (
        f"{_OPEN}\nx = real(4, 8)\nfd.add_output(fd.ops.exp(x))\nfd.__exit__(None, None, None)\n"
        "inputs = [torch.randn(4, 8)]",
        "assert trace.wall_ms > 0",
    ),
}


def _prints_a_definition(printed: str, folder: Path) -> None:
    assert "make_tensor((2, 3), dtype=torch.float32, device='cpu')" in printed


# Section -> what must hold of all that its blocks print.
CHECKS: dict[str, Callable[[str, Path], None]] = {
    "Definitions as Python": _prints_a_definition,
}


# Pages that go on from the host program of the first program, on two ranks: program.txt.
WITH_PROGRAM = (
    "docs/explanation/cost-model.md",
    "docs/reference/command-line.md",
    "docs/reference/text-format.md",
)
# Pages whose text blocks are the output of the section's programs, `..` being anything; a section
# without a program, and one that shows times, shows what it is about.
SHOWN = (
    "docs/reference/command-line.md",
    "docs/explanation/coordination.md",
    "docs/explanation/sharding.md",
    "docs/explanation/streams-and-overlap.md",
    "docs/reference/errors.md",
    "docs/reference/text-format.md",
)


def _assert_shown(page: str, section: str, printed: str, folder: Path) -> None:
    """Asserts that the programs of a section printed each line of its text blocks."""
    for block in _ALL:
        if (block.page, block.section, block.language) == (page, section, "text"):
            missing = missing_lines(block.text, printed.replace(f"{folder}/", ""))
            assert not missing, f"{page}, line {block.line}: nothing prints {missing}\n{printed}"


@pytest.mark.parametrize("block", _ALL, ids=lambda b: f"{b.page}:{b.line}")
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES, "the language is one of these"
    assert not block.why_not or block.why_not in NOT_RUN


def test_blocks_that_are_not_run_are_few() -> None:
    """Lists all blocks that are not run, so that nobody skips a block by adding a word."""
    found = [
        (b.page, b.text.split("\n")[0].split("#")[0].strip())
        for b in _ALL
        if b.why_not and b.language != "text"
    ]
    assert sorted(found) == [
        ("README.md", ".venv/bin/mpirun -np 3 .venv/bin/python scripts/encode.py --text examples/sentences.txt"),  # noqa: E501
        ("README.md", "bash scripts/quickstart.sh"),
        ("benchmarks/notes.md", "python scripts/bench.py attention --json attention.jsonl"),
        ("benchmarks/notes.md", "python scripts/bench.py kernels --only main --shapes all --dtypes bfloat16 \\"),  # noqa: E501
        ("benchmarks/notes.md", "python scripts/bench.py library --json cells.jsonl"),
        ("docs/examples/thunder_gpt_block.md", ".venv/bin/python examples/thunder_gpt_block.py"),
        ("docs/explanation/cost-model.md", "mpirun -np 4 python -m hostir calibrate"),
        ("docs/how-to/install.md", "pip install -e '.[mpi]'"),
        ("docs/how-to/use-with-thunder.md", ".venv/bin/pip install lightning-thunder"),
        ("docs/performance/index.md", "mpirun -np 4 python benchmarks/allreduce_time.py --sizes 1024,65536,1048576,4194304"),  # noqa: E501
        ("docs/performance/index.md", "mpirun -np 4 python3 benchmarks/overlap_time.py --json overlap.jsonl"),  # noqa: E501
        ("docs/performance/index.md", "python benchmarks/host_time.py"),
        ("docs/performance/index.md", "python scripts/bench.py kernels --only main --shapes all --dtypes bfloat16 --json cells.jsonl"),  # noqa: E501
        ("docs/reference/command-line.md", "mpirun -np 4 python -m hostir calibrate"),
    ]  # fmt: skip


@pytest.mark.parametrize(("page", "section"), _SECTIONS, ids=lambda v: v.replace(" ", "-"))
def test_the_blocks_of_a_section_run(
    page: str, section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [b for b in _ALL if (b.page, b.section) == (page, section) and b.is_run]
    if any("mpirun" in b.text for b in found) and MPIRUN is None:
        pytest.skip("needs MPI")
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    if page in WITH_PROGRAM:
        with simulate(2) as world:
            found_names = world.run(runpy.run_path, "first.py")[0]
        text = found_names["fd"].fec.host_program().full_text()
        (tmp_path / "program.txt").write_text(text)
    before, after = AROUND.get(section, ("", ""))
    names: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec(before, names)
    printed = ""
    for block in found:
        if block.language == "python":
            printed += run_python(block, names)
        else:
            printed += "".join(out for _, out in run_commands(block, tmp_path))
    exec(after, names)
    CHECKS.get(section, lambda printed, folder: None)(printed, tmp_path)
    if page in SHOWN:
        _assert_shown(page, section, printed, tmp_path)


@pytest.mark.parametrize("page", WALKED)
def test_a_page_can_be_walked(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if MPIRUN is None and any("mpirun" in b.text for b in blocks(page) if b.is_run):
        pytest.skip("needs MPI")
    monkeypatch.chdir(tmp_path)
    walk(page, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_first_program(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "first.py"
    file.write_text(first_program())
    with simulate(ranks) as world:
        results = world.run(runpy.run_path, str(file))
    lines = sorted(capsys.readouterr().out.split("\n")[:-1])
    shape = [8, 64 // ranks]
    assert lines == [f"rank {r}: x is {shape}, the result equals torch" for r in range(ranks)]
    text = str(results[0]["fd"].fec.host_program())
    assert text.count("type=Allreduce") == (ranks > 1)
