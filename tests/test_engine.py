"""The flat layout and the gradients that autograd leaves in it."""

from __future__ import annotations

import mmap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner.api import Slot
from runner.optimizer.adamw import AdamW
from runner.optimizer.groups import DECAYED, roles_of
from runner.parallel import gradient
from runner.parallel.single import Single
from tests.parallel_ranks import Tiny

LLMC = ["ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb"]
LLMC += ["ln2w", "ln2b", "fcw", "fcb", "fcprojw", "fcprojb"]


class Named(nn.Module):
    """Parameters under given names, with 2 elements per dimension of the given number."""

    def __init__(self, **dims: int) -> None:
        super().__init__()
        for name, ndim in dims.items():
            setattr(self, name, nn.Parameter(torch.randn((2,) * ndim)))


class Gpt2(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        dims = {name: 2 if name in ("qkvw", "attprojw", "fcw", "fcprojw") else 1 for name in LLMC}
        self.embed = Named(wte=2, wpe=2)
        self.blocks = nn.ModuleList([Named(**dims) for _ in range(layers)])
        self.final = Named(lnfw=1, lnfb=1)


def test_gpt2_gets_llmcs_tensors_in_file_order() -> None:
    model = Gpt2()
    expected = torch.cat(
        [model.embed.wte.flatten(), model.embed.wpe.flatten()]
        + [getattr(block, name).flatten() for name in LLMC for block in model.blocks]
        + [model.final.lnfw, model.final.lnfb]
    )
    engine = Single()
    engine.place(model)
    names = [slot.name.rpartition(".")[2] for slot in engine.layout]
    assert names == ["wte", "wpe", *LLMC, "lnfw", "lnfb"]
    assert engine.layout[3] == Slot("blocks.*.ln1b", (2,), 3, 8 + 6)
    assert torch.equal(engine.weights, expected.detach())
    assert engine.weights.data_ptr() % mmap.PAGESIZE == engine.gradient.data_ptr() % mmap.PAGESIZE == 0


def test_llmc_decays_six_tensors() -> None:
    decayed = {name.rpartition(".")[2] for name, role in roles_of(Gpt2()).items() if role in DECAYED}
    assert decayed == {"wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"}


def test_roles_of_a_strangers_model() -> None:
    class Stranger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(4, 2)
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.norm = nn.LayerNorm(2)
            self.lm_head = nn.Linear(2, 4)

    model = Stranger()
    assert list(roles_of(model).values()) == [
        "embedding",
        *["matrix", "vector"] * 2,
        *["vector"] * 2,
        *["head", "vector"],
    ]
    model.roles = {"layers.0.weight": "vector"}
    assert roles_of(model)["layers.0.weight"] == "vector"
    assert roles_of(model)["layers.1.weight"] == "matrix"
    model.roles = {"bias": "matrx"}
    with pytest.raises(ValueError, match=r"model.roles\['bias'\]: 'matrx' is not a role"):
        roles_of(model)


def test_layers_that_differ_are_not_stacked_and_tied_parameters_appear_once() -> None:
    engine = Single()
    engine.place(nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))}))
    assert [(slot.name, slot.layers) for slot in engine.layout] == [
        ("net.0.weight", 1),
        ("net.1.weight", 1),
        ("net.2.weight", 1),
        ("net.*.bias", 3),
    ]
    engine.place(Tiny())
    assert [slot.name for slot in engine.layout].count("embed.weight") == 1
    assert not any("head" in slot.name for slot in engine.layout)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Identity(), "no parameters"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), "torch.bfloat16, torch.float32"),
        (nn.Linear(2, 2).double(), "torch.float64"),
        (nn.Linear(2, 2).requires_grad_(False), "'weight' has requires_grad=False"),
    ],
)
def test_what_cannot_share_a_buffer_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Single().place(model)


@pytest.mark.parametrize("large", [1, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_flat_gradient_is_autograds(
    large: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two steps of two micro-batches, with a parameter that only the first uses."""
    monkeypatch.setattr(gradient, "LARGE", large)
    plain, ours = Tiny().to(dtype), Tiny().to(dtype)
    ours.load_state_dict(plain.state_dict())
    engine = Single()
    engine.place(ours)
    for step in range(2):
        engine.zero_grad()
        expected = torch.zeros_like(engine.gradient)
        for i in range(2):
            tokens = torch.randint(16, (2, 6))
            _loss(plain, tokens, step=step).backward()
            expected += torch.cat([_stacked(plain, slot) for slot in engine.layout])
            plain.zero_grad()
            with engine.micro_batch(last=i == 1):
                _loss(ours, tokens, step=step).backward()
        engine.finish_gradient_sync()
        assert torch.equal(engine.gradient, expected)


def _loss(model: Tiny, tokens: torch.Tensor, *, step: int) -> torch.Tensor:
    loss = model(tokens)
    return loss + model.unused.weight.float().sum() if step == 0 else loss


def _stacked(model: nn.Module, slot: Slot) -> torch.Tensor:
    names = [slot.name.replace("*", str(layer)) for layer in range(slot.layers)]
    parameters = [model.get_parameter(name) for name in names]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([grad.float().flatten() for grad in grads])


def test_an_update_reaches_the_model() -> None:
    engine = Single()
    model = engine.place(nn.Linear(3, 2))
    optimizer = engine.optimizer(lambda segments: AdamW(segments, lr=0.1, weight_decay=0.0))
    before = model.weight.detach().clone()
    engine.zero_grad()
    with engine.micro_batch(last=True):
        F.linear(torch.ones(1, 3), model.weight, model.bias).sum().backward()
    engine.finish_gradient_sync()
    assert float(engine.grad_norm()) == pytest.approx(8**0.5)
    optimizer.update(step=0, lr=0.1, scale=torch.tensor(1.0), apply=torch.tensor(True))
    assert torch.allclose(model.weight, before - 0.1, atol=1e-6)
    assert model.weight.data_ptr() == engine.weights.data_ptr()
