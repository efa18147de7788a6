"""Outlier verdicts: llm.c's z-scores to the bit, refusals and their reasons, windows and their state."""

import ast
import inspect
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import outlier, zscore_device
from runner.api import REASONS
from runner.outlier import Finite, Median, Off, ZScore

SEQUENCES = json.loads((Path(__file__).parent / "golden" / "outlier_detector.json").read_text())["sequences"]
ALL = [ZScore, Median, Finite, Off]


def judge(part, loss, norm=1.0):
    return part(torch.tensor(loss, dtype=torch.float32), torch.tensor(norm, dtype=torch.float32))


def reasons(verdict):
    bits = int(verdict.reason)
    return {text for bit, text in REASONS.items() if bits & bit}


class Reference:
    """llm.c's detector in plain floats."""

    def __init__(self, window):
        self.window, self.values, self.index, self.sum, self.sum_sq = window, [], 0, 0.0, 0.0

    def __call__(self, x):
        if len(self.values) < self.window:
            self.values.append(x)
            self.sum += x
            self.sum_sq += x * x
            return math.nan
        old = self.values[self.index]
        self.sum -= old
        self.sum_sq -= old * old
        self.values[self.index] = x
        self.sum += x
        self.sum_sq += x * x
        self.index = (self.index + 1) % self.window
        mean = self.sum / self.window
        with np.errstate(invalid="ignore"):
            std = float(np.sqrt(np.float64(self.sum_sq / self.window - mean * mean)))
        return 0.0 if std == 0 else (x - mean) / std


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize("sequence", SEQUENCES, ids=[s["name"] for s in SEQUENCES])
def test_z_is_llmc_to_the_last_bit(sequence):
    part = ZScore()
    for x, z in zip(sequence["input"], sequence["z"], strict=True):
        x = torch.tensor(float(x), dtype=torch.float64)
        verdict = part(x, x)
        assert same(verdict.loss_z.item(), float(z))
        assert same(verdict.norm_z.item(), float(z))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.integers(2, 40), scale=st.sampled_from([1e-8, 1.0, 1e6]))
def test_random_streams_give_the_reference_scores_and_decisions(seed, window, scale):
    rng = random.Random(seed)
    part = ZScore(window=window, max_loss_z=1.5, max_norm_z=1.0)
    loss_z, norm_z = Reference(window), Reference(window)
    for _ in range(3 * window):
        loss = float(np.float32(rng.choice([1.0, rng.gauss(3, scale), rng.expovariate(1) * scale])))
        norm = float(np.float32(rng.gauss(1, 0.1)))
        verdict = judge(part, loss, norm)
        a, b = loss_z(loss), norm_z(norm)
        assert same(verdict.loss_z.item(), a)
        assert same(verdict.norm_z.item(), b)
        want = set()
        if math.isfinite(a) and np.float32(a) > np.float32(1.5):
            want = {"loss z-score"}
        elif math.isfinite(b) and np.float32(b) > np.float32(1.0):
            want = {"gradient norm z-score"}
        assert reasons(verdict) == want
        assert verdict.apply.item() == (not want)


def test_no_score_before_the_window_is_full_and_one_right_after():
    part = ZScore(window=128, max_loss_z=1.0)
    for i in range(128):
        verdict = judge(part, 100.0 * i)
        assert math.isnan(verdict.loss_z.item())
        assert verdict.apply.item()
    assert not judge(part, 1e6).apply.item()


def test_the_root_is_correctly_rounded():
    x = np.random.default_rng(0).lognormal(0, 20, 20000)
    assert (zscore_device.square_root(torch.from_numpy(x)).numpy() == np.sqrt(x)).all()
    assert zscore_device.square_root(
        torch.tensor([0.0, -1.0, math.inf], dtype=torch.float64)
    ).isnan().tolist() == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("make", [ZScore, lambda: ZScore(robust=True), Median, Finite])
