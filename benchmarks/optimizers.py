"""Train one small model on the built-in corpus with every optimizer, and record each one's curve.

    python benchmarks/optimizers.py [steps=300] [out=benchmarks/results/optimizers.csv]

Equal data, order, schedule and number of steps; two learning rates each. What is compared is the loss by
step, which no other program on the machine disturbs; times are left out for that reason.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

GRID = {
    "adamw": ("3e-3", "1e-2"),
    "lion": ("5e-4", "1e-3"),
    "sophia": ("5e-4", "1e-3"),
    "muon": ("3e-3", "1e-2"),
    "adafactor": ("3e-2", "1e-1"),
    "sgd": ("1e-1", "3e-1"),
}
MODEL = ["model.layers=3", "model.heads=4", "model.width=64", "train.seq_len=96", "train.micro_batch=8"]
SETTINGS = ["precision=fp32", "run.threads=1", "run.plot=false", "logger=[jsonl]", "checkpoint.every=0"]
VALIDATION = ["evaluate=val", "evaluate.val.every=50", "evaluate.val.batches=20", "scheduler.warmup_steps=30"]


def curve(optimizer: str, lr: str, *, steps: int, root: Path) -> dict[int, float]:
    """Return the validation loss by step of one run."""
    name = f"{optimizer}_{lr}"
    command = [sys.executable, "-m", "runner", f"optimizer={optimizer}", f"optimizer.lr={lr}"]
    command += [
        f"train.steps={steps}",
        *MODEL,
        *SETTINGS,
        *VALIDATION,
        f"run.root={root}",
        f"run.name={name}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (root / name / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["val/loss"] for row in rows if row["event"] == "ValLoss"}


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    steps = int(options.get("steps", 300))
    out = Path(options.get("out", Path(__file__).parent / "results" / "optimizers.csv"))
    with tempfile.TemporaryDirectory() as folder, open(out, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["optimizer", "lr", "step", "val_loss"])
        for optimizer, rates in GRID.items():
            ends = {}
            for lr in rates:
                losses = curve(optimizer, lr, steps=steps, root=Path(folder))
                writer.writerows([optimizer, lr, step, f"{loss:.4f}"] for step, loss in losses.items())
                file.flush()
                ends[lr] = losses[steps]
            best = min(ends, key=ends.__getitem__)
            print(f"{optimizer:10} best {ends[best]:.4f} at lr={best}", ends, flush=True)


if __name__ == "__main__":
    main()
