"""What `python -m runner.generate` understands, reads and writes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch

from runner.generate import LoadedRun, generate
from runner.sampling import check_sampling
from runner.text_stream import TextStream

Load = Callable[..., LoadedRun]


MOST_TEXTS = 4096  # at once: each has its keys and values in memory


class Options(NamedTuple):
    """The command's arguments, by name and with their defaults."""

    run: str
    prompt: str = ""
    n: int = 1
    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 1337
    device: str = "auto"
    json: bool = False
    cache: bool = True


def parse(argv: list[str]) -> Options:
    """Return the options; ValueError names the argument that is none."""
    known = get_type_hints(Options)
    values: dict[str, Any] = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        if not equals or key not in known:
            raise ValueError(
                f"{argument!r} is not an option: expected key=value with one of {', '.join(known)}"
            )
        if key == "stop":
            values[key] = (*values.get(key, ()), text)
        else:
            values[key] = _value(key, text=text, kind=known[key])
    if "run" not in values:
        raise ValueError("run=PATH is missing: the folder of a run, such as run=outputs/x")
    options = Options(**values)
    if not 1 <= options.n <= MOST_TEXTS:
        raise ValueError(f"n={options.n} must lie in 1..{MOST_TEXTS}")
    if options.max_tokens < 1:
        raise ValueError(f"max_tokens={options.max_tokens} must be at least 1")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"seed={options.seed} must lie in 0..{2**63 - 1}")
    check_sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    return options


def _value(key: str, *, text: str, kind: Any) -> Any:
    if kind == int | None:
        if text.lower() in ("null", "none"):
            return None
        kind = int
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{key}={text} must be true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key}={text} must be a {'whole ' if kind is int else ''}number") from None


def write(options: Options, *, load: Load) -> None:
    """Load the model, generate, and write the texts to the standard output."""
    prompt = _prompt(options.prompt)
    device = _device(options.device)
    run = load(Path(options.run), device=device)
    tokens = run.tokenizer.encode(prompt) or [run.tokenizer.eot]
    texts = [TextStream(run.tokenizer, stop=options.stop) for _ in range(options.n)]
    live = options.n == 1 and not options.json
    if live:
        _show(prompt)

    def watch(row: int, token: int) -> bool:
        piece = texts[row].push(token)
        if live and piece:
            _show(piece)
        return texts[row].done

    written = generate(
        run.model,
        torch.tensor([tokens] * options.n, device=device),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_token=run.tokenizer.eot,
        seed=options.seed,
        use_cache=options.cache,
        watch=watch,
    )
    rest = [text.close() for text in texts]
    if live:
        _show(rest[0] + "\n")
    for text, row in zip(texts, written, strict=True) if not live else ():
        full = len(row) == options.max_tokens and not text.done
        entry = {"step": run.step, "prompt": prompt, "text": text.text, "tokens": row}
        entry["end"] = "length" if full else "stop"
        _show((json.dumps(entry) if options.json else prompt + text.text) + "\n")


def _prompt(given: str) -> str:
    return sys.stdin.read() if given == "-" else given


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", name, re.ASCII):
        raise ValueError(f"device={name} is no device; use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name}: this machine or this torch has no CUDA; use cpu")
    return device
