"""A home folder that cannot be written costs one line, not the run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from runner.home import own_folder, usable
from tests.commands import SMALL, environment

MOVED = ("XDG_CACHE_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR")


def started(folder: Path, *arguments: str, module: str = "runner", **variables: str) -> str:
    """Run with a file for a home, in which nobody can make a folder, not even root; return what was said."""
    (folder / "home").write_text("")
    (folder / "tmp").mkdir(exist_ok=True)
    env = {name: value for name, value in environment().items() if name not in MOVED}
    env |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), **variables}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_default_parts_run_without_a_home_and_say_so_once(tmp_path: Path) -> None:
    all_loggers = ["logger=[llmc,console,jsonl,wandb]", "run.plot=true", "train.steps=4", "run.name=x"]
    said = started(tmp_path, *SMALL, *all_loggers)
    (line,) = said.splitlines()
    assert line.startswith(f"the home folder {tmp_path / 'home'} cannot be written: caches go to ")
    own = tmp_path / "tmp" / f"runner-{os.getuid()}"
    assert any((own / "runner" / "data").iterdir())
    assert (tmp_path / "outputs" / "x" / "loss.png").is_file()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    said = started(tmp_path, "outputs/x", module="runner.report")
    assert len(said.splitlines()) == 1


def test_a_cache_that_a_person_chose_is_used(tmp_path: Path) -> None:
    chosen = {name: str(tmp_path / "chosen") for name in MOVED}
    assert started(tmp_path, *SMALL, "train.steps=2", **chosen) == ""
    assert any((tmp_path / "chosen" / "runner" / "data").iterdir())
    assert not list((tmp_path / "tmp").glob("runner-*"))


def test_no_home_is_touched_to_find_out(tmp_path: Path) -> None:
    assert usable(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []
    assert not usable(Path("~"))


def test_a_folder_that_others_may_write_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = own_folder(tmp_path / "runner-7")
    assert own_folder(tmp_path / "runner-7") == first == tmp_path / "runner-7"
    first.chmod(0o777)
    assert own_folder(tmp_path / "runner-7") != first
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("elsewhere")
    assert own_folder(tmp_path / "link") != tmp_path / "link"