@pytest.mark.parametrize(
    ("loss", "norm", "bits"), [(math.nan, 1, 1), (1, math.inf, 2), (math.inf, math.nan, 3)]
)
def test_a_non_finite_step_is_refused_and_leaves_no_trace(make, loss, norm, bits):
    part, twin = make(), make()
    rng = random.Random(0)
    for step in range(400):
        pair = rng.gauss(3, 0.1), rng.gauss(1, 0.1)
        if step % 7 == 3:
            verdict = judge(part, loss, norm)
            assert not verdict.apply.item()
            assert verdict.reason.item() == bits
        assert judge(part, *pair).apply.item()
        judge(twin, *pair)
    for name, value in part.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])


def test_off_applies_everything_and_says_so():
    verdict = judge(Off(), math.nan, math.inf)
    assert verdict.apply.item()
    assert verdict.reason.item() == 0
    assert "NaN" in Off().warnings()[0]


def test_thresholds_of_zero_are_off_and_drops_never_count():
    for thresholds in ({}, {"max_loss_z": 3.0, "max_norm_z": 3.0}):
        part = ZScore(window=8, **thresholds)
        for i in range(9):
            judge(part, 1.0 + i % 2, 1.0 + i % 2)
        assert judge(part, -1e6, -1e6).apply.item()
        if not thresholds:
            assert judge(part, 1e6, 1e6).apply.item()


def test_a_window_poisoned_by_a_spike_recovers_only_in_robust_mode():
    kept_out, parity = ZScore(robust=True, max_loss_z=5.0, window=32), ZScore(max_loss_z=5.0, window=32)
    rng = random.Random(1)
    stream = [rng.gauss(3, 0.1) for _ in range(40)] + [1e12] * 3 + [rng.gauss(3, 0.1) for _ in range(60)]
    for x in stream:
        robust, as_llmc = judge(kept_out, x), judge(parity, x)
    assert abs(robust.loss_z.item()) < 5
    assert math.isnan(as_llmc.loss_z.item()) or abs(as_llmc.loss_z.item()) < 1e-3  # residue of the spike
    assert reasons(judge(kept_out, 6.0)) == {"loss z-score"}
    assert judge(kept_out, 3.0).apply.item()


def test_a_constant_loss_is_no_outlier_in_robust_mode():
    part = ZScore(robust=True, max_loss_z=3.0, window=16)
    assert all(judge(part, 3.3, 0.1).apply.item() for _ in range(64))


def test_median_refuses_five_times_the_running_median_after_sixteen_norms():
    part = Median()
    for _ in range(15):
        judge(part, 3.0, 1.0)
    assert judge(part, 3.0, 100.0).apply.item()  # the 16th norm is only collected
    assert judge(part, 3.0, 5.0).apply.item()
    verdict = judge(part, 3.0, 5.01)
    assert reasons(verdict) == {"gradient norm over the running median"}
    assert not verdict.apply.item()


