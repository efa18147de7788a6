"""Graphs of a pass: what is captured and replayed, that warming up leaves no trace, and what is refused.

A tape stands in for the device: like a CUDA graph it repeats tensor operations on fixed memory and runs no
Python, so whatever a hook or a branch decides anew in each pass would be missed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.api import Batch
from runner.cli import ConfigError
from runner.cuda_graphs import Captured, Graphs, graphs_of
from runner.rng import Generators
from runner.session import Session
from runner.train import train
from tests.sessions import TINY, configured, opened


class Tape(TorchDispatchMode):
    """Records tensor operations with the memory that they read and write; `play` does them again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


class TapeRecorder:
    """Captures on a tape; what capturing itself computed is undone, as a device would not have done it."""

    def __init__(self, *, kept: Callable[[], list[Tensor]] = list, said: list[str] | None = None) -> None:
        self._kept, self.said = kept, [] if said is None else said

    def warm_up(self, work: Callable[[], object]) -> None:
        self.said.append("warm up")
        for _ in range(2):
            work()

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        self.said.append("capture")
        before = [tensor.clone() for tensor in self._kept()]
        with Tape() as tape:
            loss = work()
        for tensor, value in zip(self._kept(), before, strict=True):
            tensor.copy_(value)
        loss.fill_(torch.nan)

        def play() -> None:
            self.said.append("replay")
            tape.play()

        return Captured(play, loss)


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


def batch_of(value: int) -> Batch:
    return Batch(torch.full((1, 2), value), torch.full((1, 2), value + 1))


# ---------------------------------------------------------------- the sequence


@pytest.mark.parametrize(("accumulate", "kinds"), [(1, [True]), (3, [True, False])])
def test_warm_up_then_each_kind_once_then_replays(accumulate: int, kinds: list[bool]) -> None:
    said: list[str] = []

    def run(batch: Batch, *, first: bool, last: bool) -> Tensor:
        said.append(f"run first={first}")
        return batch.inputs.sum().float()

    recorder = TapeRecorder(said=said)
    graphs = Graphs(accumulate=accumulate, untouched=nothing, recorder=recorder)
    for step in range(3):
        for i in range(accumulate):
            graphs(run, batch_of(step), first=i == 0)
    both = [f"run first={first}" for first in kinds]
    captures = [line for each in both for line in ("capture", each)]
    assert said == ["warm up", *both, *both, *captures, *["replay"] * (3 * accumulate)]


def test_a_loss_outlives_the_next_replay_and_follows_the_inputs() -> None:
    def run(batch: Batch, *, first: bool, last: bool) -> Tensor:
        return (batch.inputs + batch.targets).sum().float()

    graphs = Graphs(accumulate=1, untouched=nothing, recorder=TapeRecorder())
    losses = [graphs(run, batch_of(value), first=True) for value in (1, 10, 100)]
    assert [float(loss) for loss in losses] == [6, 42, 402]


def test_warming_up_leaves_the_generators_as_they_were() -> None:
    def run(batch: Batch, *, first: bool, last: bool) -> Tensor:
        return torch.rand(7).sum()

    before = torch.get_rng_state()
    graphs = Graphs(accumulate=1, untouched=Generators().untouched, recorder=TapeRecorder())
    graphs._prepare(run, batch_of(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pass_that_cannot_be_captured_names_the_key() -> None:
    def run(batch: Batch, *, first: bool, last: bool) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = Graphs(accumulate=1, untouched=nothing, recorder=TapeRecorder())
    with pytest.raises(RuntimeError, match=r"run.cuda_graphs=true: .*not permitted.*run.cuda_graphs=false"):
        graphs(run, batch_of(0), first=True)


# ---------------------------------------------------------------- a run

PLAIN = [*TINY, "model.kernels=plain", "train.steps=6", "run.deterministic=false", "checkpoint.every=3"]


def taped(session: Session) -> Session:
    """Return a session whose passes are replayed."""
    recorder = TapeRecorder(kept=lambda: [session.engine.gradient])
    accumulate, untouched = session.plan.accumulate, session.generators.untouched
    return replace(session, graphs=Graphs(accumulate=accumulate, untouched=untouched, recorder=recorder))


def trained(session: Session) -> Session:
    train(session)
    session.stream.close()
    session.store.close()
    session.engine.close()
    return session


def held(session: Session) -> list[bytes]:
    tensors = [session.engine.full_weights(), *session.optimizer.state_dict().values()]
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
@pytest.mark.parametrize("tokens", [32, 96])
def test_replayed_passes_train_to_the_bits_of_eager_ones(precision: str, tokens: int, tmp_path: Path) -> None:
    command = [*PLAIN, f"precision={precision}", f"train.tokens_per_step={tokens}", "model.width=64"]
    command += ["model.layers=1", "model.padded_vocab=1152"]  # an embedding that counts as a large tensor
    eager = trained(opened(*command, dir=tmp_path / "eager"))
    assert any(p.numel() >= 1 << 16 for p in eager.model.parameters())
    replayed = trained(taped(opened(*command, dir=tmp_path / "replayed")))
    assert held(replayed) == held(eager)
    assert replayed.progress.step == 6


@pytest.mark.parametrize("cut", [2, 4])
def test_a_run_that_is_resumed_warms_up_again_without_a_trace(cut: int, tmp_path: Path) -> None:
    command = [*PLAIN, "precision=fp32", "train.tokens_per_step=64", "scheduler=constant"]
    whole = trained(opened(*command, dir=tmp_path / "whole"))
    dir = tmp_path / "cut"
    trained(taped(opened(*command, f"train.steps={cut}", dir=dir)))
    resumed = trained(taped(opened(*command, dir=dir)))
    assert held(resumed) == held(whole)
    saved = [(tmp_path / name / "model_00000006.bin").read_bytes() for name in ("whole", "cut")]
    assert saved[0] == saved[1]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("run.device=cpu", "run.device=cpu"),
        ("parallel=ddp parallel.processes=2", "2 processes"),
        ("parallel=fsdp parallel.processes=2", "parallel=fsdp"),
        ("parallel.reduce=canonical", "parallel.reduce=canonical"),
        ("train.checkpoint_blocks=true", "train.checkpoint_blocks=true"),
        ("model.dropout=0.1", "model.dropout=0.1"),
        ("precision=fp8", "precision.mode=fp8"),
        ("debug.nan_loss_at=[3]", "debug.nan_loss_at"),
        ("debug.spike_loss_at=[3]", "debug.spike_loss_at"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(*TINY, "run.cuda_graphs=true", "run.device=cuda", *override.split())
    lines = [line for line in caught.value.problems if line.startswith("run.cuda_graphs:")]
    assert any(named in line and "run.cuda_graphs=false" in line for line in lines)


def test_what_a_graph_can_hold_is_not_refused() -> None:
    configured(
        *TINY, "run.cuda_graphs=true", "run.device=cuda", "run.compile=blocks", "debug.nan_grad_at=[1]"
    )
    configured(*TINY, "parallel=ddp", "parallel.processes=2")


def test_without_a_gpu_the_key_is_an_error_and_never_ignored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run.cuda_graphs: true needs a CUDA device.*cpu"):
        opened(*TINY, "run.cuda_graphs=true", dir=tmp_path)
    cpu = torch.device("cpu")
    assert graphs_of(cpu, wanted=False, accumulate=1, untouched=nothing) is None
