"""llm.c's random streams to the bit, and every other generator that a run draws from.

llm.c rounds weights to bfloat16 stochastically: a 64-bit xorshift* stream gives one seed per tensor
and update, and a hash of (seed, position) gives the noise (llmc/sampler.h, llmc/cuda_utils.cuh).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner import native
from runner.api import State

START = 13371337  # llm.c's first state on rank 0; every rank uses it here
_MASK = (1 << 64) - 1
_MULTIPLIER = 0x2545F4914F6CDD1D
_PRIME = 198491317  # of the second coordinate of the noise
BLOCK = 512  # threads of llm.c's AdamW kernel, which its noise positions are made of


def xorshift(state: int) -> tuple[int, int]:
    """Return the next state and its 32-bit draw of the xorshift* stream."""
    state ^= state >> 12
    state = (state ^ (state << 25)) & _MASK
    state ^= state >> 27
    return state, (state * _MULTIPLIER & _MASK) >> 32


def uniform(draw: int) -> float:
    """Return the float32 in [0, 1) that llm.c makes of a 32-bit draw."""
    return (draw >> 8) / 16777216.0


def draws(state: int, count: int) -> tuple[int, list[int]]:
    """Return the state after `count` draws, and the draws."""
    out = []
    for _ in range(count):
        state, draw = xorshift(state)
        out.append(draw)
    return state, out


class ModelRng:
    """llm.c's model stream: a draw per micro-step, then one per tensor of an update that is applied.

    fp32 runs draw too, as llm.c's do. On a GPU the state lives on the device, because only the device
    knows in time whether the update is applied; reading `state` there waits for it.

    All ranks share the stream, drawing once per micro-step as llm.c's rank 0. `draws` (supplied, an
    engine's `draws_per_micro_step`) is more where the bits must not depend on the number of ranks.
    """

    def __init__(self, *, device: torch.device | None = None, draws: int = 1) -> None:
        on_gpu = device is not None and device.type == "cuda"
        self._state = START
        self._last_update = START
        self._draws = draws
        self._pending = 0  # draws of micro-steps, not yet made
        self._on_device = torch.tensor([START, START], device=device) if on_gpu else None

    @property
    def state(self) -> int:
        """The state before the next draw."""
        state = self._state if self._on_device is None else int(self._on_device[0]) & _MASK
        return draws(state, self._pending)[0]

    @property
    def last_update(self) -> int:
        """The state before the draws of the last applied update: what re-rounds its weights."""
        return self._last_update if self._on_device is None else int(self._on_device[1]) & _MASK

    def micro_step(self) -> None:
        """Draw the seed that llm.c's embedding backward takes."""
        self._pending += self._draws

    def update(self, count: int) -> list[int]:
        """Return the seeds of `count` tensors for an update that is applied."""
        assert self._on_device is None, "on a GPU the seeds are drawn by `update_on_device`"
        self._state = self._last_update = self.state
        self._pending = 0
        self._state, seeds = draws(self._state, count)
        return seeds

    def update_on_device(self, count: int, *, apply: Tensor) -> Tensor:
        """Return `count` seeds int32 (the draws' bits); advance past them only if `apply` [] bool."""
        assert self._on_device is not None
        kernels = native.triton_kernels() if self._on_device.is_cuda else None
        if kernels is not None:
            pending, self._pending = self._pending, 0
            seeds: Tensor = kernels.draws(self._on_device, pending=pending, count=count, apply=apply)
            return seeds
        return self._draw_by_torch(count, apply=apply)

    def _draw_by_torch(self, count: int, *, apply: Tensor) -> Tensor:
        assert self._on_device is not None
        state = self._on_device[0].clone()
        for _ in range(self._pending):
            state, _seed = _xorshift_on_device(state)
        self._pending = 0
        before, drawn = state, []
        for _ in range(count):
            state, seed = _xorshift_on_device(state)
            drawn.append(seed)
        self._on_device[1] = torch.where(apply, before, self._on_device[1])
        self._on_device[0] = torch.where(apply, state, before)
        return torch.stack(drawn).to(torch.int32)

    def state_dict(self) -> State:
        return {"state": self.state, "last_update": self.last_update}

    def load_state_dict(self, state: State) -> None:
        self._pending = 0
        self._state, self._last_update = int(state["state"]), int(state["last_update"])
        if self._on_device is not None:
            both = np.array([self._state, self._last_update], dtype=np.uint64).view(np.int64)
            self._on_device.copy_(torch.from_numpy(both))


