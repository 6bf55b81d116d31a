"""docs/reference/api.md lists everything that the packages export."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

import fuser
import hostir
import multidevice
from fuser.support.errors import FuserError
from hostir.ir.ops import HOST_OPS
from tests.support.jobs import ROOT

_PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()


@pytest.mark.parametrize("package", [fuser, multidevice, hostir], ids=lambda p: p.__name__)
def test_every_public_name_is_on_the_page(package: ModuleType) -> None:
    names = [name for name in getattr(package, "__all__", dir(package)) if name[0] != "_"]
    # Errors and host operations have pages of their own.
    elsewhere = {cls.__name__ for cls in HOST_OPS} | {
        name
        for name in names
        if isinstance(value := getattr(package, name), type) and issubclass(value, FuserError)
    }
    missing = [
        name
        for name in names
        if name not in elsewhere
        and not re.search(rf"`(fuser\.)?{name}`|^::: \S+\.{name}$", _PAGE, re.MULTILINE)
    ]
    assert not missing


def test_documented_names_exist() -> None:
    for path in re.findall(r"^::: (\S+)$", _PAGE, re.MULTILINE):
        module, _, name = path.rpartition(".")
        assert hasattr(__import__(module, fromlist=[name]), name), path
