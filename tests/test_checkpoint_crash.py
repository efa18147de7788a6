"""Kill a process that checkpoints after every step, at random instants: no checkpoint may ever lie."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, ".")
import torch
torch.set_num_threads(1)
from tests.checkpoint_cases import assert_same_snapshot, gpt2_snapshot, other_snapshot
from tests.test_checkpoint_store import make_store
from runner.checkpoint import folder, load

path, kills, make = Path(sys.argv[1]), int(sys.argv[2]), globals()[sys.argv[3]]
mode = sys.argv[4]

def train() -> None:
    store = make_store(path, every=1, keep=2, major_every=25, async_=mode)
    snapshot = store.restore(make(0)).snapshot
    step = 0 if snapshot is None else snapshot.step
    while True:
        step += 1
        live = make(step)
        store.save(live)
        events = store.before_update()
        assert all(type(e).__name__ in ("Saved", "Removed") for e in events), events

def check() -> int:
    steps = folder.done_steps(path)
    for step in steps:
        found = folder.inspect(path, step)
        folder.verify(found)
        weights = load.load_weights(found, layout=make(0).layout)
        assert_same_snapshot(load.load_rank(found, 0, weights), make(step))
    found, damaged = load.newest(path)
    assert damaged == (), damaged
    return found.step if found else 0

random.seed(int(sys.argv[5]))
newest = partial = 0
for kill in range(kills):
    child = os.fork()
    if child == 0:
        train()
    time.sleep(random.uniform(0.02, 0.3))
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child died by itself"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    after = check()
    assert after >= newest, (after, newest)
    newest = after
    names = os.listdir(path)
    partial += any(name.endswith(".tmp") for name in names) or len(names) % 4 != 0
print("newest", newest, "unfinished", partial)
"""


@pytest.mark.parametrize(
    ("make", "mode", "seed"), [("gpt2_snapshot", "auto", "1"), ("other_snapshot", "off", "2")]
)
def test_killed_at_random_instants(tmp_path: Path, make: str, mode: str, seed: str) -> None:
    kills = 15
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(kills), make, mode, seed],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert int(words[1]) > 5, "hardly anything was saved"
    assert int(words[3]) > 0, "no kill hit a checkpoint in the middle: the test shows nothing"
