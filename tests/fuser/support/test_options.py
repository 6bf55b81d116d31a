"""The table of environment variables and per-call options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import platformdirs
import pytest

from fuser.support import options
from fuser.support.errors import OptionError
from fuser.support.options import EFFECTS, NO_EFFECT


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
        ("FUSER_DUMP", "host_ir(shrt)", r"host_ir\(shrt\) is not known: .*did you mean 'short'"),
        ("FUSER_DUMP", "host_ir(short,full)", r"host_ir\(short,full\) is not known: expected"),
        ("FUSER_DUMP", "cuda_kernel(3)", r"cuda_kernel takes no arguments, got cuda_kernel\(3\)"),
        ("FUSER_ENABLE", "machine(h100)", r"machine\(h100\) is not known: .*machine\(\*.json\)"),
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


def test_settings_are_one_object_per_content(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = options.settings()
    assert not plain.enabled("checked")
    assert plain.argument("schedules_for") is None
    # Names without effect do not cause another program to be compiled.
    assert options.settings(["host_ir_lowering"], ["matmul_expr_eval"]) is plain
    per_call = options.settings(["checked", "schedules_for(h200)"])
    assert per_call.enabled("checked")
    assert per_call.argument("schedules_for") == "h200"
    monkeypatch.setenv("FUSER_ENABLE", "schedules_for(h200),checked")
    assert options.settings() is per_call
    assert options.settings(["checked"]) is per_call


@pytest.mark.parametrize(
    ("enable", "disable", "text"),
    [
        (["nope"], (), "Unrecognized enable_option: nope"),
        (["cheked"], (), "did you mean 'checked'"),
        ((), ["host_ir_lowering"], "Unrecognized disable_option: host_ir_lowering"),
        ("checked", (), "list of names"),
        (None, (), "list of names"),
        ([1], (), "Unrecognized enable_option: 1"),
        (["schedules_for"], (), r"expected schedules_for\(h200\)"),
        (["schedules_for(h100)"], (), r"schedules_for\(h100\) is not known"),
        (["checked(1)"], (), "checked takes no arguments"),
        ((), ["multidevice"], "set it in FUSER_DISABLE"),
    ],
)
def test_bad_options_of_a_call(enable: Any, disable: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        options.settings(enable, disable)


def test_asking_for_a_feature_without_effect_is_an_error() -> None:
    """No code can depend on a name that has no effect."""
    with pytest.raises(OptionError, match="not a DISABLE option"):
        options.settings().disabled("matmul_expr_eval")


def test_every_name_is_documented_and_does_one_thing() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "options.md").read_text()
    for kind in options.KINDS:
        assert not EFFECTS[kind].keys() & NO_EFFECT[kind].keys()
        for name, why in {**EFFECTS[kind], **NO_EFFECT[kind]}.items():
            assert f"`{name}`" in text, f"{name} of FUSER_{kind}"
            assert why in text, f"the meaning of {name} of FUSER_{kind}"
    for variable in options.VARIABLES.values():
        assert f"`{variable.name}`" in text


@pytest.mark.parametrize("port", ["\u0663\u0663", "\u00b2", "1" * 5000, "-1", "0", "65536"])
@pytest.mark.finding("F53")
def test_a_port_is_written_in_ascii_digits(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("FUSER_MASTER_PORT", port)
    with pytest.raises(OptionError, match="not a port number"):
        options.master_port()


@pytest.mark.finding("F53")
def test_the_cache_of_an_unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_CACHE_DIR", "~no-such-user-here/kernels")
    with pytest.raises(OptionError, match="FUSER_CACHE_DIR='~no-such-user-here/kernels'"):
        options.cache_dir()
    monkeypatch.delenv("FUSER_CACHE_DIR")

    def has_no_home(*_: object, **__: object) -> Path:
        raise RuntimeError("no home directory")

    monkeypatch.setattr(platformdirs, "user_cache_path", has_no_home)
    with pytest.raises(OptionError, match="FUSER_CACHE_DIR is not set: no home directory"):
        options.cache_dir()


def test_a_name_that_prints_nothing_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_DUMP", "ptx")
    with pytest.warns(UserWarning, match="FUSER_DUMP: nothing is printed for ptx"):
        options.check_environment()


def test_a_dump_that_exists_elsewhere_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVFUSER_DUMP", "fusion_ir_math,python_definition,launch_param,ptx")
    with pytest.warns(UserWarning, match="nothing is printed for") as seen:
        options.check_environment()
    text = str(seen[0].message)
    for words in (
        "fusion_ir_math (fd.fusion.print_math() returns this text)",
        "python_definition (repr(fd) is this text)",
        "launch_param (FUSER_PROF=print shows grid and block of each kernel)",
        "ptx (no such text exists here)",
    ):
        assert words in text, text


def test_an_unknown_option_of_a_call_lists_the_options_and_the_line() -> None:
    words = r"Unrecognized enable_option: id_model\nAvailable options: checked, double_numbers, "
    with pytest.raises(OptionError, match=rf"{words}.*tune \(user code at .*test_options\.py:\d"):
        options.settings(["id_model"])


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FUSER_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert options.cache_dir() == tmp_path / "fuser-hostir"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert options.cache_dir() == tmp_path / "home" / ".cache" / "fuser-hostir"
    monkeypatch.setenv("FUSER_CACHE_DIR", str(tmp_path / "kernels"))
    assert options.cache_dir() == tmp_path / "kernels"
