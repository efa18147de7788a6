"""What a sweep's folder is summed up to, from cells written by hand."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.sweep import cells, figures, summary
from runner.sweep.cells import Cell, Result
from runner.sweep.rows import read_rows, spreads
from runner.sweep.settings import Sweep
from runner.sweep.slots import make_slots
from runner.sweep.tell import Teller


def write(folder: Path, settings: list[dict[str, Any]], losses: list[float]) -> None:
    for number, (overrides, loss) in enumerate(zip(settings, losses, strict=True)):
        cell = Cell(number, str(number), "", overrides, {}, folder / cells.folder_name(number))
        cells.write_cell(cell)
        status: cells.Status = "diverged" if math.isinf(loss) else "finished"
        cells.write_result(cell.folder, Result(status, 0, 10, loss))
        steps = range(10)
        made = [{"event": "TrainStep", "step": s, "applied": True, "train/loss": 5.0 - s / 10} for s in steps]
        made += [{"event": "ValLoss", "step": s, "val/loss": 5.0 - s / 10} for s in (0, 5, 10)]
        (cell.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))


def grid(**axes: list[Any]) -> list[dict[str, Any]]:
    keys = [key.replace("__", ".") for key in axes]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*axes.values())]


def test_a_table_is_sorted_and_a_heatmap_keeps_what_diverged_apart(tmp_path: Path) -> None:
    settings = grid(scheduler__warmup_steps=[10, 50], optimizer__lr=[1e-3, 3e-3])
    write(tmp_path, settings, [2.5, math.inf, 2.25, 2.75])
    rows = read_rows(tmp_path)
    assert [row.number for row in rows] == [2, 0, 3, 1]
    assert summary.table(rows)[1][:4] == ["#2", "50", "0.001", "2.2500"]
    down, across, means = figures.table(rows, "scheduler.warmup_steps", "optimizer.lr")
    assert (down, across) == ([10, 50], [1e-3, 3e-3])
    np.testing.assert_array_equal(means, [[2.5, math.inf], [2.25, 2.75]])
    assert summary.csv_text(rows).splitlines()[4].startswith("1,10,0.003,inf,")


@pytest.mark.parametrize(
    "settings",
    [
        grid(scheduler__warmup_steps=[10, 50], optimizer__lr=[1e-3, 3e-3], run__seed=[1, 2]),
        [{"a.lr": 10.0**-i, "b.warmup_steps": i} for i in range(1, 9)],
        grid(optimizer__lr=[1e-4, 1e-3, 1e-2, 1e-1], scheduler=["wsd", "cosine"]),
        grid(scheduler=["wsd", "cosine"], clip=["none", "norm"], run__seed=[1, 2]),
    ],
    ids=["heatmap", "scatter", "line", "dots"],
)
def test_every_form_of_sweep_is_drawn(tmp_path: Path, settings: list[dict[str, Any]]) -> None:
    losses = [2.0 + i / 10 for i in range(len(settings) - 1)]
    write(tmp_path, settings, [*losses, math.inf])
    summary.write(tmp_path, read_rows(tmp_path))
    assert (tmp_path / "summary.png").stat().st_size > 10_000
    page = (tmp_path / "summary.html").read_text()
    assert "data:image/png;base64," in page
    assert "//" not in page.replace("data:image", "").split("base64,")[0]


def test_a_sweep_that_validates_nothing_is_drawn_with_its_cells_named(tmp_path: Path) -> None:
    write(tmp_path, grid(run__seed=[1, 2]), [math.nan, math.nan])
    for log in tmp_path.glob("*/metrics.jsonl"):
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if "ValLoss" not in line))
    rows = [replace(row, label=f"seed={row.number}") for row in read_rows(tmp_path)]
    shown: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: shown.extend(legends(figure)))
        figures.draw(rows, tmp_path / "x.png")
    assert shown == [["seed=0", "seed=1"]]


def legends(figure: Any) -> list[list[str]]:
    found = (axes.get_legend() for axes in figure.axes)
    return [[text.get_text() for text in legend.get_texts()] for legend in found if legend is not None]


def test_seeds_are_grouped(tmp_path: Path) -> None:
    write(
        tmp_path, grid(scheduler=["wsd", "cosine"], run__seed=[1, 2, 3]), [2.0, 2.1, 2.2, 3.0, 3.0, math.inf]
    )
    first, second = spreads(read_rows(tmp_path))
    assert (first.label, first.cells, round(first.mean, 9), round(first.deviation, 9)) == (
        "scheduler=wsd",
        3,
        2.1,
        0.1,
    )
    assert (second.label, second.cells, second.deviation) == ("scheduler=cosine", 2, 0.0)


def test_identity_ignores_order_and_how_a_run_is_carried_out() -> None:
    one = {"optimizer.lr": 1e-3, "train.steps": 5, "run.threads": 1, "sweep.parallel": 2, "logger": "none"}
    other = {"train.steps": 5, "optimizer.lr": 0.001, "run.threads": 2}
    assert cells.identity(one) == cells.identity(other)
    assert cells.identity(one) != cells.identity({**other, "train.steps": 6})
    swept = frozenset({"run.threads"})
    assert cells.identity(one, swept=swept) != cells.identity(other, swept=swept)


def test_gpus_and_threads_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr("runner.sweep.slots.cpus", lambda: 8)
    config = {"run": {"device": "auto"}}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    slots = make_slots(Sweep(), config, processes=2)
    assert [slot.env["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["0,1", "2,3"]
    assert [slot.threads for slot in slots] == [2, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [slot.threads for slot in make_slots(Sweep(parallel=2), config, processes=1)] == [4, 4]
    assert make_slots(Sweep(), config, processes=1) == [(None, {})]


def test_a_picture_that_cannot_be_drawn_costs_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    write(tmp_path, grid(lr=[1e-3, 3e-3]), [2.0, 1.0])
    monkeypatch.setattr(figures, "draw", full)
    summary.report(tmp_path, tell=Teller(total=2, parallel=1))
    assert "summary: could not be written (OSError: [Errno 28] No space left" in capsys.readouterr().out
