"""What a person types: every mistake is one clear line, exit 2, and nothing is created."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runner import __version__
from runner.cli import run_command
from tests.commands import ROOT, SMALL, environment, run

MISTAKES = {
    "scheduler=wsdd": "scheduler: no option 'wsdd'; choose one of constant, cosine",
    "train.stepz=10": "train.stepz: no such option (did you mean train.steps?)",
    "+train.stepz=10": "train.stepz: no such option (did you mean train.steps?)",
    "train.steps=abc": "train.steps: expected a whole number, got 'abc'",
    "train.steps=-1": "train.steps: must be >= 1, got -1",
    "train.steps=1e3": "train.steps: expected a whole number, got 1000.0 (write 1000)",
    "train.steps=": "train.steps: expected a whole number, got ''",
    "optimizer.lr=nan": "optimizer.lr: must be a finite number, got nan",
    "optimizer.lr=fast": "optimizer.lr: expected a number, got 'fast'",
    "clip.max_norm=-1": "clip.max_norm: must be > 0, got -1",
    "scheduler=null": "scheduler: expected the name of an option, got null; choose one of",
    "train=5": "train: expected the name of an option, got 5",
    "logger=[nope]": "logger: no option 'nope'; choose one of",
    "train.tokens_per_step=1000": "train.tokens_per_step: 1000 is not a multiple of",
    "model.heads=3": "model.heads: 3 does not divide model.width 128",
    "run.root=/proc/nowhere": "run.root: cannot write to",
    "run.name=a/../b": "run.name: 'a/../b' is not a folder name",
    "run.device=tpu": "run.device: no device is called 'tpu'",
    "run.tags=x": "run.tags: expected a list, got 'x'",
    "optimizer._target_=os.system": "optimizer._target_: 'os.system' is outside the trusted packages",
    "+logger.x._target_=acme.Logger": "logger.x._target_: 'acme.Logger' is outside the trusted packages",
    "train.steps=1,2": "train.steps: '1,2' is several values; add -m",
    "train.steps=100000000": "train.steps: must be <= 99999999, got 100000000",
    "run.seed=9223372036854775808": "run.seed: must be <= 2147483647",
    "run.threads=5000": "run.threads: must be <= 1024, got 5000",
    "foo=1": "foo: no such option",
    "+foo=1": "foo: no such option",
    "scheduler.warmup_steps=-5": "scheduler.warmup_steps: must be >= 0, got -5",
    "scheduler.total_steps=10": "scheduler: ",
    "--stepz": "--stepz: no such flag",
    "run.name=a b=c": "run.name: cannot read the value 'a b=c'; quote it",
    "run.name=naïve": "run.name: cannot read the value 'naïve'; quote it inside",
    "run.root=~x": "run.root: cannot read the value '~x'; quote it",
    "train.steps=${nowhere}": "train.steps: ",
    "run.seed=${run.seed}": "a value: Recursive interpolation detected",
    "run.compile=true": "run.compile: must be one of false, blocks, got true",
    "run.name='a\nb'": "run.name: 'a\\nb' is not a folder name",
    "run.root=/dev/null/x": "run.root: cannot write to /dev/null/x",
    "parallel.processes=2": "parallel.processes: no such option of the chosen parallel; parallel=ddp or",
    "+scheduler.decay_frac=0.2": "scheduler.decay_frac: no such option of the chosen scheduler; scheduler=",
    "optimizer=[adamw,lion]": "optimizer: takes one option, got [adamw,lion]; sweep over them with -m",
    "hydra.run.dir=x": "hydra.run.dir: not used here, a run's folder is run.root/run.name",
    "train.micro_batch=auto": "train.micro_batch: auto needs train.tokens_per_step",
    "": "'': a setting has a name, as in train.steps=1000 (is a shell variable empty?)",
    "=5": "'=5': a setting has a name, as in train.steps=1000",
    "train": "train: not a setting; settings are written key=value (train.steps=1000), see --help",
    "train.steps=${train.seq_len": "train.steps: in '${train.seq_len' the ${ is not closed",
    "train.steps=${model}": "train.steps: expected a whole number, got {'_target_'",
    "+train.steps=10": "train.steps: is there already; write train.steps=... without the +",
    "+optimizer=lion": "optimizer: one is chosen already; write optimizer=... without the +",
    "++optimizer=lion": "optimizer: write optimizer=... without the ++",
    "~optimizer": "~optimizer: a run needs its optimizer; choose another one, optimizer=NAME",
    "~foo": "~foo: nothing of this name is there",
    "~train.steps": "~train.steps: scheduler.total_steps is made from it, so that it has to stay; set",
    "~optimizer.lr": "~optimizer.lr: scheduler.peak_lr is made from it",
    "~model.width": "model.width: is required, give it on the command line (model.width=...)",
    "train.seq_len=100000000": "data: no shard for validation holds train.seq_len + 1 = 100000001 tokens",
    "optimizer._target_=torch.optim.LBFGS": "optimizer._target_: torch.optim.LBFGS cannot train here: it",
    "optimizer._target_=torch.optim.Adm": "optimizer._target_: 'torch.optim' has no 'Adm' (did you mean Adam",
    "experiment=null": "experiment: null is what it is anyway; leave experiment=null out; choose one of",
    "optimizer.betas={a:1}": "optimizer.betas: a list and a mapping cannot stand for each other",
    "logger.tensorboard.every=2": "logger.tensorboard: no such option among the chosen ones; choose it with",
    "sweep.search.trials=5": "sweep.search.trials: no such option; it needs sweep=search",
    "run.root=": "run.root: '' is not a folder; write . for the one you are in",
    f"run.name={'a' * 256}": f"run.name: '{'a' * 56}... has over 255 bytes",
    "run.device=cpu:3": "run.device: no device is called 'cpu:3'; use auto, cpu, cuda or cuda:N",
    "run.device=meta": "run.device: no device is called 'meta'; use auto, cpu, cuda or cuda:N",
    "debug.rank=1": "debug.rank: there is no rank 1, ranks count from 0 and the run has 1",
    "outlier.window=99999999999999": "outlier.window: must be <= 1000000",
    "checkpoint.resume=must": "checkpoint.resume=must: ",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner", argument])
    assert run_command([argument]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"runner: error: {MISTAKES[argument]}"), lines[0]
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["optimizer=torch"], ["optimizer._target_: is required, give it", "optimizer.lr: is required"]),
        (
            ["optimizer=torch", "optimizer._target_=torch.optim.Rprop", "optimizer.lr=1"],
            ["optimizer.weight_decay: torch.optim.Rprop has no such option; leave it out with ~optimizer.we"],
        ),
        (["optimizer=sgd", "optimizer.momentum=-1"], ["optimizer: Invalid momentum value: -1.0"]),
        (["optimizer=adafactor", "optimizer.d=0"], ["optimizer: Clipping threshold d should be >= 1"]),
        (["evaluate=none", "evaluate.val.every=3"], ["evaluate.val: no such option among the chosen ones;"]),
        (["run.from=."], ["run.from=.: "]),
    ],
)
def test_mistakes_of_several_words(
    arguments: list[str],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner", *arguments])
    assert run_command(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(expected), lines
    for line, text in zip(lines, expected, strict=True):
        assert line.startswith(f"runner: error: {text}")
    assert list(tmp_path.rglob("*")) == []


def test_a_wrong_environment_variable_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runner", "train.steps=1"]
    env = {**environment(), "RUNNER_KERNELS": "maybe"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "runner: error: RUNNER_KERNELS: must be one of on, off, got 'maybe'\n"


def test_several_mistakes_come_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "train.steps=abc",
        "model.heads=3",
        "clip.max_norm=x",
        "data=shards",
        "data.val=x",
        "data.train=y*",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner", *arguments])
    assert run_command(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) >= 3


def shard(path: Path, tokens: list[int], *, count: int | None = None) -> Path:
    header = struct.pack("<3i", 20240520, 1, len(tokens) if count is None else count).ljust(1024, b"\0")
    path.write_bytes(header + np.array(tokens, dtype="<u2").tobytes())
    return path


def data_mistake(tmp_path: Path, train: str, *more: str) -> str:
    val = shard(tmp_path / "val.bin", [1] * 5000)
    arguments = [
        "data=shards",
        f"data.train={train}",
        f"data.val={val}",
        f"run.root={tmp_path / 'out'}",
        *more,
    ]
    printed = run(*arguments, cwd=tmp_path, code=2)
    lines = [line for line in printed.splitlines() if line]
    assert len(lines) == 1, printed
    assert not (tmp_path / "out").exists()
    return lines[0]


def test_bad_shards_are_named(tmp_path: Path) -> None:
    assert "missing*.bin" in data_mistake(tmp_path, str(tmp_path / "missing*.bin"))
    cut = shard(tmp_path / "cut.bin", [1] * 5000, count=6000)
    line = data_mistake(tmp_path, str(cut))
    assert "cut.bin" in line
    assert "13024" in line or "6000" in line
    over = shard(tmp_path / "over.bin", [1] * 4000 + [60000] + [1] * 999)
    line = data_mistake(tmp_path, str(over))
    assert "over.bin" in line
    assert "60000" in line
    short = shard(tmp_path / "short.bin", [1] * 100)
    line = data_mistake(tmp_path, str(short))
    assert "short.bin" in line
    assert "100" in line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {steps: 5}\n", "experiment: its settings have no place here; begin its file with the line"),
        (
            "# @package _global_\nlogger: [llmc]\n",
            "a list and a mapping cannot stand for each other; in a file,",
        ),
    ],
)
def test_mistakes_of_an_experiments_file(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    printed = run("--config-dir", str(tmp_path), "experiment=mine", cwd=tmp_path, code=2)
    assert printed.startswith(f"runner: error: {line}")
    assert len(printed.splitlines()) == 1


def test_a_yaml_mistake_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ntrain:\n  steps: [1, 2\nrun: {}\n"
    )
    printed = run("--config-dir", str(tmp_path), "+experiment=mine", cwd=tmp_path, code=2)
    assert len(printed.splitlines()) == 1
    assert "mine.yaml:4" in printed


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        (disk / "filler").write_bytes(b"\0" * 60000)
        printed = run(*SMALL, f"run.root={disk}", cwd=tmp_path, code=2)
        assert len(printed.splitlines()) == 1
        assert "no space left" in printed
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_only_starts_or_refuses_a_run_needs_no_torch(tmp_path: Path) -> None:
    """Slow, and fatal: a signal during an unguarded import of torch aborts the process."""
    record = tmp_path / "outputs" / "done"
    record.mkdir(parents=True)
    ended = {"at": "2026-01-01", "status": "finished", "step": 3}
    (record / "manifest.json").write_text(json.dumps({"config": {}, "sessions": [{"ended": ended}]}))
    code = (
        "import sys; from runner.cli import run_command\n"
        "sys.argv = ['runner', *sys.argv[1:]]\n"
        "rc = run_command(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules and 'wandb' not in sys.modules, 'imported too much'\n"
        "sys.exit(rc)"
    )
    for argument, text, expected in (
        ("--version", f"runner {__version__}", 0),
        ("--help", "scheduler", 0),
        ("train.steps=-1", "must be >= 1", 2),
        ("run.name=done", "holds the record of a run that finished at step 3", 2),
    ):
        process = subprocess.run(
            [sys.executable, "-c", code, argument],
            env=environment(),
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert process.returncode == expected, process.stdout
        assert text in process.stdout
    printed = run("--cfg", "job", "scheduler=wsd", cwd=tmp_path)
    assert "_target_: runner.scheduler.wsd" in printed


def test_every_key_of_the_packaged_configuration_is_explained() -> None:
    """A newcomer reads the YAML: each key of each group says its unit, its choices or its source."""
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        if path.parent.name in ("experiment", "sweep", "hydra", "launcher", "sweeper"):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            if (
                line
                and not line.endswith(":")
                and not line.startswith(("#", " ", "_target_", "{", "defaults", "run:", "hydra:", "sweep:"))
            ):
                assert "#" in line, f"{path.relative_to(ROOT)}: {line}"


BAD_FILES = {
    "list": (b"- a\n", "scheduler: expected the settings of one option, got ['a']"),
    "number": (b"5\n", "{file}: Invalid loaded object type: int (it must be"),
    "binary": (b"\xff\xfe", "{file}: 'utf-8' codec can't decode"),
    "empty": (b"", "scheduler: needs a _target_"),
    "tab": (b"\tx: 1\n", "{file}:1:1: found character"),
    "unclosed": (b"a: [1\n", "{file}:2:1: expected ',' or ']'"),
}
SAYS_LIBYAML = "did not find "  # before what it expected, which PyYAML's own parser says without these words


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_option_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine/scheduler" / f"{name}.yaml"
    file.parent.mkdir(parents=True)
    content, line = BAD_FILES[name]
    file.write_bytes(content)
    arguments = ["--config-dir", str(tmp_path / "mine"), f"scheduler={name}"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner", *arguments])
    assert run_command(arguments) == 2
    (said,) = capsys.readouterr().err.replace(SAYS_LIBYAML, "").splitlines()
    assert said.startswith(f"runner: error: {line.format(file=file)}"), said


@pytest.mark.parametrize("how", ["--config-dir {}", "--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_an_option_that_would_never_be_read_is_refused(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine/scheduler/wsd.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("_target_: acme.wsd\n")
    assert run_command([*how.format(tmp_path / "mine").split(" "), "scheduler=wsd"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"runner: error: {file}: never read")


def test_flags_may_stand_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "mine/scheduler/flat.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("_target_: runner.scheduler.constant\npeak_lr: 0.5\nwarmup_steps: 0\n")
    printed = run("train.steps=3", "--config-dir", "mine", "scheduler=flat", "--cfg", "job", cwd=tmp_path)
    assert "peak_lr: 0.5" in printed
    assert "steps: 3" in printed


def test_a_primary_config_that_is_missing_is_one_line(tmp_path: Path) -> None:
    said = run("--config-name=mine", cwd=tmp_path, code=2)
    assert said.startswith("runner: error: --config-name: there is no mine.yaml; leave the flag out")
    assert said.count("\n") == 1


def test_a_flag_without_its_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train.steps=3", "--cfg"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said == "runner: error: argument --cfg/-c: expected one argument; see --help"


@pytest.mark.parametrize(
    ("swept", "line"),
    [
        ("optimizer.lr=glob(*)", "-m: nothing to run, optimizer.lr=glob(*) matches no value"),
        ("optimizer.lr=interval(0,1)", "optimizer.lr: an interval has no cells; add sweep=search"),
    ],
)
def test_a_sweep_without_cells_is_one_line(swept: str, line: str, tmp_path: Path) -> None:
    printed = run("-m", swept, cwd=tmp_path, code=2)
    assert printed.startswith(f"runner: error: {line}"), printed
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
