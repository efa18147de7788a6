"""Keep what llm.c's files have no room for: `extra_%08d_%05d.json`, strict JSON that checks itself.

Values come back with their type and bits: what JSON cannot say becomes an object whose first key
starts with `$` and names the type.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from runner.api import State
from runner.checkpoint.disk import memory
from runner.checkpoint.reader import Reader

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
}
"""The element types that a checkpoint keeps, by name."""

_HEAD, _MIDDLE, _END = b'{"xxh3_64": "', b'",\n"content": ', b"}\n"
_CONTENT_AT = len(_HEAD) + 16 + len(_MIDDLE)


# ---------------------------------------------------------------- the file


def frame(encoded: str, *, files: dict[str, list[Any]]) -> bytes:
    """Make a side file of an encoded table (`dumps`) and the files it vouches for."""
    text = f'{{"files":{json.dumps(files)},{encoded[1:]}'.encode()
    return _HEAD + xxhash.xxh3_64_hexdigest(text).encode() + _MIDDLE + text + _END


def read(path: Path) -> State:
    """Read a side file; ValueError names the path and what is wrong."""
    with Reader(path) as file:
        data = file.take(file.size)
    if not data.startswith(_HEAD):
        raise ValueError(f"{path}: not a side file of a checkpoint, or one that is damaged")
    text, framed = data[_CONTENT_AT : -len(_END)], data[:_CONTENT_AT]
    digest = xxhash.xxh3_64_hexdigest(text).encode()
    if framed != _HEAD + digest + _MIDDLE or not data.endswith(_END):
        raise ValueError(f"{path}: damaged (its own checksum does not fit)")
    try:
        content = loads(text.decode())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no table")
    return content


def dumps(value: Any) -> str:
    """Encode any state value as strict JSON."""
    return json.dumps(_encode(value, "state"), allow_nan=False, separators=(",", ":"))


def loads(text: str) -> Any:
    """Decode what `dumps` made; ValueError for anything else."""
    try:
        return _decode(json.loads(text, object_pairs_hook=unique, parse_constant=_refuse_constant))
    except RecursionError:
        raise ValueError("nested too deep") from None
    except (KeyError, TypeError, AttributeError, binascii.Error, OverflowError, struct.error) as error:
        raise ValueError(f"damaged value ({type(error).__name__}: {error})") from None


# ---------------------------------------------------------------- encode


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return _encode_dict(value, where)
    for kind, encode in _ENCODERS:
        if isinstance(value, kind):
            return encode(value, where)
    raise ValueError(
        f"{where}: a checkpoint cannot keep a {type(value).__name__}; keep numbers, text or arrays"
    )


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [[_encode(k, f"{where} key"), _encode(v, f"{where}.{k}")] for k, v in value.items()]
    return {"$dict": pairs}


def _encode_float(value: float, where: str) -> Any:
    if math.isfinite(value):
        return value
    return {"$float": struct.pack(">d", value).hex(), "reads": str(value)}


def _encode_array(value: Any, where: str) -> Any:
    if value.dtype.kind not in "biufc":
        raise ValueError(f"{where}: a checkpoint cannot keep an array of {value.dtype}; keep numbers")
    shape = list(value.shape)
    data = np.ascontiguousarray(value).tobytes()
    tag = "$array" if isinstance(value, np.ndarray) else "$scalar"
    return {tag: _text(data), "dtype": value.dtype.newbyteorder("<").str, "shape": shape}


def _encode_tensor(value: Tensor, where: str) -> Any:
    name = str(value.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{where}: a checkpoint cannot keep a tensor of {value.dtype}")
    data = memory(value.detach().cpu().contiguous()).tobytes()
    return {"$tensor": _text(data), "dtype": name, "shape": list(value.shape)}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


_ENCODERS: tuple[tuple[Any, Callable[[Any, str], Any]], ...] = (
    ((np.ndarray, np.generic), _encode_array),  # before float: numpy's float64 is a float too
    (float, _encode_float),
    (tuple, lambda value, where: {"$tuple": [_encode(item, where) for item in value]}),
    ((bytes, bytearray), lambda value, where: {"$bytes": _text(bytes(value))}),
    (Tensor, _encode_tensor),
)


# ---------------------------------------------------------------- decode


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON table, refusing a key that stands twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice in one table")
    return table


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item) for key, item in value.items()}
    if tag not in _DECODERS:
        raise ValueError(f"unknown type {tag}")
    return _DECODERS[tag](value)


def _decode_array(value: State) -> Any:
    tag = "$array" if "$array" in value else "$scalar"
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in "biufc" or dtype.itemsize > 32:
        raise ValueError(f"array of {dtype}")
    data = _data(value[tag], value["shape"], dtype.itemsize)
    array = np.frombuffer(data, dtype).reshape(value["shape"]).copy()
    return array if tag == "$array" else array[()]


def _decode_tensor(value: State) -> Tensor:
    dtype = DTYPES[value["dtype"]]
    data = _data(value["$tensor"], value["shape"], dtype.itemsize)
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.clone().view(dtype).reshape(value["shape"])


def _data(text: str, shape: list[int], itemsize: int) -> bytearray:
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape) or len(shape) > 32:
        raise ValueError(f"shape {shape}")
    data = bytearray(base64.b64decode(text, validate=True))
    if len(data) != math.prod(shape) * itemsize:
        raise ValueError(f"{len(data)} bytes for shape {shape} of {itemsize}-byte elements")
    return data


_DECODERS: dict[str, Callable[[State], Any]] = {
    "$dict": lambda value: {_decode(k): _decode(v) for k, v in value["$dict"]},
    "$float": lambda value: struct.unpack(">d", bytes.fromhex(value["$float"]))[0],
    "$tuple": lambda value: tuple(_decode(item) for item in value["$tuple"]),
    "$bytes": lambda value: base64.b64decode(value["$bytes"], validate=True),
    "$array": _decode_array,
    "$scalar": _decode_array,
    "$tensor": _decode_tensor,
}
