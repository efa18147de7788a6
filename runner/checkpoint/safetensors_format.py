"""Write and read checkpoints of any model and optimizer as safetensors.

Same file names as llm.c's, ending in `.safetensors`, so that other tools open them: the model file holds
one tensor per parameter under its own name, the state file every tensor of the optimizer and the
data stream, with the rest of their state as text in the metadata. The format is small enough to be written
straight from live memory, which the safetensors library cannot do.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.api import Slot, Snapshot, State
from runner.checkpoint import side_file
from runner.checkpoint.disk import Chunk, Written
from runner.checkpoint.reader import Reader

SUFFIX = ".safetensors"

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_STORED = "$stored"  # a tensor's place in the state: the name of its entry in the file
_ALIGN = 4096  # where tensor data starts, so that live memory can be written directly


class File(NamedTuple):
    """A safetensors file's content."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    written: Written


class Entry(NamedTuple):
    """Where a tensor lies in the data part of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


# ---------------------------------------------------------------- model


def parameter_names(slot: Slot) -> list[str]:
    """Return the names of a slot's layers; `*` in a stacked slot's name stands for the layer."""
    if "*" in slot.name:
        return [slot.name.replace("*", str(layer)) for layer in range(slot.layers)]
    assert slot.layers == 1, f"stacked slot {slot.name} needs a * in its name"
    return [slot.name]


def model_chunks(snapshot: Snapshot) -> list[Chunk]:
    """Return what the model file holds, without copying the weights."""
    entries, width = [], snapshot.weights.element_size()
    for slot in snapshot.layout:
        for layer, name in enumerate(parameter_names(slot)):
            start = (slot.offset + layer * slot.layer_numel) * width
            end = start + slot.layer_numel * width
            entries.append(Entry(name, snapshot.weights.dtype, slot.shape, start, end))
    model = side_file.dumps(snapshot.model)
    metadata = {"format": "pt", "step": str(snapshot.step), "model": model}
    return [header(entries, metadata), snapshot.weights.view(-1)]


def read_model(path: Path, *, layout: tuple[Slot, ...]) -> tuple[Tensor, dict[str, Any], Written]:
    """Read the flat weights of a model with this layout, its kind and shape; ValueError on any difference."""
    with Reader(path) as file:
        entries, metadata = _read_header(file)
        wanted = {name: slot.shape for slot in layout for name in parameter_names(slot)}
        found = {entry.name: entry.shape for entry in entries}
        different = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        if different:
            name, count = different[0], f"{len(different)} of {len(wanted)} tensors differ"
            shapes = f"{_shape(found, name)} in the file, {_shape(wanted, name)} in the run"
            raise MismatchError(f"{path}: {name} has shape {shapes} ({count}); use the checkpoint's model")
        if len({entry.dtype for entry in entries}) > 1 or [e.name for e in entries] != list(wanted):
            raise ValueError(f"{path}: tensors are not of one type in the model's order")
        numel = sum(slot.numel for slot in layout)
        weights = file.tensor(numel, entries[0].dtype)
        return weights, side_file.loads(metadata.get("model", "{}")), file.end()


class MismatchError(ValueError):
    """An intact file that belongs to another model."""


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "(absent)"


# ---------------------------------------------------------------- state


def state_chunks(snapshot: Snapshot) -> list[Chunk]:
    """Return what this rank's state file holds; tensors are not copied."""
    tensors: dict[str, Tensor] = {}
    state = {"optimizer": snapshot.optimizer, "stream": snapshot.stream, "rng": snapshot.rng}
    rest = side_file.dumps(_take_tensors(state, "", tensors))
    at = {"step": str(snapshot.step), "rank": str(snapshot.rank), "world": str(snapshot.world)}
    entries, start = [], 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), start, end))
        start = end
    return [header(entries, {**at, "state": rest}), *tensors.values()]


def read_state(path: Path) -> tuple[State, dict[str, int], Written]:
    """Return {optimizer, stream, rng}, {step, rank, world} and the file's size and checksum."""
    content = read_file(path)
    try:
        at = {name: int(content.metadata[name]) for name in ("step", "rank", "world")}
        state = _put_tensors(side_file.loads(content.metadata["state"]), content.tensors)
        rng, good = state["rng"], all(isinstance(state[k], dict) for k in ("optimizer", "stream", "rng"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a state file of a checkpoint ({error})") from None
    if not (good and all(type(rng.get(k)) is int for k in ("state", "last_update"))):
        raise ValueError(f"{path}: not a state file of a checkpoint")
    return state, at, content.written


def _take_tensors(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Move tensors and arrays out of nested state into `tensors`, leaving their names."""
    if isinstance(value, dict):
        return {k: _take_tensors(v, f"{where}.{k}" if where else str(k), tensors) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_take_tensors(v, f"{where}.{i}", tensors) for i, v in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Tensor) and value.dtype in _NAMES:
        kind = "tensor"
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.str[1:] != "f16":
        kind, value = "array", torch.from_numpy(np.array(value.astype(value.dtype.newbyteorder("="))))
    else:
        return value
    name = where if where not in tensors else f"{where}#{len(tensors)}"
    tensors[name] = value if value.is_contiguous() else value.contiguous()
    return {_STORED: name, "kind": kind}


def _put_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list | tuple):
        items = [_put_tensors(v, tensors) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if not isinstance(value, dict):
        return value
    if _STORED in value:
        tensor = tensors[value[_STORED]]
        return tensor if value["kind"] == "tensor" else tensor.numpy()
    return {k: _put_tensors(v, tensors) for k, v in value.items()}


# ---------------------------------------------------------------- the format


def read_file(path: Path) -> File:
    """Read every tensor of a safetensors file; ValueError names the path and what is wrong."""
    with Reader(path) as file:
        entries, metadata = _read_header(file)
        tensors = {}
        for entry in entries:
            tensors[entry.name] = file.tensor(math.prod(entry.shape), entry.dtype).reshape(entry.shape)
        return File(tensors, metadata, file.end())


def header(entries: list[Entry], metadata: dict[str, str]) -> bytes:
    """Return the file's start: the table of tensors, padded so that their data can be written directly."""
    table: dict[str, Any] = {"__metadata__": metadata}
    for entry in entries:
        span = {"data_offsets": [entry.start, entry.end]}
        table[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), **span}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: Reader) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries in file order, checked to fill the data part without gaps."""
    n = int.from_bytes(file.take(8), "little")
    if n > min(file.size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"{file.path}: header of {n} bytes in a file of {file.size}")
    try:
        table = json.loads(file.take(n), object_pairs_hook=side_file.unique)
        metadata = table.pop("__metadata__", {})
        entries = [_entry(name, fields) for name, fields in table.items()]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file.path}: damaged header ({type(error).__name__}: {error})") from None
    entries.sort(key=lambda entry: (entry.start, entry.end))
    starts = [0, *(entry.end for entry in entries)]
    if starts != [*(entry.start for entry in entries), file.size - 8 - n]:
        raise ValueError(f"{file.path}: {file.size} bytes, its tensors do not fill it exactly")
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{file.path}: damaged metadata")
    return entries, metadata


def _entry(name: str, fields: dict[str, Any]) -> Entry:
    dtype, shape, (start, end) = _DTYPES[fields["dtype"]], fields["shape"], fields["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, start, end)) or len(shape) > 32:
        raise ValueError(f"{name}: shape {shape}, bytes {start} to {end}")
    if math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError(f"{name}: shape {shape} does not fill bytes {start} to {end}")
    return Entry(name, dtype, tuple(shape), start, end)