@settings(max_examples=25, deadline=None)
@given(norms=st.lists(st.floats(0, 100, width=32), min_size=1, max_size=80))
def test_median_is_the_lower_middle_of_the_last_norms(norms):
    part = Median(window=10, warmup=3, max_ratio=2.0)
    for i, norm in enumerate(norms):
        before = sorted(norms[max(0, i - 10) : i])
        want = len(before) >= 3 and norm > 2.0 * before[(len(before) - 1) // 2]
        assert judge(part, 1.0, norm).apply.item() == (not want)


@pytest.mark.parametrize("make", [ZScore, lambda: ZScore(robust=True, max_loss_z=2.0), Median, Finite, Off])
@pytest.mark.parametrize("cut", [5, 100, 131, 300])
def test_saved_and_loaded_state_continues_exactly(make, cut):
    rng = random.Random(2)
    stream = [(rng.gauss(3, 0.5), rng.expovariate(1)) for _ in range(cut + 200)]
    whole, first, second = make(), make(), make()
    for pair in stream[:cut]:
        judge(whole, *pair)
        judge(first, *pair)
    state = first.state_dict()
    for pair in stream[:9]:
        judge(first, *pair)  # the saved state is a copy
    second.load_state_dict(state)
    for pair in stream[cut:]:
        a, b = judge(whole, *pair), judge(second, *pair)
        assert all(same(x.item(), y.item()) for x, y in zip(a, b, strict=True))


def test_a_state_of_another_window_or_kind_is_refused():
    with pytest.raises(ValueError, match=r"window=64 differs from the checkpoint's 128"):
        ZScore(window=64).load_state_dict(ZScore().state_dict())
    with pytest.raises(ValueError, match="no state of outlier=median"):
        Median().load_state_dict(ZScore().state_dict())


def test_a_threshold_out_of_reach_is_warned_about():
    assert ZScore(max_loss_z=11.2, max_norm_z=0.0).warnings() == []
    (line,) = ZScore(max_norm_z=11.27).warnings()
    assert "max_norm_z=11.27 can never fire" in line


@pytest.mark.parametrize("bad", [{"max_loss_z": -1.0}, {"max_norm_z": math.nan}, {"window": 1}])
def test_bad_settings_are_named(bad):
    with pytest.raises(ValueError, match=f"outlier.{next(iter(bad))}"):
        ZScore(**bad)
    with pytest.raises(ValueError, match="warmup=20 must lie in 1"):
        Median(window=8, warmup=20)


@pytest.mark.parametrize("make", ALL)
def test_verdicts_are_scalars_of_the_promised_types(make):
    verdict = judge(make(), 1.0)
    assert [t.shape for t in verdict] == [torch.Size()] * 4
    assert [t.dtype for t in verdict] == [torch.bool, torch.float64, torch.float64, torch.int64]


def test_nothing_reads_a_device_value_or_branches_on_one():
    tree = ast.parse(inspect.getsource(outlier))
    called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not called & {"item", "tolist", "cpu", "numpy"}
    # on the meta device there are no values: any look at one would raise
    loss = torch.zeros((), device="meta")
    for part in (Finite(), Off()):
        assert part(loss, loss).apply.device.type == "meta"


@pytest.mark.parametrize("seed", range(6))
def test_the_host_and_the_device_arithmetic_have_the_same_bits(seed):
    host, device = (ZScore(max_loss_z=2.0, max_norm_z=1.5, window=8) for _ in range(2))
    numbers = np.random.default_rng(seed)
    for step in range(400):
        scale = 10.0 ** numbers.integers(-20, 20) if seed > 2 else 1.0
        loss, norm = (torch.tensor(x, dtype=torch.float32) for x in numbers.normal(3, 1, 2) * scale)
        if step % 37 == 5:
            loss = torch.tensor([torch.nan, torch.inf, -torch.inf][step % 3])
        if step % 90 > 70:
            loss, norm = torch.tensor(2.5), torch.tensor(0.5)  # constant: a variance of 0
        ours, theirs = host(loss, norm), device._on_device(loss, norm)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            assert a.numpy().tobytes() == b.numpy().tobytes() or (a.isnan() and b.isnan())
        for a, b in zip(host.state_dict().values(), device.state_dict().values(), strict=True):
            assert torch.equal(a, b)


def test_the_hosts_view_of_the_window_does_not_outlive_a_move_to_another_device():
    moved, fresh = ZScore(window=4), ZScore(window=4)
    for loss in (1.0, 2.0):
        judge(moved, loss)
    moved._move(torch.device("meta"))
    for name in ("_ring", "_sums", "_width", "_seen", "_limits", "_bits", "_reasons"):
        setattr(moved, name, getattr(fresh, name).clone())
    for loss in (3.0, 5.0, 4.0, 2.0, 6.0, 9.0):
        assert same(*(float(judge(part, loss).loss_z) for part in (moved, fresh)))
    assert all(torch.equal(moved.state_dict()[name], value) for name, value in fresh.state_dict().items())
