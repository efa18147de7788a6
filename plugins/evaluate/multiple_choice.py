"""Multiple-choice accuracy during training: HellaSwag and llm.c's evaluation files, and word order.

R rows (examples x endings) of T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from annotated_types import Ge
from torch import Tensor

from runner.api import Event, Score, Tokenizer, View

Ids = tuple[int, ...]


class Right(NamedTuple):
    """How many examples a rank or all ranks got right."""

    mean: int  # by the mean log-probability of the ending's tokens: llm.c's measure
    sum: int  # by their summed log-probability


class Example(Protocol):
    """A question as token ids; see `runner.data.eval_file.Example`."""

    @property
    def context(self) -> Ids: ...

    @property
    def endings(self) -> tuple[Ids, ...]: ...

    @property
    def label(self) -> int: ...


class Rows(NamedTuple):
    """Examples laid out for a model, one row per ending: R = examples x endings, T tokens."""

    inputs: Tensor  # [R, T] int64, zero beyond the ending
    targets: Tensor  # [R, T] int64, the ending's tokens one position early
    mask: Tensor  # [R, T] bool, true where a target is to be predicted


class MultipleChoice:
    """Measure how often the true ending is the likeliest, every `every` steps but the first, and at the end.

    `questions` gives the examples for a tokenizer (or None). All ranks share them. Two scores come out:
    `name` by the mean log-probability of an ending's tokens, which is what llm.c reports, and `name_sum`
    by the sum.
    """

    def __init__(
        self, *, questions: Any, every: Annotated[int, Ge(1)] = 250, name: str = "hellaswag"
    ) -> None:
        self.every, self.name = every, name
        self._questions: Callable[[Tokenizer | None], Sequence[Example]] = questions
        self._examples: Sequence[Example] = ()

    def __call__(self, view: View, step: int) -> Iterable[Event]:
        if not self._examples:
            self._examples = self._prepare(view)
        if step == 0:
            return
        right = count_right(view, self._examples)
        if view.engine.rank == 0:
            yield Score(step, self.name, right.mean / len(self._examples))
            yield Score(step, f"{self.name}_sum", right.sum / len(self._examples))

    def _prepare(self, view: View) -> Sequence[Example]:
        try:
            examples = self._questions(view.data.tokenizer)
            check_vocabulary(examples, int(view.model.vocab_size))  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"evaluate.{self.name}: {error}") from None
        return examples


def check_vocabulary(examples: Sequence[Example], vocab_size: int) -> None:
    """Raise ValueError if a token id is not the model's."""
    for index, example in enumerate(examples):
        top = max(max(part) for part in (example.context, *example.endings))
        if top >= vocab_size:
            raise ValueError(
                f"example {index} holds token {top}, the model knows 0..{vocab_size - 1}: "
                "use questions of the data's tokenizer"
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
        right = score(batch, losses, mask=laid_out.mask)
        mean, total = mean + right.mean, total + right.sum
    view.model.train(was_training)
    return Right(_over_ranks(view, mean), _over_ranks(view, total))


def _width(examples: Sequence[Example], view: View) -> int:
    """Return the row length for these examples: few different ones, as each may be compiled."""
    longest = max(len(e.context) + max(map(len, e.endings)) for e in examples)
    return min(int(view.model.max_seq_len), max(32, 1 << (longest - 1).bit_length()))  # type: ignore[arg-type]


def _losses(view: View, laid_out: Rows) -> Tensor:
    """Return the loss of every position [R, T] on the host; unmasked ones mean nothing."""
    inputs, targets = laid_out.inputs.to(view.engine.device), laid_out.targets.to(view.engine.device)
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


# ---------------------------------------------------------------- shares and rows


def share(count: int, *, rank: int, world: int) -> range:
    """Return the examples of one rank: ceil(count / world) in a row, as llm.c cuts them.

    llm.c's last ranks die where that leaves nothing for them; here their range is empty.
    """
    each = -(-count // world)
    return range(min(count, rank * each), min(count, (rank + 1) * each))


def rows(examples: Iterable[Example], *, seq_len: int) -> Rows:
    """Lay examples out in rows of `seq_len` tokens; those that are longer lose the start of their context."""
    chosen = list(examples)
    count = sum(len(example.endings) for example in chosen)
    inputs, targets = (torch.zeros(count, seq_len, dtype=torch.int64) for _ in range(2))
    mask = torch.zeros(count, seq_len, dtype=torch.bool)
    row = 0
    for example in chosen:
        context, endings = _cropped(example, seq_len)
        for ending in endings:
            start, end = len(context) - 1, len(context) + len(ending) - 1
            inputs[row, : end + 1] = torch.tensor(context + ending)
            targets[row, start:end] = torch.tensor(ending)
            mask[row, start:end] = True
            row += 1
    return Rows(inputs, targets, mask)


def _cropped(example: Example, seq_len: int) -> tuple[Ids, tuple[Ids, ...]]:
    """Cut all endings to the same context, so that they stay comparable."""
    endings = tuple(ending[: seq_len - 1] for ending in example.endings)
    room = seq_len - max(map(len, endings))
    return example.context[-room:], endings
