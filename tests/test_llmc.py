"""llm.c's command line: its own logs come out, an interrupted run goes on, mistakes are one line each."""

import json
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.llmc import main
from runner.llmc_flags import FLAGS, parse
from runner.llmc_model import quoted
from runner.llmc_translate import translate

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "golden" / "tiny"
LOOP = json.loads((ROOT / "tests" / "golden" / "loop.json").read_text())
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(flags: str, out: Path) -> list[str]:
    arguments = flags.split()
    arguments[arguments.index("-o") + 1] = str(out)
    return [sys.executable, "-m", "runner.llmc", *arguments]


def run(flags: str, out: Path, *more: str):
    done = subprocess.run(
        [*command(flags, out), *more],
        cwd=TINY,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def log_of(out: Path) -> list[str]:
    return (out / "main.log").read_text().splitlines()


def last_wins(lines: list[str]) -> dict[tuple[str, str], str]:
    """Read a log as llm.c's own notebook does: of lines for the same step and stream the last counts."""
    return {(line.split(" ")[0], line.split(" ")[1].split(":")[0]): line for line in lines}


def state_header(path: Path) -> dict[str, object]:
    raw = path.read_bytes()
    rng = struct.unpack_from("<2Q", raw, 80)
    return {
        "step": struct.unpack_from("<i", raw, 40)[0],
        "rng_state": hex(rng[0]),
        "rng_state_last_update": hex(rng[1]),
        "current_shard_idx": struct.unpack_from("<Q", raw, 120)[0],
        "current_sample_idx": struct.unpack_from("<Q", raw, 128)[0],
    }


def body(path: Path) -> bytes:
    """Return a state file without the eight bytes that llm.c never sets, or any other file as it is."""
    raw = bytearray(path.read_bytes())
    if path.name.startswith("state_") and struct.unpack_from("<i", raw, 20)[0]:
        raw[-2520:-2512] = bytes(8)
    return bytes(raw)


# ---------------------------------------------------------------- llm.c's own runs


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    out = tmp_path_factory.mktemp("llmc") / "log"
    return out, run(LOOP["full"]["args"], out)


def test_main_log_equals_llmc_to_the_byte(full):
    assert log_of(full[0]) == LOOP["full"]["log"]


def test_files_and_state_headers_equal_llmc(full):
    out = full[0]
    assert set(LOOP["full"]["files"]) <= {path.name for path in out.iterdir()}
    for step, want in LOOP["full"]["headers"].items():
        got = state_header(out / f"state_{int(step):08d}_00000.bin")
        assert got == {name: want[name] for name in got}


def test_standard_output_has_llmc_step_lines(full):
    lines = full[1].splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 40
    assert steps[0].startswith("step    1/40 | loss 5.550")
    assert "(+nanz)| norm 2.4" in steps[0]
    assert any(line.startswith("val loss 5.5499") for line in lines)
    assert "Writing checkpoint at step 10" in lines


def test_the_printed_command_is_equivalent(full, tmp_path):
    printed = next(line for line in full[1].splitlines() if line.startswith("python -m runner "))
    arguments = shlex.split(printed)[1:]
    changed = [f"run.root={tmp_path}" if a.startswith("run.root=") else a for a in arguments]
    subprocess.run(
        [sys.executable, *changed], cwd=TINY, env=ENV, capture_output=True, timeout=120, check=True
    )
    for name in ("main.log", "model_00000040.bin", "state_00000040_00000.bin"):
        assert (tmp_path / "log" / name).read_bytes() == (full[0] / name).read_bytes()


@pytest.mark.parametrize("wait_for", ["DONE_00000020", pytest.param("DONE_00000010", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_the_same_losses_and_files(full, tmp_path, wait_for):
    """A run that was interrupted (kill -9) and resumed by -y 1 ends as one that was left alone."""
    out = tmp_path / "log"
    process = subprocess.Popen(
        command(LOOP["full"]["args"], out), cwd=TINY, env=ENV, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (out / wait_for).exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (out / "DONE_00000040").exists()
    for junk in ("DONE_junk", "DONE_00000099.tmp", "DONE_99"):
        (out / junk).touch()
    run(LOOP["full"]["args"], out, "-y", "1")
    assert last_wins(log_of(out)) == last_wins(LOOP["full"]["log"])
    for name in ("model_00000040.bin", "state_00000040_00000.bin", "model_00000030.bin"):
        assert body(out / name) == body(full[0] / name), name


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    out = tmp_path_factory.mktemp("unequal") / "log"
    run(LOOP["unequal"]["args"], out)
    return out


def test_unequal_shards_are_walked_as_llmc_does(unequal):
    assert log_of(unequal) == LOOP["unequal"]["log"]
    for row in LOOP["unequal"]["rows"]:
        got = state_header(unequal / f"state_{row['step']:08d}_00000.bin")
        assert got == {name: row["header"][name] for name in got}


@pytest.mark.parametrize("step", [20, *(pytest.param(s, marks=pytest.mark.slow) for s in (10, 30))])
def test_goes_on_from_checkpoints_of_unequal_shards(unequal, tmp_path, step):
    """llm.c itself can load one of these: it compares the number of samples of the wrong shard."""
    out = shutil.copytree(unequal, tmp_path / "log")
    for path in [p for later in range(step + 10, 41, 10) for p in out.glob(f"*{later:08d}*")]:
        path.unlink()
    run(LOOP["unequal"]["args"], out, "-y", "1")
    assert last_wins(log_of(out)) == last_wins(LOOP["unequal"]["log"])
    for name in ("model_00000040.bin", "state_00000040_00000.bin"):
        assert body(out / name) == body(unequal / name)


def test_outliers_are_skipped_at_llmc_steps(tmp_path):
    out = tmp_path / "log"
    printed = run(LOOP["skips"]["args"], out)
    assert printed.count("skipping update due to") == len(LOOP["skips"]["skipped"])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    skipped = [row["step"] for row in rows if row.get("applied") is False]
    assert skipped == LOOP["skips"]["skipped"]
    assert len(log_of(out)) == len(LOOP["skips"]["log"])
    for got, want in zip(log_of(out), LOOP["skips"]["log"], strict=True):
        assert abs(loss_in(got) - loss_in(want)) < 1.5e-4
        assert got.split(" ")[2:] == want.split(" ")[2:]


def loss_in(line: str) -> float:
    return float(line.split(" ")[1].split(":")[1])


def test_one_batch_again_and_again_equals_llmc(tmp_path):
    out = tmp_path / "log"
    first, then = LOOP["overfit"]["runs"]
    run(first, out)
    assert log_of(out) == LOOP["overfit"]["log"][:9]
    run(then, out)
    # llm.c validates once more where it takes up; a validation here is not repeated.
    assert last_wins(log_of(out)) == last_wins(LOOP["overfit"]["log"])


def test_bf16_stays_close_to_llmc(tmp_path):
    """Rounding and order are llm.c's; its matrix products in this log are not, so digits may differ."""
    out = tmp_path / "log"
    run(LOOP["full_bf16"]["args"], out)
    for got, want in zip(log_of(out), LOOP["full_bf16"]["log"], strict=True):
        assert abs(loss_in(got) - loss_in(want)) < 2e-3
    got = state_header(out / "state_00000040_00000.bin")
    assert got == {name: LOOP["full_bf16"]["headers"]["40"][name] for name in got}
    assert struct.unpack_from("<2i", (out / "model_00000040.bin").read_bytes()) == (20240326, 5)
    assert struct.unpack_from("<i", (out / "state_00000040_00000.bin").read_bytes(), 16) == (1,)


# ---------------------------------------------------------------- translation

BASE = [
    "-e",
    str(TINY / "nano_init.bin"),
    "-i",
    str(TINY / "nano_train_*.bin"),
    "-j",
    str(TINY / "nano_val.bin"),
]
SMALL = [*BASE, "-b", "1", "-t", "8"]


def settings(*flags: str) -> dict[str, str]:
    overrides = translate(parse([*SMALL, *flags])).overrides
    return dict(override.split("=", 1) for override in overrides)


def test_defaults_are_llmc_defaults():
    got = settings("-x", "6")
    want = {"train.steps": "6", "train.micro_batch": "1", "train.seq_len": "8", "optimizer.lr": "0.0003"}
    want |= {"optimizer.weight_decay": "0.0", "scheduler": "cosine", "scheduler.final_frac": "1.0"}
    want |= {"scheduler.warmup_steps": "0", "evaluate.val.every": "20", "evaluate.val.batches": "20"}
    want |= {"checkpoint.every": "0", "precision": "fp32", "data.order": "shuffle", "data.vocab_size": "100"}
    assert {name: got[name] for name in want} == want
    assert "run.name" not in got
    assert "outlier.max_loss_z" not in got


def test_steps_come_from_the_tokens_and_batches_from_the_split():
    tokens = sum((path.stat().st_size - 1024) // 2 for path in TINY.glob("nano_train_*.bin"))
    assert settings()["train.steps"] == str(tokens // 8)
    assert settings("-d", "16")["train.steps"] == str(tokens // 16)
    assert settings("-x", "1", "-m", "-1")["evaluate.val.batches"] == str(299 // 8)
    # llm.c validates -m batches on each process; ours are those of all together
    assert settings("-x", "1", "-pn", "2", "-m", "5")["evaluate.val.batches"] == "10"
    assert settings("-x", "1", "-pn", "2", "-m", "-1")["evaluate.val.batches"] == str(2 * (299 // 16))


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (
            "-k wsd -u 3 -q 0.0",
            {"scheduler": "wsd", "scheduler.warmup_steps": "3", "scheduler.final_frac": "0.0"},
        ),
        ("-k constant -u 3", {"scheduler": "constant", "scheduler.warmup_steps": "0"}),
        ("-pn 2", {"parallel": "ddp", "parallel.processes": "2"}),
        ("-pn 2 -z 1", {"parallel": "zero1", "parallel.processes": "2"}),
        ("-e d12", {"model": "d12", "data.vocab_size": "50257", "data.tokenizer": "gpt2"}),
        ("-e gpt3:c768", {"model": "gpt3_c768"}),
        ("-f 0", {"precision.tf32": "false"}),
        ("-sl 3 -sg 2.5", {"outlier.max_loss_z": "3.0", "outlier.max_norm_z": "2.5"}),
        ("-o /x/y -n 7 -nk 2 -nm 14 -y 1", {"run.root": "/x", "run.name": "y", "checkpoint.every": "7"}),
        ("-o /x/y -nk 2 -nm 14 -y 1", {"checkpoint.keep": "2", "checkpoint.major_every": "14"}),
        ("-o 2024 -y 0", {"run.root": "'.'", "run.name": "'2024'", "run.overwrite": "true"}),
        ("train.steps=9", {"train.steps": "9"}),
    ],
)
def test_flags_become_settings(flags, want):
    got = settings("-x", "6", *flags.split())
    assert {name: got.get(name) for name in want} == want


def test_bf16_files_ask_for_bf16_weights():
    flags = ["-e", str(TINY / "nano2_init_bf16.bin"), "-x", "2", "-w", "0"]
    got = settings(*flags)
    assert (got["precision"], got["optimizer.master"]) == ("bf16_master", "false")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-Q 3", "-Q: not a flag of llm.c's train_gpt2cu"),
        ("-ix 3", "-ix: not a flag"),
        ("-x six", "-x six: expected a whole number"),
        ("-l fast", "-l fast: expected a number"),
        ("-x", "-x: needs a value"),
        ("-x 0", "-x 0: makes 0 steps"),
        ("-d 12", "-d 12: must be a multiple of b x t x processes = 8"),
        ("-k foo", "-k foo: unknown schedule; llm.c has cosine, linear, constant, wsd"),
        ("-v 0", "-v 0: must be at least 1"),
        ("-m 0", "-m 0: must be at least 1, or -1"),
        ("-z 2", "-z 2: llm.c has ZeRO stages 0 and 1"),
        ("-y 1", "-y 1: there is no folder to go on from"),
        ("-a 1", "-a 1: needs a folder"),
        ("-e d13", "model descriptor 'd13' is unknown"),
        ("-e none.bin", "none.bin: No such file"),
    ],
)
def test_mistakes_are_one_line_each(flags, message, capsys):
    assert main([*SMALL, "-x", "6", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_all_mistakes_come_at_once(capsys):
    assert main(["-Q", "1", "-x", "y", "-b", "z"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_flags_without_effect_are_named():
    notes = translate(parse([*SMALL, "-x", "6", "-r", "0", "-ge", "1", "-pm", "tcp", "-h", "1"])).notes
    for flag in ("-r 0", "-ge 1", "-pm tcp", "-h 1"):
        assert any(note.startswith(f"{flag} has no effect") for note in notes), flag


def test_checkpoints_are_neither_continued_nor_deleted_unasked(tmp_path, capsys):
    (tmp_path / "DONE_00000004").touch()
    assert main([*SMALL, "-x", "6", "-o", str(tmp_path)]) == 2
    assert "-y 1 goes on there, -y 0 deletes them" in capsys.readouterr().err


def test_help_lists_every_flag(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in FLAGS)


@pytest.mark.parametrize(
    "text", ["a", "20", "1e3", "null", "a b", "it's", "x=y", "a,b", "", ".", "[x]", "a\\b", "x\\", "é"]
)
def test_values_survive_hydra(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = OverridesParser.create().parse_override(f"run.name={quoted(text)}")
    assert override.value() == text
