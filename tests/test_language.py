"""Runs on data with known answers: below them lies a leak, far above them a fault."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from runner.api import ValLoss
from runner.data.synthetic import Markov
from runner.session import Session
from tests.sessions import ran

MODELS = ["tiny", "llama_tiny"]
SMALL = [
    *("model.layers=2", "model.heads=4", "model.width=64", "precision=fp32", "run.threads=1"),
    *("evaluate=none", "logger=none", "checkpoint.every=0", "run.plot=false", "scheduler.warmup_steps=20"),
]
MARKOV = ["data=markov", "train.seq_len=64", "train.micro_batch=16", "optimizer.lr=1e-2", *SMALL]
INDUCTION = ["data=induction", "train.seq_len=63", "train.micro_batch=32", "optimizer.lr=5e-3", *SMALL]


@torch.no_grad()
def losses_by_place(s: Session, *, batches: int = 16) -> torch.Tensor:
    """Return the mean held-out loss of each position [T], in nats."""
    view, total = s.view, torch.zeros(s.plan.seq_len, dtype=torch.float64)
    where = {"micro_batch": view.micro_batch, "seq_len": view.seq_len, "rank": 0, "world": 1}
    stream = s.data.val(**where, device=torch.device("cpu"), seed=view.seed)
    s.model.eval()
    for _ in range(batches):
        batch = stream.next()
        total += s.model(batch.inputs, batch.targets, reduction="none").double().mean(0)
    stream.close()
    return total / batches


def test_no_model_beats_the_chain(tmp_path: Path) -> None:
    session = ran(*MARKOV, "train.steps=60", dir=tmp_path)
    assert Markov.entropy == pytest.approx(1.2080, abs=1e-4)
    assert Markov.entropy - 0.03 < float(losses_by_place(session).mean()) < 2.2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", MODELS)
def test_the_chain_is_learned_to_its_entropy(model: str, tmp_path: Path) -> None:
    session = ran(f"model={model}", *MARKOV, "train.steps=700", dir=tmp_path)
    assert float(losses_by_place(session).mean()) == pytest.approx(Markov.entropy, abs=0.03)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", MODELS)
def test_only_the_repetition_can_be_foreseen(model: str, tmp_path: Path) -> None:
    """The first half stays at ln 64 (a leak would lower it), the repeated half falls to nothing."""
    session = ran(f"model={model}", *INDUCTION, "train.steps=800", dir=tmp_path)
    losses = losses_by_place(session)
    first, second = losses[:31], losses[32:]  # place 31 predicts the repetition's first symbol
    assert float(first.mean()) == pytest.approx(math.log(64), abs=0.03)
    assert float(second.mean()) < 0.02


def test_bits_per_byte_and_perplexity_are_those_of_a_plain_computation(tmp_path: Path) -> None:
    """From logits in numpy, and the text's own bytes, over exactly the tokens that validation reads."""
    text = "".join(f"Line {n}: déjà vu, or {n * n} times as many.\n" for n in range(300))
    (tmp_path / "text.txt").write_text(text)
    data = ["data=text", f"data.path={tmp_path / 'text.txt'}", f"data.cache={tmp_path / 'cache'}"]
    settings = [*SMALL, "evaluate=val", "evaluate.val.batches=3", "train.seq_len=16", "train.micro_batch=2"]
    command = [*data, "data.tokenizer=gpt2", "train.steps=2", *settings, "evaluate.val.every=1000"]
    command.remove("evaluate=none")
    session = ran(*command, dir=tmp_path / "run")
    (event,) = (e for e in session.evaluators["val"](session.view, 2) if isinstance(e, ValLoss))

    nats, count = 0.0, 0
    view = session.view
    where = {"micro_batch": 2, "seq_len": 16, "rank": 0, "world": 1, "seed": view.seed}
    stream = session.data.val(**where, device=torch.device("cpu"))
    session.model.eval()
    for _ in range(3):
        batch = stream.next()
        with torch.no_grad():
            logits = session.model(batch.inputs).double().numpy()
        for row, targets in zip(logits, batch.targets.numpy(), strict=True):
            for scores, target in zip(row, targets, strict=True):
                nats -= scores[target] - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
                count += 1
    stream.close()
    session.evaluators["val"].close()  # type: ignore[attr-defined]
    assert event.loss == pytest.approx(nats / count, rel=1e-5)

    tokens = _val_tokens(session)
    tokenizer = session.data.tokenizer
    assert tokenizer is not None
    in_text = [token for token in tokens if token != tokenizer.eot]
    size = len(tokenizer.decode(in_text).encode())
    expected = nats / count / math.log(2) * len(tokens) / size
    assert event.bits_per_byte == pytest.approx(expected, rel=1e-5)


def _val_tokens(session: Session) -> list[int]:
    """Read the held-out split from its shards."""
    (manifest,) = session.dir.parent.glob("cache/**/manifest.json")
    entry = json.loads(manifest.read_text())["splits"]["val"]
    tokens: list[int] = []
    for shard in entry["shards"]:
        name = shard["file"]
        tokens += np.fromfile(manifest.parent / name, np.uint16, offset=1024).tolist()
    return tokens
