"""AdamW's compiled CPU kernel: one pass over memory for any number of threads, the definition's bits."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence

import torch

from runner import native
from runner.api import Segment
from runner.optimizer import reference
from runner.optimizer.reference import Part, Step

_log = logging.getLogger(__name__)


class _Step(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in Step._fields)


class _Part(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("param", "grad", "m", "v", "master")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "param_stride", "grad_stride", "start")),
        ("decay", ctypes.c_float),
        ("seed", ctypes.c_uint32),
    )


class Compiled:
    """The kernel bound to parts whose buffers stay where they are."""

    def __init__(self, parts: Sequence[Part], *, kernel: Callable[..., None]) -> None:
        self._kernel = kernel
        self._keep = tuple(parts)  # the addresses below are only as good as these tensors
        self._parts = (_Part * len(parts))(*map(_described, parts))
        self._half = int(parts[0].segment.param.dtype == torch.bfloat16)

    def update(self, *, step: Step, seeds: Sequence[int]) -> None:
        """Update every part in place."""
        for part, seed in zip(self._parts, seeds, strict=True):
            part.seed = seed
        scalars = _Step(*(float(value) for value in step))
        threads = torch.get_num_threads()
        self._kernel(self._parts, len(self._parts), ctypes.byref(scalars), self._half, threads)


def bind(parts: Sequence[Part]) -> Compiled | None:
    """Return the compiled update of `parts`, or None where no kernel may be used."""
    if parts[0].m.device.type != "cpu" or not _proved():
        return None
    kernel = _kernel()
    return None if kernel is None else Compiled(parts, kernel=kernel)


def _described(part: Part) -> _Part:
    param, grad = part.segment.param, part.segment.grad
    assert param.stride(1) == grad.stride(1) == 1, "a segment's rows are contiguous"
    assert all(state.is_contiguous() for state in (part.m, part.v, part.master) if state is not None)
    return _Part(
        param=param.data_ptr(),
        grad=grad.data_ptr(),
        m=part.m.data_ptr(),
        v=part.v.data_ptr(),
        master=None if part.master is None else part.master.data_ptr(),
        rows=param.shape[0],
        cols=param.shape[1],
        param_stride=param.stride(0),
        grad_stride=grad.stride(0),
        start=part.segment.start,
        decay=part.decay,
    )


@functools.cache
def _kernel() -> Callable[..., None] | None:
    library = native.load("update")
    if library is None:
        return None
    kernel = library.functions.runner_adamw
    kernel.argtypes = [
        ctypes.POINTER(_Part),
        ctypes.c_int64,
        ctypes.POINTER(_Step),
        *[ctypes.c_int64] * 2,
    ]
    kernel.restype = None
    return kernel


@functools.cache
def _proved() -> bool:
    """Whether the kernel gives the reference's bits on this CPU, for every kind of weights."""
    kernel = _kernel()
    if kernel is None:
        return False
    for half, keep_master in ((False, False), (True, False), (True, True)):
        ours, theirs = (_trial(half=half, keep_master=keep_master) for _ in range(2))
        for t in (1, 2):
            step = trial_step(t=t)
            Compiled([ours], kernel=kernel).update(step=step, seeds=[0x9E3779B9])
            reference.update([theirs], step=step, seeds=[0x9E3779B9])
        if not all(map(_same_bits, _tensors(ours), _tensors(theirs))):
            _log.warning(
                "the compiled AdamW differs from its definition on this CPU; the torch path runs instead"
            )
            return False
    return True


def trial_step(*, t: int) -> Step:
    """Return plausible scalars of step `t` for a trial."""
    values = (0.7, 1e-3, 0.9, 0.95, 1 - 0.9**t, 1 - 0.95**t, 1e-8)
    return Step(*(torch.tensor(value, dtype=torch.float32) for value in values))


def _trial(*, half: bool, keep_master: bool, shape: tuple[int, int] = (2, 611)) -> Part:
    numel = shape[0] * shape[1]
    wave = torch.sin(torch.arange(4 * numel, dtype=torch.float64) * 12.9898).view(4, *shape)
    exponent = torch.arange(numel).view(shape) % 60 - 50  # from ordinary numbers down to subnormal squares
    grad = (wave[0] * 2.0**exponent).float()
    weights = wave[1].float()
    param = weights.bfloat16() if half else weights.clone()
    segment = Segment("trial", "matrix", (shape[1],), param, grad, 0, start=3)
    m, v = (wave[2] * 2.0**exponent).float(), (wave[3].square() * 2.0 ** (2 * exponent)).float()
    return Part(segment, m, v, weights.clone() if keep_master else None, 0.1)


def _tensors(part: Part) -> list[torch.Tensor]:
    held = (part.segment.param, part.m, part.v, part.master)
    return [tensor for tensor in held if tensor is not None]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
