"""Check that logs are read back as written, and that the report shows them and needs nothing else."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Sample, ValLoss
from runner.history import History, by_loss, differing, flatten, read_history, summarize
from runner.plot import plot_run, smooth
from runner.plugins.logger.jsonl import JsonlLogger
from runner.plugins.logger.llmc import LlmcLogger
from runner.report import labels, main, table, write_report
from tests.test_logger_console import step
from tests.test_logger_llmc import run_info

ROOT = Path(__file__).parent.parent


def write_run(folder, *, loggers=(JsonlLogger, LlmcLogger), end=2.0, steps=120, lr=1e-3, warmup=10):
    folder.mkdir(parents=True, exist_ok=True)
    config = {"run": {"name": folder.name}, "optimizer": {"lr": lr}, "scheduler": {"warmup_steps": warmup}}
    (folder / "manifest.json").write_text(json.dumps({"config": config}))
    for logger in [kind() for kind in loggers]:
        logger.open(run_info(folder))
        for s in range(steps):
            if s % 40 == 0:
                logger.log(ValLoss(s, end + 4 - 4 * s / steps))
            skip = {"applied": False, "reason": "loss z-score", "loss": math.nan} if s == 7 else {}
            logger.log(step(s, **({"loss": end + 4 - 4 * s / steps, "lr": lr} | skip)))
        logger.log(ValLoss(steps, end))
        logger.log(Sample(steps, "To be", " or <not>"))
        logger.close("finished")
    return folder


@pytest.fixture
def runs(tmp_path):
    for end, lr, warmup in ((2.0, 1e-3, 10), (1.5, 3e-3, 10), (math.nan, 1e-1, 20)):
        write_run(tmp_path / "sweep" / f"lr={lr:g}", end=end, lr=lr, warmup=warmup)
    return tmp_path / "sweep"


def test_history_holds_what_was_logged(tmp_path):
    history = read_history(write_run(tmp_path / "a"))
    assert history.curves["train/loss"].steps.tolist() == list(range(120))
    assert history.curves["val/loss"].values.tolist() == [6.0, 6 - 4 / 3, 6 - 8 / 3, 2.0]
    assert math.isnan(history.curves["train/loss"].values[7])
    assert history.skipped == {7: "loss z-score"}
    assert history.sample == "To be or <not>"
    assert history.settings["optimizer.lr"] == "0.001"
    assert summarize(history)[:5] == ("a", 120, 2.0, 2.0, 120)


def test_lines_of_main_log_that_no_number_stands_in_are_passed_over(tmp_path):
    (tmp_path / "main.log").write_text(
        "s:0 trl:5.5 lr:0.1 norm:1.0\ns:x trl:1.0\ns:1.0 tel:3\ns:1 trl:-\ns:2 tel:4.5\n"
    )
    curves = read_history(tmp_path).curves
    assert {name: curve.steps.tolist() for name, curve in curves.items()} == {
        "train/loss": [0],
        "train/lr": [0],
        "train/grad_norm": [0],
        "val/loss": [2],
    }


def test_main_log_alone_gives_the_same_curves(tmp_path):
    full = read_history(write_run(tmp_path / "a"))
    plain = read_history(write_run(tmp_path / "b", loggers=[LlmcLogger]))
    for name, decimals in (("train/loss", 4), ("val/loss", 4), ("train/lr", 6), ("train/grad_norm", 2)):
        assert plain.curves[name].steps.tolist() == full.curves[name].steps.tolist()
        got, expected = plain.curves[name].values, full.curves[name].values
        np.testing.assert_allclose(got, expected, atol=0.51 * 10**-decimals, rtol=0)


def test_the_last_line_of_a_step_wins_in_order_of_steps(tmp_path):
    lines = ["s:1 trl:5.0 lr:0.1 norm:1", "s:2 trl:9.0 lr:0.1 norm:1", "# note", ""]
    lines += ["s:2 trl:4.0 lr:0.1 norm:-nan", "s:0 tel:6.0"]
    (tmp_path / "main.log").write_text("\n".join(lines) + "\n")
    curves = read_history(tmp_path).curves
    assert curves["train/loss"].steps.tolist() == [1, 2]
    assert curves["train/loss"].values.tolist() == [5.0, 4.0]
    assert math.isnan(curves["train/grad_norm"].values[1])
    assert curves["val/loss"].values.tolist() == [6.0]


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "TrainStep", "step": 120, "tra')
    assert read_history(folder).curves["train/loss"].steps[-1] == 119


def test_a_damaged_row_is_named(tmp_path):
    for damaged in (b"\xff\xfe]\n", b"[]\n", b'{"step": 1}\n'):
        (tmp_path / "metrics.jsonl").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"metrics.jsonl:1: not a row of a run's metrics"):
            read_history(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("garbage\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: not a row of a run's metrics: b'garbage"):
        read_history(tmp_path)


def test_a_damaged_manifest_is_named(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"a/manifest.json: cannot be read"):
        read_history(folder)
    (folder / "manifest.json").write_text("[]")
    assert read_history(folder).settings == {}


def test_runs_are_sorted_by_validation_loss_and_diverged_ones_come_last(runs):
    ranked = by_loss(read_history(run) for run in runs.iterdir())
    assert [history.name for history in ranked] == ["lr=0.003", "lr=0.001", "lr=0.1"]
    assert differing(ranked) == ["optimizer.lr", "scheduler.warmup_steps"]
    rows = table(ranked)
    assert rows[0][-2:] == ["optimizer.lr", "scheduler.warmup_steps"]
    assert rows[1][:4] == ["lr=0.003", "120", "1.5000", "1.5000 at 120"]
    assert rows[3][2:4] == ["-", "-"]
    assert labels(ranked)[0] == "lr=0.003 warmup_steps=10"


def test_flatten_names_every_setting():
    config = {"a": {"b": 1, "c": [1, 2]}, "d": None, "e": "x", "f": {}}
    assert flatten(config) == {"a.b": "1", "a.c": "[1, 2]", "d": "null", "e": "x"}


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=300), st.integers(1, 101))
def test_smoothing_makes_no_value_up(values, window):
    got = smooth(np.array(values), window=window)
    assert len(got) == len(values)
    assert got.min() >= min(values) - 1e-6
    assert got.max() <= max(values) + 1e-6
    if window == 1:
        np.testing.assert_allclose(got, values, atol=1e-9)


@pytest.mark.parametrize("steps", [0, 1, 2, 500])
@pytest.mark.parametrize("end", [2.0, math.nan, math.inf])
def test_any_run_can_be_drawn(tmp_path, steps, end):
    history = read_history(write_run(tmp_path / "a", steps=steps, end=end))
    plot_run(history, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_nothing_from_outside(runs, capsys):
    assert main([str(runs)]) == 0
    page = (runs / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=['"](?!data:)|url\(|@import|https?:""", page)
    assert page.count("data:image/png;base64,") == 4
    assert (runs / "report.png").stat().st_size > 10_000
    assert page.index("<td>lr=0.003") < page.index("<td>lr=0.001") < page.index("<td>lr=0.1")
    assert "To be or &lt;not&gt;" in page
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:3] == ["lr=0.003", "120", "1.5000"]
    assert f"wrote {runs / 'report.html'}" in out


