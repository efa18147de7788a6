"""Reading ahead changes nothing but time."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.api import Batch, Stream
from runner.data.loader import Loader
from runner.data.stream import Position


class Counting:
    """A source whose batch k holds k; fails at `fail_at`."""

    def __init__(self, *, fail_at=None, take_s=0.0):
        self.take_s = take_s
        self.taken = 0
        self.closed = False
        self.fail_at = fail_at

    @property
    def position(self):
        return Position(None, self.taken, 0)

    def take(self):
        if self.taken == self.fail_at:
            raise ValueError(f"bad token in batch {self.taken}")
        time.sleep(self.take_s)
        self.taken += 1
        return np.stack([np.full((2, 3), self.taken - 1), np.full((2, 3), -self.taken)])

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]

    def close(self):
        self.closed = True


def threads():
    return [t for t in threading.enumerate() if t.name == "data-prefetch"]


@settings(max_examples=25, deadline=None)
@given(
    prefetch=st.integers(0, 4),
    moves=st.lists(st.one_of(st.just("next"), st.just("save"), st.just("load")), max_size=60),
)
def test_reading_ahead_equals_reading(prefetch, moves):
    source, loader = Counting(), Loader(Counting(), prefetch=prefetch)
    saved = source.state_dict()
    for move in moves:
        if move == "next":
            inputs, targets = source.take()
            batch = loader.next()
            assert (batch.inputs.numpy() == inputs).all()
            assert (batch.targets.numpy() == targets).all()
        elif move == "save":
            saved = source.state_dict()
        else:
            source.load_state_dict(saved)
            loader.load_state_dict(saved)
        assert loader.state_dict() == source.state_dict()
        assert loader.position == source.position
    loader.close()
    assert not threads()


def test_without_a_thread_quick_batches_are_read_a_few_at_a_time_and_slow_ones_singly():
    quick, slow = Counting(), Counting(take_s=0.001)
    for source, most in ((quick, 16), (slow, 1)):
        loader = Loader(source)
        for handed_out in range(1, 40):
            loader.next()
            assert handed_out <= source.taken < handed_out + most
        loader.close()


def test_reads_at_most_depth_ahead():
    source = Counting()
    loader = Loader(source, prefetch=2)
    loader.next()
    deadline = time.monotonic() + 5
    while source.taken < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert source.taken <= 4  # one handed out, two ready, at most one just being made
    assert loader.state_dict() == {"taken": 1}
    loader.close()
    assert source.closed


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_error_surfaces_at_its_batch_and_stays(prefetch):
    loader = Loader(Counting(fail_at=2), prefetch=prefetch)
    assert [int(loader.next().inputs[0, 0]) for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="bad token in batch 2"):
            loader.next()
    assert loader.state_dict() == {"taken": 2}
    loader.close()
    assert not threads()


def test_is_a_stream_of_int64_batches_on_the_device():
    loader = Loader(Counting(), device="cpu", prefetch=1)
    assert isinstance(loader, Stream)
    batch = loader.next()
    assert isinstance(batch, Batch)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.shape == (2, 3)
    loader.close()
    loader.close()


def test_thread_does_not_keep_the_process():
    loader = Loader(Counting(), prefetch=1)
    loader.next()
    assert all(thread.daemon for thread in threads())
    loader.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_cuda_batches_are_the_same(prefetch):
    plain, device = Loader(Counting()), Loader(Counting(), device="cuda", prefetch=prefetch)
    for _ in range(50):
        expected, found = plain.next(), device.next()
        assert found.inputs.is_cuda
        assert torch.equal(expected.inputs, found.inputs.cpu())
        assert torch.equal(expected.targets, found.targets.cpu())
    device.close()
