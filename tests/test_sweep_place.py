"""Where a run goes and what it is called means something in a sweep too, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run
from tests.sweep_cases import TINY, sweep

SHORT = ("train.steps=12", "checkpoint.every=6", "scheduler=constant")
TWO = "optimizer.lr=1e-3,3e-3"


def settings(cell: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((cell / "cell.json").read_text())["config"]["run"]
    return found


def test_the_run_s_place_names_and_labels_are_those_of_the_sweep(tmp_path: Path) -> None:
    where = [*SHORT, TWO, "run.name=mine", "run.root=disk", "run.group=theirs", "run.label=big"]
    printed = sweep(*where, cwd=tmp_path)
    assert "in disk/sweeps/mine:" in printed
    assert [p.name for p in tmp_path.iterdir()] == ["disk"]
    for number, lr in ((0, "0.001"), (1, "0.003")):
        run = settings(tmp_path / "disk" / "sweeps" / "mine" / f"00{number}")
        assert (run["group"], run["label"]) == ("theirs", f"big lr={lr}")
    assert "2 done before" in sweep(*where, cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((TWO, "run.name=a,b"), "run.name: a sweep's cells are folders 000, 001, ..."),
        ((TWO, "run.root=a,b"), "run.root: a sweep's cells are folders 000, 001, ..."),
        ((TWO, "run.name=a", "sweep.name=b"), "run.name: 'a', but sweep.name='b' names the folder"),
        ((TWO, "sweep.parallel=1,2"), "sweep.parallel: a setting of the sweep as a whole"),
        ((TWO, "sweep.search.trials=range(2,4)"), "sweep.search.trials: a setting of the sweep as a whole"),
        ((TWO, "run.name=a/../b"), "sweep.name: 'a/../b' is not a folder name"),
    ],
)
def test_a_place_that_cells_cannot_have_is_one_line(
    arguments: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    printed = sweep(*arguments, cwd=tmp_path, code=2)
    (only,) = printed.splitlines()
    assert only.startswith(f"runner: error: {line}")
    assert list(tmp_path.iterdir()) == []


def test_cells_start_from_a_run_that_is_named_as_for_one_run_alone(tmp_path: Path) -> None:
    run(*TINY, *SHORT, "run.name=trunk", cwd=tmp_path)
    branches = [*SHORT, TWO, "run.from=trunk@6", "sweep.name=x"]
    sweep(*branches, cwd=tmp_path)
    cell = tmp_path / "outputs" / "sweeps" / "x" / "000"
    assert "s:6 trl:" in (cell / "main.log").read_text().splitlines()[0]
    assert "2 done before" in sweep(*branches, cwd=tmp_path)


def test_a_damaged_record_of_a_cell_is_one_line_in_every_command(tmp_path: Path) -> None:
    short = [*SHORT, TWO, "sweep.name=x", "run.plot=false"]
    sweep(*short, cwd=tmp_path)
    cell = tmp_path / "outputs" / "sweeps" / "x" / "000"
    damage = [("result.json", b"{}"), ("result.json", b"{"), ("cell.json", b"[]"), ("cell.json", b"\xff")]
    damage.append(("result.json", b'{"status": "finished", "code": 0, "val_loss": "x"}'))
    for name, content in damage:
        whole = (cell / name).read_bytes()
        (cell / name).write_bytes(content)
        for module, arguments in (
            ("runner", ["-m", *TINY, *short]),
            ("runner.sweep.status", [str(cell.parent)]),
        ):
            printed = run(*arguments, module=module, cwd=tmp_path, code=2)
            (line,) = printed.splitlines()
            assert f"000/{name}: " in line
        (cell / name).write_bytes(whole)
    (cell / "progress.log").write_bytes(b"\xff\n6 x\n7 2.5\n8")
    assert "2 done before" in sweep(*short, cwd=tmp_path)
