"""What the machine can do at most, so that a missed goal can be told from a bound."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.results import Row


def measure(*, threads: int) -> list[Row]:
    """Time matrix products and passes over memory."""
    torch.set_num_threads(threads)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    half = a.bfloat16(), b.bfloat16()
    flops = 2 * 1024**3
    rows = []
    for name, precision, operands in (
        ("fp32 product, torch's library", "highest", (a, b)),
        ("fp32 product, oneDNN", "medium", (a, b)),
        ("bf16 product", "medium", half),
    ):
        torch.set_float32_matmul_precision(precision)
        seconds = _best(lambda x, y: x @ y, operands, threads=threads)
        rows.append(Row(f"{name}, {threads} thread(s)", flops / seconds / 1e9, "GFLOP/s"))
    x, y = torch.randn(1 << 26), torch.randn(1 << 26)
    for name, action, moved in (
        ("copy", lambda x, y: x.copy_(y), 2),
        ("read and write in place", lambda x, y: x.mul_(1.0001), 2),
    ):
        seconds = _best(action, (x, y), threads=threads)
        rows.append(Row(f"{name}, {threads} thread(s)", moved * x.nbytes / seconds / 1e9, "GB/s"))
    return rows


def _best(
    action: Callable[..., object], operands: tuple[torch.Tensor, torch.Tensor], *, threads: int
) -> float:
    """Return the least seconds of a call: CPU time on one thread, else wall."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = float("inf")
    for _ in range(20):
        began = clock()
        action(*operands)
        best = min(best, clock() - began)
    return best


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main("roofline")