def command(*arguments):
    line = [sys.executable, "-m", "runner.report", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_half_a_character_in_a_sample_spoils_no_page(tmp_path):
    logger = JsonlLogger()
    logger.open(run_info(write_run(tmp_path / "a"), resumed=True, start_step=120))
    logger.log(Sample(120, "\udcff", "<b>\ud800"))
    logger.close("finished")
    history = read_history(tmp_path / "a")
    assert history.sample == "\udcff<b>\ud800"
    assert "&lt;b&gt;\\ud800" in write_report([history], tmp_path).read_text()


def test_command_for_one_run(tmp_path):
    done = command(write_run(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "a" / "report.html").read_text()
    assert "Skipped updates: 1 for loss z-score." in page
    assert "Newest sample" in page


def test_command_says_what_is_wrong_in_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "nope"):
        done = command(path)
        assert done.returncode == 2
        assert done.stderr == (
            f"runner.report: error: {path}: no run there (no metrics.jsonl, no main.log); name a run folder\n"
        )
    assert (
        command().stderr == "runner.report: error: the following arguments are required: runs; see --help\n"
    )


def test_reading_a_history_imports_neither_torch_nor_matplotlib():
    code = "import runner.history, sys; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_run_without_settings_differs_in_none(tmp_path):
    told = {"optimizer.lr": "1"}
    histories = [History("a", tmp_path, {}, settings=told), History("b", tmp_path, {}, settings={})]
    assert differing(histories) == []
    assert differing([*histories, History("c", tmp_path, {}, settings={"optimizer.lr": "2"})]) == [
        "optimizer.lr"
    ]
