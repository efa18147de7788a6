"""Load a model from whatever holds one: a run folder, llm.c's .bin, safetensors, a Hugging Face folder.

Weights are loaded in fp32, which holds bf16 and fp16 exactly; `Info.dtype` says what the file has.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner import manifest
from runner.api import Tokenizer
from runner.checkpoint import folder as files
from runner.checkpoint import llmc_format
from runner.checkpoint.load import load_weights
from runner.checkpoint.safetensors_format import read_file
from runner.config import TRUSTED, build
from runner.data.tokenizer import tokenizer as tokenizer_for
from runner.parallel.layout import layout_of
from runner.weights import assign, assign_flat, fill, rows_of

log = logging.getLogger(__name__)

Node = dict[str, Any]

_TARGETS = {"gpt2": "runner.model.gpt2.GPT2", "llama": "runner.model.llama.Llama"}
_MODEL_FILE = re.compile(r"model_(\d{8})\.(?:bin|safetensors)")
_VOCABULARIES = {257: "byte", 50257: "gpt2"}  # sizes that only one of our own tokenizers has
MODEL_ENTRY = "runner.model"  # of a safetensors file's metadata: the model's constructor call
TOKENIZER_ENTRY = "runner.tokenizer"


class Info(NamedTuple):
    """Where a model came from."""

    path: Path
    node: Node  # the constructor call that builds the model, as in a configuration
    dtype: torch.dtype  # of the stored weights
    step: int | None = None  # of the checkpoint
    tokenizer: str | None = None  # its name or path, as data.tokenizer has it
    notes: tuple[str, ...] = ()


class Loaded(NamedTuple):
    """A model in eval mode, and what else its source tells."""

    model: nn.Module
    tokenizer: Tokenizer | None
    info: Info


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    step: int | None = None,
    trust: tuple[str, ...] = TRUSTED,
) -> Loaded:
    """Build the model that `path` holds and fill it; of a run folder the newest intact checkpoint, or `step`.

    Only targets in the packages `trust` are called, whatever the folder's own configuration trusts.
    ValueError with one line if there is nothing to load.
    """
    path = Path(path)
    if not path.exists():
        at = re.fullmatch(r"(.+)@(\d+)", str(path))
        hint = f"; for a checkpoint write step={int(at[2])}" if at and Path(at[1]).exists() else ""
        raise ValueError(f"{path}: no such file or folder{hint}")
    stored = _MODEL_FILE.fullmatch(path.name)
    if stored and step is None and int(stored[1]) in files.done_steps(path.parent):
        path, step = path.parent, int(stored[1])
    if path.is_dir() and (files.done_steps(path) or (path / manifest.FILE_NAME).exists()):
        loaded = _from_run(path, step, trust)
    elif step is not None:
        raise ValueError(f"{path}: step={step} asked for, but this is not a run folder with checkpoints")
    elif path.is_dir():
        loaded = _from_hugging_face(path, trust)
    elif path.suffix == ".safetensors":
        loaded = _from_safetensors(path, trust)
    else:
        loaded = _from_llmc(path)
    return loaded._replace(model=loaded.model.to(device).eval())


def trusting(packages: str) -> tuple[str, ...]:
    """Return what `trust=a,b` on a command line allows to be called, besides this package's own."""
    return (*TRUSTED, *filter(None, packages.split(",")))


# ---------------------------------------------------------------- run folders


def _from_run(folder: Path, step: int | None, trust: tuple[str, ...]) -> Loaded:
    steps = files.done_steps(folder)
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{folder}: no checkpoint of step {step}; there are {there}")
    if not steps:
        raise ValueError(f"{folder}: no complete checkpoint (DONE file) yet")
    recorded = manifest.read(folder) or {}
    config = recorded.get("config", {})
    problems: list[str] = []
    for candidate in reversed(steps) if step is None else [step]:
        try:
            model, info = _checkpoint(folder, candidate, config, trust)
        except (ValueError, OSError) as error:
            problems.append(str(error))
            continue
        tokenizer, name = _tokenizer_of_run(config, model, trust)
        skipped = tuple(
            f"checkpoint skipped as damaged: {problem}; took step {candidate}" for problem in problems
        )
        return Loaded(model, tokenizer, info._replace(tokenizer=name, notes=skipped))
    raise ValueError(f"{folder}: nothing to load ({'; '.join(problems)})")


def _checkpoint(
    folder: Path, step: int, config: Mapping[str, Any], trust: tuple[str, ...]
) -> tuple[nn.Module, Info]:
    found = files.inspect(folder, step)
    if found.suffix == llmc_format.SUFFIX:
        header = llmc_format.read_model_header(files.model_path(folder, step, found.suffix))
        node = _gpt2_node(header.shape)
    elif "model" in config:
        saved = found.extras[0]["model"]
        node = dict(config["model"]) | {k: saved[k] for k in ("vocab_size", "max_seq_len") if k in saved}
    else:
        raise ValueError(f"{folder}: has no {manifest.FILE_NAME}, which says how to build the model")
    model = _undrawn(node, trust, folder)
    weights = load_weights(found, layout=layout_of(model).slots).weights
    assign_flat(model, weights)
    return model, Info(folder, node, weights.dtype, step)


