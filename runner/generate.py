"""Write text with a trained model: `python -m runner.generate run=outputs/x prompt="Once" n=3 json=true`.

On a terminal the text appears as it is written. B sequences, T tokens so far.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.api import Tokenizer
from runner.sampling import check_sampling, sample

Watch = Callable[[int, int], bool]
"""Told the row and each token it writes; true ends the row after that token."""

USAGE = """python -m runner.generate run=PATH [step=N] [prompt=TEXT] [n=1] [max_tokens=200]
    [temperature=0.8] [top_k=null] [top_p=1.0] [stop=TEXT] [seed=1337] [device=auto] [json=false]
    [cache=true] [trust=PACKAGE]

run      run folder, llm.c .bin, .safetensors or Hugging Face folder
step     of a run folder: the checkpoint to take, not the newest intact one
prompt   text to continue; - reads it from the standard input
n        texts to write; on a terminal a single one appears token by token
stop     end before this text (may be given several times)
json     one object a line: step, prompt, text, tokens, end (stop | length)
cache    false computes every token anew, without keys and values kept
trust    packages of your own that the model may come from, as the run's run.trust (a,b)"""


def generate(
    model: nn.Module,
    tokens: Tensor,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_token: int | None = None,
    seed: int = 1337,
    use_cache: bool = True,
    watch: Watch | None = None,
) -> list[list[int]]:
    """Return the tokens that `model` adds to each row of `tokens` [B, T], at most `max_tokens`.

    A row ends before its `stop_token` or once `watch`, told of each token, returns true, and the call as
    soon as all rows have. The model sees the last `max_seq_len` tokens, and is left in the mode it was in.
    Tokens are drawn on the host from a generator of their own, so that a seed means the same on every
    device and training's random numbers stay put.
    """
    check_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    vocab_size = int(model.vocab_size)  # type: ignore[arg-type]
    _check_prompt(tokens, vocab_size=vocab_size)
    generator = torch.Generator().manual_seed(seed)
    draw = partial(
        sample, vocab_size=vocab_size, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
    )
    writer = _Writer(model, tokens, use_cache=use_cache)
    rows = _Rows(len(tokens), stop_token=stop_token, watch=watch)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(max_tokens):
                drawn = draw(writer.next_logits().cpu())
                if rows.take(drawn.tolist()):
                    break
                writer.append(drawn.to(tokens.device))
    finally:
        model.train(was_training)
    return rows.written


class _Rows:
    """What each row has written, and which rows have ended."""

    def __init__(self, count: int, *, stop_token: int | None, watch: Watch | None) -> None:
        self.written: list[list[int]] = [[] for _ in range(count)]
        self._done = [False] * count
        self._stop_token, self._watch = stop_token, watch

    def take(self, drawn: list[int]) -> bool:
        """Add one token to each row that goes on; return whether none does any more."""
        for row, token in enumerate(drawn):
            self._done[row] = self._done[row] or token == self._stop_token
            if not self._done[row]:
                self.written[row].append(token)
                self._done[row] = self._watch is not None and self._watch(row, token)
        return all(self._done)


def _check_prompt(tokens: Tensor, *, vocab_size: int) -> None:
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ValueError("prompt is empty: give at least one token, such as the tokenizer's end-of-text")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"prompt holds token {wrong}; the model knows 0..{vocab_size - 1}: wrong tokenizer?")


class _Writer:
    """The tokens so far and, while they fit the context, the keys and values of those already seen."""

    def __init__(self, model: nn.Module, tokens: Tensor, *, use_cache: bool) -> None:
        self._model = model
        self._context = int(model.max_seq_len)  # type: ignore[arg-type]
        self._tokens = tokens[:, -self._context :]
        cached = use_cache and hasattr(model, "new_cache") and tokens.shape[1] < self._context
        self._cache: Any = model.new_cache(len(tokens)) if cached else None  # type: ignore[operator]
        self._unseen = self._tokens

    def next_logits(self) -> Tensor:
        """Return the logits [B, V] of the last position."""
        if self._cache is None:
            logits: Tensor = self._model(self._tokens)
        else:
            logits = self._model(self._unseen, cache=self._cache)
        return logits[:, -1]

    def append(self, drawn: Tensor) -> None:
        """Add a token [B] to each row; past the context the window rolls, which no cache survives."""
        self._unseen = drawn[:, None]
        if self._tokens.shape[1] >= self._context:
            self._cache = None
        self._tokens = torch.cat((self._tokens, self._unseen), dim=1)[:, -self._context :]


# ---------------------------------------------------------------- the command


class LoadedRun(NamedTuple):
    """What text needs from a finished or running run."""

    model: nn.Module
    tokenizer: Tokenizer
    step: int
    notes: tuple[str, ...] = ()


def load_run(path: Path, *, device: torch.device, step: int | None = None, trust: str = "") -> LoadedRun:
    """Build the model of `path` and its tokenizer; of a run folder's checkpoints the newest, or `step`."""
    from runner.load import load_model, trusting

    loaded = load_model(path, device=device, step=step, trust=trusting(trust))
    if loaded.tokenizer is None:
        raise ValueError(f"run={path}: no tokenizer is known for it, so that it has no text to write")
    return LoadedRun(loaded.model, loaded.tokenizer, loaded.info.step or 0, loaded.info.notes)


def main(argv: list[str] | None = None) -> int:
    """Generate from the command line; return the exit code."""
    from runner.command import HELP, told
    from runner.fault import fault_line, stack
    from runner.generate_command import parse, write

    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or HELP & set(arguments):
        print(USAGE)
        return 0
    try:
        write(parse(arguments), load=load_run)
    except ValueError as error:
        return told("runner.generate", error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"{stack(error)}runner.generate: error: {fault_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    from runner.command import leave

    leave("runner.generate", main)
