"""What `python -m runner.generate` understands, reads and writes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch

from runner.command import keyed, whole
from runner.generate import LoadedRun, generate
from runner.sampling import check_sampling
from runner.text_stream import TextStream

Load = Callable[..., LoadedRun]


MOST_TEXTS = 4096  # at once: each has its keys and values in memory


class Options(NamedTuple):
    """The command's arguments, by name and with their defaults."""

    run: str
    step: int | None = None
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
    trust: str = ""


def parse(argv: list[str]) -> Options:
    """Return the options; ValueError with a line for each argument that is wrong."""
    known = get_type_hints(Options)
    given, problems = keyed(argv, known=list(known), several=["stop"], paths=["run"])
    values: dict[str, Any] = {}
    for key, texts in given.items():
        try:
            values[key] = tuple(texts) if key == "stop" else _value(key, text=texts[-1], kind=known[key])
        except ValueError as error:
            problems.append(str(error))
    if "" in values.get("stop", ()):
        problems.append("stop= is empty, which would end every text before it begins; leave it out")
    if "run" not in given and not problems:
        problems.append("run=PATH is missing: the folder of a run, such as run=outputs/x")
    if problems:
        raise ValueError("\n".join(problems))
    options = Options(**values)
    _check(options)
    return options


def _check(options: Options) -> None:
    if not 1 <= options.n <= MOST_TEXTS:
        raise ValueError(f"n={options.n} must lie in 1..{MOST_TEXTS}")
    if options.max_tokens < 1:
        raise ValueError(f"max_tokens={options.max_tokens} must be at least 1")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"seed={options.seed} must lie in 0..{2**63 - 1}")
    check_sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)


def _value(key: str, *, text: str, kind: Any) -> Any:
    if key == "step":
        return whole(key, text)
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
    run = load(Path(options.run), device=device, step=options.step, trust=options.trust)
    for note in run.notes:
        print(f"runner.generate: warning: {note}", file=sys.stderr)
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
    """Return the text to continue; ValueError if it is no text."""
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode()
    except UnicodeError:
        raise ValueError(f"prompt={given!a}: it is not UTF-8 text") from None
    return text


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
