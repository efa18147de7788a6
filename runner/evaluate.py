"""Evaluators that look at the model during training and change nothing that training depends on.

B sequences of a micro-batch, T tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import nn

from runner.api import Data, Event, Sample, State, Stream, ValLoss, View
from runner.generate import generate
from runner.sampling import check_sampling

log = logging.getLogger(__name__)


class Validation:
    """Measure the loss on the same `batches` micro-batches every `every` steps, and at the end.

    The ranks share them, so that the value does not depend on how many there are. With `tokens` it does not
    depend on the size of a micro-batch either: so many from the start of the set, in whole sequences.
    """

    def __init__(
        self,
        *,
        every: Annotated[int, Ge(1)] = 250,
        batches: Annotated[int, Ge(1)] = 20,
        tokens: Annotated[int, Ge(1)] | None = None,
    ) -> None:
        if every < 1 or batches < 1:
            raise ValueError(
                f"evaluate.val.every={every} and evaluate.val.batches={batches} must be at least 1"
            )
        self.every = every
        self.batches = batches
        self.tokens = tokens
        self._stream: Stream | None = None
        self._start: State = {}
        self._bytes_per_token: float | None = None

    def __call__(self, view: View, step: int) -> Iterable[Event]:
        stream = self._rewound(view)
        if self._bytes_per_token is None:  # to measure it may take a pass over the whole set
            self._bytes_per_token = bytes_per_token(view.data)
        with evaluating(view.model, device=view.engine.device):
            loss = self._mean_loss(view, stream)
        yield ValLoss(step, loss, loss / math.log(2) / self._bytes_per_token)

    def _mean_loss(self, view: View, stream: Stream) -> float:
        rank, world, size = view.engine.rank, view.engine.world, view.micro_batch
        rows = self.batches * size if self.tokens is None else -(-self.tokens // view.seq_len)
        total = torch.zeros((), dtype=torch.float64, device=view.engine.device)
        for first in range(0, -(-rows // size), world):
            batch = stream.next()
            counted = min(size, max(0, rows - (first + rank) * size))  # of this rank's batch
            used = slice(counted or size)
            with view.autocast():
                loss = view.model(batch.inputs[used], batch.targets[used]).double()
            # All ranks run as many batches, as a sharded model needs; what is too many does not count.
            if counted:
                total += loss * (counted / size)
        return float(view.engine.mean(total)) * world / (rows / size)

    def close(self) -> None:
        """Release the validation files."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _rewound(self, view: View) -> Stream:
        """Open the stream once and put it back to its start before each validation."""
        if self._stream is None:
            self._stream = view.data.val(
                micro_batch=view.micro_batch,
                seq_len=view.seq_len,
                rank=view.engine.rank,
                world=view.engine.world,
                device=view.engine.device,
                seed=view.seed,
            )
            self._start = self._stream.state_dict()
        else:
            self._stream.load_state_dict(self._start)
        return self._stream


class TextSamples:
    """Let the model write a text every `every` steps, and at the end.

    All ranks write the same one, since a sharded model needs all of them; rank 0 reports it.
    """

    def __init__(
        self,
        *,
        every: Annotated[int, Ge(1)] = 1000,
        prompt: str = "",
        max_tokens: Annotated[int, Ge(1)] = 64,
        temperature: Annotated[float, Ge(0)] = 0.8,
        top_k: Annotated[int, Ge(1)] | None = None,
        top_p: Annotated[float, Gt(0), Le(1)] = 1.0,
        seed: Annotated[int, Ge(0), Le(2147483647)] = 1337,
    ) -> None:
        if every < 1 or max_tokens < 1:
            raise ValueError(f"evaluate.sample: every={every} and max_tokens={max_tokens} must be at least 1")
        check_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        self.every = every
        self.prompt, self.max_tokens, self.seed = prompt, max_tokens, seed
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p

    def __call__(self, view: View, step: int) -> Iterable[Event]:
        tokenizer = view.data.tokenizer
        if step == 0 or tokenizer is None:
            return
        tokens = tokenizer.encode(self.prompt) or [tokenizer.eot]
        try:
            written = self._write(view, tokens, stop_token=tokenizer.eot)
        except ValueError as error:  # a model that diverged has no text, which is no reason to stop a run
            log.warning("no text sample at step %d: %s", step, error)
            return
        if view.engine.rank == 0:
            yield Sample(step, self.prompt, tokenizer.decode(written))

    def _write(self, view: View, tokens: list[int], *, stop_token: int) -> list[int]:
        with evaluating(view.model, device=view.engine.device), view.autocast():
            (row,) = generate(
                view.model,
                torch.tensor([tokens], device=view.engine.device),
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                stop_token=stop_token,
                seed=self.seed,
            )
        return row


@contextmanager
def evaluating(model: nn.Module, *, device: torch.device) -> Iterator[None]:
    """Switch off dropout and gradients, and keep training's mode and random numbers as they were."""
    was_training = model.training
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


def bytes_per_token(data: Data) -> float:
    """Return the mean length of a validation token in UTF-8 bytes; nan where the corpus cannot tell."""
    measure = getattr(data, "bytes_per_token", None)
    known = measure("val") if measure is not None else None
    return float(known) if known else math.nan  # 0 where a set holds nothing but ends of texts
