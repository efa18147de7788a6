"""Questions made from the built-in corpus: which of four orders of the same words did the author write?

All endings of a question have the same characters, so that neither length nor vocabulary gives it away. A
byte-level model of 0.2 M parameters starts at chance, 25 %, and passes 60 % in 2,000 steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from runner.data.corpus import moby_documents
from runner.data.eval_file import COMPLETIONS, Example, Question, tokenize

if TYPE_CHECKING:
    from runner.api import Tokenizer

CONTEXT_CHARS = 48  # at least; up to the start of a word
ENDING_CHARS = (34, 48)  # from, to
SEED = 1337

Draw = Callable[[], float]


class WordOrder:
    """Questions for `runner.plugins.evaluate.multiple_choice`, whatever the run trains on."""

    def __init__(self, *, items: Annotated[int, Ge(1)] = 200, seed: Annotated[int, Ge(0)] = SEED) -> None:
        self._questions = word_order_questions(items, seed=seed)

    def __call__(self, tokenizer: Tokenizer | None) -> list[Example]:
        """Return the examples; ValueError without a tokenizer."""
        return tokenize(self._questions, tokenizer)


def word_order_questions(count: int, *, seed: int = SEED) -> list[Question]:
    """Return `count` questions from the held-out chapters, the same for the same seed.

    ValueError if the text does not hold as many.
    """
    # `random()` is the one method whose sequence Python promises across versions.
    draw = random.Random(seed).random
    passages = [
        p for document in moby_documents() if document.split == "val" for p in _passages(document.text)
    ]
    _shuffle(passages, draw)
    questions: list[Question] = []
    for context, words in passages:
        if len(questions) == count:
            break
        wrong = _other_orders(words, draw)
        if len(wrong) == COMPLETIONS - 1:
            label = int(draw() * COMPLETIONS)
            endings = [*wrong[:label], " ".join(words), *wrong[label:]]
            questions.append(Question(context, tuple(endings), label))
    if len(questions) < count:
        raise ValueError(f"questions.items={count}: the held-out chapters make {len(questions)}")
    return questions


def _passages(text: str) -> Iterator[tuple[str, list[str]]]:
    """Cut a chapter into contexts and the words that follow, without overlap."""
    words = text.split()
    at = 0
    while True:
        start = _take(words, at, CONTEXT_CHARS)
        end = _take(words, start, ENDING_CHARS[0])
        if end > len(words) or start == end:
            return
        ending = words[start:end]
        if ENDING_CHARS[0] <= len(" ".join(ending)) <= ENDING_CHARS[1]:
            yield " ".join(words[at:start]), ending
        at = end


def _take(words: Sequence[str], at: int, chars: int) -> int:
    """Return the index after the first words from `at` with `chars` characters; past the end if too few."""
    length = -1
    while length < chars:
        if at >= len(words):
            return len(words) + 1
        length += 1 + len(words[at])
        at += 1
    return at


def _other_orders(words: list[str], draw: Draw) -> list[str]:
    """Return three further orders of the words as text, or fewer if chance finds no more."""
    seen = [" ".join(words)]
    for _ in range(20):
        order = list(words)
        _shuffle(order, draw)
        text = " ".join(order)
        if text not in seen:
            seen.append(text)
        if len(seen) == COMPLETIONS:
            break
    return seen[1:]


def _shuffle(items: list[Any], draw: Draw) -> None:
    for i in range(len(items) - 1, 0, -1):
        j = int(draw() * (i + 1))
        items[i], items[j] = items[j], items[i]
