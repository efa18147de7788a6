"""Check the wandb plugin with the real package, offline, and against servers and services that fail."""

import json
import math
import os
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from runner.api import ValLoss
from runner.plugins.logger.wandb import WandbLogger

ROOT = Path(__file__).parent.parent
BLOCK = 32768

SCRIPT = """
import json, logging, os, signal, subprocess, sys, time
from pathlib import Path
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from runner.api import *
from runner.plugins.logger.wandb import WandbLogger
a = json.loads(sys.argv[1])
nan = float("nan")
logger = WandbLogger(**a.get("settings", {}))
if "id" in a:
    logger.load_state_dict({"id": a["id"]})
begin = time.monotonic()
start, steps = a.get("start", 0), a["steps"]
info = RunInfo("name", Path(a["dir"]), {"optimizer": {"lr": 0.5}}, {"git": "abc", "diff": "x" * 5000}, start,
               start > 0, steps, "sweep", tuple(a.get("tags", ["tag"])))
logger.open(info)
opened_s, worst_s = time.monotonic() - begin, 0.0
for s in range(start, steps):
    if s == a.get("kill_at"):
        logger._started.wait(60)
        time.sleep(1)
        ps = ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())]
        children = subprocess.run(ps, capture_output=True, text=True).stdout.splitlines()
        os.kill(next(int(row.split()[0]) for row in children if "wandb-core" in row), signal.SIGKILL)
    begin = time.monotonic()
    loss = nan if s == 2 else 4 - s / 8
    logger.log(TrainStep(s, loss, 1e-3, .5, nan, 1.5, s != 2, "", 1., 64 * s, 100., 6e4, -1., int(s >= 2)))
    if s % 4 == 3:
        logger.log(ValLoss(s + 1, 3 - s / 8))
        logger.log(Score(s + 1, "hellaswag", .25))
        logger.log(Saved(s + 1, "x", 1, .5))
        logger.log(Note(s + 1, "text only"))
    worst_s = max(worst_s, time.monotonic() - begin)
    time.sleep(a.get("sleep_s", 0))
begin = time.monotonic()
logger.close(a.get("status", "finished"))
close_s = time.monotonic() - begin
times = {"close_s": close_s, "opened_s": opened_s, "worst_s": worst_s}
print(json.dumps({**times, "off": logger._off, "hint": logger.hint(), "id": logger.state_dict()["id"]}))
"""


