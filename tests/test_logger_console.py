"""Check what a person sees: on a terminal, in a pipe, and in llm.c's own words."""

import dataclasses
import io
import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.api import Note, Sample, Saved, Score, TrainStep, ValLoss
from runner.plugins.logger.console import ConsoleLogger, clock, llmc_step, progress
from tests.test_logger_llmc import run_info

ROOT = Path(__file__).parent.parent
CASES = json.loads((Path(__file__).parent / "golden" / "parsers.json").read_text())["loss_checker"]


def step(number, **values):
    event = TrainStep(
        step=number, loss=3.25, lr=3e-4, norm=0.5, loss_z=math.nan, norm_z=math.nan, applied=True,
        reason="", scale=1.0, tokens=64, step_ms=100.0, tokens_per_s=61234.0, mfu=-1.0,
    )  # fmt: skip
    return dataclasses.replace(event, **values)


SKIP = step(3, applied=False, reason="loss z-score", loss=9.5, loss_z=7.125, skipped=1)


def pipe(tmp_path, monkeypatch, events, **settings):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    logger = ConsoleLogger(**settings)
    logger.open(run_info(tmp_path, steps=10))
    for event in events:
        logger.log(event)
    logger.close("finished")
    return out.getvalue()


def test_a_pipe_gets_plain_lines_at_the_first_step_each_event_and_the_end(tmp_path, monkeypatch):
    events = [*(step(s) for s in range(4)), ValLoss(4, 3.0), *(step(s) for s in range(4, 10))]
    text = pipe(tmp_path, monkeypatch, events, every_s=1000.0)
    lines = text.splitlines()
    assert lines[0].startswith("run r starts, 10 steps")
    assert lines[1].startswith("step 1/10  10%  loss 3.2500  lr 3.00e-04  norm 0.50  61.2k tok/s  ETA 0:01")
    assert lines[2].startswith("step 4/10  40%")
    assert lines[3] == "step 4/10  val loss 3.0000  ppl 20.09"
    assert lines[4].startswith("step 10/10  100%")
    assert "ETA" not in lines[4]
    assert lines[5].startswith("finished at step 10/10 after 0:0")
    assert lines[5].endswith(", val loss 3.0000")
    assert len(lines) == 6
    assert "\x1b" not in text
    assert "\r" not in text


def test_a_pipe_gets_every_line_that_is_due(tmp_path, monkeypatch):
    text = pipe(tmp_path, monkeypatch, [step(s) for s in range(10)], every_s=1e-9)
    assert len(re.findall(r"^step \d+/10 ", text, re.M)) == 10


def test_skips_notes_samples_and_checkpoints(tmp_path, monkeypatch):
    events = [
        SKIP,
        Note(3, "learning rate changed"),
        Note(3, "disk nearly full", "warning"),
        Sample(3, "To be", " or\x1b[31m not\nto"),
        Saved(3, "outputs/x/DONE_00000003", 12_300_000, 4.2),
        Score(3, "hellaswag", 0.25),
    ]
    text = pipe(tmp_path, monkeypatch, events)
    assert "step 4/10  update skipped: loss z-score (loss 9.5000, norm 0.5)\n" in text
    assert "\nlearning rate changed\nwarning: disk nearly full\n" in text
    assert "    To be or�[31m not\n    to\n" in text
    assert "step 3/10  saved DONE_00000003  12.3 MB  training waited 4 ms\n" in text
    assert "step 3/10  hellaswag 0.2500\n" in text


def test_llmc_style_prints_llmc_lines(tmp_path, monkeypatch):
    text = pipe(tmp_path, monkeypatch, [ValLoss(0, 5.0), SKIP, step(4, mfu=0.4215)], style="llmc")
    lines = text.splitlines()[1:]
    assert lines[0] == "val loss 5.000000"
    assert lines[1] == "skipping update due to loss z-score of 7.125000"
    assert lines[2] == (
        "step    4/10 | loss 9.500000 (+7.12z)| norm 0.5000 (+nanz)| lr 3.00e-04 | 100.00 ms"
        " | -100.0% bf16 MFU | 61234 tok/s"
    )
    assert " | 42.1% bf16 MFU | " in lines[3] or " | 42.2% bf16 MFU | " in lines[3]
    assert lines[4] == "total average iteration time: 100.000000 ms"


