"""Runs go on from checkpoints that llm.c wrote, also from those that it cannot load itself."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runner.checkpoint.inspect_state import next_batch, read
from runner.rng import draws

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
TINY = GOLDEN / "tiny"
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
NAMES = sorted(path.name for path in (GOLDEN / "state").iterdir())
STEP, STEPS, PER_STEP = 15, 17, 2 + 16  # draws per step: two micro-steps and sixteen tensors


def resume(folder: Path, *more: str):
    model = "nano2_init_bf16.bin" if folder.name.startswith("bf16") else "nano_init.bin"
    command = [
        sys.executable,
        "-m",
        "runner.llmc",
        "-e",
        model,
        "-i",
        "nanoeq_train_*.bin",
        "-j",
        "nano_val.bin",
    ]
    command += ["-o", str(folder), "-y", "1", "-b", "2", "-t", "8", "-d", "32", "-x", str(STEPS), "-n", "1"]
    command += ["-v", "50", "-m", "1", "-s", "0", "-l", "1e-3", *more]
    return subprocess.run(
        command, cwd=TINY, env=ENV, capture_output=True, text=True, timeout=120, check=False
    )


def header(path: Path):
    raw = path.read_bytes()
    flags, step = struct.unpack_from("<2i", raw, 16), struct.unpack_from("<i", raw, 40)[0]
    return flags, step, struct.unpack_from("<2Q", raw, 80), struct.unpack_from("<2Q", raw, 120)


def copied(name: str, tmp_path: Path) -> Path:
    folder = shutil.copytree(GOLDEN / "state" / name, tmp_path / name)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


def options(name: str) -> list[str]:
    order = [] if "_shuffle_" in name else ["data.order=sequential"]
    return ["-w", "0" if name.endswith("nomaster") else "1", *order]


@pytest.mark.parametrize("name", NAMES)
def test_two_more_steps_from_each_golden_state(name, tmp_path):
    folder = copied(name, tmp_path)
    before = header(folder / f"state_{STEP:08d}_00000.bin")
    done = resume(folder, *options(name))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "main.log").read_text().splitlines()
    losses = [float(line.split("trl:")[1].split(" ")[0]) for line in lines if "trl:" in line]
    assert len(losses) == STEPS - STEP
    assert all(3.5 < loss < 5.0 for loss in losses)
    for step in (STEP + 1, STEPS):
        flags, at, rng, position = header(folder / f"state_{step:08d}_00000.bin")
        assert (flags[1], at) == (before[0][1], step)
        assert flags[0] == (1 if name == "bf16_shuffle_master" else 0)
        state, _ = draws(before[2][0], PER_STEP * (step - STEP))
        assert rng == (state, draws(before[2][0], PER_STEP * (step - STEP) - 16)[0])
        assert position == (before[3][0], before[3][1] + 2 * (step - STEP))
    assert (folder / f"model_{STEPS:08d}.bin").stat().st_size == (
        folder / f"model_{STEP:08d}.bin"
    ).stat().st_size


@pytest.mark.parametrize(
    "name", ["fp32_shuffle_master", pytest.param("fp32_noshuffle_nomaster", marks=pytest.mark.slow)]
)
def test_the_data_goes_on_where_llmc_stood(name, tmp_path):
    """The next loss is that of the weights and the tokens that the files name."""
    from runner.load import load_model

    folder = copied(name, tmp_path)
    file = read(folder / f"state_{STEP:08d}_00000.bin")
    tokens = [np.fromfile(TINY / f"nanoeq_train_00000{i}.bin", "<u2")[512:] for i in range(3)]
    stream, losses = file.stream, []
    model = load_model(folder).model
    for micro in range(2):
        slot = stream["sample_slot"] + micro
        shard = stream["shard_order"][stream["shard_slot"]] if file.header.shuffled else stream["shard_slot"]
        sample = stream["sample_order"][slot] if file.header.shuffled else slot
        piece = tokens[shard][int(sample) * 16 :][:17].astype(np.int64)
        inputs, targets = (piece[i : i + 16].reshape(2, 8) for i in (0, 1))
        import torch

        losses.append(float(model(torch.from_numpy(inputs), torch.from_numpy(targets)).detach()))
    assert next_batch(file, str(TINY / "nanoeq_train_*.bin"), micro_batch=2, seq_len=8)
    assert resume(folder, *options(name)).returncode == 0
    first = (folder / "main.log").read_text().splitlines()[0]
    assert abs(float(first.split("trl:")[1].split(" ")[0]) - np.mean(losses)) <= 6e-5


def test_master_weights_that_the_run_does_not_keep_are_dropped(tmp_path):
    """llm.c warns, then reads them as the shuffle block and aborts."""
    folder = copied("bf16_shuffle_master", tmp_path)
    done = resume(folder, "-w", "0")
    assert done.returncode == 0, done.stderr
    assert header(folder / f"state_{STEPS:08d}_00000.bin")[0] == (0, 1)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("bf16_shuffle_nomaster", ["-w", "1"], "master"),
        ("fp32_shuffle_master", ["data.order=sequential"], "order"),
        ("fp32_shuffle_master", ["-b", "4", "-d", "32"], "samples in nanoeq"),
        pytest.param("fp32_shuffle_master", ["-e", "nano2_init.bin"], "model", marks=pytest.mark.slow),
        pytest.param("fp32_shuffle_master", ["precision=bf16_master"], "precision", marks=pytest.mark.slow),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(name, more, message, tmp_path):
    folder = copied(name, tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = resume(folder, *more)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.name in before}
    assert after == before


def test_a_truncated_state_is_named(tmp_path):
    folder = copied("fp32_shuffle_master", tmp_path)
    path = folder / f"state_{STEP:08d}_00000.bin"
    path.write_bytes(path.read_bytes()[:-100])
    done = resume(folder, "-w", "1")
    assert done.returncode == 2
    assert path.name in done.stderr


def test_state_json_describes_the_files_that_are_here():
    rows = json.loads((GOLDEN / "state.json").read_text())["files"]
    kept = [row for row in rows if (GOLDEN / "state" / row["file"]).exists() and "state_" in row["file"]]
    assert len(kept) == len(NAMES) == 6
    for row in kept:
        flags, step, rng, position = header(GOLDEN / "state" / row["file"])
        assert (flags, step) == ((row["use_master_weights"], row["should_shuffle"]), row["step"])
        assert [hex(x) for x in rng] == [row["rng_state"], row["rng_state_last_update"]]
        assert position == (row["current_shard_idx"], row["current_sample_idx"])


def two_ranks(tmp_path: Path) -> Path:
    folder = tmp_path / "zero1"
    folder.mkdir()
    for path in (GOLDEN / "state_zero1").glob("*.bin"):
        shutil.copyfile(path, folder / path.name)
    (folder / "DONE_00000002").touch()
    return folder


ONE_RANK = ["-e", "nano2_init.bin", "-b", "4"]  # one rank of 4 sequences cuts the data as two ranks of 2 did


def test_zero1_states_of_two_ranks_go_on_in_one_only_when_asked(tmp_path):
    folder = two_ranks(tmp_path)
    refused = resume(folder, *ONE_RANK)
    assert refused.returncode == 2
    assert "was written by 2 ranks with sharded optimizer state" in refused.stderr
    old = [read(folder / f"state_00000002_0000{rank}.bin").optimizer["m"] for rank in (0, 1)]
    done = resume(folder, *ONE_RANK, "-l", "0", "-x", "3", "checkpoint.allow_reshard=true")
    assert done.returncode == 0, done.stderr
    new = read(folder / "state_00000003_00000.bin")
    assert (new.header.world, new.header.numel) == (1, 2 * len(old[0]))
    assert (folder / "model_00000003.bin").read_bytes() == (folder / "model_00000002.bin").read_bytes()
    joined = float(sum((part.double() ** 2).sum() for part in old)) ** 0.5
    assert abs(float(new.optimizer["m"].double().norm()) / joined - 1) < 0.5


def test_a_missing_rank_file_is_named(tmp_path):
    folder = two_ranks(tmp_path)
    (folder / "state_00000002_00001.bin").unlink()
    done = resume(folder, *ONE_RANK, "checkpoint.allow_reshard=true")
    assert done.returncode == 2
    assert "state_00000002_00001.bin" in done.stderr
