"""The gradient of a tied embedding, which goes from the loss to the embedding without a tensor of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runner.model import pool
from runner.model.gpt2 import GPT2
from runner.parallel.flat import Flat

VOCAB = 1031  # times 64 channels: large enough for the engine to offer its buffer


def model(kernels: str = "fast", *, chunk: int | None = None) -> GPT2:
    shape = {"layers": 1, "heads": 2, "width": 64, "max_seq_len": 8, "vocab_size": VOCAB}
    return GPT2(**shape, kernels=kernels, loss_chunk=chunk)  # type: ignore[arg-type]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))
    tokens[0, :4] = 5  # a token that occurs often
    return tokens[:, :-1], tokens[:, 1:]


def gradients(network: nn.Module) -> list[Tensor]:
    return [p.grad for p in network.parameters() if p.grad is not None]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-6) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("chunk", [None, 5])
def test_gradient_equals_autograds(scale: float, chunk: int | None) -> None:
    ours, plain = model(chunk=chunk), model("plain")
    for network in (ours, plain):
        (network(*batch()) * scale).backward()
    assert_close(gradients(ours), gradients(plain))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradient_in_the_engines_buffer_equals_autograds(*, bf16: bool, passes: int) -> None:
    """Twice, since the second step finds the buffer full of the first one's gradient."""
    plain = model("plain")
    engine = Flat(rank=0, world=1, device=torch.device("cpu"))
    network = engine.place(model())
    for step in range(2):
        plain.zero_grad()
        engine.zero_grad()
        for i in range(passes):
            with engine.micro_batch(last=i == passes - 1), torch.autocast("cpu", torch.bfloat16, bf16):
                loss = network(*batch(step * 10 + i))
                loss.backward()
            with torch.autocast("cpu", torch.bfloat16, bf16):
                plain(*batch(step * 10 + i)).backward()
        engine.finish_gradient_sync()
        norms, parameters = engine.slot_norms(), dict(plain.named_parameters())
        wte = parameters["embed.wte"].grad
        assert wte is not None
        assert norms["embed.wte" if "embed.wte" in norms else "wte"] == pytest.approx(
            float(wte.norm()), rel=1e-2 if bf16 else 1e-5
        )
        ours = dict(network.named_parameters())["embed.wte"].grad
        assert ours is not None
        torch.testing.assert_close(ours, wte, atol=2e-3 if bf16 else 1e-6, rtol=2e-2 if bf16 else 1e-4)
        assert ours.data_ptr() == engine.gradient.data_ptr()


def test_two_losses_at_once_do_not_share_a_buffer() -> None:
    both, alone = model(), model()
    losses = []
    for seed in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(both(*batch(seed)))
    sum(losses, torch.zeros(())).backward()
    for seed in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = alone(*batch(seed))
        loss.backward()
    assert_close(gradients(both), gradients(alone), tolerance=1e-5)


def test_a_part_of_the_graph_alone() -> None:
    network = model()
    (grad,) = torch.autograd.grad(network(*batch()), [network.blocks[0].fcw])  # the embedding is not reached
    assert grad.abs().sum() > 0
    network(*batch()).backward()
    plain = model("plain")
    plain(*batch()).backward()
    assert_close(gradients(network), gradients(plain))


def test_a_second_backward_pass_is_refused() -> None:
    loss = model()(*batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gone backward already"):
        loss.backward()


def test_logits_and_token_losses_need_no_tie() -> None:
    network, (inputs, targets) = model(), batch()
    network(inputs).sum().backward()
    assert network.embed.wte.grad is not None
    network.zero_grad()
    network(inputs, targets, reduction="none").mean().backward()
    plain = model("plain")
    plain(inputs, targets).backward()
    assert_close(gradients(network), gradients(plain))


def test_pool_gives_a_buffer_to_one_at_a_time() -> None:
    cpu = torch.device("cpu")
    first, second = (pool.take(3, 7, dtype=torch.float64, device=cpu) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    pool.give_back(first)
    again = pool.take(21, dtype=torch.float64, device=cpu)
    assert again.data_ptr() == first.data_ptr()
    assert pool.take(21, dtype=torch.float32, device=cpu).dtype == torch.float32
