"""What llm.c's -e names: a model file or a descriptor, as settings of this package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from runner import CONF
from runner.model.descriptor import descriptor

_PLAIN = re.compile(r"[A-Za-z0-9_./@*?:+-]+")  # what Hydra reads without quotes
_TYPED = re.compile(r"null|true|false|yes|no|on|off|nan|inf|[+-]?[0-9._]+(?:e[+-]?[0-9]+)?", re.IGNORECASE)


class Model(NamedTuple):
    """What -e names: settings, the number of real tokens, and whether its file holds bf16."""

    settings: tuple[str, ...]
    vocab_size: int
    bf16: bool | None
    note: str = ""


def model_of(text: str, *, given: bool) -> Model:
    """Return the settings for -e; ValueError if there is no such model."""
    if not given and not Path(text).exists():
        note = f"-e not given and {text}, llm.c's default, is not here: a new model, -e d12"
        return _described("d12")._replace(note=note)
    if text.endswith(".bin"):
        return _from_file(Path(text))
    return _described(text)


def _described(text: str) -> Model:
    shape = descriptor(text)
    name = text.removeprefix("gpt2:").replace(":", "_")
    if (CONF / "model" / f"{name}.yaml").exists():
        settings = [f"model={name}"]
    else:
        fields = ("layers", "heads", "width", "max_seq_len")
        settings = ["model=gpt2_124m", *(f"model.{field}={shape[field]}" for field in fields)]
    return Model(tuple(settings), shape["vocab_size"], None)


def _from_file(path: Path) -> Model:
    import torch

    from runner.checkpoint.llmc_format import SHAPE_FIELDS, read_model_header

    header = read_model_header(path)
    length, vocab, layers, heads, channels, padded = (header.shape[field] for field in SHAPE_FIELDS)
    fields = {"layers": layers, "heads": heads, "width": channels, "max_seq_len": length}
    fields["padded_vocab"] = padded
    settings = ["model=gpt2_124m", *(f"model.{name}={value}" for name, value in fields.items())]
    settings.append(f"model.init_from={quoted(str(path))}")
    return Model(tuple(settings), vocab, header.dtype == torch.bfloat16)


def quoted(value: str) -> str:
    """Return a text as Hydra's grammar for the command line reads it back."""
    if _PLAIN.fullmatch(value) and not _TYPED.fullmatch(value):
        return value
    # Inside quotes only backslashes before a quote count as such.
    escaped = re.sub(r"\\+(?='|$)", lambda match: 2 * match[0], value).replace("'", "\\'")
    return f"'{escaped}'"
