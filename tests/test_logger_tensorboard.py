"""Check TensorBoard event files with TensorBoard's own reader."""

import subprocess
import sys
from pathlib import Path

import pytest

from runner.api import Sample, Score, ValLoss, metrics
from runner.plugins.logger.tensorboard import TensorboardLogger
from tests.test_logger_llmc import run_info, train_step

pytest.importorskip("tensorboard")
ROOT = Path(__file__).parent.parent


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return reader


def points(folder, tag):
    return [(point.step, point.value) for point in read(folder).Scalars(tag)]


def test_every_metric_at_its_step(tmp_path):
    logger = TensorboardLogger()
    logger.open(run_info(tmp_path, steps=5))
    events = [
        *(train_step(s, loss=4.0 - s / 4) for s in range(5)),
        ValLoss(5, 3.0),
        Score(5, "hellaswag", 0.25),
    ]
    for event in events:
        logger.log(event)
    logger.log(Sample(5, "To <b>be</b>", "\n# or"))
    reader = read(tmp_path)  # before close: nothing waits in a buffer
    logger.close("finished")
    assert points(tmp_path, "train/loss") == [(s, 4.0 - s / 4) for s in range(5)]
    assert points(tmp_path, "val/loss") == [(5, 3.0)]
    assert set(reader.Tags()["scalars"]) == {name for event in events for name in metrics(event)}
    tensor = reader.Tensors("sample/text_summary")[0]
    assert (tensor.step, tensor.tensor_proto.string_val[0]) == (5, b"    To <b>be</b>\n    # or")
    assert reader.SummaryMetadata("sample/text_summary").plugin_data.plugin_name == "text"


def test_every_thins_training_steps_only(tmp_path):
    logger = TensorboardLogger(every=4)
    logger.open(run_info(tmp_path, steps=8))
    for s in range(8):
        logger.log(train_step(s))
        logger.log(ValLoss(s + 1, 3.0))
    logger.close("finished")
    assert [step for step, _ in points(tmp_path, "train/loss")] == [0, 4, 7]
    assert len(points(tmp_path, "val/loss")) == 8


def test_resume_shows_one_clean_curve(tmp_path):
    first = TensorboardLogger()
    first.open(run_info(tmp_path))
    for s in range(4):
        first.log(train_step(s))
    first.log(ValLoss(4, 4.0))
    first.log(Score(4, "hellaswag", 0.25))
    state = first.state_dict()
    for s in range(4, 7):
        first.log(train_step(s, loss=9.0))
    first.log(ValLoss(7, 9.0))
    first.close("failed")
    for _ in range(2):  # the second time from the same checkpoint
        second = TensorboardLogger()
        second.load_state_dict(state)
        second.open(run_info(tmp_path, resumed=True, start_step=4))
        for s in range(4, 8):
            second.log(train_step(s, loss=1.0))
        second.log(ValLoss(8, 2.0))
        second.close("stopped")
        assert points(tmp_path, "train/loss") == [(s, 3.5 if s < 4 else 1.0) for s in range(8)]
        assert points(tmp_path, "val/loss") == [(4, 4.0), (8, 2.0)]
        assert points(tmp_path, "eval/hellaswag") == [(4, 0.25)]


def test_fresh_start_removes_what_another_run_left(tmp_path):
    for loss in (9.0, 1.0):
        logger = TensorboardLogger()
        logger.open(run_info(tmp_path))
        logger.log(train_step(0, loss=loss))
        logger.close("finished")
    assert points(tmp_path, "train/loss") == [(0, 1.0)]


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ValueError, match="pip install tensorboard") as raised:
        TensorboardLogger().open(run_info(tmp_path))
    assert "\n" not in str(raised.value)


def test_importing_the_plugin_imports_no_back_end():
    code = "import runner.plugins.logger.tensorboard, sys; assert 'tensorboard' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
