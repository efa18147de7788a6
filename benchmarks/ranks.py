"""What ranks cost and save on one machine: step time, memory of the optimizer's state, the stop flag.

    python -m benchmarks ranks                                    (two ranks against one process)
    python -m benchmarks.ranks [steps, default 30] > benchmarks/results/ranks.md   (every way)

The same global batch is trained by one rank and by two (gloo); a pair of runs shares each row's machine
state, so read the ratios. On fewer cores than ranks x threads two ranks cannot be faster than one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.results import Row
from benchmarks.workloads import FOLDER, WORKLOADS, overrides
from tests.commands import environment, run

RUN = [
    *("model.layers=4", "model.heads=4", "model.width=256", "train.seq_len=128", "train.micro_batch=2"),
    *(
        "data=markov",
        "precision=fp32",
        "evaluate=none",
        "logger=[llmc,jsonl]",
        "run.plot=false",
        "run.threads=1",
    ),
]
WAYS = {
    "single, 1 rank": ["parallel=single"],
    "ddp, 2 ranks": ["parallel=ddp", "parallel.processes=2"],
    "zero1, 2 ranks": ["parallel=zero1", "parallel.processes=2"],
    "fsdp, 2 ranks": ["parallel=fsdp", "parallel.processes=2"],
    "single, canonical": ["parallel=single", "parallel.reduce=canonical"],
    "ddp, 2 ranks, canonical": ["parallel=ddp", "parallel.processes=2", "parallel.reduce=canonical"],
}


def measure(*, rounds: int, steps: dict[str, int]) -> list[Row]:
    """Train in one process of two threads and in two gloo ranks of one, in turns, the same global batch."""
    rows = []
    for name, count in steps.items():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ranks_", dir=FOLDER) as folder:
            pairs = [_pair(Path(folder) / str(i), name, steps=count, swap=i % 2 == 1) for i in range(rounds)]
        how = f"bf16, median of {rounds} rounds of {count} steps each, wall"
        value = median(two / one for one, two in pairs)
        rows.append(Row(f"{name}: 2 gloo ranks of 1 thread / 1 process of 2", value, "x", 1.06, 1.0, how))
    with tempfile.TemporaryDirectory(prefix="ranks_", dir=FOLDER) as folder:
        how = "idle ranks, median; a step agrees five times"
        for way, ms in zip(("shared memory", "gloo messages"), agree_ms(Path(folder)), strict=True):
            rows.append(Row(f"2 ranks: to agree on one number by {way}", ms, "ms", how=how))
    return rows


def _pair(root: Path, name: str, *, steps: int, swap: bool) -> tuple[float, float]:
    """Return the milliseconds of a step of one process, and of two ranks."""
    w = WORKLOADS[name]
    tokens = f"train.tokens_per_step={w.batch * w.seq_len}"
    ways = {
        "one": overrides(w, precision="bf16", threads=2, steps=steps, root=root),
        "two": [
            *overrides(w._replace(batch=w.batch // 2), precision="bf16", threads=1, steps=steps, root=root),
            "parallel=ddp",
            "parallel.processes=2",
        ],
    }
    found = {}
    for way in sorted(ways, reverse=swap):
        usual = [a for a in ways[way] if not a.startswith("logger.")]
        found[way], _ = timed(root, way, [*usual, tokens, "logger=[llmc,jsonl]"])
    return found["one"], found["two"]


def main() -> None:
    """Run every way once and print the table."""
    steps = sys.argv[1] if len(sys.argv) > 1 else "30"
    print(
        f"{os.cpu_count()} cores, one thread a rank, {steps} steps of 1024 tokens, "
        + "a GPT-2 of 3.3M parameters\n"
    )
    print("| parallel | step ms (median) | of single | optimizer state per rank, MB | of single |")
    print("|---|---:|---:|---:|---:|")
    base: tuple[float, float] | None = None
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        for name, parallel in WAYS.items():
            more = [f"run.root={folder}", "train.tokens_per_step=1024", f"train.steps={steps}"]
            row = timed(Path(folder), name, [*RUN, *parallel, *more])
            base = base or row
            print(
                f"| {name} | {row[0]:.1f} | {row[0] / base[0]:.2f} | {row[1]:.2f} | {row[1] / base[1]:.2f} |",
                flush=True,
            )
        memory, message = (1e3 * ms for ms in agree_ms(Path(folder)))
    print(f"\nAgreeing on one number: {memory:.0f} us in shared memory (ddp), {message:.0f} us through gloo.")


def timed(root: Path, name: str, arguments: list[str]) -> tuple[float, float]:
    """Return the median step in ms and rank 0's state in MB (0 where none is saved)."""
    slug = name.replace(", ", "_").replace(" ", "_")
    root.mkdir(parents=True, exist_ok=True)
    run(*arguments, f"run.name={slug}", cwd=root)
    rows = [json.loads(line) for line in (root / slug / "metrics.jsonl").read_text().splitlines()]
    times = [row["perf/step_ms"] for row in rows if row["event"] == "TrainStep"][3:]
    states = sum(path.stat().st_size for path in (root / slug).glob("state_*_00000.*"))
    return median(times), states / 1e6


def agree_ms(folder: Path) -> tuple[float, float]:
    """Return the median time in which two ranks agree on a flag: in shared memory, by gloo."""
    code = """
import statistics, sys, time, torch, torch.distributed as dist
from runner.parallel.collective import Messages
from runner.parallel.shared import common
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
messages = Messages(world=2, device=torch.device("cpu"))
found = common(1, words=1, rank=rank, world=2, otherwise=messages)
for agreement in (messages if found is None else found.agreement, messages):
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        agreement.any_flag(False)
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(1e3 * statistics.median(times))
dist.destroy_process_group()
"""
    program = [sys.executable, "-c", code]
    meeting = str(folder / "meeting")
    started = [
        subprocess.Popen([*program, rank, meeting], stdout=subprocess.PIPE, text=True, env=environment())
        for rank in "01"
    ]
    printed = [process.communicate(timeout=120)[0] for process in started]
    by_memory, by_message = map(float, printed[0].split())
    return by_memory, by_message


if __name__ == "__main__":
    main()
