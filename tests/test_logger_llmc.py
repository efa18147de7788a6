"""Check main.log against lines that llm.c's own logger wrote, and against its readers' rules."""

import json
import os
import struct
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Note, RunInfo, Saved, Score, TrainStep, ValLoss
from runner.plugins.logger.llmc import LlmcLogger, line

GOLDEN = Path(__file__).parent / "golden"
LOGGER = json.loads((GOLDEN / "logger.json").read_text())
VISLOG = json.loads((GOLDEN / "parsers.json").read_text())["vislog"]


def run_info(folder, *, start_step=0, resumed=False, steps=1000):
    return RunInfo(
        name="r", dir=folder, config={}, manifest={}, start_step=start_step, resumed=resumed, steps=steps
    )


def train_step(step, *, loss=3.5, lr=1e-3, norm=1.0):
    return TrainStep(
        step=step, loss=loss, lr=lr, norm=norm, loss_z=float("nan"), norm_z=float("nan"), applied=True,
        reason="", scale=1.0, tokens=64 * (step + 1), step_ms=10.0, tokens_per_s=6400.0, mfu=-1.0,
    )  # fmt: skip


def vislog(text):
    """Read a log by the rules of llm.c's notebook: {stream: [[steps], [values]]}, sorted by step."""
    streams = defaultdict(dict)
    for row in text.split("\n")[: None if not text.endswith("\n") else -1] if text else []:
        fields = row.split()
        step = int(fields[0].split(":")[1])
        name, value = fields[1].split(":")[:2]
        streams[name][step] = float(value)
    return {
        name: [list(xs) for xs in zip(*sorted(points.items()), strict=True)]
        for name, points in streams.items()
    }


def golden_event(case):
    values = [struct.unpack(">f", bytes.fromhex(bits))[0] for bits in case["bits"]]
    if case["kind"] == "train":
        return train_step(case["step"], loss=values[0], lr=values[1], norm=values[2])
    if case["kind"] == "val":
        return ValLoss(case["step"], values[0])
    return Score(case["step"], "hellaswag", values[0])


def test_every_golden_line(tmp_path):
    logger = LlmcLogger()
    logger.open(run_info(tmp_path))
    for case in LOGGER["lines"]:
        logger.log(golden_event(case))
    expected = "".join(case["line"] + "\n" for case in LOGGER["lines"])
    assert (tmp_path / "main.log").read_bytes() == expected.encode()
    assert len(LOGGER["lines"]) > 100


def test_values_are_rounded_to_float32_first():
    assert line(Score(3, "hellaswag", 0.00025)) == "s:3 eval:0.0003\n"  # the double would print 0.0002
    assert line(ValLoss(3, 1e39)) == "s:3 tel:inf\n"


@pytest.mark.parametrize("case", VISLOG, ids=lambda case: repr(case["text"])[:40])
def test_reader_follows_llmc_notebook(case):
    """The reader used below is the notebook's: same streams, same exceptions."""
    if isinstance(case["result"], str):
        with pytest.raises((IndexError, ValueError)) as raised:
            vislog(case["text"])
        assert f"{raised.type.__name__}: {raised.value}" == case["result"]
        return
    got = vislog(case["text"])
    assert json.dumps(_plain(got), sort_keys=True) == json.dumps(_plain(case["result"]), sort_keys=True)


def _plain(streams):
    return {name: [steps, [str(float(v)) for v in values]] for name, (steps, values) in streams.items()}


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.floats(width=32), st.floats(width=32), st.floats(width=32)))
)
def test_every_line_can_be_read_back(rows):
    text = "".join(line(train_step(step, loss=a, lr=b, norm=c)) for step, a, b, c in rows)
    text += "".join(line(ValLoss(step, a)) for step, a, _, _ in rows)
    got = vislog(text)
    assert set(got) == ({"trl", "tel"} if rows else set())
    if rows:
        assert set(got["trl"][0]) == {row[0] for row in rows}


