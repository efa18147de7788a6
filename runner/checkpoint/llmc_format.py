"""Write and read llm.c's checkpoint files, byte for byte.

`model_%08d.bin` (magic 20240326; version 3 fp32, 5 bf16) and `state_%08d_%05d.bin` (20240527), as
llm.c's `gpt2_write_to_checkpoint` and `save_state` in train_gpt2.cu lay them out. Little-endian. Every
size is checked against the file before memory is taken for it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.api import Slot, Snapshot, State
from runner.checkpoint import shuffle_block
from runner.checkpoint.disk import Chunk, Written
from runner.checkpoint.reader import Reader

SUFFIX = ".bin"
SHAPE_FIELDS = ("max_seq_len", "vocab_size", "layers", "heads", "channels", "padded_vocab")
"""A GPT-2's shape integers in the order of the model header, ints 2 to 7."""

_HEADER_BYTES = 1024
_MODEL_MAGIC, _STATE_MAGIC, _STATE_VERSION = 20240326, 20240527, 1
_MODEL_VERSIONS = {torch.float32: 3, torch.bfloat16: 5}
_MOMENTS = ("m", "v")


class ModelHeader(NamedTuple):
    """What a model file says about itself."""

    shape: dict[str, int]  # SHAPE_FIELDS
    dtype: torch.dtype
    params: int


class ModelFile(NamedTuple):
    """A model file's content."""

    header: ModelHeader
    weights: Tensor  # [params], llm.c's tensor order
    written: Written


class StateHeader(NamedTuple):
    """What a state file says about itself."""

    step: int
    rank: int
    world: int
    arrays: tuple[str, ...]  # m, v and perhaps master
    numel: int  # of each array
    shuffled: bool
    shard_slot: int
    sample_slot: int
    rng: dict[str, int]


class StateFile(NamedTuple):
    """One rank's state file: Adam's moments and where data and generators stand."""

    header: StateHeader
    optimizer: State  # flat fp32 tensors by name
    stream: State
    written: Written


# ---------------------------------------------------------------- layout


def gpt2_layout(shape: Mapping[str, int]) -> tuple[Slot, ...]:
    """Return llm.c's 16 parameter tensors of a GPT-2 of this shape, in file order."""
    length, layers, c, v = (shape[k] for k in ("max_seq_len", "layers", "channels", "padded_vocab"))
    block: dict[str, tuple[int, ...]] = {
        "ln1w": (c,),
        "ln1b": (c,),
        "qkvw": (3 * c, c),
        "qkvb": (3 * c,),
        "attprojw": (c, c),
        "attprojb": (c,),
        "ln2w": (c,),
        "ln2b": (c,),
        "fcw": (4 * c, c),
        "fcb": (4 * c,),
        "fcprojw": (c, 4 * c),
        "fcprojb": (c,),
    }
    named: list[tuple[str, tuple[int, ...], int]] = [("embed.wte", (v, c), 1), ("embed.wpe", (length, c), 1)]
    named += [(f"blocks.*.{name}", extents, layers) for name, extents in block.items()]
    named += [("final.lnfw", (c,), 1), ("final.lnfb", (c,), 1)]
    slots: list[Slot] = []
    for name, extents, copies in named:
        offset = slots[-1].offset + slots[-1].numel if slots else 0
        slots.append(Slot(name, extents, copies, offset))
    return tuple(slots)


def holds(snapshot: Snapshot) -> bool:
    """Whether llm.c's files have room for this model and optimizer."""
    state = snapshot.optimizer
    return (
        snapshot.model.get("kind") == "gpt2"
        and snapshot.weights.dtype in _MODEL_VERSIONS
        and set(state) in ({"m", "v"}, {"m", "v", "master"})
        and all(isinstance(t, Tensor) and t.dtype == torch.float32 for t in state.values())
        and snapshot.weights.numel() == sum(slot.numel for slot in gpt2_layout(snapshot.model))
    )


# ---------------------------------------------------------------- write


def model_chunks(snapshot: Snapshot) -> list[Chunk]:
    """Return what the model file holds, without copying the weights."""
    header = np.zeros(256, "<i4")
    header[:2] = _MODEL_MAGIC, _MODEL_VERSIONS[snapshot.weights.dtype]
    header[2:8] = [snapshot.model[name] for name in SHAPE_FIELDS]
    return [header.tobytes(), snapshot.weights.view(-1)]


def state_chunks(snapshot: Snapshot) -> list[Chunk]:
    """Return what this rank's state file holds, without copying the moments."""
    optimizer, stream = snapshot.optimizer, snapshot.stream
    shuffled = stream.get("order") == "shuffle"
    header = bytearray(_HEADER_BYTES)
    struct.pack_into("<4i", header, 0, _STATE_MAGIC, _STATE_VERSION, snapshot.world, snapshot.rank)
    struct.pack_into("<2i", header, 16, "master" in optimizer, shuffled)
    struct.pack_into("<i", header, 40, snapshot.step)
    struct.pack_into("<2Q", header, 80, snapshot.rng["state"], snapshot.rng["last_update"])
    struct.pack_into("<2Q", header, 120, stream.get("shard_slot", 0), stream.get("sample_slot", 0))
    arrays = [optimizer[name].view(-1) for name in (*_MOMENTS, "master") if name in optimizer]
    tail = [shuffle_block.pack(stream)] if shuffled else []
    return [bytes(header), *arrays, *tail]


