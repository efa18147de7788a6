"""Multiple-choice accuracy during training: HellaSwag and llm.c's evaluation files, and word order.

R rows (examples x endings) of T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from runner.api import Event, Score, Tokenizer, View
from runner.data.eval_file import Example, Question, Rows, read_examples, read_questions, rows, share


class Right(NamedTuple):
    """How many examples a rank or all ranks got right."""

    mean: int  # by the mean log-probability of the ending's tokens: llm.c's measure
    sum: int  # by their summed log-probability


class MultipleChoice:
    """Measure how often the true ending is the likeliest, every `every` steps but the first, and at the end.

    `path` is an llm.c evaluation file (.bin, token ids) or JSON lines {"ctx", "endings", "label"} (.jsonl,
    which need the data's tokenizer). All ranks share the examples. Two scores come out: `name` by the mean
    log-probability of an ending's tokens, which is what llm.c reports, and `name_sum` by the sum.
    """

    def __init__(
        self,
        *,
        path: str,
        every: Annotated[int, Ge(1)] = 250,
        name: str = "hellaswag",
        limit: Annotated[int, Ge(1)] | None = None,
    ) -> None:
        self.every, self.name = every, name
        self._examples: list[Example] | None = None
        self._questions: list[Question] = []
        file = Path(path).expanduser()
        if file.suffix == ".bin":
            self._examples = read_examples(file)[:limit]
        elif file.suffix == ".jsonl":
            self._questions = read_questions(file)[:limit]
        else:
            raise ValueError(f"evaluate.{name}.path={path}: expected llm.c's .bin or HellaSwag-like .jsonl")

    def __call__(self, view: View, step: int) -> Iterable[Event]:
        if self._examples is None:
            self._examples = tokenize(self._questions, view.data.tokenizer, name=self.name)
        check_vocabulary(self._examples, int(view.model.vocab_size), name=self.name)  # type: ignore[arg-type]
        if step == 0:
            return
        right = count_right(view, self._examples)
        if view.engine.rank == 0:
            yield Score(step, self.name, right.mean / len(self._examples))
            yield Score(step, f"{self.name}_sum", right.sum / len(self._examples))


class WordOrder(MultipleChoice):
    """Measure how often the model prefers the author's order of words to three others; needs no file.

    The questions come from the held-out chapters of the built-in corpus, whatever the run trains on.
    """

    def __init__(
        self,
        *,
        every: Annotated[int, Ge(1)] = 250,
        name: str = "wordorder",
        items: Annotated[int, Ge(1)] = 200,
        seed: Annotated[int, Ge(0)] = 1337,
    ) -> None:
        from runner.data.word_order import word_order_questions

        self.every, self.name = every, name
        self._examples = None
        self._questions = word_order_questions(items, seed=seed)


def tokenize(questions: Sequence[Question], tokenizer: Tokenizer | None, *, name: str) -> list[Example]:
    """Encode questions as llm.c's hellaswag.py does: the context, then each ending after a space."""
    if tokenizer is None:
        raise ValueError(
            f"evaluate.{name}: its questions are text; set data.tokenizer, or drop this evaluation"
        )
    return [
        Example(
            tuple(tokenizer.encode(q.context)),
            tuple(tuple(tokenizer.encode(f" {e}")) for e in q.endings),
            q.label,
        )
        for q in questions
    ]


def check_vocabulary(examples: Sequence[Example], vocab_size: int, *, name: str) -> None:
    """Raise ValueError if a token id is not the model's."""
    for index, example in enumerate(examples):
        top = max(max(part) for part in (example.context, *example.endings))
        if top >= vocab_size:
            raise ValueError(
                f"evaluate.{name}: example {index} holds token {top}, the model knows 0..{vocab_size - 1}: "
                "use an evaluation file of the data's tokenizer"
            )


@torch.no_grad()
def count_right(view: View, examples: Sequence[Example]) -> Right:
    """Score this rank's share of the examples; return the counts of all ranks."""
    engine, per_batch = view.engine, max(1, view.micro_batch // 4)
    mine = share(len(examples), rank=engine.rank, world=engine.world)
    was_training = view.model.training
    view.model.eval()
    mean = total = 0
    # Every rank runs as many forward passes as rank 0: a sharded model needs all of them in each.
    for start in range(0, len(share(len(examples), rank=0, world=engine.world)), per_batch):
        batch = [examples[i] for i in mine[start : start + per_batch]]
        laid_out = rows(batch or examples[:1], seq_len=_width(batch or examples[:1], view))
        losses = _losses(view, laid_out)
        right = score(batch, losses, mask=torch.from_numpy(laid_out.mask))
        mean, total = mean + right.mean, total + right.sum
    view.model.train(was_training)
    return Right(_over_ranks(view, mean), _over_ranks(view, total))


def _width(examples: Sequence[Example], view: View) -> int:
    """Return the row length for these examples: few different ones, as each may be compiled."""
    longest = max(len(e.context) + max(map(len, e.endings)) for e in examples)
    return min(int(view.model.max_seq_len), max(32, 1 << (longest - 1).bit_length()))  # type: ignore[arg-type]


def _losses(view: View, laid_out: Rows) -> Tensor:
    """Return the loss of every position [R, T] on the host; unmasked ones mean nothing."""
    inputs, targets = (
        torch.from_numpy(a).to(view.engine.device) for a in (laid_out.inputs, laid_out.targets)
    )
    with view.autocast():
        losses: Tensor = view.model(inputs, targets, reduction="none")
    return losses.float().cpu()


def score(examples: Sequence[Example], losses: Tensor, *, mask: Tensor) -> Right:
    """Count the examples whose true ending has the lowest loss; the first of equals; nan is never right."""
    masked = torch.where(mask, losses.double(), 0.0)
    totals, lengths = masked.sum(dim=1), mask.sum(dim=1)
    mean = total = row = 0
    for example in examples:
        at = slice(row, row + len(example.endings))
        row = at.stop
        mean += _first_lowest(totals[at] / lengths[at]) == example.label
        total += _first_lowest(totals[at]) == example.label
    return Right(mean, total)


def _first_lowest(losses: Tensor) -> int:
    values = losses.tolist()
    return -1 if any(value != value for value in values) else values.index(min(values))


def _over_ranks(view: View, count: int) -> int:
    value = torch.tensor(float(count), dtype=torch.float64, device=view.engine.device)
    return round(float(view.engine.mean(value)) * view.engine.world)