def test_fresh_start_empties_and_resume_leaves_alone(tmp_path):
    path = tmp_path / "main.log"
    path.write_text("s:0 tel:9.9999\n")
    LlmcLogger().open(run_info(tmp_path, resumed=True, start_step=5))
    assert path.read_text() == "s:0 tel:9.9999\n"
    logger = LlmcLogger()
    logger.open(run_info(tmp_path, resumed=True, start_step=5))
    logger.log(ValLoss(5, 4.25))
    logger.close("finished")
    assert path.read_text() == "s:0 tel:9.9999\ns:5 tel:4.2500\n"
    LlmcLogger().open(run_info(tmp_path))
    assert path.read_bytes() == b""


def test_resume_without_a_file_creates_it_with_the_first_line(tmp_path):
    logger = LlmcLogger()
    logger.open(run_info(tmp_path, resumed=True, start_step=10))
    assert not (tmp_path / "main.log").exists()
    logger.log(ValLoss(10, 4.25))
    assert (tmp_path / "main.log").read_text() == "s:10 tel:4.2500\n"


def test_missing_folder_fails_at_open_or_at_the_first_line(tmp_path):
    with pytest.raises(FileNotFoundError):
        LlmcLogger().open(run_info(tmp_path / "nope"))
    logger = LlmcLogger()
    logger.open(run_info(tmp_path / "nope", resumed=True))
    with pytest.raises(FileNotFoundError):
        logger.log(ValLoss(0, 1.0))


@given(cut=st.integers(0, 60), junk=st.sampled_from([b"", b"\0\0\0"]))
def test_a_torn_line_never_reaches_a_reader(tmp_path_factory, cut, junk):
    folder = tmp_path_factory.mktemp("torn")
    whole = b"s:6 tel:4.1234\ns:6 trl:4.0000 lr:0.000600 norm:12.34\n"
    (folder / "main.log").write_bytes(whole[: max(0, len(whole) - cut)] + junk)
    logger = LlmcLogger()
    logger.open(run_info(folder, resumed=True, start_step=6))
    logger.log(ValLoss(7, 1.0))
    got = (folder / "main.log").read_bytes().splitlines(keepends=True)
    assert got[-1] == b"s:7 tel:1.0000\n"
    assert got[:-1] == whole.splitlines(keepends=True)[: len(got) - 1]
    if cut == 1 and not junk:  # only the newline was missing
        assert len(got) == 3


def test_rewind_keeps_one_clean_curve(tmp_path):
    logger = LlmcLogger(on_resume="rewind")
    logger.open(run_info(tmp_path))
    events = [ValLoss(0, 5.0), *(train_step(s) for s in range(4)), ValLoss(4, 4.0)]
    before = [*events, Score(4, "hellaswag", 0.25)]
    for event in [*before, *(train_step(s) for s in range(4, 8)), ValLoss(8, 3.0), train_step(8)]:
        logger.log(event)
    logger = LlmcLogger(on_resume="rewind")
    logger.open(run_info(tmp_path, resumed=True, start_step=4))
    assert (tmp_path / "main.log").read_text() == "".join(line(event) for event in before)
    assert os.listdir(tmp_path) == ["main.log"]
    for event in [*(train_step(s) for s in range(4, 8)), ValLoss(8, 3.0)]:
        logger.log(event)
    rows = (tmp_path / "main.log").read_text().splitlines()
    heads = [row.rsplit(":", 1)[0].split(" lr")[0].split(".")[0] for row in rows]
    assert len(heads) == len(set(heads)) == 12


def test_events_without_a_line_and_other_scores_write_nothing(tmp_path):
    logger = LlmcLogger(score="arc")
    logger.open(run_info(tmp_path))
    for event in (Note(1, "hello"), Saved(1, "x", 1, 1.0), Score(1, "hellaswag", 0.5)):
        logger.log(event)
    assert (tmp_path / "main.log").read_bytes() == b""
    logger.log(Score(1, "arc", 0.5))
    assert (tmp_path / "main.log").read_text() == "s:1 eval:0.5000\n"


def test_another_writer_and_no_open_file(tmp_path):
    """Each line is its own open and close: a reader may move or append to the file at any time."""
    logger = LlmcLogger(fsync=True)
    logger.open(run_info(tmp_path))
    logger.log(train_step(0))
    with (tmp_path / "main.log").open("a") as other:
        other.write("# by hand\n")
    logger.log(train_step(1))
    assert [row[:4] for row in (tmp_path / "main.log").read_text().splitlines()] == ["s:0 ", "# by", "s:1 "]
    open_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert str(tmp_path / "main.log") not in open_files
