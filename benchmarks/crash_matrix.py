"""Kill runs at random instants and continue them: what is lost, what goes on wrongly, which DONE lies.

    python benchmarks/crash_matrix.py [kills per cell, default 20] [seed] [cell] > crash_matrix.md

Each cell of {single, ddp 2, zero1 2} x {async on, off} trains once without interruption. Then, time and
again, a run of the same command is killed with SIGKILL (the command itself, one rank, or all of them)
at a random instant after its start, checked, and continued until it ends; all that is left must be the
uninterrupted run's, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runner.usage import Parser, count  # noqa: E402
from tests.commands import start  # noqa: E402
from tests.rank_runs import children, command, done_steps, lines  # noqa: E402

CELLS = {
    "single": ["parallel=single"],
    "ddp 2": ["parallel=ddp", "parallel.processes=2"],
    "zero1 2": ["parallel=zero1", "parallel.processes=2"],
}
STEPS, EVERY = 120, 6


@dataclass
class Tally:
    """What happened in one cell."""

    kills: int = 0
    mid_save: int = 0  # kills that left an unfinished file behind
    missed: int = 0  # the run had ended before it could be killed
    lost: int = 0
    wrong: int = 0
    lying: int = 0
    by: Counter[str] = field(default_factory=Counter)


def main() -> None:
    """Run the matrix and print its table; exit code 1 if anything was lost, wrong or lying."""
    parser = Parser(prog="python benchmarks/crash_matrix.py", description=__doc__)
    cells = [f"{name} {mode}" for name in CELLS for mode in ("on", "off")]
    parser.add_argument("kills", nargs="?", type=count, default=20, help="per cell")
    parser.add_argument("seed", nargs="?", type=int, default=1)
    parser.add_argument("cell", nargs="?", choices=cells, help="one of them")
    asked = parser.parse_args()
    per_cell, chance, only = asked.kills, random.Random(asked.seed), asked.cell
    rows = {}
    with tempfile.TemporaryDirectory(prefix="crash_matrix_") as folder:
        for name, parallel in CELLS.items():
            for mode in ("on", "off"):
                if only not in (None, f"{name} {mode}"):
                    continue
                more = [*parallel, f"checkpoint.async={mode}"]
                rows[f"{name} | {mode}"] = crash(Path(folder) / f"{name}_{mode}", more, per_cell, chance)
    print(table(rows))
    sys.exit(any(tally.lost or tally.wrong or tally.lying for tally in rows.values()))


def crash(folder: Path, more: list[str], kills: int, chance: random.Random) -> Tally:
    """Fill one cell with `kills` kills."""
    folder.mkdir(parents=True)
    few = command(folder, *more, f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "checkpoint.keep=2")
    few += ["evaluate.val.every=20", "model.dropout=0.1"]
    began = time.monotonic()
    finish(few, "straight", folder)
    length_s = time.monotonic() - began
    tally, number = Tally(), 0
    while tally.kills < kills:
        number += 1
        name = f"run{number}"
        one_run(
            few, folder / name, straight=folder / "straight", length_s=length_s, chance=chance, tally=tally
        )
        print(f"{folder.name}: {tally}", file=sys.stderr, flush=True)
    return tally


def one_run(
    few: list[str], run: Path, *, straight: Path, length_s: float, chance: random.Random, tally: Tally
) -> None:
    """Kill one run up to three times, then let it finish and compare it with the uninterrupted one."""
    for _ in range(chance.randint(1, 3)):
        process = start(*few, f"run.name={run.name}", cwd=run.parent)
        victim = kill(process, run, length_s=length_s, chance=chance)
        if victim is None:
            tally.missed += 1
            break
        tally.kills += 1
        tally.by[victim] += 1
        tally.mid_save += bool(list(run.glob("*.tmp")))
        tally.lying += not honest(run)
    try:
        finish(few, run.name, run.parent)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        tally.lost += 1
        return
    tally.wrong += not same(run, straight)


def kill(process: subprocess.Popen[str], run: Path, *, length_s: float, chance: random.Random) -> str | None:
    """SIGKILL the command, one rank or all ranks at a random instant; return whom, None if it had ended.

    Three times in four the instant lies some steps and milliseconds into the training, where the saves
    are; else it is any moment from the start of the command on.
    """
    log = run / "main.log"
    if chance.random() < 0.75:
        target = lines(log) + chance.randint(1, STEPS // 3)
        while process.poll() is None and lines(log) < target:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
    else:
        time.sleep(chance.uniform(0, length_s))
    ranks = children(process)
    if process.poll() is not None:
        return None
    victim = chance.choice(["the command", "one rank", "all ranks"]) if len(ranks) > 1 else "the command"
    pids = {"the command": [process.pid], "one rank": [chance.choice(ranks or [0])], "all ranks": ranks}[
        victim
    ]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    return victim


def finish(few: list[str], name: str, folder: Path) -> None:
    process = start(*few, f"run.name={name}", cwd=folder)
    printed, _ = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(f"{name} did not go on, exit {process.returncode}:\n{printed}")


def honest(run: Path) -> bool:
    """Whether every DONE stands for files that are all there and as their checksums say."""
    from runner.checkpoint import folder as files

    for step in done_steps(run):
        try:
            files.verify(files.inspect(run, step))
        except (ValueError, OSError) as error:
            print(f"{run.name}: DONE {step} lies: {error}", file=sys.stderr)
            return False
    return True


def same(run: Path, straight: Path) -> bool:
    """Whether log (the last line of each step wins), weights, state and the newest checkpoints are equal."""
    if last_lines(run) != last_lines(straight) or done_steps(run)[-2:] != done_steps(straight)[-2:]:
        return False
    names = [p.name for p in straight.glob(f"*_{STEPS:08d}*") if p.name.startswith(("model", "state"))]
    return bool(names) and all((run / n).read_bytes() == (straight / n).read_bytes() for n in names)


def last_lines(run: Path) -> dict[tuple[str, str], str]:
    """Return main.log by step and stream, as its readers see it."""
    text = (run / "main.log").read_text().splitlines()
    return {(line.split()[0], line.split()[1].split(":")[0]): line for line in text}


def table(rows: dict[str, Tally]) -> str:
    """Return the matrix in Markdown."""
    out = [
        "| parallel | async | kills | of them in a save | runs lost | wrong resumes | lying DONE |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, t in rows.items():
        out.append(f"| {name} | {t.kills} | {t.mid_save} | {t.lost} | {t.wrong} | {t.lying} |")
    total = [
        sum(getattr(t, k) for t in rows.values()) for k in ("kills", "mid_save", "lost", "wrong", "lying")
    ]
    out.append("| all | | " + " | ".join(map(str, total)) + " |")
    by = sum((t.by for t in rows.values()), Counter())
    out.append("\nKilled: " + ", ".join(f"{who} {n}" for who, n in sorted(by.items())) + ".")
    return "\n".join(out)


if __name__ == "__main__":
    main()
