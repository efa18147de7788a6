"""Tensors made of host numbers are as torch.tensor makes them, and each its own."""

import pytest
import torch

from runner.host_scalars import HostScalars

VALUES = [0.1, -0.0, 1e-320, 3.4e38, 1e-46, float("inf"), float("-inf"), float("nan"), 1 / 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_shape_are_those_of_torch_tensor(dtype):
    scalar = HostScalars(dtype)
    for value in VALUES:
        got, wanted = scalar(value), torch.tensor(value, dtype=dtype)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.signbit(got) == torch.signbit(wanted)


def test_none_is_overwritten_by_a_later_one():
    scalar = HostScalars(torch.float64)
    kept = [scalar(float(i)) for i in range(1000)]
    kept[300].add_(0.5)
    assert [t.item() for t in kept] == [i + 0.5 * (i == 300) for i in range(1000)]
