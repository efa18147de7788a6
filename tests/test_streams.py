"""Whoever reads the output, or nobody: the run is the same, and its exit code too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.streams import LastingStream
from tests.commands import SMALL, environment

RUNS = [*SMALL, "train.steps=3", "run.name=a"]
READERS = {
    "closed": "{} >&-",
    "all closed": "{} <&- >&- 2>&-",
    "reader gone": "{{ {}; echo $? >code; }} 2>err | true; exit $(cat code)",
    "full": "{} >/dev/full",
}


@pytest.mark.parametrize("logger", ["[llmc,jsonl]", "[llmc,console]"])
@pytest.mark.parametrize("reader", READERS)
def test_a_run_ends_well_without_a_reader(reader: str, logger: str, tmp_path: Path) -> None:
    command = " ".join([sys.executable, "-m", "runner", *RUNS, f"logger={logger}"])
    ended = subprocess.run(
        ["bash", "-c", READERS[reader].format(command)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "is off" not in ended.stderr
    assert (tmp_path / "outputs/a/DONE_00000003").is_file()
    assert not (tmp_path / "err").is_file() or (tmp_path / "err").read_text() == ""


def test_a_stream_goes_on_after_its_reader_left() -> None:
    reading, writing = os.pipe()
    stream = LastingStream(writing)
    os.close(reading)
    stream.write("gone\n")
    stream.flush()
    assert os.readlink(f"/proc/self/fd/{writing}") == "/dev/null"
    stream.write("gone too\n")
    stream.close()
    os.close(writing)


def test_a_stream_writes_what_its_encoding_lacks() -> None:
    reading, writing = os.pipe()
    stream = LastingStream(writing, encoding="ascii")
    stream.write("é\n")
    assert os.read(reading, 100) == b"\\xe9\n"
    stream.close()
    os.close(reading)
    os.close(writing)
