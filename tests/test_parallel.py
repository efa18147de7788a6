"""Real gloo ranks: bits across ranks, across world sizes and across a resume."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.parallel.ddp import Ddp
from runner.parallel.layout import layout_of
from runner.parallel.shard import check_divisible
from runner.parallel.single import Single

ROOT = Path(__file__).parent.parent
WORLDS = (1, 2, 4)
KINDS = ("ddp-native", "ddp-sent", "ddp-canonical", "zero1-native", "zero1-canonical")
Seen = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What every rank of 1, 2 and 4 saw; all programs are started at once."""
    folder = tmp_path_factory.mktemp("ranks")
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "parallel_ranks.py"), str(rank), str(world), str(folder)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for world in WORLDS
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(errors)
    return {
        world: [torch.load(folder / f"seen-{world}-{rank}.pt", weights_only=False) for rank in range(world)]
        for world in WORLDS
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["", "-bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_hold_the_same_bits(seen: Seen, kind: str, dtype: str) -> None:
    for world in WORLDS:
        first, *others = (rank[kind + dtype] for rank in seen[world])
        assert torch.isfinite(first["weights"]).all()
        for other in others:
            assert same(other["weights"], first["weights"])
            assert (other["norms"], other["losses"]) == (first["norms"], first["losses"])


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["", "-bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_the_uninterrupted_one(seen: Seen, kind: str, dtype: str) -> None:
    for world in WORLDS:
        for rank in seen[world]:
            whole, resumed = rank[kind + dtype], rank[f"{kind}{dtype}-resumed"]
            assert same(resumed["weights"], whole["weights"])
            assert resumed["norms"] == whole["norms"]
            assert resumed["rng"] == whole["rng"]
            for name, value in whole["state"].items():
                assert same(resumed["state"][name], value)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["", "-bf16"])
def test_canonical_bits_do_not_depend_on_ranks_or_sharding(seen: Seen, dtype: str) -> None:
    reference = seen[1][0]["ddp-canonical" + dtype]
    for world in WORLDS:
        for kind in ("ddp-canonical", "zero1-canonical"):
            for rank in seen[world]:
                assert same(rank[kind + dtype]["weights"], reference["weights"]), (world, kind)
                assert rank[kind + dtype]["norms"] == reference["norms"], (world, kind)
                assert rank[kind + dtype]["rng"] == reference["rng"], (world, kind)


@pytest.mark.dist
def test_canonical_bits_hold_for_a_number_of_micro_batches_that_is_no_power_of_two(seen: Seen) -> None:
    one, two = (seen[world][0]["ddp-canonical-6"] for world in (1, 2))
    assert same(one["weights"], two["weights"])
    assert same(seen[2][1]["zero1-canonical-6"]["weights"], one["weights"])


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_trains_the_same_model(seen: Seen, kind: str) -> None:
    reference = seen[1][0]["ddp-native"]
    for world in WORLDS:
        run = seen[world][0][kind]
        assert torch.allclose(run["weights"], reference["weights"], atol=2e-4)
        assert run["norms"] == pytest.approx(reference["norms"], rel=1e-4)
        assert run["losses"] == pytest.approx(reference["losses"], rel=1e-4)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["", "-bf16"])
def test_each_rank_keeps_its_part_of_every_tensor_and_layer(seen: Seen, dtype: str) -> None:
    whole = seen[1][0]["zero1-canonical" + dtype]
    for world in WORLDS:
        for number, rank in enumerate(seen[world]):
            run = rank["zero1-canonical" + dtype]
            assert set(run["state"]) == ({"m", "v", "master"} if dtype else {"m", "v"})
            for name, mine in run["state"].items():
                assert mine.numel() == whole["weights"].numel() // world
                pieces = [
                    layer.chunk(world)[number]
                    for slot in run["layout"]
                    for layer in whole["state"][name][slot.offset : slot.offset + slot.numel].view(
                        slot.layers, -1
                    )
                ]
                assert same(torch.cat(pieces), mine)


@pytest.mark.dist
def test_values_and_flags_are_agreed(seen: Seen) -> None:
    for world in WORLDS:
        for rank in seen[world]:
            assert rank["mean"] == seen[world][0]["mean"]
            assert rank["mean"].dtype == torch.float32
            assert float(rank["mean"]) == pytest.approx(0.1 * (world + 1) / 2)
            assert rank["any"] == [True, False]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"parallel: single runs 1 process, but 2 were started"):
        Single(world=2)
    with pytest.raises(ValueError, match=r"parallel.processes: 3, but 1 were started"):
        Ddp(processes=3)
    with pytest.raises(ValueError, match=r"canonical needs a power-of-two number of processes, not 3"):
        Ddp(world=3, reduce="canonical")
    with pytest.raises(ValueError, match=r"zero1 cannot cut 'bias' \[7\] \(7 elements\) into 2 equal parts"):
        check_divisible(layout_of(nn.Linear(8, 7)).slots, world=2)


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="no shared memory here")
def test_two_ranks_add_to_the_same_bits_in_shared_memory_and_by_messages(seen: Seen) -> None:
    for rank in seen[2]:
        shared, sent = rank["ddp-native"], rank["ddp-sent"]
        assert (shared["adds_in"], sent["adds_in"]) == ("shared memory", "native")
        assert same(shared["weights"], sent["weights"])
        assert same(shared["gradient"], sent["gradient"])
        assert shared["norms"] == sent["norms"]
