"""A steady step of the runner against a nanoGPT-style loop, that loop compiled, and other trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.contenders import missing
from benchmarks.race import Lap, Racer, percentile, race, ratio
from benchmarks.results import Row
from benchmarks.workloads import WORKLOADS

OURS = ("runner-bf16", "runner-fp32")
BOUND = "products-bf16"
PEERS = ("compiled-bf16", "lightning-fp32", "lightning-bf16", "hf-fp32", "hf-bf16")
LARGE = {"L1024": ("compiled-bf16", "lightning-bf16")}
"""Peers where not all fit into 24 GiB at once: those that are the fastest wherever all race."""


class Goal(NamedTuple):
    """Must and want of bf16 / nanoGPT, bf16 / the fastest peer, fp32 / nanoGPT."""

    bf16: tuple[float, float]
    fastest: tuple[float, float]
    fp32: tuple[float, float]


GOALS = {
    "S": Goal((0.68, 0.58), (0.72, 0.62), (0.97, 0.90)),
    "M256": Goal((0.55, 0.48), (0.90, 0.80), (0.94, 0.88)),
    "M50k": Goal((0.46, 0.40), (0.63, 0.55), (0.77, 0.70)),
    "L": Goal((0.40, 0.34), (0.75, 0.66), (0.63, 0.57)),
    "L1024": Goal((0.52, 0.46), (0.82, 0.74), (0.91, 0.85)),
}


def measure(*, threads: int, rounds: int, steps: dict[str, int]) -> list[Row]:
    """Race on each workload of `steps` (name to steps per turn)."""
    rows = []
    for name, turn in steps.items():
        peers = [peer for peer in LARGE.get(name, PEERS) if missing(peer) is None]
        names = [*OURS, BOUND, "nanogpt", *peers]
        laps, racers = race(names, name, threads=threads, rounds=rounds, steps=turn)
        rows += _rows(name, laps, racers, peers=peers, threads=threads)
    return rows


def skipped() -> list[str]:
    """Return a word on each library that is not installed."""
    lacking = sorted({str(missing(peer)) for peer in PEERS if missing(peer)})
    way = "pip install -e '.[peers]'"
    return [f"{package} is not installed: what needs it is left out ({way})" for package in lacking]


def _rows(
    name: str, laps: dict[str, list[Lap]], racers: dict[str, Racer], *, peers: Sequence[str], threads: int
) -> list[Row]:
    metric = "cpu_ms" if threads == 1 else "wall_ms"
    how = f"{len(laps['nanogpt'])} rounds, {threads} thread(s), {metric[:-3]}"
    goal = GOALS.get(name, Goal((1, 1), (1, 1), (1, 1)))
    rows = [
        Row(
            f"{name}: bf16 / nanoGPT-style",
            ratio(laps, OURS[0], "nanogpt", metric=metric),
            "x",
            *goal.bf16,
            how,
        ),
        Row(
            f"{name}: fp32 / nanoGPT-style",
            ratio(laps, OURS[1], "nanogpt", metric=metric),
            "x",
            *goal.fp32,
            how,
        ),
    ]
    others = [ratio(laps, OURS[0], peer, metric=metric) for peer in ("nanogpt", *peers)]
    slowest = max(range(len(others)), key=others.__getitem__)  # the peer that we lead by least
    text = f"{how}; the fastest: {('nanogpt', *peers)[slowest]}"
    rows.append(Row(f"{name}: bf16 / the fastest peer", others[slowest], "x", *goal.fastest, text))
    bound = ratio(laps, BOUND, ("nanogpt", *peers)[slowest], metric=metric)
    rows.append(Row(f"{name}: its products alone, bf16 / the fastest peer", bound, "x", how=text))
    rows += [
        Row(f"{name}: {p} / nanoGPT-style", ratio(laps, p, "nanogpt", metric=metric), how=how) for p in peers
    ]
    ms = percentile([lap.wall_ms for lap in laps["runner-bf16"]], 10)
    rate = WORKLOADS[name].flops / ms / 1e6
    rows.append(Row(f"{name}: bf16 rate of the runner", rate, "GFLOP/s", how="to compare with the roofline"))
    rows += [Row(f"{name}: peak memory of {n}", r.peak_mb, "MB") for n, r in racers.items()]
    return rows


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main("peers")