def test_llmc_step_line_is_the_one_that_its_checker_reads():
    expected = [row for row in CASES[0]["text"].splitlines() if row.startswith("step")]
    for number, row in enumerate(expected):
        loss = float(row[20:28])
        event = step(number, loss=loss, norm=1.0, lr=1e-4, step_ms=1.0, tokens_per_s=100.0)
        assert llmc_step(event, steps=10) == row


@pytest.mark.parametrize("width", range(10, 140))
def test_the_progress_line_fits_and_keeps_what_matters(width):
    event = step(419_999, skipped=12, mfu=0.42, loss=10.98765)
    text = progress(event, steps=1_000_000, eta_s=98_765.0, width=width)
    assert len(text) <= width
    if width >= 79:
        for part in ("step 420000/1000000", "42%", "loss 10.9877", "skipped 12", "ETA 1d 03:26"):
            assert part in text
    if width >= 115:
        assert "norm 0.50  61.2k tok/s  MFU 42.0%" in text


def test_percent_is_full_only_at_the_end():
    assert " 99% " in progress(step(998), steps=1000, eta_s=1.0)
    assert " 100% " in progress(step(999), steps=1000, eta_s=0.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (754, "12:34"),
        (11229, "3:07:09"),
        (356_820, "4d 03:07"),
        (math.nan, "?"),
    ],
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_time_left_ignores_the_first_step_and_pauses(tmp_path, monkeypatch):
    events = [step(0, step_ms=60_000.0), step(1, step_ms=1000.0), step(2, step_ms=1000.0), ValLoss(3, 3.0)]
    text = pipe(tmp_path, monkeypatch, events, every_s=1000.0)
    assert re.search(r"^step 3/10 .* ETA 0:07$", text, re.M)


SCRIPT = """
import sys, time
from pathlib import Path
from runner.api import *
from runner.plugins.logger.console import ConsoleLogger
logger = ConsoleLogger()
logger.open(RunInfo("r", Path("x"), {}, {}, 0, False, 10))
for s in range(10):
    logger.log(TrainStep(s, 3.25, 3e-4, .5, 0., 0., True, "", 1., 64, 100., 6e4, -1.))
    if s == 4:
        logger.log(ValLoss(5, 3.0))
    time.sleep(0.03)
logger.close("finished")
"""


def terminal(env):
    """Run SCRIPT on a pseudo-terminal of 80 columns and return what it wrote."""
    parent, child = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm", **env}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=child, env=env, cwd=ROOT)
    os.close(child)
    data = b""
    try:
        while chunk := os.read(parent, 65536):
            data += chunk
    except OSError:  # the terminal's way to say that the other end has closed
        pass
    os.close(parent)
    assert process.wait(timeout=60) == 0
    return data.decode()


def screen(text):
    """Return the lines that stand on a terminal in the end."""
    lines = []
    for raw in text.replace("\r\n", "\n").split("\n"):
        shown = raw.rsplit("\r\x1b[2K", 1)[-1]
        lines.append(re.sub(r"\x1b\[\d+m", "", shown))
    return lines


def test_a_terminal_shows_one_live_line_below_lines_that_stay():
    text = terminal({"NO_COLOR": ""})
    lines = screen(text)
    assert lines[0].startswith("run r starts")
    assert lines[1] == "step 5/10  val loss 3.0000  ppl 20.09"
    assert lines[2].startswith("step 10/10  100%  loss 3.2500")
    assert lines[3].startswith("finished at step 10/10")
    assert lines[4:] == [""]
    assert text.count("\r\x1b[2Kstep") >= 4
    assert text.index("step 1/10") < text.index("step 5/10")
    assert "\x1b[1m" in text


def test_no_color_is_obeyed_on_a_terminal():
    assert not re.search(r"\x1b\[\d*m", terminal({"NO_COLOR": "1"}))


def test_a_dumb_terminal_gets_plain_lines():
    assert "\x1b" not in terminal({"TERM": "dumb"})


def test_a_reader_that_leaves_does_not_stop_the_run():
    script = SCRIPT.replace("0.03", "0.05") + "\nsys.stderr.write('alive')"
    command = f'"{sys.executable}" -c "$SCRIPT" | head -n 1'
    env = {**os.environ, "SCRIPT": script.replace("ConsoleLogger()", "ConsoleLogger(every_s=1e-9)")}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.stderr == "alive"
    assert done.stdout.startswith("run r starts")


def test_text_that_the_output_cannot_show_is_replaced(tmp_path, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    logger = ConsoleLogger()
    logger.open(run_info(tmp_path))
    logger.log(Sample(1, "é", "ü"))
    assert out.buffer.getvalue().endswith(b"    ??\n")
