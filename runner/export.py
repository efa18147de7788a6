"""Write a model for other programs: `python -m runner.export run=outputs/x to=hf out=exports/x`.

hf: config.json, model.safetensors and tokenizer for transformers (GPT2LMHeadModel, LlamaForCausalLM).
llmc: llm.c's model .bin, and its tokenizer file beside it. safetensors: our own parameter names, with the
constructor call in the metadata, so that `model.init_from` and `runner.generate` read it alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from runner.api import Slot, Snapshot
from runner.checkpoint import llmc_format, safetensors_format, side_file
from runner.checkpoint.disk import Chunk, write_file
from runner.checkpoint.folder import done_steps
from runner.checkpoint.safetensors_format import Entry
from runner.command import HELP, keyed, leave, told, whole
from runner.data.tokenizer import BpeTokenizer, ByteTokenizer
from runner.data.tokenizer_file import write_tokenizer
from runner.load import MODEL_ENTRY, TOKENIZER_ENTRY, Loaded, load_model, trusting
from runner.model.gpt2 import GPT2
from runner.parallel.layout import layout_of

USAGE = """python -m runner.export run=PATH to=hf|llmc|safetensors out=PATH [step=N]
    [dtype=fp32|bf16] [overwrite=false] [trust=PACKAGE]

run        a run folder, a model .bin of llm.c, safetensors, or a Hugging Face folder
out        a new or empty folder; for to=llmc a .bin and for to=safetensors a .safetensors file as well
step       of a run folder: the checkpoint to take, not the newest intact one
overwrite  true replaces the files that are there
trust      packages of your own that the model may come from, as the run's run.trust (a,b)"""

Target = Literal["hf", "llmc", "safetensors"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SUFFIXES = {"hf": "", "llmc": ".bin", "safetensors": ".safetensors"}
"""Of `out` where it names one file and not a folder."""


class Options(NamedTuple):
    """The command's arguments."""

    run: str
    to: str
    out: str
    step: int | None = None
    dtype: str | None = None
    overwrite: bool = False
    trust: str = ""


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
    try:
        write_file(temporary, chunks)
        os.replace(temporary, path)
    except BaseException:  # a full disk, or Ctrl-C
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return path


# ---------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    """Export from the command line; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or HELP & set(arguments):
        print(USAGE)
        return 0
    try:
        written = _run(_options(arguments))
    except ValueError as error:
        return told("runner.export", error)
    for path in written:
        print(f"{path}  {path.stat().st_size} bytes")
    return 0


def _options(arguments: Sequence[str]) -> Options:
    given = keyed(arguments, known=Options._fields, paths=("run", "out"))
    values = {key: texts[-1] for key, texts in given.values.items()}
    problems = given.problems or list(_problems(values))
    if problems:
        raise ValueError("\n".join(problems))
    step, overwrite = values.pop("step", None), values.pop("overwrite", "false")
    return Options(
        step=None if step is None else whole("step", step), overwrite=overwrite == "true", **values
    )


def _problems(values: Mapping[str, str]) -> Iterator[str]:
    missing = [key for key in ("run", "to", "out") if key not in values]
    if missing:
        yield f"{missing[0]}= is missing; {USAGE.splitlines()[0]}"
    choices = {"to": get_args(Target), "dtype": tuple(DTYPES), "overwrite": ("true", "false")}
    for key, allowed in choices.items():
        if key in values and values[key] not in allowed:
            yield f"{key}={values[key]}: allowed are {', '.join(allowed)}"


def _check_out(options: Options) -> None:
    """Raise ValueError, before anything is loaded, if writing would cost files that are there."""
    out, suffix = Path(options.out), SUFFIXES[options.to]
    other = sorted(set(SUFFIXES.values()) - {"", suffix})
    if out.suffix in other and not out.is_dir():
        takes = f"a folder or a {suffix} file" if suffix else "a folder"
        raise ValueError(f"out={out}: to={options.to} writes {takes}, no {out.suffix} file")
    file = bool(suffix) and out.suffix == suffix and not out.is_dir()
    folder = out.parent if file else out
    if done_steps(folder):
        raise ValueError(f"out={out}: {folder} is a run folder, whose files stay as they are; choose another")
    if out.exists() and not file and not out.is_dir():
        raise ValueError(f"out={out}: is a file; to={options.to} writes a folder, choose another name")
    there = _there(out, file=file)
    if there and not options.overwrite:
        what = (
            "is there already"
            if file
            else f"is not empty ({', '.join(there[:3])}{', ...' * (there[3:] != [])})"
        )
        raise ValueError(f"out={out}: {what}; choose another one, or replace files with overwrite=true")


def _there(out: Path, *, file: bool) -> list[str]:
    """Return the names of what is in the way."""
    if file:
        return [out.name] if out.exists() else []
    try:
        return sorted(os.listdir(out))
    except OSError:  # nothing is there, or writing will say what is wrong
        return []


def _run(options: Options) -> list[Path]:
    _check_out(options)
    loaded = load_model(options.run, step=options.step, trust=trusting(options.trust))
    for note in loaded.info.notes:
        print(f"runner.export: warning: {note}", file=sys.stderr)
    dtype = DTYPES[options.dtype] if options.dtype else None
    return export(loaded, to=options.to, out=Path(options.out), dtype=dtype)  # type: ignore[arg-type]


if __name__ == "__main__":
    leave("runner.export", main)
