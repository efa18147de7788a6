"""What a logger does wrong costs no other logger, and of the record no more than has to be."""

from __future__ import annotations

import errno
import os
import re

import pytest
import torch

from runner.api import Note, Score, ValLoss
from runner.emit import Emitter
from runner.plugins.logger.jsonl import JsonlLogger
from runner.plugins.logger.llmc import LlmcLogger
from tests.test_logger_llmc import run_info


class Kept:
    """A logger that keeps what it is given, fails with `wrong`, and cannot write a `Score`."""

    def __init__(self):
        self.events, self.wrong = [], None

    def open(self, run):
        pass

    def log(self, event):
        if self.wrong is not None:
            raise self.wrong
        if isinstance(event, Score):
            float(event.value)
        self.events.append(event)

    def close(self, status):
        pass


FULL = OSError(errno.ENOSPC, "No space left on device")
LOSSES = [ValLoss(step, 1.0) for step in range(8)]
ODD = [Score(3, "x", bad) for bad in (None, "much", 1j, 10**400, torch.ones(2))]


def test_what_waits_is_written_in_order_before_what_comes_after():
    record, view = Kept(), Kept()
    emitter = Emitter({"jsonl": record, "console": view})
    for step, loss in enumerate(LOSSES):
        record.wrong = FULL if step in (1, 2, 5, 7) else None
        emitter([loss])
        assert [event.step for event in record.events] == list(range(len(record.events)))
    assert emitter.close("finished") == ["jsonl"]
    record.wrong = None
    assert emitter.close("finished") == []
    assert record.events == LOSSES
    assert [event for event in view.events if not isinstance(event, Note)] == LOSSES
    told = [event.text for event in view.events if isinstance(event, Note)]
    assert len(told) == 3
    assert all("wait in memory" in text for text in told)


def test_an_event_without_a_form_is_left_out_and_holds_up_no_other(caplog):
    for odd in ODD:
        record, view = Kept(), Kept()
        emitter = Emitter({"jsonl": record, "console": view})
        emitter([LOSSES[0], odd, LOSSES[1]])
        record.wrong = FULL
        emitter([LOSSES[2], odd, LOSSES[3]])
        record.wrong = None
        emitter([LOSSES[4]])
        assert record.events == LOSSES[:5]
        assert "console" not in emitter.loggers
        assert emitter.close("finished") == ["jsonl"]
        assert "2 lines are lost" in caplog.text


def test_only_the_first_of_many_events_without_a_form_is_told():
    view = Kept()
    view.log = view.events.append
    emitter = Emitter({"jsonl": Kept(), "console": view})
    emitter([ODD[0]] * 5)
    told = [event for event in view.events if isinstance(event, Note)]
    assert [(note.level, note.step) for note in told] == [("error", 3)]
    assert "this Score is left out" in told[0].text


@pytest.mark.parametrize("name", ["llmc", "jsonl"])
def test_a_line_that_could_not_be_synced_stands_there_once(name, tmp_path, monkeypatch):
    logger = {"llmc": LlmcLogger, "jsonl": JsonlLogger}[name](fsync=True)
    emitter = Emitter({name: logger})
    emitter.open(run_info(tmp_path))
    sync = os.fsync
    for step, loss in enumerate(LOSSES):
        monkeypatch.setattr(os, "fsync", fails if step in (2, 3, 6) else sync)
        emitter([loss])
    assert emitter.close("finished") == []
    (path,) = tmp_path.glob("m*")
    found = [int(match) for match in re.findall(r'(?m)^(?:s:|.*"step": )(\d+)', path.read_text())]
    assert found == list(range(len(LOSSES)))


def fails(fd):
    raise FULL