def _tokenizer_of_run(
    config: Mapping[str, Any], model: nn.Module, trust: tuple[str, ...]
) -> tuple[Tokenizer | None, str | None]:
    data = config.get("data")
    if not isinstance(data, Mapping) or "_target_" not in data:
        return _tokenizer_by_size(model)
    tokenizer: Tokenizer | None = build(data, trust=trust).tokenizer
    return tokenizer, data.get("tokenizer") if tokenizer else None


def _tokenizer_by_size(model: nn.Module) -> tuple[Tokenizer | None, str | None]:
    name = _VOCABULARIES.get(int(model.vocab_size))  # type: ignore[arg-type]
    return (tokenizer_for(name), name) if name else (None, None)


# ---------------------------------------------------------------- files of others


def _from_llmc(path: Path) -> Loaded:
    file = llmc_format.read_model(path)
    node = _gpt2_node(file.header.shape)
    model = _undrawn(node, TRUSTED, path)
    assign_flat(model, file.weights)
    tokenizer, name = _tokenizer_by_size(model)
    return Loaded(model, tokenizer, Info(path, node, file.header.dtype, tokenizer=name))


def _gpt2_node(shape: Mapping[str, int]) -> Node:
    length, vocab, layers, heads, channels, padded = (shape[name] for name in llmc_format.SHAPE_FIELDS)
    node = {"layers": layers, "heads": heads, "width": channels, "max_seq_len": length}
    return {"_target_": _TARGETS["gpt2"], **node, "vocab_size": vocab, "padded_vocab": padded}


def _from_hugging_face(folder: Path, trust: tuple[str, ...]) -> Loaded:
    from runner.hf import read_hugging_face

    if not (folder / "config.json").exists():
        raise ValueError(
            f"{folder}: neither a run folder (DONE files) nor a Hugging Face model (config.json)"
        )
    found = read_hugging_face(folder)
    node = {"_target_": _TARGETS[found.kind], **found.shape}
    model = _undrawn(node, trust, folder)
    assign(model, found.tensors, folder)
    dtype = next(iter(found.tensors.values())).dtype
    spec = folder / "tokenizer.json"
    tokenizer, name = (tokenizer_for(str(spec)), str(spec)) if spec.exists() else _tokenizer_by_size(model)
    return Loaded(model, tokenizer, Info(folder, node, dtype, tokenizer=name))


def _from_safetensors(path: Path, trust: tuple[str, ...]) -> Loaded:
    if (path.parent / "config.json").exists() and path.name == "model.safetensors":
        return _from_hugging_face(path.parent, trust)
    file = read_file(path)
    if MODEL_ENTRY not in file.metadata:
        raise ValueError(
            f"{path}: does not say which model it holds; give its run folder, or a folder with config.json"
        )
    from runner.checkpoint import side_file

    node = side_file.loads(file.metadata[MODEL_ENTRY])
    if not isinstance(node, dict) or "_target_" not in node:
        raise ValueError(f"{path}: damaged metadata entry {MODEL_ENTRY}")
    model = _undrawn(node, trust, path)
    assign(model, file.tensors, path)
    name = file.metadata.get(TOKENIZER_ENTRY) or None
    tokenizer = tokenizer_for(name) if name else None
    return Loaded(model, tokenizer, Info(path, node, next(iter(file.tensors.values())).dtype, tokenizer=name))


# ---------------------------------------------------------------- fill a model


def _undrawn(node: Node, trust: tuple[str, ...], path: Path) -> nn.Module:
    """Build a model without drawing weights that are about to be replaced."""
    call = dict(node)
    if node["_target_"] in _TARGETS.values():
        call["init_from"] = str(path)
    model: nn.Module = build(call, trust=trust)
    return model


# ---------------------------------------------------------------- model.init_from


@torch.no_grad()
def initialise(model: nn.Module, init_from: str) -> None:
    """Fill a run's model with the weights that `init_from` holds: anything `load_model` reads, or run@step.

    The shapes must agree; only the model's context may be shorter, and its vocabulary padding differ.
    """
    key = f"model.init_from={init_from}"
    match = re.fullmatch(r"(.+)@(\d+)", init_from)
    path, step = (match[1], int(match[2])) if match and not Path(init_from).exists() else (init_from, None)
    try:
        loaded = load_model(path, step=step)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    for note in loaded.info.notes:
        log.warning("%s: %s", key, note)
    source = loaded.model
    _check_numbers(model, source, key)
    theirs = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in theirs:
            raise ValueError(
                f"{key}: holds a {type(source).__name__} without {name}; use a model of its kind"
            )
        tensor: Tensor = theirs[name]
        if name == "embed.wpe":
            tensor = tensor[: parameter.shape[0]]
        try:
            fill(parameter, tensor, rows=rows_of(model, name), name=name, path=Path(path))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None


def _check_numbers(model: nn.Module, source: nn.Module, key: str) -> None:
    """Raise ValueError for a number that changes what the weights mean."""
    checks: dict[str, Callable[[Any, Any], bool]] = dict.fromkeys(
        ("layers", "heads", "kv_heads", "width", "vocab_size", "rope_theta", "norm_eps"), lambda a, b: a == b
    )
    checks["max_seq_len"] = lambda here, there: here <= there or not hasattr(model.embed, "wpe")
    for name, fits in checks.items():
        here, there = getattr(model, name, None), getattr(source, name, None)
        if not fits(here, there):
            raise ValueError(
                f"{key}: it has {name} {there}, the run's model {here}; set model.{name}={there}"
            )