def _xorshift_on_device(state: Tensor) -> tuple[Tensor, Tensor]:
    """Do `xorshift` in wrapping int64; the draw is sign-extended from its 32 bits."""
    state = state ^ (state >> 12 & (1 << 52) - 1)
    state = state ^ (state << 25)
    state = state ^ (state >> 27 & (1 << 37) - 1)
    return state, state * _MULTIPLIER >> 32


# ---------------------------------------------------------------- noise and rounding


def _signed(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    return x >> bits & (1 << 32 - bits) - 1  # torch shifts int32 arithmetically: clear what it drags in


def squirrel_noise(position: Tensor, *, seed: int | Tensor) -> Tensor:
    """Return the noise of int32 `position` (bits of a uint32): SquirrelNoise5."""
    k = position * _signed(0xD2A80A3F)
    k = k + (_signed(seed) if isinstance(seed, int) else seed)
    k = k ^ _shifted(k, 9)
    k = k + _signed(0xA884F197)
    k = k ^ _shifted(k, 11)
    k = k * _signed(0x6C736F4B)
    k = k ^ _shifted(k, 13)
    k = k + _signed(0xB79F3ABB)
    k = k ^ _shifted(k, 15)
    k = k * _signed(0x1B56C4F5)
    return k ^ _shifted(k, 17)


def noise_2d(x: Tensor, y: Tensor, *, seed: int | Tensor) -> Tensor:
    """Return the noise of int32 coordinates: llm.c's Get2dNoiseUint."""
    return squirrel_noise(x + y * _PRIME, seed=seed)


def weight_noise(numel: int, *, start: int, layer: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """Return AdamW's rounding noise [numel] int32 for elements `start`... of one layer of a tensor."""
    i = torch.arange(start, start + numel, dtype=torch.int32, device=device)
    return noise_2d(i & BLOCK - 1, (i & -BLOCK) + layer, seed=seed)


def stochastic_round(x: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 `x` as bfloat16, rounded away from zero with probability (low 16 bits) / 65536.

    As in llm.c a NaN whose payload sits in the low half alone can become an infinity; others give 0x7FFF.
    """
    bits = x.view(torch.int32)
    up = (bits & 0xFFFF) > (noise & 0xFFFF)
    kept = torch.where(up, bits | 0xFFFF, bits & ~0xFFFF)
    is_nan = (kept & 0x7FFFFFFF) > 0x7F800000
    nearest = _shifted(kept + (0x7FFF + (kept >> 16 & 1)), 16)
    return torch.where(is_nan, 0x7FFF, nearest).to(torch.int16).view(torch.bfloat16)


# ---------------------------------------------------------------- general generators


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Seed Python's, numpy's and torch's generators, apart for each rank."""
    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


class Generators:
    """The global generators of Python, numpy and torch (CPU, and `device` if it is a GPU), as state."""

    def __init__(self, *, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None

    def state_dict(self) -> State:
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": {"version": version, "words": list(words), "gauss": gauss},
            "numpy": [name, np.asarray(keys), int(position), int(has_gauss), float(cached)],
            "torch": torch.get_rng_state(),
        }
        if self._device is not None:
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: State) -> None:
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if self._device is not None and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Give every generator back as it was, whatever is drawn inside."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(before)
