"""Write text with a trained model: `python -m runner.generate run=outputs/x prompt="Once" n=3 json=true`.

B sequences, T tokens so far.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor, nn

from runner.api import Tokenizer
from runner.sampling import check_sampling, sample

USAGE = """python -m runner.generate run=outputs/x [prompt=TEXT] [n=1] [max_tokens=200] [temperature=0.8]
    [top_k=null] [top_p=1.0] [seed=1337] [device=auto] [json=false]"""


@torch.no_grad()
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
) -> list[list[int]]:
    """Return the tokens that `model` adds to each row of `tokens` [B, T], at most `max_tokens`.

    A row ends before its `stop_token`, and the call as soon as all rows have. The model sees the last
    `max_seq_len` tokens, and is left in the mode it was in. Tokens are drawn on the host from a generator
    of their own, so that a seed means the same on every device and training's random numbers stay put.
    """
    check_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    vocab_size = int(model.vocab_size)  # type: ignore[arg-type]
    _check_prompt(tokens, vocab_size=vocab_size)
    generator = torch.Generator().manual_seed(seed)
    draw = partial(
        sample, vocab_size=vocab_size, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
    )
    writer = _Writer(model, tokens, use_cache=use_cache)
    written: list[list[int]] = [[] for _ in range(len(tokens))]
    done = [False] * len(tokens)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_tokens):
            drawn = draw(writer.next_logits().cpu())
            for row, token in enumerate(drawn.tolist()):
                done[row] = done[row] or token == stop_token
                if not done[row]:
                    written[row].append(token)
            if all(done):
                break
            writer.append(drawn.to(tokens.device))
    finally:
        model.train(was_training)
    return written


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


def load_run(path: Path, *, device: torch.device) -> LoadedRun:
    """Build the model of `path` (a run folder's newest checkpoint, or any other model) and its tokenizer."""
    from runner.load import load_model

    loaded = load_model(path, device=device)
    if loaded.tokenizer is None:
        raise ValueError(f"run={path}: no tokenizer is known for it, so that it has no text to write")
    return LoadedRun(loaded.model, loaded.tokenizer, loaded.info.step or 0)


def main(argv: list[str] | None = None) -> int:
    """Generate from the command line; return the exit code."""
    try:
        options = _options(sys.argv[1:] if argv is None else argv)
        if options is None:
            print(USAGE)
            return 0
        for line in _write(options):
            print(line, flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


class Options(NamedTuple):
    """The command's arguments, by name and with their defaults."""

    run: str
    prompt: str = ""
    n: int = 1
    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 1337
    device: str = "auto"
    json: bool = False


def _options(argv: list[str]) -> Options | None:
    if not argv or argv[0] in ("-h", "--help"):
        return None
    known = get_type_hints(Options)
    values: dict[str, Any] = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        if not equals or key not in known:
            raise ValueError(
                f"{argument!r} is not an option: expected key=value with one of {', '.join(known)}"
            )
        values[key] = _parse(key, text=text, kind=known[key])
    if "run" not in values:
        raise ValueError("run=PATH is missing: the folder of a run, such as run=outputs/x")
    return Options(**values)


def _parse(key: str, *, text: str, kind: Any) -> Any:
    if kind == int | None:
        if text.lower() in ("null", "none"):
            return None
        kind = int
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{key}={text} must be true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key}={text} must be a number ({kind.__name__})") from None


def _write(options: Options) -> list[str]:
    if options.n < 1 or options.max_tokens < 1:
        raise ValueError(f"n={options.n} and max_tokens={options.max_tokens} must be at least 1")
    check_sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    run = load_run(Path(options.run), device=device)
    prompt = run.tokenizer.encode(options.prompt) or [run.tokenizer.eot]
    rows = generate(
        run.model,
        torch.tensor([prompt] * options.n, device=device),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_token=run.tokenizer.eot,
        seed=options.seed,
    )
    texts = [run.tokenizer.decode(row) for row in rows]
    if options.json:
        return [json.dumps({"step": run.step, "prompt": options.prompt, "text": text}) for text in texts]
    return [options.prompt + text for text in texts]


if __name__ == "__main__":
    sys.exit(main())
