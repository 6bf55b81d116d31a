"""The table of environment variables and per-call options."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuser import options
from fuser.errors import OptionError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in options.VARIABLES.values():
        for name in (variable.name, variable.alias):
            if name is not None:
                monkeypatch.delenv(name, raising=False)


def test_nothing_is_dumped_by_default() -> None:
    options.check_environment()
    assert not options.dump_enabled("host_ir")
    assert options.timeout_s() == 60.0
    assert options.master_port() is None


@pytest.mark.parametrize("name", ["FUSER_DUMP", "NVFUSER_DUMP"])
def test_dump_names_and_arguments(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "host_ir(indices),cuda_kernel,lower_verbose(a,b)")
    assert options.dump_enabled("host_ir")
    assert options.dump_enabled("cuda_kernel")
    assert not options.dump_enabled("ptx")
    assert options.dump_args("host_ir") == ("indices",)
    assert options.dump_args("lower_verbose") == ("a", "b")
    assert options.dump_args("cuda_kernel") == ()


def test_our_name_wins_over_the_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVFUSER_DUMP", "ptx")
    monkeypatch.setenv("FUSER_DUMP", "host_ir")
    assert options.dump_enabled("host_ir")
    assert not options.dump_enabled("ptx")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("FUSER_DUMP", "hots_ir", "Invalid option: 'hots_ir'; did you mean 'host_ir'"),
        ("FUSER_DUMP", "host_ir(a", r"unclosed '\('"),
        ("FUSER_DUMP", "host_ir(a)ptx", r"expect a ',' after '\)'"),
        ("FUSER_ENABLE", "host_ir_lowerin", "did you mean 'host_ir_lowering'"),
        ("FUSER_DISABLE", "multi", "Parsing DISABLE failed"),
        ("FUSER_PROF", "on", "Parsing PROF failed"),
        ("FUSER_TIMEOUT_S", "soon", "not a positive number"),
        ("FUSER_TIMEOUT_S", "0", "not a positive number"),
        ("FUSER_TIMEOUT_S", "nan", "not a positive number"),
        ("FUSER_MASTER_PORT", "70000", "not a port"),
        ("FUSER_BACKEND", "glo", "did you mean 'gloo'"),
        ("FUSER_TIMEOUT", "5", "unknown environment variable FUSER_TIMEOUT; did you mean"),
    ],
)
def test_a_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=text):
        options.check_environment()


def test_asking_for_an_unknown_dump_is_an_error() -> None:
    with pytest.raises(OptionError, match="did you mean 'host_ir'"):
        options.dump_enabled("hostir")


def test_per_call_options() -> None:
    assert options.check_enable_options(["host_ir_lowering"]) == {"host_ir_lowering"}
    assert options.enabled("host_ir_lowering", ["host_ir_lowering"])
    assert not options.enabled("host_ir_lowering")
    assert options.disabled("infer_contiguity", options.check_disable_options(["infer_contiguity"]))
    with pytest.raises(OptionError, match="Unrecognized enable_option: nope"):
        options.check_enable_options(["nope"])
    with pytest.raises(OptionError, match="Unrecognized disable_option: host_ir_lowering"):
        options.check_disable_options(["host_ir_lowering"])
    with pytest.raises(OptionError, match="list of names"):
        options.check_enable_options("host_ir_lowering")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert options.cache_dir() == tmp_path / "fuser-hostir"
    monkeypatch.setenv("FUSER_CACHE_DIR", str(tmp_path / "kernels"))
    assert options.cache_dir() == tmp_path / "kernels"
