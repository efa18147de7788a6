"""A steady step of the runner against the same kernels in a bare loop, and against plain torch modules."""

from __future__ import annotations

from benchmarks.race import race, races, ratio
from benchmarks.results import Row

BARE = ("kernels-bf16", "runner-bf16", "kernels-bf16-again")
PROCESSES = 3  # of each program: where their memory lies makes two of one kind differ by 2 % and more
SHORT = 20  # steps per turn from which on a step is so short that this matters most
LLAMA = ("plain-fp32", "plain-bf16", "runner-fp32", "runner-bf16")


def measure(*, threads: int, rounds: int, steps: dict[str, int]) -> list[Row]:
    """Race on each workload of `steps` (name to steps per turn)."""
    metric = "cpu_ms" if threads == 1 else "wall_ms"
    how = f"{rounds} rounds, {threads} thread(s), {metric[:-3]}"
    rows = []
    for name, turn in steps.items():
        if name.startswith("llama"):
            laps, _ = race(LLAMA, name, threads=threads, rounds=rounds, steps=turn)
            for precision, must, want in (("fp32", 0.95, 0.85), ("bf16", 0.70, 0.60)):
                value = ratio(laps, f"runner-{precision}", f"plain-{precision}", metric=metric)
                rows.append(
                    Row(f"{name} {precision}: step / plain torch modules", value, "x", must, want, how)
                )
            continue
        processes = PROCESSES + 2 if turn >= SHORT else PROCESSES
        laps = races(BARE, name, threads=threads, rounds=rounds, steps=turn, processes=processes)
        of_each = f"{processes} processes of each, {how}"
        value = ratio(laps, "runner-bf16", "kernels-bf16", metric=metric)
        rows.append(Row(f"{name} bf16: step / same kernels, bare loop", value, "x", 1.02, 1.005, of_each))
        value = ratio(laps, "kernels-bf16-again", "kernels-bf16", metric=metric)
        rows.append(Row(f"{name} bf16: bare loop / itself, another process", value, "x", None, None, of_each))
    return rows


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main("step")
