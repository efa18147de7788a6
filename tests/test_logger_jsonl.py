"""Check that metrics.jsonl holds every event to the bit and stands rewound after a resume."""

import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Note, Ranks, Removed, Sample, Saved, Score, TrainStep, ValLoss, metrics
from runner.plugins.logger.jsonl import JsonlLogger, line
from tests.test_logger_llmc import run_info, train_step


def strict(text):
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rows(folder):
    return [strict(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


SKIPPED = TrainStep(
    step=7, loss=math.inf, lr=3e-4, norm=math.nan, loss_z=9.5, norm_z=math.nan, applied=False,
    reason="non-finite loss", scale=0.25, tokens=512, step_ms=12.5, tokens_per_s=100.0, mfu=0.5, skipped=3,
)  # fmt: skip
EVENTS = [
    SKIPPED,
    ValLoss(8, 3.25, 1.5),
    Score(8, "hellaswag", 0.2875),
    Sample(8, "To be", ", or not\n\u2028\u00e9"),
    Saved(8, "outputs/x/DONE_00000008", 1234, 0.5),
    Removed(8, "outputs/x/DONE_00000004"),
    Note(8, "learning rate changed", "warning"),
    Ranks(8, (1.5, 2.5)),
]


def test_every_kind_of_event(tmp_path):
    logger = JsonlLogger(fsync=True)
    logger.open(run_info(tmp_path))
    for event in EVENTS:
        logger.log(event)
    logger.close("finished")
    got = rows(tmp_path)
    assert [r["event"] for r in got] == [type(e).__name__ for e in EVENTS]
    for event, values in zip(EVENTS, got, strict=True):
        assert values["step"] == event.step
        for name, value in metrics(event).items():
            assert float(values[name]) == value or math.isnan(value)
    assert got[0]["train/loss"] == "Infinity"
    assert got[0]["train/grad_norm"] == "NaN"
    assert (got[0]["applied"], got[0]["reason"], got[0]["train/skipped"]) == (False, "non-finite loss", 3)
    assert "train/norm_z" not in got[0]
    assert (got[3]["prompt"], got[3]["text"]) == ("To be", ", or not\n\u2028\u00e9")
    assert (got[4]["path"], got[4]["bytes"]) == ("outputs/x/DONE_00000008", 1234)
    assert (got[6]["text"], got[6]["level"]) == ("learning rate changed", "warning")
    assert got[7]["step_ms"] == [1.5, 2.5]


@given(st.floats(), st.floats(allow_nan=False))
def test_floats_read_back_to_the_same_bits(loss, lr):
    got = strict(line(train_step(3, loss=loss, lr=lr), time_s=0.0))
    assert struct.pack("d", float(got["train/lr"])) == struct.pack("d", lr)
    assert math.isnan(loss) or float(got["train/loss"]) == loss
    assert not math.isnan(loss) or math.isnan(float(got["train/loss"]))


def test_numpys_numbers_of_a_plugin_are_numbers():
    numbers = (
        np.float64(0.1),
        np.float32(0.5),
        np.int64(3),
        np.True_,
        3,
        True,
        torch.tensor(0.1),
        torch.tensor(2),
    )
    for value in numbers:
        assert strict(line(Score(8, 'sc"ore', value), time_s=0.0))['eval/sc"ore'] == value
        assert float(strict(line(ValLoss(8, value), time_s=0.0))["val/loss"]) == value


def test_a_row_needs_numbers_but_not_of_every_rank():
    assert strict(line(Ranks(8, ()), time_s=0.0))["step_ms"] == []
    assert strict(line(Ranks(8, [1.0, np.nan]), time_s=0.0))["step_ms"] == [1.0, "NaN"]
    for bad in (None, "much", 1j, 10**400, torch.ones(2)):
        with pytest.raises((TypeError, ValueError, ArithmeticError, RuntimeError)):
            line(Score(8, "x", bad), time_s=0.0)


def test_resume_rewinds_to_the_checkpoint_and_drops_a_torn_line(tmp_path, caplog):
    logger = JsonlLogger()
    logger.open(run_info(tmp_path))
    before = [ValLoss(0, 5.0), *(train_step(s) for s in range(4)), ValLoss(4, 4.0), Saved(4, "c", 1, 0.0)]
    for event in [*before, *(train_step(s) for s in range(4, 7)), Ranks(4, (1.0,)), ValLoss(7, 3.0)]:
        logger.log(event)
    logger.close("failed")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "TrainStep", "step": 1, "tr')
    logger = JsonlLogger()
    logger.open(run_info(tmp_path, resumed=True, start_step=4))
    assert [(r["event"], r["step"]) for r in rows(tmp_path)] == [(type(e).__name__, e.step) for e in before]
    assert "dropped 1 torn line" in caplog.text
    for event in [*(train_step(s) for s in range(4, 8)), ValLoss(8, 3.0)]:
        logger.log(event)
    logger.close("finished")
    keys = [(r["event"], r["step"]) for r in rows(tmp_path)]
    assert len(keys) == len(set(keys)) == 12
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_fresh_start_empties_and_resume_without_a_file_works(tmp_path):
    for resumed, expected in ((True, 1), (True, 2), (False, 1)):
        logger = JsonlLogger()
        logger.open(run_info(tmp_path, resumed=resumed, start_step=1))
        logger.log(ValLoss(1, 2.0))
        logger.close("stopped")
        assert len(rows(tmp_path)) == expected


def test_rows_are_there_before_close(tmp_path):
    logger = JsonlLogger()
    logger.open(run_info(tmp_path))
    for step in range(3):
        logger.log(train_step(step))
        assert len(rows(tmp_path)) == step + 1
    logger.close("failed")
