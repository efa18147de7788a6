"""Every packaged experiment composes, is what its source says, and runs in seconds with small settings."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from runner import CONF
from runner.cli import ConfigError
from runner.config import build
from runner.schedule import compose_plan
from tests.commands import run
from tests.sessions import configured, opened, ran

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
NEEDED = {  # what an experiment leaves to its user
    "gpt2_124m": [
        "data.train=tests/golden/dataloader_shards/eq_*.bin",
        "data.val=tests/golden/dataloader_shards/eq_*.bin",
    ],
    "shakespeare": [f"data.path={Path(__file__)}"],
}
QUICK = [
    *("model.layers=1", "model.heads=2", "model.width=16", "train.seq_len=16", "train.micro_batch=2"),
    *("train.tokens_per_step=null", "evaluate=none", "logger=none", "run.plot=false", "run.threads=1"),
]


def test_there_are_experiments() -> None:
    assert {"gpt2_124m", "llama_30m", "shakespeare"} < set(EXPERIMENTS)
    assert {"lab_nan", "lab_lion_vs_adamw", "lab_bf16", "lab_compile"} < set(EXPERIMENTS)


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in NEEDED])
def test_it_composes_and_passes_every_check(name: str) -> None:
    assert configured(f"experiment={name}")["run"]["seed"] == 42


def test_a_recipe_says_which_files_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"data\.path"):
        configured("experiment=shakespeare")
    with pytest.raises(ConfigError, match=r"data\.train"):
        configured("experiment=gpt2_124m")


def test_the_30m_recipe(tmp_path: Path) -> None:
    config = configured("experiment=llama_30m")
    assert config["train"] | {"_target_": ""} == {
        "_target_": "",
        "steps": 20000,
        "micro_batch": 32,
        "seq_len": 1024,
        "tokens_per_step": None,
        "checkpoint_blocks": False,
    }
    optimizer, scheduler = config["optimizer"], config["scheduler"]
    assert (optimizer["lr"], optimizer["betas"], optimizer["weight_decay"]) == (3e-4, [0.9, 0.95], 0.1)
    assert optimizer["eps"] == 1e-8
    model = build(config["model"], vocab_size=128, max_seq_len=1024)  # not 50257: drawing them takes seconds
    assert model.embed.wte.shape == (128, 512)
    block = model.blocks[0]
    assert block.qkvw.shape == ((8 + 2 * 4) * 64, 512)
    assert block.gateupw.shape == (2 * 1536, 512)
    body = 8 * (block.qkvw.numel() + 512 * 512 + 3 * 512 * 1536 + 2 * 512) + 512
    assert sum(p.numel() for p in model.parameters()) == 128 * 512 + body
    assert 50257 * 512 + body == 50_906_112

    plan = compose_plan(["experiment=llama_30m"])

    def lesson(step: int) -> float:
        if step < 200:
            return 3e-4 * step / 200
        progress = (step - 200) / (20000 - 200)
        return 0.1 * 3e-4 + 0.5 * (3e-4 - 0.1 * 3e-4) * (1 + math.cos(math.pi * progress))

    assert len(plan.steps) >= 2000
    assert plan.lr == pytest.approx([lesson(step) for step in plan.steps], rel=1e-5, abs=1e-12)
    assert (config["clip"]["max_norm"], config["outlier"]["max_ratio"]) == (1.0, 5.0)
    assert scheduler["peak_lr"] == optimizer["lr"]


def test_the_30m_recipe_runs_on_a_cpu(tmp_path: Path) -> None:
    quick = [
        "train.micro_batch=1",
        "train.seq_len=32",
        "model.layers=1",
        "model.width=64",
        "model.feed_forward=96",
    ]
    config = [
        "experiment=llama_30m",
        *quick,
        "evaluate=none",
        "logger=none",
        "checkpoint.every=0",
        "run.threads=1",
    ]
    session = ran(*config, "train.steps=2", dir=tmp_path)
    assert session.progress.step == 2


def test_llmcs_recipe() -> None:
    config = configured(
        "experiment=gpt2_124m", *NEEDED["gpt2_124m"], "train.tokens_per_step=null", *QUICK[3:5]
    )
    assert config["train"]["steps"] * 524288 > 9.8e9
    assert (config["optimizer"]["lr"], config["optimizer"]["weight_decay"]) == (6e-4, 0.1)
    assert (config["scheduler"]["warmup_steps"], config["scheduler"]["final_frac"]) == (700, 0.0)
    shape = {key: config["model"][key] for key in ("layers", "heads", "width")}
    assert shape == {"layers": 12, "heads": 12, "width": 768}


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("To do is to be. " * 60)
    source = [f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "checkpoint.every=0"]
    session = ran("experiment=shakespeare", *source, *QUICK, "train.steps=2", dir=tmp_path / "run")
    assert session.progress.step == 2


def test_a_nan_is_skipped_with_the_guard_and_fatal_without(tmp_path: Path) -> None:
    """The lab's first experiment, as the sweep that it is."""
    quick = [
        "train.steps=6",
        "debug.nan_loss_at=[3]",
        "train.micro_batch=2",
        "model.layers=1",
        "model.width=32",
    ]
    quick += ["evaluate.val.every=3", "evaluate.val.batches=1", "logger=[jsonl]", "run.plot=false"]
    run(
        "experiment=lab_nan",
        *quick,
        f"sweep.root={tmp_path}",
        "sweep.name=lab",
        "run.threads=1",
        cwd=tmp_path,
    )
    with open(tmp_path / "lab" / "summary.csv", newline="", encoding="utf-8") as file:
        rows = {row["outlier"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"finite", "off"}
    assert int(rows["finite"]["skipped"]) == 1
    assert 2 < float(rows["finite"]["val_loss"]) < 6
    assert not _finite(rows["off"]["val_loss"])


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


CELLS: dict[str, list[list[str]]] = {
    "lab_lion_vs_adamw": [["optimizer=adamw"], ["optimizer=lion"]],
    "lab_bf16": [["precision=fp32"], ["precision=bf16"], ["precision=bf16_master"]],
}


@pytest.mark.parametrize("name", CELLS)
def test_the_labs_cells_train(name: str, tmp_path: Path) -> None:
    quick = [
        "train.steps=25",
        "train.micro_batch=2",
        "model.layers=1",
        "model.width=32",
        "scheduler.warmup_steps=2",
    ]
    for index, cell in enumerate(CELLS[name]):
        command = [f"experiment={name}", *cell, *quick, "logger=none", "optimizer.lr=3e-3"]
        fresh = opened(*command, dir=tmp_path / f"start{index}")
        command += ["evaluate.val.batches=1"]
        before, after = _loss(fresh), _loss(ran(*command, dir=tmp_path / f"end{index}"))
        assert after < before - 0.5


def _loss(session: Any) -> float:
    batch = session.data.val(
        micro_batch=4, seq_len=session.plan.seq_len, rank=0, world=1, device=session.engine.device, seed=1
    ).next()
    session.model.eval()
    with session.autocast():
        return float(session.model(batch.inputs, batch.targets).detach())
