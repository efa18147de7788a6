"""Compiled blocks: one compilation for all, none in evaluation, and no silent break."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from runner.blocks import settle_blocks
from runner.model.gpt2 import GPT2
from runner.model.llama import Llama

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler about itself
MODELS = {
    "gpt2": lambda: GPT2(layers=12, heads=2, width=32, max_seq_len=16, vocab_size=100),
    "llama": lambda: Llama(
        layers=12, heads=4, kv_heads=2, width=64, feed_forward=96, max_seq_len=16, vocab_size=100
    ),
}


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compile to the plain operations, and tell of each compilation."""
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_twelve_blocks_are_compiled_once_and_only_to_train(name: str, compilations: list[Any]) -> None:
    model = MODELS[name]()
    settle_blocks(model, compile="blocks", checkpoint=False)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with torch.no_grad():
        model(tokens, tokens)
        model.eval()
        model(tokens[:, :5])
    assert not compilations
    model.train()
    for _ in range(3):
        model(tokens, tokens).backward()
    assert len(compilations) == 1


class Breaking(nn.Module):
    """A block that looks at a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.sum()) > 0 else x


def test_a_break_in_the_graph_is_an_error(compilations: list[Any]) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([Breaking()])
    settle_blocks(model, compile="blocks", checkpoint=False)
    with pytest.raises(RuntimeError, match=r"data-dependent|graph break|Unsupported"):
        model.blocks[0](torch.ones(3, requires_grad=True))
