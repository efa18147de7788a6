"""Optimizers that update a shard, and those of torch and of other libraries by their own arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from runner.api import Segment
from runner.config import build, check_node
from runner.optimizer.options import assemble
from runner.rng import ModelRng
from runner.signature import signature_of
from tests.test_optimizers import LR, _copied, bits, optimizer, segments, update


@pytest.mark.parametrize("name", ["adamw", "lion", "sophia", "sgd", "nadam"])
def test_a_shard_is_updated_as_part_of_the_whole(name: str) -> None:
    whole, halves = segments(), [segments(), segments()]
    for rank, parts in enumerate(halves):
        for i, part in enumerate(parts):
            n = part.param.shape[1] // 2
            mine = slice(rank * n, (rank + 1) * n)
            offset = whole[i].offset // 2
            views = {"param": part.param[:, mine], "grad": part.grad[:, mine]}
            parts[i] = replace(part, **views, offset=offset, start=rank * n)
    made = [optimizer(name, parts) for parts in (whole, *halves)]
    for step in range(3):
        for one in made:
            update(one, step)
    for part, left, right in zip(whole, *halves, strict=True):
        assert torch.equal(part.param, torch.cat([left.param, right.param], dim=1))


def test_matrix_optimizers_refuse_shards() -> None:
    shard = [Segment("w", "matrix", (4, 4), torch.zeros(1, 8), torch.zeros(1, 8), 0)]
    optimizer("sgd", shard)
    for name in ("muon", "adafactor"):
        with pytest.raises(ValueError, match="needs whole tensors, parallel=zero1"):
            optimizer(name, shard)


def test_any_optimizer_of_torch_by_its_own_arguments() -> None:
    node = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentumm": 0.9, "lr_scale": {"head": 2.0}}
    assert list(check_node(node, "optimizer")) == [
        "optimizer.momentumm: no such option (did you mean optimizer.momentum?)"
    ]
    parts = segments()
    node = {"_target_": "torch.optim.Rprop", "lr": 0.1, "step_sizes": [1e-5, 1.0]}
    update(assemble(parts, node=node, make=build, takes=frozenset({"params"}), rng=ModelRng()))
    fresh = [part.param for part in segments()]
    assert not any(torch.equal(part.param, p) for part, p in zip(parts, fresh, strict=True))

    node = {"_target_": "torch.optim.Adam", "lr": 0.1, "foreach": True, "fused": True}
    with pytest.raises(ValueError, match=r"^optimizer: .*`fused` and `foreach` cannot be"):
        assemble(segments(), node=node, make=build, takes=frozenset({"params"}), rng=ModelRng())


def test_soap_of_a_library_trains_skips_and_goes_on() -> None:
    pytest.importorskip("pytorch_optimizer")
    node = {"_target_": "pytorch_optimizer.SOAP", "lr": LR, "precondition_frequency": 2}
    make = partial(build, trust=("pytorch_optimizer",))
    takes = frozenset(signature_of(node["_target_"]).parameters)
    parts = segments()
    made = assemble(parts, node=node, make=make, takes=takes, rng=ModelRng())
    for step in range(3):
        update(made, step)
    again = segments()
    for part, source in zip(again, parts, strict=True):
        part.param.copy_(source.param)
    resumed = assemble(again, node=node, make=make, takes=takes, rng=ModelRng())
    resumed.load_state_dict(_copied(made.state_dict()))
    update(made, 3, apply=False)
    for step in range(4, 7):
        update(made, step)
        update(resumed, step)
    assert bits(made, parts) == bits(resumed, again)
