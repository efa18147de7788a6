"""Peak resident memory of a short run of the runner against a nanoGPT-style loop."""

from __future__ import annotations

from benchmarks.race import Racer
from benchmarks.results import Row

GOALS = {"S": (0.90, 0.82), "M50k": (0.60, 0.48), "L": (1.00, 0.95)}
STEPS = 3


def measure(workloads: tuple[str, ...] = tuple(GOALS)) -> list[Row]:
    """Run three steps of each contender, one after the other."""
    rows = []
    for name in workloads:
        peaks = {}
        for contender in ("runner-bf16", "runner-fp32", "nanogpt"):
            racer = Racer(contender, name, threads=1)
            racer.run(STEPS)
            racer.close()
            peaks[contender] = racer.peak_mb
        goals = GOALS.get(name, (None, None))
        for contender in ("runner-bf16", "runner-fp32"):
            value = peaks[contender] / peaks["nanogpt"]
            how = f"{peaks[contender]:.0f} / {peaks['nanogpt']:.0f} MB"
            rows.append(Row(f"{name}: peak memory, {contender} / nanoGPT-style", value, "x", *goals, how))
    return rows


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main("memory")