def stream_rest(stream: State) -> State:
    """Return the entries of a stream's state that a state file has no room for."""
    held = {"order", "shard_slot", "sample_slot"}
    if stream.get("order") == "shuffle":
        held |= {"shard_order", "samples", "sample_order", "twister"}
    elif stream.get("order") != "sequential":
        held = set()
    return {name: value for name, value in stream.items() if name not in held}


# ---------------------------------------------------------------- read


def read_model_header(path: Path) -> ModelHeader:
    """Read a model file's header and check the file's size against it."""
    with Reader(path) as file:
        return _model_header(file)


def read_model(path: Path) -> ModelFile:
    """Read a model file; ValueError names the path and what is wrong."""
    with Reader(path) as file:
        header = _model_header(file)
        return ModelFile(header, file.tensor(header.params, header.dtype), file.end())


def _model_header(file: Reader) -> ModelHeader:
    path = file.path
    ints = struct.unpack("<256i", file.take(_HEADER_BYTES))
    if ints[0] != _MODEL_MAGIC:
        raise ValueError(f"{path}: magic {ints[0]}, an llm.c GPT-2 model has {_MODEL_MAGIC}")
    dtypes = {version: dtype for dtype, version in _MODEL_VERSIONS.items()}
    if ints[1] not in dtypes:
        raise ValueError(f"{path}: version {ints[1]}, known are 3 (fp32) and 5 (bf16)")
    shape = dict(zip(SHAPE_FIELDS, ints[2:8], strict=True))
    if min(shape.values()) < 1 or any(ints[8:]):
        raise ValueError(f"{path}: damaged header ({shape}; the other fields must be 0)")
    if shape["channels"] % shape["heads"] or shape["padded_vocab"] < shape["vocab_size"]:
        raise ValueError(f"{path}: impossible shape {shape}")
    slots = gpt2_layout(shape)
    params = slots[-1].offset + slots[-1].numel
    dtype = dtypes[ints[1]]
    expected = _HEADER_BYTES + params * dtype.itemsize
    if file.size != expected:
        raise ValueError(f"{path}: {file.size} bytes, its header asks for {expected}")
    return ModelHeader(shape, dtype, params)


def read_state_header(path: Path, *, params: int) -> StateHeader:
    """Read a state file's header and check the file's size against it; `params` as in `read_state`."""
    with Reader(path) as file:
        return _state_header(file, params)


def read_state(path: Path, *, params: int) -> StateFile:
    """Read a state file of a model with `params` parameters (padding included), from any llm.c run.

    Each of m, v and master holds all of them, or 1/P under ZeRO-1: the file's size tells. ValueError names
    the path and what is wrong.
    """
    with Reader(path) as file:
        at = _state_header(file, params)
        optimizer: State = {name: file.tensor(at.numel, torch.float32) for name in at.arrays}
        stream: State = {"order": "shuffle" if at.shuffled else "sequential"}
        stream |= {"shard_slot": at.shard_slot, "sample_slot": at.sample_slot}
        if at.shuffled:
            stream |= shuffle_block.read(file, shard_slot=at.shard_slot, sample_slot=at.sample_slot)
        return StateFile(at, optimizer, stream, file.end())


def _state_header(file: Reader, params: int) -> StateHeader:
    path, header = file.path, file.take(_HEADER_BYTES)
    magic, version, world, rank, master, shuffled = struct.unpack_from("<6i", header, 0)
    (step,) = struct.unpack_from("<i", header, 40)
    if (magic, version) != (_STATE_MAGIC, _STATE_VERSION):
        raise ValueError(f"{path}: magic {magic} version {version}, a state file has {_STATE_MAGIC} and 1")
    unused = header[24:40] + header[44:80] + header[96:120] + header[136:]
    if not (0 <= rank < world and {master, shuffled} <= {0, 1} and step >= 0) or any(unused):
        found = f"world {world}, rank {rank}, master {master}, shuffle {shuffled}, step {step}"
        raise ValueError(f"{path}: damaged header ({found}; unused fields must be 0)")
    arrays = (*_MOMENTS, "master") if master else _MOMENTS
    numel = _state_numel(file, params, world, arrays=len(arrays), shuffled=bool(shuffled))
    rng = dict(zip(("state", "last_update"), struct.unpack_from("<2Q", header, 80), strict=True))
    shard_slot, sample_slot = struct.unpack_from("<2Q", header, 120)
    return StateHeader(step, rank, world, arrays, numel, bool(shuffled), shard_slot, sample_slot, rng)


def _state_numel(file: Reader, params: int, world: int, *, arrays: int, shuffled: bool) -> int:
    """Find how many elements each array has, from the file's size alone."""
    sizes = []
    for numel in {params, params // world} if params % world == 0 else {params}:
        body = _HEADER_BYTES + 4 * arrays * numel
        rest = shuffle_block.size(file, body) if shuffled else 0
        if rest is not None and file.size == body + rest:
            return numel
        sizes.append(body)
    least = " or ".join(str(size) for size in sorted(sizes))
    tail = " and its shuffle block" if shuffled else ""
    raise ValueError(
        f"{file.path}: {file.size} bytes, {params} parameters on {world} ranks need {least}{tail}"
    )
