"""Tensors over memory that torch has not made, on the device that they are said to be on.

Torch looks up where a pointer lies; of memory of several GPUs side by side that is the first one's.
DLPack says it. https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_DEVICES = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class Holder:
    """What a tensor holds for as long as its memory is in use."""


# What tensors stand on: by the address of what torch was given.
_held: dict[int, Any] = {}


def _drop(address: int, held: dict[int, Any] = _held) -> None:
    held.pop(address, None)


_let_go = _Deleter(_drop)
# Torch may let go of memory when this module has gone already.
for _one in (_held, _let_go):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_one))


def raw_tensor(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Returns so many bytes at an address as uint8; the tensor's memory holds `owner`."""
    sizes, strides = (ctypes.c_int64 * 1)(nbytes), (ctypes.c_int64 * 1)(1)
    where = _Device(_DEVICES[device.type], device.index or 0)
    made = _Tensor(address, where, 1, _DType(_UNSIGNED, 8, 1), sizes, strides, 0)
    managed = _Managed(made, None, _let_go)
    _held[ctypes.addressof(managed)] = managed, sizes, strides, owner
    return torch.from_dlpack(_capsule()(ctypes.addressof(managed), _NAME, None))


@cache
def _capsule() -> Any:
    made = ctypes.pythonapi.PyCapsule_New
    made.restype = ctypes.py_object
    made.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return made
