"""Schedules: llm.c's bits, the laws of a curve, and what a user sees for a bad setting."""

import json
import math
import shutil
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import CONF, schedule, scheduler
from runner.plugins.scheduler.inv_sqrt import inv_sqrt
from runner.scheduler import constant, cosine, curve, decay_start, linear, wsd

GOLDEN = json.loads((Path(__file__).parent / "golden" / "schedulers.json").read_text())["cases"]


def settings_of(case):
    lr = {"peak_lr": float(case["learning_rate"])}
    if case["type"] == "constant":
        return lr
    return lr | {
        "warmup_steps": case["warmup"],
        "total_steps": case["total"],
        "final_frac": float(case["final_frac"]),
    }


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_every_golden_value_is_met_to_the_bit(kind):
    function = getattr(scheduler, kind)
    checked = 0
    for case in (c for c in GOLDEN if c["type"] == kind):
        for step, want in zip(case["steps"], case["lr"], strict=True):
            if want == "abort":
                with pytest.raises(ValueError, match=f"step {step} .* {case['total']} steps"):
                    function(step, **settings_of(case))
            else:
                assert function(step, **settings_of(case)) == np.float32(want), (case, step)
            checked += 1
    assert checked > 25


def test_decay_start_is_llmc_truncation():
    assert [decay_start(n) for n in (1, 2, 5, 10, 18865)] == [0, 1, 4, 8, 15092]
    # float32 and float64 part here for the first time
    assert decay_start(5242881) == 4194305 != int(0.8 * 5242881)
    assert decay_start(1000, decay_frac=0.2) == decay_start(1000) == 800


@pytest.mark.parametrize("frac", [0.0, 0.1, 0.15, 0.3, 0.35, 0.7, 1.0])
def test_decay_frac_never_loses_a_step_to_binary_fractions(frac):
    percent = round(frac * 100)
    for total in range(1, 2001):
        assert decay_start(total, decay_frac=frac) == total * (100 - percent) // 100


def test_decay_steps_and_decay_frac_exclude_each_other():
    assert decay_start(100, decay_steps=30) == 70
    with pytest.raises(ValueError, match=r"decay_steps=3 and scheduler.decay_frac=0.5 .* null"):
        decay_start(100, decay_steps=3, decay_frac=0.5)
    with pytest.raises(ValueError, match=r"decay_steps=101 must lie in 0\.\.100"):
        decay_start(100, decay_steps=101)


SHAPES = st.fixed_dictionaries(
    {
        "peak_lr": st.floats(1e-6, 1.0),
        "warmup_steps": st.integers(0, 60),
        "total_steps": st.integers(1, 120),
        "final_frac": st.floats(0, 1),
        "warmup_from": st.sampled_from(["one", "zero"]),
    }
)
KINDS = st.one_of(
    st.just(cosine),
    st.just(linear),
    st.sampled_from(["sqrt", "linear", "cosine"]).map(lambda tail: partial(wsd, decay=tail)),
)


@settings(deadline=None)
@given(kind=KINDS, shape=SHAPES)
def test_a_curve_rises_through_warmup_then_never_again_and_stays_below_the_peak(kind, shape):
    lr = curve(partial(kind, **shape), shape["total_steps"])
    warm = lr[: shape["warmup_steps"]]
    assert all(a < b for a, b in pairwise(warm))
    ulp = 1 + 2e-7
    rest = lr[shape["warmup_steps"] :]
    assert all(b <= a * ulp for a, b in pairwise(rest))
    assert max(lr) <= shape["peak_lr"] * ulp
    if shape["warmup_from"] == "one":
        assert lr[0] > 0


@settings(deadline=None)
@given(kind=KINDS, shape=SHAPES)
def test_step_n_is_the_final_fraction_of_the_peak(kind, shape):
    n = shape["total_steps"]
    if shape["warmup_steps"] < n:
        end = kind(n, **shape)
        assert end == pytest.approx(
            shape["peak_lr"] * shape["final_frac"], rel=1e-6, abs=1e-7 * shape["peak_lr"]
        )


@settings(deadline=None)
@given(tail=st.sampled_from(["sqrt", "linear", "cosine"]), shape=SHAPES)
def test_wsd_is_continuous_where_the_decay_begins(tail, shape):
    start = decay_start(shape["total_steps"])
    if shape["warmup_steps"] <= start:
        assert wsd(start, decay=tail, **shape) == pytest.approx(shape["peak_lr"], rel=3e-7)


def test_degenerate_lengths_are_legal_runs():
    for kind in (cosine, linear, wsd):
        for warmup, total in ((0, 1), (1, 1), (5, 3), (3, 3), (1000, 20)):
            lr = curve(
                partial(kind, peak_lr=1e-3, warmup_steps=warmup, total_steps=total, final_frac=0.1), total
            )
            assert len(lr) == total
            assert min(lr) > 0
        assert kind(0, peak_lr=1e-3, warmup_steps=0, total_steps=9, final_frac=0.0) == np.float32(1e-3)
    flat = partial(wsd, peak_lr=1e-3, warmup_steps=0, total_steps=9, final_frac=0.0, decay_steps=0)
    assert set(curve(flat, 9)) == {float(np.float32(1e-3))}
    assert constant(10**9, peak_lr=0.5) == 0.5


