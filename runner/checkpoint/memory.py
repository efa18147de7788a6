"""Copy and check a training state's memory, in compiled code (memory.c) where there is any."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch

from runner import native
from runner.checkpoint.disk import Bytes


def copy(data: Bytes, place: Bytes) -> None:
    """Copy `data` to `place`, which is of its size and page-aligned: by all threads, as training waits."""
    compiled = _functions()
    if compiled is not None:
        compiled.runner_copy(place.ctypes.data, data.ctypes.data, len(data), torch.get_num_threads())
    elif data.flags.writeable:  # a tensor's memory
        torch.from_numpy(place).copy_(torch.from_numpy(data))
    else:
        np.copyto(place, data)


def any_not_finite(data: Bytes, *, width: int, infinity: int) -> bool | None:
    """Whether any number of `width` bytes is nan or inf, whose bits are `infinity`; None if nobody knows."""
    compiled = _functions()
    if compiled is None or width not in (2, 4):
        return None
    find = compiled.runner_any_not_finite_16 if width == 2 else compiled.runner_any_not_finite_32
    return bool(find(data.ctypes.data, len(data) // width, infinity))


@functools.cache
def _functions() -> ctypes.CDLL | None:
    library = native.load("memory")
    if library is None:
        return None
    found, (pointer, count) = library.functions, (ctypes.c_void_p, ctypes.c_int64)
    found.runner_copy.argtypes, found.runner_copy.restype = [pointer, pointer, count, count], None
    for find, bits in (
        (found.runner_any_not_finite_16, ctypes.c_uint16),
        (found.runner_any_not_finite_32, ctypes.c_uint32),
    ):
        find.argtypes, find.restype = [pointer, count, bits], count
    return found