def start(folder, *, env=None, **arguments):
    """Run SCRIPT in a process of its own; return its report, what it wrote to stderr and how long it took."""
    folder.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    home = {"HOME": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps({"dir": str(folder), **arguments})],
        capture_output=True, text=True, timeout=90, cwd=ROOT, env=clean | home | (env or {}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def records(path):
    """Yield the records of a `.wandb` file: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:7] == b":W&B" + struct.pack("<HB", 0xBEE1, data[6])
    position, parts = 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # too little room for a header: the rest of a block is padding
            position += BLOCK - position % BLOCK
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, position)
        chunk = data[position + 7 : position + 7 + length]
        assert crc == zlib.crc32(bytes([kind]) + chunk), f"bad checksum at {position}"
        parts += chunk
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read(folder):
    """Return the history rows and the other records of the newest wandb run in a folder."""
    file = max(folder.glob("wandb/*run-*/*.wandb"), key=lambda path: path.parent.name.split("run-")[1])
    found = list(records(file))
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    others = {record.WhichOneof("record_type"): record for record in found}
    return rows, others


def test_records_hold_every_metric_with_its_step(tmp_path):
    settings = {"project": "p", "tags": ["mine"], "notes": "n"}
    report, stderr = start(tmp_path, steps=200, status="failed", settings=settings)
    rows, others = read(tmp_path)
    assert stderr == ""
    assert (report["off"], report["opened_s"] < 0.5, report["worst_s"] < 0.5) == (False, True, True)
    train = {row["train/step"]: row for row in rows if "train/loss" in row}
    assert list(train) == list(range(200))
    for step, row in train.items():
        assert math.isnan(row["train/loss"]) if step == 2 else row["train/loss"] == 4 - step / 8
        assert (row["train/lr"], row["train/norm_z"], row["train/tokens"]) == (1e-3, 1.5, 64 * step)
        assert "train/loss_z" not in row
        assert "perf/mfu" not in row
    val = {row["train/step"]: row["val/loss"] for row in rows if "val/loss" in row}
    assert val == {step: 3 - (step - 1) / 8 for step in range(4, 201, 4)}
    assert [row["train/step"] for row in rows if "eval/hellaswag" in row] == list(range(4, 201, 4))
    assert [row["train/step"] for row in rows if "checkpoint/step" in row] == list(range(4, 201, 4))
    assert others["exit"].exit.exit_code == 1
    check_the_run(others["run"].run, report=report, folder=tmp_path)


def check_the_run(run, *, report, folder):
    assert (run.project, run.display_name, run.run_group, run.job_type) == ("p", "name", "sweep", "train")
    assert (run.run_id, list(run.tags), run.notes) == (report["id"], ["mine", "tag"], "n")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["optimizer"], config["manifest"]) == ({"lr": 0.5}, {"git": "abc"})
    folder = next(folder.glob("wandb/offline-run-*"))
    assert report["hint"] == f"wandb: look with `wandb leet {folder}`, upload with `wandb sync {folder}`"


def test_what_is_not_set_comes_from_wandbs_own_variables_and_the_run_itself_never(tmp_path):
    names = ("PROJECT", "ENTITY", "TAGS", "NOTES", "RUN_ID", "NAME", "RESUME", "DIR")
    env = {f"WANDB_{name}": f"env-{name.lower()}" for name in names} | {"WANDB_MODE": "offline"}
    env |= {"WANDB_RESUME": "must"}
    report, said = start(tmp_path, env=env, steps=2, tags=[])
    assert not report["off"], said
    run = read(tmp_path)[1]["run"].run
    assert (run.project, run.entity, run.notes, list(run.tags)) == (
        *("env-project", "env-entity", "env-notes"),
        ["env-tags"],
    )
    assert (run.run_id, run.display_name) == (report["id"], "name")

    start(tmp_path / "plain", steps=2, settings={"mode": "offline"}, tags=[])
    assert read(tmp_path / "plain")[1]["run"].run.project == "runner"


def test_resume_keeps_the_id_and_takes_steps_back(tmp_path):
    first, _ = start(tmp_path, steps=20)
    second, _ = start(tmp_path, steps=12, start=8, id=first["id"])
    assert second["id"] == first["id"]
    whole = f"`wandb sync --id {first['id']} {tmp_path}/wandb/offline-run-*-{first['id']}`"
    assert second["hint"].endswith(whole), "a run that was continued has several folders"
    assert [row["train/step"] for row in read(tmp_path)[0] if "train/loss" in row] == [8, 9, 10, 11]


def test_every_thins_training_steps_only(tmp_path):
    start(tmp_path, steps=10, settings={"every": 4})
    rows = read(tmp_path)[0]
    assert [row["train/step"] for row in rows if "train/loss" in row] == [0, 2, 4, 8, 9]  # 2 was skipped
    assert [row["train/step"] for row in rows if "val/loss" in row] == [4, 8]


def test_a_killed_service_switches_wandb_off_and_training_goes_on(tmp_path):
    report, stderr = start(tmp_path, steps=300, kill_at=150, sleep_s=0.003)
    assert report["off"]
    assert report["close_s"] < 11
    assert report["worst_s"] < 0.5
    assert stderr.count("wandb is switched off, training goes on") == 1
    assert "Traceback" not in stderr
    rows = read(tmp_path)[0]
    assert len([row for row in rows if "train/loss" in row]) > 100


def test_a_server_that_never_answers_neither_stalls_nor_loses_rows(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        env = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": url}
        report, stderr = start(tmp_path, env=env, steps=40, settings={"close_s": 6.0})
    assert (report["opened_s"] < 0.5, report["worst_s"] < 0.5, report["close_s"] < 7.5) == (True, True, True)
    assert "writing offline instead" in stderr
    assert "Traceback" not in stderr
    rows = [row["train/step"] for row in read(tmp_path)[0] if "train/loss" in row]
    assert report["off"] or rows == list(range(40))


def test_offline_means_no_connection_at_all(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        env = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": url, "WANDB_MODE": "offline"}
        start(tmp_path, env=env, steps=20, settings={"close_s": 60.0})
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    assert len(read(tmp_path)[0]) > 20


def test_online_without_a_key_says_so_and_writes_offline(tmp_path):
    report, stderr = start(tmp_path, steps=1, settings={"mode": "online"})
    assert stderr.startswith("logger.wandb.mode=online, but no API key is set (`wandb login`)")
    assert "wandb sync" in report["hint"]


@pytest.mark.parametrize("source", ["netrc", "settings", "none"])
def test_auto_finds_a_key_without_the_network(tmp_path, source):
    code = """
import wandb
from runner.plugins.logger.wandb import _resolve_mode
print(_resolve_mode("auto", settings=wandb.setup().settings))
"""
    if source == "netrc":
        (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
        (tmp_path / ".netrc").chmod(0o600)
    if source == "settings":
        (tmp_path / "settings").write_text("[default]\nmode = offline\n")
        (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env = clean | {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout.split() == ["online" if source == "netrc" else "offline"], done.stderr


def test_more_events_than_memory_has_room_for_switch_wandb_off(monkeypatch, caplog):
    monkeypatch.setattr(sys.modules[WandbLogger.__module__], "_QUEUE_EVENTS", 3)
    logger = WandbLogger()  # not opened: nobody takes an event out
    for step in range(5):
        logger.log(ValLoss(step, 1.0))
    assert [record.getMessage() for record in caplog.records] == [
        "wandb is switched off, training goes on: it is 3 events behind"
    ]


def test_disabled_does_nothing(tmp_path):
    report, stderr = start(tmp_path, steps=3, settings={"mode": "disabled"})
    assert (report["hint"], stderr) == ("", "")
    assert not (tmp_path / "wandb").exists()


def test_importing_the_plugin_does_not_import_wandb():
    code = "import runner.plugins.logger.wandb, sys; assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_ids_are_fresh_and_the_state_is_the_id():
    first, second = WandbLogger(), WandbLogger()
    assert first.state_dict()["id"] != second.state_dict()["id"]
    assert set(first.state_dict()) == {"id"}
