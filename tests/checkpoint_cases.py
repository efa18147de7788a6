"""Small snapshots that the checkpoint tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from runner.api import Slot, Snapshot
from runner.checkpoint.llmc_format import gpt2_layout

SHAPE = {
    "max_seq_len": 16,
    "vocab_size": 100,
    "layers": 2,
    "heads": 2,
    "channels": 8,
    "padded_vocab": 128,
}


def twister() -> bytes:
    """Return the struct of llm.c's generator as it is after seeding, with seed_ 0."""
    state = np.arange(624, dtype="<u4")
    head = (0).to_bytes(8, "little") + (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    return head + state.tobytes() + np.array([0, 0x9908B0DF], "<u4").tobytes()


def stream(order: str = "shuffle", *, samples: int = 5) -> dict[str, Any]:
    at: dict[str, Any] = {"order": order, "shard_slot": 1, "sample_slot": 3}
    if order == "shuffle":
        at |= {"shard_order": np.array([2, 0, 1], np.int32), "samples": samples, "twister": twister()}
        at["sample_order"] = np.roll(np.arange(samples, dtype=np.int32), 2)
    return at


def gpt2_snapshot(
    step: int = 20,
    *,
    rank: int = 0,
    world: int = 1,
    dtype: torch.dtype = torch.float32,
    master: bool = False,
    sharded: bool = False,
    order: str = "shuffle",
) -> Snapshot:
    """Make one rank's snapshot; the values depend on the step, so that a mixture shows."""
    layout = gpt2_layout(SHAPE)
    params = sum(slot.numel for slot in layout)
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(params, generator=generator).to(dtype)
    names = ("m", "v", "master") if master else ("m", "v")
    numel = params // world if sharded else params
    return Snapshot(
        step=step,
        rank=rank,
        world=world,
        layout=layout,
        model={"kind": "gpt2", **SHAPE},
        weights=weights,
        optimizer={name: torch.randn(numel, generator=generator) for name in names},
        stream=stream(order),
        rng={"state": 2**63 + step, "last_update": step},
        parts={
            "outlier": {"window": torch.arange(3.0), "sum": float("nan")},
            "clock": {"seconds": 0.1 * step},
        },
        env={"threads": 1, "torch": "x"},
    )


def other_snapshot(step: int = 20) -> Snapshot:
    """Make a snapshot of a model and an optimizer that llm.c does not know."""
    layout = (Slot("embed", (7, 4), 1, 0), Slot("layers.*.gate", (4, 3), 2, 28))
    generator = torch.Generator().manual_seed(step)
    moments = {"exp_avg": torch.randn(4, 3, generator=generator), "step": step, "beta": 0.9}
    state = {"groups": [moments, (1, None, b"\x00\xff")], "flag": True, "nan": float("inf")}
    return replace(
        gpt2_snapshot(step),
        layout=layout,
        model={"kind": "llama", "layers": 2},
        weights=torch.randn(52, generator=generator),
        optimizer=state,
    )


def assert_equal(a: Any, b: Any) -> None:
    """Compare nested state by type and bits."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.numel():
            bits = [t.contiguous().clone().reshape(-1).view(torch.uint8) for t in (a, b)]
            assert torch.equal(*bits)
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    else:
        assert repr(a) == repr(b)


def assert_same_snapshot(a: Snapshot, b: Snapshot) -> None:
    for name in (
        "step",
        "rank",
        "world",
        "layout",
        "model",
        "weights",
        "optimizer",
        "stream",
        "rng",
        "parts",
        "env",
    ):
        assert_equal(getattr(a, name), getattr(b, name))