def test_warmup_from_zero_starts_at_zero_and_meets_the_peak_one_step_later():
    both = {"peak_lr": 1.0, "warmup_steps": 4, "total_steps": 8, "final_frac": 1.0}
    assert curve(partial(cosine, **both, warmup_from="zero"), 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert curve(partial(cosine, **both), 5) == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_lr": math.nan}, "peak_lr=nan must be a finite"),
        ({"peak_lr": 1e39}, "peak_lr=1e[+]39 must be a finite"),
        ({"final_frac": 1.5}, r"final_frac=1.5 must lie in \[0, 1\]"),
        ({"final_frac": math.nan}, "final_frac=nan"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
    ],
)
def test_bad_settings_are_one_line(change, message):
    settings = {"peak_lr": 1e-3, "warmup_steps": 0, "total_steps": 10, "final_frac": 0.1} | change
    with pytest.raises(ValueError, match=message) as caught:
        cosine(5, **settings)
    assert "\n" not in str(caught.value)


def test_curve_names_the_first_step_with_a_bad_value():
    with pytest.raises(ValueError, match="step 3 of 5 is inf"):
        curve(lambda step: math.inf if step == 3 else 1.0, 5)
    with pytest.raises(ValueError, match="step 0 of 1 is -1"):
        curve(lambda step: -1.0, 1)


def test_importing_schedules_needs_no_torch():
    code = "import sys, runner.scheduler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_inverse_square_root_has_its_peak_at_the_end_of_warmup():
    lr = curve(partial(inv_sqrt, peak_lr=1e-3, warmup_steps=10), 1000)
    assert max(lr) == lr[9] == float(np.float32(1e-3))
    assert lr[39] == pytest.approx(5e-4)


@pytest.fixture
def conf(tmp_path):
    shutil.copytree(CONF / "scheduler", tmp_path / "scheduler")
    (tmp_path / "config.yaml").write_text(
        "defaults: [{scheduler: cosine}, _self_]\n"
        "train: {_target_: runner.train.Plan, steps: 100, micro_batch: 4, seq_len: 8,"
        " tokens_per_step: null}\n"
        "parallel: {}\noptimizer: {lr: 3e-4}\n"
    )
    return tmp_path


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "scheduler").glob("*.yaml")))
def test_every_configured_schedule_can_be_drawn(conf, name, capsys):
    image = conf / "lr.png"
    assert schedule.main([f"scheduler={name}", f"out={image}"], conf=conf) == 0
    printed = capsys.readouterr().out
    assert image.read_bytes().startswith(b"\x89PNG")
    assert "3.00e-04" in printed
    assert all(len(line) <= schedule.WIDTH for line in printed.splitlines()[: schedule.HEIGHT + 1])


def test_the_drawing_names_where_a_wsd_schedule_turns(conf):
    plan = schedule.compose_plan(["scheduler=wsd", "scheduler.warmup_steps=10"], conf=conf)
    assert plan.marks == {"first": 0, "warmup end": 9, "decay start": 80, "last": 99}
    assert plan.lr[9] == plan.lr[80] == float(np.float32(3e-4))


def test_a_long_schedule_is_drawn_from_few_steps_and_named_ones_are_exact(conf, monkeypatch):
    asked = []
    real = schedule.curve
    monkeypatch.setattr(schedule, "curve", lambda *a, at: asked.extend(at) or real(*a, at=at))
    long = ["scheduler=wsd", "train.steps=99999999", "scheduler.warmup_steps=777777"]
    plan = schedule.compose_plan(long, conf=conf)
    assert len(asked) < 3000
    assert plan.steps == sorted(asked)
    turn = decay_start(99999999, decay_frac=0.2, decay_steps=None)
    assert plan.marks == {"first": 0, "warmup end": 777776, "decay start": turn, "last": 99999998}
    shape = {"peak_lr": 3e-4, "warmup_steps": 777777, "total_steps": 99999999, "final_frac": 0.0}
    exact = partial(wsd, **shape, decay_frac=0.2)
    for step in plan.marks.values():
        assert plan.rate(step) == exact(step)
    drawn = schedule.draw(plan).splitlines()
    assert drawn[-2].count("█") > 60
    assert drawn[-1].endswith("99999998")
    assert schedule.compose_plan(["train.steps=37"], conf=conf).steps == list(range(37))
    one = schedule.compose_plan(["train.steps=1"], conf=conf)
    assert schedule.draw(one).splitlines()[-1].strip() == "0"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scheduler=nosuch"], "scheduler: no option 'nosuch'"),
        (["+scheduler.warmup=3"], "scheduler.warmup: no such option"),
        (["scheduler.final_frac=2"], "scheduler.final_frac: must be <= 1, got 2"),
        (["train.steps=0"], "train.steps=0"),
        (["scheduler._target_=os.system"], "os.system"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(conf, overrides, message, capsys):
    assert schedule.main([*overrides, f"out={conf / 'lr.png'}"], conf=conf) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("runner.schedule: error: ")
    assert "ValueError" not in error
    assert len(error.splitlines()) == 1


def test_a_trapezoid_in_tokens_is_the_one_in_steps():
    shape = {"peak_lr": 1e-3, "total_steps": 100, "final_frac": 0.1}
    by_tokens = {"warmup_steps": 7, "warmup_tokens": 999, "decay_tokens": 2001, "tokens_per_step": 100}
    for step in range(101):
        want = scheduler.wsd(step, **shape, warmup_steps=10, decay_steps=21, decay="linear")
        assert scheduler.trapezoid(step, **shape, **by_tokens) == want
    with pytest.raises(ValueError, match="decay_tokens=5 is given beside"):
        scheduler.trapezoid(0, **shape, warmup_steps=0, decay_tokens=5, decay_frac=0.1)
