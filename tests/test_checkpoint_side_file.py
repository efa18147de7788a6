"""The side file: any state comes back with its types and bits, and damage shows."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from runner.checkpoint import side_file
from tests.checkpoint_cases import assert_equal


def bits_to_float(bits: int) -> float:
    return struct.unpack("<d", bits.to_bytes(8, "little"))[0]


arrays = npst.arrays(
    st.sampled_from(["<f8", "<f4", "<f2", "<i8", "<i4", "<u8", "<u2", "|b1", "|i1", "<c16"]),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
tensors = arrays.filter(lambda a: a.dtype.kind != "c").map(torch.from_numpy)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(0, 2**64 - 1).map(bits_to_float),
    st.floats(),
    st.text(),
    st.binary(),
    arrays,
    arrays.filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0]),
    tensors,
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.just("$float")), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_every_value_comes_back(value: Any) -> None:
    text = side_file.dumps(value)
    json.loads(text, parse_constant=pytest.fail)  # strict JSON
    assert_equal(side_file.loads(text), value)


@pytest.mark.parametrize("bits", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000000, 1 << 63, 1])
def test_special_floats_keep_their_bits(bits: int) -> None:
    value = bits_to_float(bits)
    again = side_file.loads(side_file.dumps(value))
    assert struct.pack("<d", again) == struct.pack("<d", value)


def test_bfloat16_and_float8_tensors_come_back() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float16):
        value = torch.tensor([0.5, -2.0, math.inf]).to(dtype)
        assert_equal(side_file.loads(side_file.dumps({"x": value})), {"x": value})


def test_result_is_writable_and_owns_its_memory() -> None:
    value = side_file.loads(side_file.dumps([np.arange(3), torch.arange(3)]))
    value[0][0] = 7
    value[1][0] = 7
    assert (value[0][0], int(value[1][0])) == (7, 7)


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(ValueError, match=r"state.parts.logger\[1\]: a checkpoint cannot keep a object"):
        side_file.dumps({"parts": {"logger": [1, object()]}})
    with pytest.raises(ValueError, match="array of object"):
        side_file.dumps(np.array([None]))


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        '{"a": 1, "a": 2}',
        '{"$strange": 1}',
        '{"$float": "7ff8"}',
        '{"$bytes": "!"}',
        '{"$bytes": 3}',
        '{"$array": "", "dtype": "|O", "shape": []}',
        '{"$array": "", "dtype": "<f8", "shape": [99999999999999999999]}',
        '{"$array": "", "dtype": "<f8", "shape": [0, -1]}',
        '{"$array": "AAAA", "dtype": "<f8", "shape": [1]}',
        '{"$array": "AAAA", "dtype": "no such type", "shape": [1]}',
        '{"$tensor": "", "dtype": "object", "shape": []}',
        '{"$tensor": "", "shape": []}',
        '{"$tuple": 3}',
        '{"$dict": [[1]]}',
        '{"$dict": [[[], 1]]}',
        "[" * 100_000,
        '{"$tuple": [' * 20_000,
    ],
)
def test_damaged_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        side_file.loads(text)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "extra.json"
    data = side_file.frame(side_file.dumps({"step": 3, "x": [1.5, None]}), files={"a.bin": [1, "00"]})
    path.write_bytes(data)
    assert side_file.read(path) == {"files": {"a.bin": [1, "00"]}, "step": 3, "x": [1.5, None]}
    assert json.loads(data)["content"]["step"] == 3
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            side_file.read(path)
        path.write_bytes(data[:at])
        with pytest.raises(ValueError, match="damaged"):
            side_file.read(path)
