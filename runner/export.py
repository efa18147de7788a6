"""Write a model for other programs: `python -m runner.export run=outputs/x to=hf out=exports/x`.

hf: config.json, model.safetensors and tokenizer for transformers (GPT2LMHeadModel, LlamaForCausalLM).
llmc: llm.c's model .bin, and its tokenizer file beside it. safetensors: our own parameter names, with the
constructor call in the metadata, so that `model.init_from` and `runner.generate` read it alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from runner.api import Slot, Snapshot
from runner.checkpoint import llmc_format, safetensors_format, side_file
from runner.checkpoint.disk import Chunk, write_file
from runner.checkpoint.safetensors_format import Entry
from runner.config import TRUSTED
from runner.data.tokenizer import BpeTokenizer, ByteTokenizer
from runner.data.tokenizer_file import write_tokenizer
from runner.load import MODEL_ENTRY, TOKENIZER_ENTRY, Loaded, load_model
from runner.model.gpt2 import GPT2
from runner.parallel.layout import layout_of

USAGE = """python -m runner.export run=PATH to=hf|llmc|safetensors out=PATH [step=N]
    [dtype=fp32|bf16] [trust=PACKAGE]
    run: a run folder, a model .bin of llm.c, safetensors, or a Hugging Face folder"""

Target = Literal["hf", "llmc", "safetensors"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Options(NamedTuple):
    """The command's arguments."""

    run: str
    to: str
    out: str
    step: int | None = None
    dtype: str | None = None
    trust: str | None = None


def export(loaded: Loaded, *, to: Target, out: Path, dtype: torch.dtype | None = None) -> list[Path]:
    """Write `loaded` below or at `out`, in `dtype` or that of its source; return the files.

    ValueError if the target cannot hold the model.
    """
    stored = loaded.info.dtype if loaded.info.dtype in DTYPES.values() else torch.float32
    write = {"hf": _write_hf, "llmc": _write_llmc, "safetensors": _write_safetensors}[to]
    try:
        return write(loaded, out, dtype or stored)
    except OSError as error:
        raise ValueError(f"out={out}: {error.filename or ''}: {error.strerror or error}") from None


# ---------------------------------------------------------------- targets


def _write_hf(loaded: Loaded, out: Path, dtype: torch.dtype) -> list[Path]:
    from runner.hf import to_hugging_face
    from runner.hf_config import config_of
    from runner.hf_tokenizer import tokenizer_files

    tensors = to_hugging_face(loaded.model, dtype=dtype)
    eot = loaded.tokenizer.eot if loaded.tokenizer else None
    texts = {"config.json": json.dumps(config_of(loaded.model, dtype=dtype, eot=eot), indent=2)}
    limit = int(loaded.model.max_seq_len)  # type: ignore[arg-type]
    texts |= tokenizer_files(loaded.info.tokenizer, eot=eot, max_seq_len=limit)
    _folder(out)
    # config.json last: a folder with one is complete.
    written = [_write(out / "model.safetensors", _safetensors(tensors, {"format": "pt"}))]
    return written + [_write(out / name, [text.encode()]) for name, text in reversed(texts.items())]


def _write_llmc(loaded: Loaded, out: Path, dtype: torch.dtype) -> list[Path]:
    model = loaded.model
    if not isinstance(model, GPT2):
        raise ValueError(
            f"to=llmc: llm.c's model file holds a GPT-2, not a {type(model).__name__}; use to=hf"
        )
    layout = layout_of(model)
    weights = torch.empty(layout.numel, dtype=dtype)
    for placed in layout.placed:
        weights[placed.offset : placed.offset + placed.numel] = placed.parameter.detach().cpu().view(-1)
    path = out if out.suffix == ".bin" else out / f"model_{loaded.info.step or 0:08d}.bin"
    _folder(path.parent)
    written = [_write(path, llmc_format.model_chunks(_snapshot(model, layout.slots, weights)))]
    if isinstance(loaded.tokenizer, ByteTokenizer | BpeTokenizer):
        # The name under which llm.c's programs look for it, in their working folder.
        tokenizer = path.with_name("gpt2_tokenizer.bin")
        write_tokenizer(tokenizer, loaded.tokenizer)
        written.append(tokenizer)
    return written


def _snapshot(model: GPT2, slots: tuple[Slot, ...], weights: Tensor) -> Snapshot:
    ints = (model.max_seq_len, model.vocab_size, model.layers, model.heads, model.width, model.padded_vocab)
    shape = dict(zip(llmc_format.SHAPE_FIELDS, ints, strict=True))
    return Snapshot(
        0, 0, 1, slots, {"kind": "gpt2", **shape}, weights, {}, {}, {"state": 0, "last_update": 0}
    )


def _write_safetensors(loaded: Loaded, out: Path, dtype: torch.dtype) -> list[Path]:
    metadata = {"format": "pt", MODEL_ENTRY: side_file.dumps(_complete(loaded))}
    if loaded.info.tokenizer:
        metadata[TOKENIZER_ENTRY] = loaded.info.tokenizer
    tensors = {name: p.detach().to("cpu", dtype) for name, p in loaded.model.named_parameters()}
    path = out if out.suffix == ".safetensors" else out / "weights.safetensors"
    _folder(path.parent)
    return [_write(path, _safetensors(tensors, metadata))]


def _complete(loaded: Loaded) -> dict[str, object]:
    """Return the constructor call with what the program had supplied, so that it stands alone."""
    supplied = {name: getattr(loaded.model, name) for name in ("vocab_size", "max_seq_len")}
    return {**loaded.info.node, **supplied, "init_from": None}


# ---------------------------------------------------------------- files


def _folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def _safetensors(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> list[Chunk]:
    entries, chunks, start = [], [], 0
    for name, tensor in tensors.items():
        held = tensor.contiguous()
        end = start + held.numel() * held.element_size()
        entries.append(Entry(name, held.dtype, tuple(held.shape), start, end))
        chunks.append(held)
        start = end
    return [safetensors_format.header(entries, metadata), *chunks]


def _write(path: Path, chunks: Sequence[Chunk]) -> Path:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    write_file(temporary, chunks)
    os.replace(temporary, path)
    return path


# ---------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    """Export from the command line; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        for path in _run(_options(arguments)):
            print(f"{path}  {path.stat().st_size} bytes")
    except ValueError as error:
        print(f"runner.export: error: {error}", file=sys.stderr)
        return 2
    return 0


def _options(arguments: Sequence[str]) -> Options:
    values: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in Options._fields:
            raise ValueError(f"{argument!r}: expected key=value with one of {', '.join(Options._fields)}")
        values[key] = value
    missing = [key for key in ("run", "to", "out") if not values.get(key)]
    if missing:
        raise ValueError(f"{missing[0]}= is missing; {USAGE.splitlines()[0]}")
    step = values.pop("step", None)
    if step is not None and not step.isdecimal():
        raise ValueError(f"step={step}: expected a whole number")
    options = Options(step=int(step) if step else None, **values)
    if options.to not in get_args(Target):
        raise ValueError(f"to={options.to}: allowed are {', '.join(get_args(Target))}")
    if options.dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={options.dtype}: allowed are {', '.join(DTYPES)}")
    return options


def _run(options: Options) -> list[Path]:
    trust = (*TRUSTED, *(options.trust.split(",") if options.trust else ()))
    loaded = load_model(options.run, step=options.step, trust=trust)
    dtype = DTYPES[options.dtype] if options.dtype else None
    return export(loaded, to=options.to, out=Path(options.out), dtype=dtype)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
