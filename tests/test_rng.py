"""llm.c's generators and rounding against golden values; every generator against its own state."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner import rng

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rng.json").read_text())


def int32(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64).astype(np.uint32).view(np.int32))


def uint32(tensor: torch.Tensor) -> list[int]:
    return tensor.numpy().view(np.uint32).tolist()


@pytest.mark.parametrize("case", GOLDEN["xorshift"], ids=lambda case: case["start_state"])
def test_xorshift_draws(case: dict) -> None:
    state = case["start_state_dec"]
    for u32, after, f32 in zip(case["u32"], case["state_after_each"], case["f32"], strict=True):
        state, draw = rng.xorshift(state)
        assert (draw, state) == (u32, int(after, 16))
        assert np.float32(rng.uniform(draw)) == np.float32(f32)


def test_noise() -> None:
    for position, seed, expected in GOLDEN["SquirrelNoise5"]:
        assert uint32(rng.squirrel_noise(int32([position]), seed=seed)) == [expected]
    for x, y, seed, expected in GOLDEN["Get2dNoiseUint"]:
        assert uint32(rng.noise_2d(int32([x]), int32([y]), seed=seed)) == [expected]


def test_stochastic_rounding_of_every_kind_of_value() -> None:
    for bits, x, block_x, block_y, block, seed, threshold, expected in GOLDEN["stochastic_rounding"]:
        noise = rng.noise_2d(int32([x]), int32([block_x * block + block_y]), seed=seed)
        assert uint32(noise)[0] & 0xFFFF == threshold
        rounded = rng.stochastic_round(int32([bits]).view(torch.float32), noise)
        assert rounded.view(torch.int16).item() & 0xFFFF == expected, hex(bits)


def test_rounding_is_unbiased() -> None:
    noise = rng.weight_noise(1_000_000, start=0, layer=0, seed=42, device=torch.device("cpu"))
    rounded = rng.stochastic_round(torch.full((1_000_000,), 1.00317), noise)
    assert abs(rounded.double().mean().item() - GOLDEN["mean_of_1e6_roundings_of_1.00317"]) < 1e-5


@pytest.mark.parametrize(
    "case", GOLDEN["training_rng"], ids=lambda c: f"rank{c['rank']}-{c['grad_accum_steps']}"
)
def test_the_model_stream_of_a_run(case: dict) -> None:
    stream = rng.ModelRng()
    assert stream.state == rng.START
    stream.load_state_dict({"state": rng.START + case["rank"], "last_update": 0})
    for step in case["steps"]:
        for seed in step["encoder_seeds"]:
            assert rng.xorshift(stream.state)[1] == seed
            stream.micro_step()
        assert stream.update(16) == step["tensor_seeds"]
        assert stream.last_update == int(step["rng_state_last_update"], 16)
        assert stream.state == int(step["rng_state_after"], 16)


def test_a_skipped_update_draws_only_its_micro_steps() -> None:
    skipped, plain = rng.ModelRng(), rng.ModelRng()
    for stream in (skipped, plain):
        stream.micro_step()
        stream.update(16)
    last = plain.last_update
    skipped.micro_step()  # and no update
    assert skipped.last_update == last
    assert skipped.state == rng.xorshift(plain.state)[0]


@given(state=st.integers(1, 2**64 - 1), pending=st.integers(0, 3), apply=st.booleans())
def test_the_stream_on_a_device_equals_the_one_on_the_host(state: int, pending: int, apply: bool) -> None:
    host, device = rng.ModelRng(), rng.ModelRng()
    device._on_device = torch.zeros(2, dtype=torch.int64)  # what a GPU would hold
    for stream in (host, device):
        stream.load_state_dict({"state": state, "last_update": 7})
        for _ in range(pending):
            stream.micro_step()
    seeds = device.update_on_device(5, apply=torch.tensor(apply))
    if apply:
        assert uint32(seeds) == host.update(5)
    assert device.state_dict() == host.state_dict()


def test_generators_come_back() -> None:
    rng.seed_everything(3, rank=1)
    generators = rng.Generators()
    random.gauss(0, 1), np.random.randn()
    kept = generators.state_dict()

    def drawn() -> tuple:
        return random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(3).tolist()

    first = drawn()
    generators.load_state_dict(kept)
    assert drawn() == first


def test_ranks_are_seeded_apart_and_repeatably() -> None:
    def drawn(rank: int) -> float:
        rng.seed_everything(3, rank=rank)
        return torch.rand(()).item()

    assert drawn(0) == drawn(0) != drawn(1)
