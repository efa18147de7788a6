"""The commands beside the run: what a person mistypes costs a line and nothing else, whoever reads."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner import export, generate, inspect, report, schedule
from runner.command import keyed, whole
from runner.data import prepare
from runner.history import read_history
from runner.load import initialise, load_model
from runner.sweep import status
from runner.sweep.figures import draw
from runner.sweep.rows import Row
from tests.commands import ROOT, environment, run
from tests.sessions import TINY, ran

FILES = ROOT / "tests" / "golden" / "tiny"
MODEL = str(FILES / "tiny_init.bin")
MAIN: dict[str, Callable[[list[str]], int]] = {
    "generate": generate.main,
    "export": export.main,
    "inspect": inspect.main,
    "report": report.main,
    "schedule": schedule.main,
    "data.prepare": prepare.main,
    "sweep.status": status.main,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained") / "a run, été"
    ran(*TINY, "data=moby", "model.layers=1", "train.steps=4", "checkpoint.every=2", dir=folder)
    return folder


def test_arguments_are_read_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/there")
    found = keyed(["a=~/x", "b=~/x", "b=2"], known=["a", "b"], several=["b"], paths=["a"])
    assert found == ({"a": ["/there/x"], "b": ["~/x", "2"]}, [])
    wrong = keyed(["aa=1", "--a", "zzz", "a=", "a=2"], known=["a", "b"], paths=["a"]).problems
    assert wrong == [
        "'aa=1' is not an option, did you mean a=...?",
        "'--a' is not an option, did you mean a=...?",
        "'zzz' is not an option: expected key=value with one of a, b",
        "a= is empty; name a path (is a shell variable empty?)",
        "a= is given 2 times (, 2); give it once",
    ]
    assert whole("n", "7") == 7
    for text in ("-1", "1.0", "1e3", "٣", "", "0"):
        with pytest.raises(ValueError, match="expected a whole number of at least 1"):
            whole("n", text, least=1)


WRONG = {
    "generate runs/a": ["'runs/a' is not an option"],
    "generate run=x promt=y": ["'promt=y' is not an option, did you mean prompt=...?"],
    "generate run=x run=y": ["run= is given 2 times (x, y); give it once"],
    "generate run=": ["run= is empty; name a path (is a shell variable empty?)"],
    "generate run=x stop=": ["stop= is empty, which would end every text before it begins; leave it out"],
    "generate run=x step=-1 top_k=z": ["step=-1: expected a whole number", "top_k=z must be a whole number"],
    "generate run=nowhere": ["nowhere: no such file or folder"],
    "generate run=TRAINED@2": ["TRAINED@2: no such file or folder; for a checkpoint write step=2"],
    "generate run=TRAINED step=3": ["TRAINED: no checkpoint of step 3; there are 2, 4"],
    f"generate run={MODEL} step=3": [f"{MODEL}: step=3 asked for, but this is not a run folder"],
    "generate run=TRAINED prompt=\udcff": ["prompt='\\udcff': it is not UTF-8 text"],
    "export run=x to=hf": ["out= is missing"],
    "export run=x to=hf out=y out=z": ["out= is given 2 times (y, z)"],
    "export run=x to=hf out=y step=x": ["step=x: expected a whole number of at least 0"],
    "export run=x to=hf out=y overwrite=yes": ["overwrite=yes: allowed are true, false"],
    "export run=x to=hf out=TRAINED overwrite=true": [
        "out=TRAINED: TRAINED is a run folder, whose files stay"
    ],
    "export run=x to=llmc out=TRAINED/model_00000004.bin": [
        "out=TRAINED/model_00000004.bin: TRAINED is a run"
    ],
    f"export run=x to=llmc out={MODEL}": [f"out={MODEL}: is there already; choose another one, or replace"],
    "export run=x to=hf out=FULL": [
        "out=FULL: is not empty (file.txt); choose another one, or replace files"
    ],
    "export run=x to=hf out=FULL/file.txt": ["out=FULL/file.txt: is a file; to=hf writes a folder"],
    "export run=x to=llmc out=m.safetensors": ["out=m.safetensors: to=llmc writes a folder or a .bin file"],
    "inspect nowhere.bin": ["nowhere.bin: no such file"],
    "inspect FULL": ["FULL: is a folder; name files"],
    "inspect TRAINED": ["TRAINED: is a folder; name files, as in TRAINED/model_00000004.bin"],
    f"inspect {MODEL} tokeniser=byte": ["'tokeniser=byte' is not an option, did you mean tokenizer=...?"],
    f"inspect {MODEL} batch=2": ["batch= says how data= is cut; give data=GLOB too, or leave it out"],
    f"inspect {MODEL} data=no* batch=2 seq_len=0": ["seq_len=0: expected a whole number of at least 1"],
    f"inspect {MODEL} data=no* batch=2 seq_len=4": ["data='no*' matches no file"],
    "schedule out=": ["out= is empty; name a path"],
    "schedule out=a.png out=b.png": ["out= is given 2 times (a.png, b.png)"],
    "schedule out=FULL": ["out=FULL: is a folder; name a file, as in out=FULL/schedule.png"],
    "schedule out=a.xyz": ["out=a.xyz: no image is called .xyz; use .avif"],
    "schedule train.seq_len=0": ["train.seq_len: must be >= 1, got 0"],
    "schedule ~scheduler": ["~scheduler: a run needs its scheduler"],
    "schedule -m scheduler=wsd,cosine": ["-m: a sweep has no one schedule; draw one of its cells"],
    "schedule --config-dir": ["--config-dir: needs a folder, as in --config-dir my_conf"],
    "schedule --config-dir nowhere": ["--config-dir "],
    "report ~/nowhere": ["HOME/nowhere: no run there"],
    "sweep.status nowhere": ["nowhere: no sweep there"],
    "data.prepare input=/dev/zero output=x": ["input: /dev/zero: is a pipe or a device; write its text to"],
    "data.prepare input=FULL/file.txt output=": ["output= is empty; name a path"],
    "data.prepare input=a input=b output=x": ["input= is given 2 times (a, b)"],
    "data.prepare input=FULL/file.txt output=x workers=99999": ["workers=99999 must lie in 0..1024"],
    "data.prepare input=FULL/file.txt output=x every=0": ["every=0 must be at least 1"],
}


@pytest.mark.parametrize("typed", WRONG)
def test_a_mistake_is_one_line_each_and_leaves_nothing(
    typed: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file.txt").write_text("kept")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = {path: path.read_bytes() for path in trained.iterdir()}

    def placed(text: str) -> str:
        places = {"TRAINED": trained, "FULL": full, "HOME": tmp_path}
        for name, path in places.items():
            text = text.replace(name, str(path))
        return text

    name, *arguments = typed.split(" ")
    assert MAIN[name]([placed(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(WRONG[typed]), lines
    for line, expected in zip(lines, WRONG[typed], strict=True):
        assert line.startswith(f"runner.{name}: error: {placed(expected)}")
    assert list(here.iterdir()) == []
    assert {path: path.read_bytes() for path in trained.iterdir()} == before


@pytest.mark.parametrize("name", [name for name in MAIN if name not in ("report", "sweep.status")])
def test_help_may_stand_anywhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert MAIN[name](["x=1", "--help"]) == 0
    assert f"runner.{name}" in capsys.readouterr().out


def test_a_checkpoint_is_chosen_and_a_damaged_one_is_told(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def steps(folder: Path, *arguments: str) -> tuple[int, str]:
        assert generate.main([f"run={folder}", "max_tokens=2", "json=true", *arguments]) == 0
        printed = capsys.readouterr()
        return json.loads(printed.out)["step"], printed.err

    assert steps(trained) == (4, "")
    assert steps(trained, "step=2") == (2, "")
    torn = tmp_path / "torn"
    torn.mkdir()
    for path in trained.iterdir():
        (torn / path.name).write_bytes(path.read_bytes())
    (torn / "model_00000004.bin").write_bytes(b"short")
    step, said = steps(torn)
    assert step == 2
    assert said.startswith("runner.generate: warning: checkpoint skipped as damaged: ")
    assert said.endswith("took step 2\n")
    initialise(load_model(torn).model, str(torn))
    assert f"model.init_from={torn}: checkpoint skipped as damaged" in caplog.text
    assert export.main([f"run={torn}", "to=hf", f"out={tmp_path / 'out'}"]) == 0
    assert "runner.export: warning: checkpoint skipped as damaged" in capsys.readouterr().err


def test_an_export_replaces_only_what_it_may(tmp_path: Path) -> None:
    asked = [f"run={MODEL}", "to=safetensors", f"out={tmp_path / 'out'}"]
    assert export.main(asked) == 0
    (tmp_path / "out" / "weights.safetensors").write_bytes(b"mine")
    assert export.main(asked) == 2
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == b"mine"
    assert export.main([*asked, "overwrite=true"]) == 0
    assert (tmp_path / "out" / "weights.safetensors").stat().st_size > 1000


def test_a_schedule_of_ones_own_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my conf" / "scheduler").mkdir(parents=True)
    node = "_target_: own_schedules.halving\npeak_lr: ${optimizer.lr}\nevery: 100\n"
    (tmp_path / "my conf" / "scheduler" / "halving.yaml").write_text(node)
    call = "def halving(step: int, *, peak_lr: float, every: int) -> float:\n    return peak_lr\n"
    (tmp_path / "own_schedules.py").write_text(call)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    asked = ["--config-dir", "my conf", "scheduler=halving", "scheduler.every=5", "out=curve"]
    assert schedule.main(asked) == 2
    assert "add run.trust=[own_schedules] if you trust it" in capsys.readouterr().err
    assert schedule.main([*asked, "run.trust=[own_schedules]"]) == 0
    assert capsys.readouterr().out.endswith("image  curve.png\n")
    assert (tmp_path / "curve.png").is_file()


def test_files_without_text_are_no_data_and_their_folder_stays_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("")
    asked = [f"input={tmp_path / 'a.txt'}", f"output={tmp_path / 'out'}", "tokenizer=byte"]
    for _ in range(2):
        assert prepare.main(asked) == 2
        assert capsys.readouterr().err.endswith("holds no text; name other files\n")
    (tmp_path / "a.txt").write_text("some text")
    assert prepare.main(asked) == 0


def shell(line: str, cwd: Path) -> tuple[int, str, str]:
    text = f"set -o pipefail; {sys.executable} -m runner.{line}"
    done = subprocess.run(
        ["bash", "-c", text], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "code", "out", "error"),
    [
        (f"inspect {MODEL} | true", 0, "", ""),
        (f"inspect {MODEL} | head -1", 0, "GPT-2 model", ""),
        (f"inspect {MODEL} >&-", 0, "", ""),
        (f"inspect {MODEL} >/dev/full", 1, "", "runner.inspect: error: standard output: No space left on"),
        (f"inspect {MODEL} nowhere.bin 2>&-", 2, "GPT-2 model", ""),
        (f"export run={MODEL} to=llmc out=x | true", 0, "", ""),
        (f"generate run={MODEL} prompt=- max_tokens=3 <&-", 0, "", ""),
        (f"generate run={MODEL} max_tokens=99999999 temperature=1 | head -c 1", 0, "", ""),
        ("schedule train.steps=9 | true", 0, "", ""),
        ("llmc --help | true", 0, "", ""),
    ],
)
def test_output_ends_with_its_reader(line: str, code: int, out: str, error: str, tmp_path: Path) -> None:
    got, printed, said = shell(line, tmp_path)
    assert (got, said.count("\n")) == (code, bool(error)), said
    assert said.startswith(error)
    assert out in printed


def test_a_sweep_that_no_launcher_starts_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    asked = ["-m", "optimizer.lr=1e-3,2e-3", "hydra/launcher=submitit_slurm", f"sweep.root={tmp_path / 'sw'}"]
    printed = run(*asked, cwd=tmp_path, code=2)
    assert "hydra/launcher: it cannot start the cells" in printed
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_sweep_without_any_validation_is_drawn_without_a_warning(tmp_path: Path) -> None:
    row = {"event": "TrainStep", "step": 0, "train/loss": 2.0, "train/lr": 0.1, "applied": True, "reason": ""}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    losses = {"val_loss": math.nan, "best_val_loss": math.nan, "train_loss": 2.0}
    told: dict[str, Any] = {**losses, "skipped": 0, "seconds": 1.0, "history": read_history(tmp_path)}
    values, state = {"optimizer.lr": 1}, "finished"
    cell = Row(number=0, label="lr=1", values=values, state=state, step=1, folder=tmp_path, **told)
    draw([cell], tmp_path / "summary.png")
    assert (tmp_path / "summary.png").is_file()


def test_a_run_says_since_when_it_has_no_loss_and_what_shares_a_record(tmp_path: Path) -> None:
    small = [*TINY, "train.steps=9", "evaluate=val", "evaluate.val.batches=1", "run.name=x", "run.root=."]
    hopeless = ["optimizer.lr=1e30", "clip=none", "outlier=finite", "outlier.max_consecutive_skips=3"]
    printed = run(*small, *hopeless, cwd=tmp_path, code=1)
    assert "diverged: 3 steps in a row" in printed
    assert "  updates     all refused since step " in printed
    twice = ["+evaluate.more._target_=runner.evaluate.Validation", "run.overwrite=true"]
    printed = run(*small, *twice, cwd=tmp_path)
    assert "evaluate.val and evaluate.more both write the validation loss" in printed
    assert "since step" not in printed


def test_a_terminal_without_blocks_gets_a_drawing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runner.schedule", "train.steps=9"]
    env = {**environment(), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "####" in done.stdout
    assert "\\u" not in done.stdout
