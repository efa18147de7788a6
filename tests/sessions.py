"""Open a run inside the test's own process, where its parts can be looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from runner import CONF
from runner.assembly import Process
from runner.cli import resolve
from runner.opening import open_session
from runner.session import Session
from runner.stop import Stop
from runner.train import train
from runner.watchdog import Watchdog

TINY = [
    *("data=markov", "model.layers=2", "model.heads=2", "model.width=32", "train.seq_len=16"),
    *("train.micro_batch=2", "scheduler=constant", "evaluate=none", "logger=none", "checkpoint.async=off"),
    *("run.plot=false", "run.threads=1"),
]


def configured(*overrides: str) -> dict[str, Any]:
    """Return the checked configuration of a command line; ConfigError where it is wrong."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return resolve(compose("config", overrides=list(overrides)))


def opened(*overrides: str, dir: Path) -> Session:
    """Return a session in `dir`, fresh or continued."""
    dir.mkdir(exist_ok=True)
    process = Process(0, 1, torch.device("cpu"), Stop(), Watchdog(None, folder=dir))
    return open_session(configured(*overrides), dir=dir, process=process)


def ran(*overrides: str, dir: Path) -> Session:
    """Train a session in `dir` to its end and close it; its parts stay readable."""
    session = opened(*overrides, dir=dir)
    train(session)
    session.stream.close()
    session.store.close()
    session.engine.close()
    return session
