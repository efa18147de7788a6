"""Branches off a trunk: exact at the first step, on the decay's formula from there."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from runner.scheduler import wsd
from runner.sweep.branches import checkpoint_every, leaves_at
from runner.sweep.settings import Branches
from tests.commands import SMALL, run
from tests.sweep_cases import folder


def train_lines(log: Path) -> dict[int, tuple[str, str]]:
    """Return the loss and lr of each step as main.log has them."""
    found = re.findall(r"^s:(\d+) trl:(\S+) lr:(\S+)", log.read_text(), re.M)
    return {int(step): (loss, lr) for step, loss, lr in found}


def metrics(cell: Path, name: str) -> dict[int, float]:
    """Return a metric in full precision."""
    found = (json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: float(row[name]) for row in found if name in row}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    cwd = tmp_path_factory.mktemp("tree")
    budgets = ("sweep=wsd_branches", "sweep.branches.budgets=[20,40]", "sweep.parallel=2")
    printed = run(*SMALL[: SMALL.index("train.steps=40")], *rest(), *budgets, cwd=cwd)
    return cwd, printed


def rest() -> list[str]:
    return [s for s in SMALL[SMALL.index("train.steps=40") + 1 :] if not s.startswith("checkpoint")]


def test_a_branch_continues_the_trunk_exactly_and_decays(tree: tuple[Path, str]) -> None:
    trunk, short, long = (folder(tree[0]) / name for name in ("000", "001", "002"))
    loss, lr = metrics(short, "train/loss"), metrics(short, "train/lr")
    assert min(loss) == 16
    assert loss[16] == metrics(trunk, "train/loss")[16]
    assert loss[17] == metrics(trunk, "train/loss")[17]  # the first decaying step still has the peak
    assert loss[18] != metrics(trunk, "train/loss")[18]
    expected = {
        s: wsd(s, peak_lr=1e-2, warmup_steps=4, total_steps=20, final_frac=0.0, decay_steps=4) for s in lr
    }
    assert lr == expected
    assert min(metrics(long, "train/loss")) == 32
    assert train_lines(short / "main.log").keys() == {16, 17, 18, 19}


def test_a_table_tells_the_loss_by_budget(tree: tuple[Path, str]) -> None:
    with (folder(tree[0]) / "summary.csv").open() as file:
        budgets = {row["budget"]: float(row["val_loss"]) for row in csv.DictReader(file)}
    assert budgets.keys() == {"trunk", "20", "40"}


def test_a_larger_budget_extends_the_trunk(tree: tuple[Path, str]) -> None:
    more = ("sweep=wsd_branches", "sweep.branches.budgets=[20,40,60]")
    printed = run(*SMALL[: SMALL.index("train.steps=40")], *rest(), *more, cwd=tree[0])
    assert "2 done before, 1 to continue, 1 to start" in printed
    assert max(metrics(folder(tree[0]) / "000", "train/loss")) == 47


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere", "there is no run nowhere"),
        ("000@x", "is not a step"),
        ("000@5", "no checkpoint of step 5"),
    ],
)
def test_a_wrong_start_is_one_line(tree: tuple[Path, str], where: str, message: str) -> None:
    root = f"run.root={folder(tree[0])}"
    printed = run(*SMALL, root, "run.name=wrong", f"run.from='{where}'", cwd=tree[0], code=2)
    assert message in printed
    assert printed.count("\n") == 1
    assert not (folder(tree[0]) / "wrong").exists()


def test_branch_points_and_the_interval_that_meets_them() -> None:
    branches = Branches(budgets=[250, 500, 1000])
    assert [leaves_at(budget, branches) for budget in branches.budgets] == [200, 400, 800]
    assert checkpoint_every(branches) == 200
