"""`python -m runner.generate` on real runs: the cache changes nothing, and it prints what was asked for."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from runner import generate as command
from tests.commands import run
from tests.sessions import ran

SMALL = [
    *("model.layers=2", "model.heads=2", "model.width=32", "train.seq_len=64", "train.micro_batch=4"),
    *("train.steps=3", "optimizer.lr=1e-2", "scheduler=constant", "precision=fp32", "checkpoint.async=off"),
    *("evaluate=none", "logger=none", "run.plot=false", "run.threads=1"),
]
MODELS = {"gpt2": "model=tiny", "llama": "model=llama_tiny"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return run folders of a GPT-2 (llm.c files) and of a Llama (safetensors)."""
    root = tmp_path_factory.mktemp("runs")
    for name, model in MODELS.items():
        ran(model, *SMALL, dir=root / name)
    return {name: root / name for name in MODELS}


def entries(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert command.main([*arguments, "json=true"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "settings", [["temperature=0"], ["temperature=1"], ["top_k=9"], ["top_p=0.8"]], ids=str
)
@pytest.mark.parametrize("model", MODELS)
def test_the_cache_changes_no_token(
    model: str, settings: list[str], runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also beyond the context of 64, where the window rolls and the cache must go."""
    asked = [f"run={runs[model]}", "prompt=Call me Ishmael.", "max_tokens=70", "n=2", *settings]
    kept, anew = entries(capsys, *asked), entries(capsys, *asked, "cache=false")
    assert kept == anew
    assert [entry["step"] for entry in kept] == [3, 3]
    assert all(len(entry["tokens"]) == 70 or entry["end"] == "stop" for entry in kept)
    if settings == ["temperature=0"]:
        assert kept[0] == kept[1]
    else:
        assert kept[0]["tokens"] != kept[1]["tokens"]
        assert entries(capsys, *asked, "seed=7") != kept


def test_every_source_of_a_model_writes_the_same(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["prompt=Call", "max_tokens=12", "temperature=0"]
    for model, suffix in (("gpt2", "bin"), ("llama", "safetensors")):
        by_run = entries(capsys, f"run={runs[model]}", *asked)
        by_file = entries(capsys, f"run={runs[model]}/model_00000003.{suffix}", *asked)
        assert by_run == by_file
        assert len(by_run[0]["tokens"]) == 12


def test_a_stop_text_ends_and_is_not_written(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [f"run={runs['gpt2']}", "prompt=Call", "max_tokens=60", "temperature=1.5"]
    (whole,) = entries(capsys, *asked)
    stop = whole["text"][3:5]
    assert len(stop) == 2
    (cut,) = entries(capsys, *asked, "stop=\0never", f"stop={stop}")
    assert cut["end"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].find(stop)]
    assert len(cut["tokens"]) < 60


def test_a_single_text_appears_as_it_is_written(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(
        sys, "stdout", type("Terminal", (), {"write": shown.append, "flush": lambda self: None})()
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("Call me"))
    assert command.main([f"run={runs['gpt2']}", "prompt=-", "max_tokens=20", "temperature=0"]) == 0
    monkeypatch.undo()
    assert shown[0] == "Call me"
    assert shown[-1].endswith("\n")
    assert 10 < len(shown) <= 22


def test_a_person_types_it(runs: dict[str, Path], tmp_path: Path) -> None:
    asked = [f"run={runs['llama']}", "prompt=Call", "max_tokens=5", "temperature=0"]
    printed = run(*asked, cwd=tmp_path, module="runner.generate")
    assert printed.startswith("Call")
    missing = run("run=nowhere", cwd=tmp_path, module="runner.generate", code=2)
    assert len(missing.splitlines()) == 1
    assert "nowhere: no such file or folder" in missing


@pytest.mark.parametrize("count", ["0", "5000", "1000000000000"])
def test_more_texts_than_memory_can_hold_are_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run=nowhere", f"n={count}"]) == 2
    assert f"n={count} must lie in 1..4096" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["max_tokens=0", "max_tokens=1e9", "device=meta", "device=tpu"])
def test_a_wrong_value_is_named_alone(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run=nowhere", argument]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"runner.generate: error: {argument}" if "device" not in argument else "runner.")


def test_what_the_machine_lacks_is_one_line(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(command, "load_run", full)
    assert command.main([f"run={runs['gpt2']}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("runner.generate: error: out of memory")
