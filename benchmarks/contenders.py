"""Run one contender for ever, gated: `python -m benchmarks.contenders NAME WORKLOAD THREADS`."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.workloads import RUNS, WORKLOADS, Workload, overrides

MANY = 5_000  # more than any race takes; the runner evaluates its whole schedule at the start


def runner_loop(w: Workload, threads: int, *, precision: str, more: tuple[str, ...] = ()) -> None:
    """Run the runner's own command line, with one logger more."""
    import tempfile

    from runner.cli import main

    RUNS.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="run-", dir=RUNS))
    arguments = overrides(w, precision=precision, threads=threads, steps=MANY, root=root)
    gate = ["+logger.gate._target_=benchmarks.gate.GateLogger", "run.trust=[benchmarks]"]
    sys.argv = ["runner", *arguments, *gate, *more, *os.environ.get("BENCHMARK_OVERRIDES", "").split()]
    main()


def kernels_loop(w: Workload, threads: int, *, precision: str) -> None:
    """Run the runner's model, gradient buffer, norm and optimizer in a loop with nothing around them."""
    from benchmarks.kernels import kernels_loop as loop

    loop(w, threads=threads, bf16=precision == "bf16")


def bare_loop(w: Workload, threads: int, **options: bool) -> None:
    """Run a loop in plain torch."""
    import torch

    from benchmarks.bare import plain_loop
    from benchmarks.gate import Gate

    torch.set_num_threads(threads)
    plain_loop(w, Gate(), **options)


def bound_loop(w: Workload, threads: int) -> None:
    """Do the matrix products of a step alone."""
    import torch

    from benchmarks.gate import Gate
    from benchmarks.products import products_loop

    torch.set_num_threads(threads)
    products_loop(w, Gate())


def library_loop(w: Workload, threads: int, *, library: str, bf16: bool) -> None:
    """Run a trainer of another library."""
    import torch

    from benchmarks import libraries

    torch.set_num_threads(threads)
    getattr(libraries, library)(w, bf16=bf16)


CONTENDERS: dict[str, Callable[[Workload, int], None]] = {
    **{f"runner-{p}": functools.partial(runner_loop, precision=p) for p in ("fp32", "bf16")},
    "runner-bf16-no-wandb": functools.partial(runner_loop, precision="bf16", more=("~logger.wandb",)),
    **{f"kernels-{p}": functools.partial(kernels_loop, precision=p) for p in ("fp32", "bf16")},
    "kernels-bf16-again": functools.partial(kernels_loop, precision="bf16"),
    "products-bf16": bound_loop,
    "nanogpt": functools.partial(bare_loop),
    "nanogpt-compiled": functools.partial(bare_loop, compiled=True),
    "compiled-bf16": functools.partial(bare_loop, compiled=True, fused=True, bf16=True),
    "plain-fp32": functools.partial(bare_loop, fused=True, original=True),
    "plain-bf16": functools.partial(bare_loop, fused=True, original=True, bf16=True),
    **{
        f"{name}-{p}": functools.partial(library_loop, library=name, bf16=p == "bf16")
        for name in ("lightning", "hf")
        for p in ("fp32", "bf16")
    },
}


def missing(name: str) -> str | None:
    """Return which package a contender lacks here, or None."""
    if "compiled" in name and shutil.which(os.environ.get("CXX", "g++")) is None:
        return "g++"
    needed = {"lightning": ("lightning",), "hf": ("transformers", "accelerate")}
    for package in needed.get(name.split("-")[0], ()):
        if importlib.util.find_spec(package) is None:
            return package
    return None


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    CONTENDERS[sys.argv[1]](WORKLOADS[sys.argv[2]], int(sys.argv[3]))
