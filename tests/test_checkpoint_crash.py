"""Kill a process that checkpoints all the time, at random instants: no checkpoint may ever lie."""

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
from dataclasses import replace
from tests.checkpoint_cases import assert_same_snapshot, gpt2_snapshot, other_snapshot
from tests.test_checkpoint_store import make_store
from runner.checkpoint import disk, folder, load

SPAN = 3  # updates between saves: the second and third happen while files are written
disk._PIECE_BYTES = 1024
write = os.write
def slow_write(fd, data):
    time.sleep(0.0005)
    return write(fd, data)
os.write = slow_write

path, kills, make = Path(sys.argv[1]), int(sys.argv[2]), globals()[sys.argv[3]]
mode = sys.argv[4]

def train() -> None:
    store = make_store(path, every=SPAN, keep=2, major_every=50, async_=mode)
    snapshot = store.restore(make(0)).snapshot
    step = 0 if snapshot is None else snapshot.step
    live = make(step)
    while True:
        step += 1
        events = store.before_update()
        overwrite(live, make(step))
        if step % SPAN == 0:
            new = make(step)  # its tensors are the live ones, which change while they are written
            new = replace(new, weights=live.weights, optimizer=merged(new.optimizer, live.optimizer))
            events += store.save(new)
        assert all(type(e).__name__ in ("Saved", "Removed") for e in events), events

def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)

def merged(fresh, live):
    # `fresh` with the live tensors in place of its own
    if isinstance(fresh, torch.Tensor):
        return live
    if isinstance(fresh, dict):
        return {key: merged(fresh[key], live[key]) for key in fresh}
    if isinstance(fresh, (list, tuple)):
        return type(fresh)(merged(a, b) for a, b in zip(fresh, live))
    return fresh

def overwrite(live, new) -> None:
    live.weights.copy_(new.weights)
    for a, b in zip(tensors(live.optimizer), tensors(new.optimizer)):
        a.copy_(b)

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
