"""Check everything that only a GPU can show, in one table and at most eight minutes.

    python benchmarks/gpu_check.py [--budget SECONDS] [--results FOLDER] [--only SECTION ...]

Kernels against their definitions, host syncs per step, bits from run to run and across a resume, losses
beside a CPU's, the speed and memory of GPT-2 124M (eager, compiled blocks, CUDA graphs, fp8) beside torch
eager, torch.compile and a nanoGPT-style loop, what a checkpoint costs. Each section is a process with a
time limit of its own, and what it found is kept whatever happens to it or to this program. On a CPU
everything runs on tiny sizes, to show that the script itself works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import gpu_sections
from benchmarks.results import RESULTS, Row, load_average, save, table
from benchmarks.workloads import FOLDER
from runner.usage import Parser, count

BUDGET_S = 450.0
ROOT = Path(__file__).parent.parent
NAN = float("nan")
GRAPHS, COMPILED = "run.cuda_graphs=true", "run.compile=blocks"


class Section(NamedTuple):
    """A measurement, and the seconds after which it is stopped."""

    measure: Callable[[gpu_sections.Report], None]
    limit_s: float
    gpu_only: bool = False


SECTIONS = {
    "kernels": Section(gpu_sections.kernels, 90),
    "runner": Section(partial(gpu_sections.steps, name="runner"), 75),
    "runner, CUDA graphs": Section(
        partial(gpu_sections.steps, name="runner, CUDA graphs", more=[GRAPHS]), 75, gpu_only=True
    ),
    "losses": Section(gpu_sections.losses, 45),
    "runner, compiled blocks": Section(
        partial(gpu_sections.steps, name="runner, compiled blocks", more=[COMPILED]), 90, gpu_only=True
    ),
    "bits": Section(partial(gpu_sections.bits, name="runner"), 90),
    "loops": Section(gpu_sections.loops, 110),
    "checkpoint": Section(gpu_sections.checkpoint, 60),
    "bits, CUDA graphs": Section(
        partial(gpu_sections.bits, name="CUDA graphs", more=[GRAPHS], again=False), 70, gpu_only=True
    ),
    "bits, compiled blocks": Section(
        partial(gpu_sections.bits, name="compiled blocks", more=[COMPILED], again=False), 90, gpu_only=True
    ),
    "fp8": Section(gpu_sections.fp8, 90),
    "runner, compiled blocks and CUDA graphs": Section(
        partial(gpu_sections.steps, name="runner, compiled blocks and CUDA graphs", more=[COMPILED, GRAPHS]),
        75,
        gpu_only=True,
    ),
}


class Found(NamedTuple):
    """What the sections have found so far."""

    rows: list[Row]
    figures: dict[str, Any]


def main() -> None:
    """Run every section that the time allows; print and keep one table; exit with 1 if a goal was missed."""
    parser = Parser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--budget", type=count, default=BUDGET_S, help="seconds for all sections together")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="sections to run; default: all")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.section:
        SECTIONS[asked.section].measure(gpu_sections.Report(asked.report))
        return
    sys.exit(_run_all(asked.only or list(SECTIONS), budget_s=asked.budget, results=asked.results))


def _run_all(names: Sequence[str], *, budget_s: float, results: Path) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` below comes to pass
    deadline, load = time.perf_counter() + budget_s, load_average()
    shutil.rmtree(FOLDER / "gpu", ignore_errors=True)
    found = Found([], {})
    try:
        for name in names:
            began = time.perf_counter()
            _run_section(name, found, left_s=deadline - began)
            print(f"[{time.perf_counter() - began:.0f} s] {name}", flush=True)
            save(_name(), found.rows, load=load, folder=results)
    finally:
        found.rows.extend(_attempt(lambda: _compared(found.figures)))
        save(_name(), found.rows, load=load, folder=results)
        print(f"\n{table(found.rows)}\n\n{_where()}", flush=True)
        shutil.rmtree(FOLDER / "gpu", ignore_errors=True)
    return int(any(row.must is not None and not row.value <= row.must for row in found.rows))


def _run_section(name: str, found: Found, *, left_s: float) -> None:
    """Run one section in a process of its own; a failure, or a limit reached, is a row."""
    section = SECTIONS[name]
    if section.gpu_only and not gpu_sections.on_gpu():
        found.rows.append(Row(f"{name}: left out", NAN, "", how="needs a GPU"))
        return
    if left_s < 5:
        found.rows.append(Row(f"{name}: left out", NAN, "", 0, 0, "the time is up"))
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        problem = _outcome(name, report, limit_s=min(section.limit_s, left_s))
        for line in report.read_text(encoding="utf-8").splitlines() if report.exists() else ():
            _take(line, found)
    if problem is not None:
        found.rows.append(Row(f"{name}: failed", NAN, "", 0, 0, problem))


def _outcome(name: str, report: Path, *, limit_s: float) -> str | None:
    """Return why the section ended early, or None."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--section", name, "--report", str(report)]
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True)
        try:
            code = child.wait(timeout=limit_s)
            problem = f"exit {code}: " if code else None
        except subprocess.TimeoutExpired:
            problem = f"stopped after {limit_s:.0f} s: "
        finally:
            _end(child)
        said.seek(0)
        text = said.read().decode(errors="replace").strip()
    if problem is None:
        return None
    print(f"--- {name}\n{text[-4000:]}\n---", file=sys.stderr, flush=True)
    return problem + " ".join(text.splitlines()[-1:])[:300].replace("|", "/")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a section and all that it started."""
    if child.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:  # stuck in the driver: leave it behind, the table matters more
        print("a process of a section cannot be ended", file=sys.stderr)


def _take(line: str, found: Found) -> None:
    try:
        content = json.loads(line)
    except ValueError:  # cut off in the middle
        return
    if "row" in content:
        found.rows.append(Row(**content["row"]))
    else:
        name, value = content["figure"]
        found.figures[name] = value


def _attempt(make: Callable[[], list[Row]]) -> list[Row]:
    try:
        return make()
    except Exception as error:
        traceback.print_exc()
        return [Row("comparisons: failed", NAN, "", 0, 0, f"{type(error).__name__}: {error}"[:300])]


def _compared(figures: dict[str, Any]) -> list[Row]:
    """Return what follows from several sections: ratios of times, losses and bits beside the eager run's."""
    times = {name.removeprefix("ms "): ms for name, ms in figures.items() if name.startswith("ms ")}
    loops = [name for name in times if not name.startswith("runner")]
    ours = {name: ms for name, ms in times.items() if name not in (*loops, "runner, fp8")}
    rows = []
    for name, ms in times.items():
        if name in loops:
            goals = (1.0, 0.95) if gpu_sections.on_gpu() else (None, None)
            best = min(ours, key=lambda which: ours[which], default=None)
            rows += [Row(f"{best}: step / {name}", ours[best] / ms, "x", *goals)] if best else []
    eager = figures.get("losses runner", [])
    for name, losses in figures.items():
        which = name.removeprefix("losses ")
        if name.startswith("losses ") and which != "runner" and eager:
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses, eager, strict=True))
            exact = which == "runner, CUDA graphs"
            goals = (0, 0) if exact else (0.02, 0.01)
            rows.append(Row(f"{which}: losses / eager - 1", worst, "", *goals, f"of {len(eager)} steps"))
    if {"bits runner", "bits CUDA graphs"} <= figures.keys():
        differ = float(figures["bits runner"] != figures["bits CUDA graphs"])
        rows.append(Row("CUDA graphs and eager: bits differ", differ, "", 0, 0, "losses and weights"))
    return rows


def _name() -> str:
    return f"gpu_check-{gpu_sections.scale().device.type}"


def _where() -> str:
    import torch

    gpu = gpu_sections.on_gpu()
    return f"{torch.cuda.get_device_name() if gpu else 'CPU, tiny sizes'}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
