"""Open a session of the runner inside this process, for checks that look at it from within."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import CONF
from runner.assembly import Process, choose_device
from runner.cli import resolve
from runner.job import settle_process
from runner.opening import open_session
from runner.session import Session
from runner.stop import Stop
from runner.watchdog import Watchdog


def session(arguments: Sequence[str], *, folder: Path) -> Session:
    """Compose and check a command line, and build its session in `folder`."""
    config = resolve(compose(arguments))
    folder.mkdir(parents=True, exist_ok=True)
    settle_process(config["run"])
    device = choose_device(config["run"]["device"], local_rank=0)
    process = Process(0, 1, device, Stop(), Watchdog(None, folder=folder, rank=0))
    return open_session(config, dir=folder, process=process)


def compose(arguments: Sequence[str]) -> Any:
    """Return Hydra's composition of a command line."""
    import hydra

    base = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
    with hydra.initialize_config_dir(str(CONF), **base):
        return hydra.compose("config", overrides=list(arguments))
