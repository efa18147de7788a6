"""Endless made-up data with known answers: what a correct model must reach, and what it cannot.

A loss below these bounds proves a leak, a loss that stays above them proves a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from runner.data.loader import Loader
from runner.data.splits import Where
from runner.data.stream import Pair, Position, Shape, State, require_same, require_same_shape, shape_state
from runner.data.window import random_words

if TYPE_CHECKING:
    from runner.api import Stream, Tokenizer

SYMBOLS = 64
SUCCESSOR_PROBABILITIES = (0.5, 0.25, 0.15, 0.1)

Generate = Callable[[NDArray[np.uint64]], NDArray[np.int64]]
"""Random words [B, T+1] -> tokens [B, T+1]; row by row."""


class Markov:
    """A Markov chain over 64 symbols, each with 4 successors of probability 0.5, 0.25, 0.15 and 0.1.

    No model can get below `entropy` nats per token, and a good one gets within a few hundredths.
    """

    vocab_size = SYMBOLS
    tokenizer: Tokenizer | None = None
    entropy = -sum(p * math.log(p) for p in SUCCESSOR_PROBABILITIES)  # 1.20797, whatever the table

    def __init__(self, *, seed: Annotated[int, Ge(0), Le(2147483647)] | None = None) -> None:
        self._seed = seed

    def check(self, *, micro_batch: int, seq_len: int, world: int, vocab_size: int | None) -> list[str]:
        return _vocabulary_problems(vocab_size)

    def train(self, **where: Any) -> Stream:
        return self._open(Where(**where), stream=0)

    def val(self, **where: Any) -> Stream:
        return self._open(Where(**where), stream=1)

    def fingerprint(self) -> dict[str, Any]:
        return {"synthetic": "markov", "seed": self._seed}

    def bytes_per_token(self, split: str = "val") -> float | None:
        return None

    def _open(self, where: Where, *, stream: int) -> Stream:
        seed = where.seed if self._seed is None else self._seed
        successors = successor_table(seed)
        source = SyntheticSource(lambda words: walk(words, successors), where.shape, seed=seed, stream=stream)
        return Loader(source, device=where.device)


class Induction:
    """Rows of (T+1)/2 random symbols and the same again: only attention to the first half helps.

    The loss of the first half cannot get below ln 64 = 4.159 nats, that of the repeated half gets to 0.
    """

    vocab_size = SYMBOLS
    tokenizer: Tokenizer | None = None
    entropy = math.log(SYMBOLS)  # of a token of the first half

    def __init__(self, *, seed: Annotated[int, Ge(0), Le(2147483647)] | None = None) -> None:
        self._seed = seed

    def check(self, *, micro_batch: int, seq_len: int, world: int, vocab_size: int | None) -> list[str]:
        short = [f"train.seq_len={seq_len} leaves nothing to repeat: use at least 3"] if seq_len < 3 else []
        return _vocabulary_problems(vocab_size) + short

    def train(self, **where: Any) -> Stream:
        return self._open(Where(**where), stream=0)

    def val(self, **where: Any) -> Stream:
        return self._open(Where(**where), stream=1)

    def fingerprint(self) -> dict[str, Any]:
        return {"synthetic": "induction", "seed": self._seed}

    def bytes_per_token(self, split: str = "val") -> float | None:
        return None

    def _open(self, where: Where, *, stream: int) -> Stream:
        seed = where.seed if self._seed is None else self._seed
        return Loader(SyntheticSource(repeat, where.shape, seed=seed, stream=stream), device=where.device)


def successor_table(seed: int) -> NDArray[np.int64]:
    """Return the 4 distinct successors of each symbol [64, 4], the likeliest first."""
    words = random_words(_key(seed, stream=2), start=0, count=SYMBOLS * SYMBOLS).reshape(SYMBOLS, SYMBOLS)
    return np.argsort(words, axis=1, kind="stable")[:, : len(SUCCESSOR_PROBABILITIES)]


def walk(words: NDArray[np.uint64], successors: NDArray[np.int64]) -> NDArray[np.int64]:
    """Follow the chain of `successors` from a uniform first symbol, one word a token."""
    ends = np.cumsum(SUCCESSOR_PROBABILITIES)[:-1]
    choices = np.searchsorted(ends, words / 2.0**64, side="right")
    tokens = np.empty(words.shape, np.int64)
    tokens[:, 0] = words[:, 0] % SYMBOLS
    for place in range(1, words.shape[1]):
        tokens[:, place] = successors[tokens[:, place - 1], choices[:, place]]
    return tokens


def repeat(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Repeat the first half of each row, a uniform symbol a word."""
    length = words.shape[1]
    half = (words[:, : (length + 1) // 2] % SYMBOLS).astype(np.int64)
    return np.concatenate([half, half], axis=1)[:, :length]


class SyntheticSource:
    """Rows made from a counter-based stream of random words: row k takes T+1 words from k*(T+1) on."""

    def __init__(self, generate: Generate, shape: Shape, *, seed: int, stream: int) -> None:
        self._generate = generate
        self._shape = shape
        self._seed = seed
        self._key = _key(seed, stream=stream)
        self._batches = 0

    @property
    def position(self) -> Position:
        """Where the last batch's first row begins, counted in tokens of the endless stream."""
        return Position(None, max(0, self._first_row(self._batches - 1)) * (self._shape.seq_len + 1), 0)

    def take(self) -> Pair:
        rows, length = self._shape.micro_batch, self._shape.seq_len + 1
        start = self._first_row(self._batches) * length
        words = random_words(self._key, start=start, count=rows * length)
        tokens = self._generate(words.reshape(rows, length))
        self._batches += 1
        return np.stack([tokens[:, :-1], tokens[:, 1:]])

    def state_dict(self) -> State:
        state = {"order": "synthetic", "batches": self._batches, "synthetic_seed": self._seed}
        return state | shape_state(self._shape)

    def load_state_dict(self, state: State) -> None:
        saved = state.get("order")
        require_same(
            "order", saved=saved, current="synthetic", way_out="resume with the data the run started with"
        )
        require_same_shape(state, self._shape)
        seed = state["synthetic_seed"]
        require_same("seed", saved=seed, current=self._seed, way_out=f"data.seed={seed}")
        self._batches = int(state["batches"])

    def close(self) -> None:
        pass

    def _first_row(self, batches: int) -> int:
        return (batches * self._shape.world + self._shape.rank) * self._shape.micro_batch


def _key(seed: int, *, stream: int) -> int:
    return 4 * seed + stream


def _vocabulary_problems(vocab_size: int | None) -> list[str]:
    if vocab_size is None or vocab_size >= SYMBOLS:
        return []
    return [
        f"data: has {SYMBOLS} symbols, but the model's vocabulary is {vocab_size}: model.vocab_size={SYMBOLS}"
    ]
