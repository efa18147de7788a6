"""Made-up data: its laws hold exactly, and its position is one integer."""

import math

import numpy as np
import pytest

from runner.data.synthetic import Induction, Markov, successor_table

WHERE = {"micro_batch": 16, "seq_len": 63, "seed": 3}


def rows(stream, n):
    taken = [stream.next() for _ in range(n)]
    return np.concatenate([np.column_stack([b.inputs.numpy(), b.targets.numpy()[:, -1:]]) for b in taken])


def test_entropy_is_the_documented_one():
    assert Markov.entropy == pytest.approx(1.20797, abs=1e-5)
    assert Induction.entropy == math.log(64)


def test_markov_follows_its_table():
    table = successor_table(3)
    assert all(len(set(row)) == 4 for row in table.tolist())
    tokens = rows(Markov().train(**WHERE), 200)
    before, after = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
    place = (table[before] == after[:, None]).argmax(1)
    assert (table[before, place] == after).all()
    found = np.bincount(place, minlength=4) / len(place)
    assert found == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.005)
    assert -np.log([0.5, 0.25, 0.15, 0.1])[place].mean() == pytest.approx(Markov.entropy, abs=0.005)


def test_induction_repeats_its_first_half():
    tokens = rows(Induction().train(**WHERE), 50)
    assert (tokens[:, :32] == tokens[:, 32:]).all()
    assert np.bincount(tokens[:, :32].flatten(), minlength=64).min() > 300  # of 400 expected
    odd = rows(Induction().train(**(WHERE | {"seq_len": 64})), 1)
    assert (odd[:, :32] == odd[:, 33:]).all()


@pytest.mark.parametrize("kind", [Markov, Induction])
def test_streams(kind):
    data = kind()
    train, val = rows(data.train(**WHERE), 5), rows(data.val(**WHERE), 5)
    assert not np.array_equal(train, val)
    assert np.array_equal(train, rows(data.train(**WHERE), 5))
    assert not np.array_equal(train, rows(data.train(**(WHERE | {"seed": 4})), 5))
    assert np.array_equal(train, rows(kind(seed=3).train(**(WHERE | {"seed": 4})), 5))
    ranks = [rows(data.train(**(WHERE | {"micro_batch": 8}), rank=r, world=2), 5) for r in range(2)]
    halves = [part.reshape(5, 8, 64) for part in ranks]
    assert np.array_equal(np.concatenate(halves, axis=1).reshape(80, 64), train)
    stream, other = data.train(**WHERE), data.train(**WHERE)
    rows(stream, 3)
    other.load_state_dict(stream.state_dict())
    assert np.array_equal(rows(other, 2), train[48:])
    with pytest.raises(ValueError, match=r"data\.seed=3"):
        data.train(**(WHERE | {"seed": 4})).load_state_dict(stream.state_dict())


@pytest.mark.parametrize("kind", [Markov, Induction])
def test_checks(kind):
    shape = {"micro_batch": 1, "seq_len": 8, "world": 1}
    assert kind().check(**shape, vocab_size=64) == []
    assert kind().check(**shape, vocab_size=None) == []
    (line,) = kind().check(**shape, vocab_size=63)
    assert "model.vocab_size=64" in line
    assert kind().bytes_per_token() is None
