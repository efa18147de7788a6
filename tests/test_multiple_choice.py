"""Multiple-choice scores: llm.c's counts for its own losses, an oracle model, ranks, and a real run."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from runner.api import Score, View
from runner.data.eval_file import Example, Questions, read_examples, write_examples
from runner.data.tokenizer import ByteTokenizer
from runner.data.word_order import WordOrder
from runner.plugins.evaluate.multiple_choice import MultipleChoice, Right, count_right, rows, score, share

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
RUNS = [run for run in json.loads((GOLDEN / "evalloader.json").read_text())["runs"] if "batches" in run]


def golden_losses(rows_, seq_len, batch):
    k = np.arange(rows_ * seq_len, dtype=np.uint64)
    hashed = (k * np.uint64(2654435761) + np.uint64(batch * 40503)) % np.uint64(1000003)
    return torch.from_numpy((hashed.astype(np.float32) / np.float32(100000)).reshape(rows_, seq_len))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['file']}-{run['rank']}of{run['num_processes']}")
def test_counts_equal_llmc(run):
    examples = read_examples(GOLDEN / "tiny" / run["file"])
    mine = share(len(examples), rank=run["rank"], world=run["num_processes"])
    per_batch = run["B"] // 4
    for i, batch in enumerate(run["batches"]):
        part = [examples[k] for k in mine[i * per_batch : (i + 1) * per_batch]]
        laid_out = rows(part, seq_len=run["T"])
        losses = golden_losses(len(laid_out.mask), run["T"], i)
        assert score(part, losses, mask=laid_out.mask).mean == batch["correct"]


class Oracle(nn.Module):
    """Gives each token a loss from a table, so that the right answers are known."""

    max_seq_len, vocab_size = 32, 300

    def __init__(self, cost):
        super().__init__()
        self.register_buffer("cost", torch.tensor([float(cost(t)) for t in range(self.vocab_size)]))

    def forward(self, tokens, targets, *, reduction):
        assert reduction == "none"
        assert not self.training
        assert tokens.shape[1] <= self.max_seq_len
        return self.cost[targets]


def view_of(model, *, rank=0, world=1, mean=None, micro_batch=8, tokenizer=None):
    engine = SimpleNamespace(rank=rank, world=world, device=torch.device("cpu"), mean=mean or (lambda x: x))
    data = SimpleNamespace(tokenizer=tokenizer)
    return View(model, engine, data, contextlib.nullcontext, micro_batch, 32, 0, 10)


def of_file(path, *, limit=None):
    return MultipleChoice(questions=Questions(path=str(path), limit=limit))


def one_of_each():
    """The cheap token is 1, the dear one 2: the mean prefers (1, 1, 1, 2), the sum prefers (2,)."""
    return [Example((5,), ((1, 1, 1, 2), (2,), (2, 2), (2, 2, 2)), label) for label in (0, 1, 2)]


def test_mean_and_sum_are_told_apart():
    model = Oracle(lambda token: {1: 0.5, 2: 1.0}.get(token, 9.0))
    model.train()
    assert count_right(view_of(model), one_of_each()) == Right(mean=1, sum=1)
    assert model.training
    assert count_right(view_of(model), one_of_each()[:1]) == Right(mean=1, sum=0)


def test_nan_is_never_right():
    model = Oracle(lambda token: float("nan"))
    assert count_right(view_of(model), one_of_each()) == Right(0, 0)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7])
def test_ranks_share_the_work_and_agree(world):
    """5 examples on up to 7 ranks: llm.c's 4th of 4 dies here."""
    examples = read_examples(GOLDEN / "tiny" / "tiny_eval5.bin")
    model = Oracle(lambda token: (token * 7919) % 101)
    alone = count_right(view_of(model), examples)
    values: list[list[float]] = []
    for rank in range(world):
        seen: list[float] = []
        count_right(
            view_of(model, rank=rank, world=world, mean=lambda x, s=seen: s.append(float(x)) or x), examples
        )
        values.append(seen)
    sums = [sum(column) for column in zip(*values, strict=True)]
    assert sums == [alone.mean, alone.sum]
    means = iter([total / world for total in sums])
    view = view_of(
        model, rank=world - 1, world=world, mean=lambda x: torch.tensor(next(means), dtype=torch.float64)
    )
    assert count_right(view, examples) == alone


def test_long_contexts_are_cropped_to_the_model(tmp_path):
    examples = [Example(tuple(range(3, 203)), ((1, 1), (2,), (2, 2), (2,)), 0)]
    write_examples(tmp_path / "long.bin", examples)
    evaluator = of_file(tmp_path / "long.bin")
    events = list(evaluator(view_of(Oracle(lambda token: token)), 250))
    assert events == [Score(250, "hellaswag", 1.0), Score(250, "hellaswag_sum", 1.0)]


def test_nothing_at_step_0_and_only_rank_0_reports():
    evaluator = of_file(GOLDEN / "tiny" / "tiny_eval5.bin", limit=3)
    model = Oracle(lambda token: token)
    assert list(evaluator(view_of(model), 0)) == []
    assert len(list(evaluator(view_of(model), 1))) == 2
    assert list(evaluator(view_of(model, rank=1, world=2), 1)) == []


def test_a_foreign_vocabulary_and_a_missing_tokenizer_have_a_line():
    model = Oracle(lambda token: 0.0)
    model.vocab_size = 100
    evaluator = of_file(GOLDEN / "tiny" / "tiny_eval5.bin")
    with pytest.raises(
        ValueError, match=r"evaluate\.hellaswag: example 0 holds token \d+, the model knows 0\.\.99"
    ):
        list(evaluator(view_of(model), 0))
    with pytest.raises(ValueError, match=r"data\.tokenizer"):
        list(MultipleChoice(questions=WordOrder(items=2))(view_of(model), 0))
    with pytest.raises(ValueError, match=r"path=x\.txt"):
        Questions(path="x.txt")
    with pytest.raises(ValueError, match=r"none\.bin: cannot be read"):
        Questions(path="none.bin")


def test_word_order_of_a_model_that_knows_nothing_is_near_chance():
    evaluator = MultipleChoice(questions=WordOrder(items=200), name="wordorder")
    generator = torch.Generator().manual_seed(0)

    class Noise(Oracle):
        def forward(self, tokens, targets, *, reduction):
            return torch.rand(targets.shape, generator=generator)

    model = Noise(lambda token: 0.0)
    model.max_seq_len = 128
    scores = list(evaluator(view_of(model, tokenizer=ByteTokenizer()), 5))
    assert scores[0].name == "wordorder"
    assert 0.15 < scores[0].value < 0.35


def test_scores_reach_main_log(tmp_path):
    command = [
        *(sys.executable, "-m", "runner", "train.steps=2", "train.micro_batch=2", "train.seq_len=64"),
        *("model.layers=1", "model.width=32", "model.heads=2", "logger=[llmc]", "run.plot=false"),
        *(
            "evaluate=[hellaswag,wordorder]",
            f"evaluate.hellaswag.questions.path={GOLDEN}/tiny/tiny_eval10.bin",
        ),
        *("evaluate.wordorder.questions.items=4", f"run.root={tmp_path}", "run.name=x", "checkpoint.every=0"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in (tmp_path / "x" / "main.log").read_text().splitlines() if "eval:" in line]
    assert len(lines) == 1
    assert lines[0].startswith("s:2 eval:0.")
