"""What a run leaves behind for a person: `loss.png`, and the lines that say how it went and what is next."""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from runner.arguments import to_type
from runner.history import is_run
from runner.launch import Outcome
from runner.session import Session

log = logging.getLogger(__name__)


def report(s: Session, config: dict[str, Any], outcome: Outcome) -> None:
    """Draw the run's curves and write the closing screen to standard output."""
    plot = _plot(s.dir) if config["run"]["plot"] and is_run(s.dir) else None  # without a record: no curves
    sys.stdout.write("\n".join(closing_lines(s, outcome, run=config["run"], plot=plot)) + "\n")


def _plot(folder: Path) -> Path | None:
    from runner.history import read_history
    from runner.plot import plot_run

    try:
        plot_run(read_history(folder), folder / "loss.png")
        return folder / "loss.png"
    except Exception as error:
        # A picture is never worth a run's exit code.
        log.warning("loss.png could not be drawn: %s", error)
        return None


def closing_lines(s: Session, outcome: Outcome, *, run: dict[str, Any], plot: Path | None) -> list[str]:
    """Return the closing screen, one entry per line."""
    folder = _short(s.dir)
    lines = [outcome.message] if outcome.message else []
    if s.store.resumed_step is not None and s.store.resumed_step >= s.plan.steps:
        lines.append(f"nothing to do: the run is at step {outcome.step}, train.steps is {s.plan.steps}")
    if math.isfinite(s.progress.best_val_loss):
        best = f"best {s.progress.best_val_loss:.4f} at step {s.progress.best_step}"
        lines.append(f"  val loss    {outcome.val_loss:.4f} nats per token ({best})")
    if (since := s.progress.lost_since) is not None:
        what = "updates     all refused" if math.isinf(outcome.val_loss) else "train loss  not finite"
        lines.append(f"  {what} since step {since}")
    names = [n for n in ("main.log", "metrics.jsonl", "manifest.json") if (s.dir / n).is_file()]
    names += ["checkpoints"] if any(s.dir.glob("DONE_*")) else []
    lines.append(f"  files       {folder}: {', '.join(names)}")
    if plot is not None:
        lines.append(f"  curves      {_short(plot)}")
    lines += [f"  {name:<11} {hint.removeprefix(f'{name}: ')}" for name, hint in s.emitter.hints()]
    return lines + (_next(s, outcome, run=run) if "checkpoints" in names else [])


def _next(s: Session, outcome: Outcome, *, run: dict[str, Any]) -> list[str]:
    """Return the commands that go on from this run's checkpoints, as a shell takes them."""
    root = "" if run["root"] == "outputs" else f" {to_type('run.root', run['root'])}"
    again = f"python -m runner{root} {to_type('run.name', run['name'] or s.dir.name)}"
    lines = []
    if outcome.status == "finished":
        lines.append(f"  train on    {again} train.steps={outcome.step * 2} ... (with your other settings)")
    elif outcome.status == "stopped":
        lines.append(f"  continue    {again} ... (the same command, with this run.name)")
    if s.data.tokenizer is not None:
        chosen = shlex.quote(f"run={_short(s.dir)}")
        lines.append(f"  sample      python -m runner.generate {chosen} prompt='Call me'")
    return lines


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
