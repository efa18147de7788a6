"""What a person types is what Hydra gets, and what we print can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.arguments import INFO, TOPICS, VALUED, as_meant, to_type
from tests.commands import SMALL, run


def parsed(argument: str) -> object:
    (override,) = OverridesParser.create().parse_overrides([argument])
    return override.value()


@pytest.mark.parametrize("name", ["2026_11_30", "1e3", "007", "-1", "true", "nan", "1.50"])
@pytest.mark.parametrize("key", ["run.name", "sweep.name", "run.root", "++run.label"])
def test_a_name_is_text(key: str, name: str) -> None:
    (argument,) = as_meant([f"{key}={name}"])
    assert str(parsed(argument)) == name


@pytest.mark.parametrize("argument", ["run.name=null", "run.name=a,b", "train.steps=1_000", "run.name=a1"])
def test_what_is_no_such_name_stays(argument: str) -> None:
    assert as_meant([argument]) == [argument]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1))
def test_what_is_to_be_typed_survives_shell_and_hydra(value: str) -> None:
    (argument,) = as_meant(shlex.split(to_type("run.name", value)))
    assert str(parsed(argument)) == value


def test_the_closing_screen_continues_a_run_of_any_name(tmp_path: Path) -> None:
    printed = run(*SMALL, "train.steps=2", "run.name='a=b c'", cwd=tmp_path)
    found = re.search(r"train on +python -m runner (.*) \.\.\. ", printed)
    assert found is not None, printed
    again = run(*SMALL, *shlex.split(found[1]), "logger=[llmc,console]", cwd=tmp_path)
    assert "resumes at step 2, 4 steps" in again
    assert "nothing to do" not in again
    folder = tmp_path / "outputs" / "a=b c"
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    idle = run(*SMALL, "train.steps=3", "optimizer.lr=1", "run.name='a=b c'", cwd=tmp_path)
    assert "nothing to do: the run is at step 4" in idle
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    assert after == before, "what no step was trained with is no setting of the run"


def test_nothing_is_offered_that_would_start_again(tmp_path: Path) -> None:
    printed = run(*SMALL, "train.steps=2", "run.name=a", "checkpoint.every=0", cwd=tmp_path)
    assert "train on" not in printed


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("a=1 -m b=1,2", "-m a=1 b=1,2"),
        ("a=1 --config-dir d b=2", "--config-dir d a=1 b=2"),
        ("a=1 --config-dir=d b=2", "--config-dir=d a=1 b=2"),
        ("a=1 -i b=2", "-i a=1 b=2"),
        ("a=1 --info plugins b=2", "--info plugins a=1 b=2"),
        ("a=-1 b=2", "a=-1 b=2"),
        ("a=1 --cfg", "--cfg a=1"),
    ],
)
def test_flags_go_first(typed: str, given: str) -> None:
    assert as_meant(typed.split()) == given.split()


def test_the_flags_with_values_are_hydras() -> None:
    actions = [action for action in get_args_parser()._actions if action.option_strings]
    assert {o for a in actions if a.nargs is None for o in a.option_strings} == VALUED
    (info,) = [action for action in actions if action.nargs == "?"]
    assert (set(info.option_strings), set(info.choices or ())) == (set(INFO), set(TOPICS))


def test_a_tilde_is_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run(*SMALL, "train.steps=1", "run.root=~/runs", "run.name=a", cwd=tmp_path)
    assert (tmp_path / "home/runs/a/DONE_00000001").is_file()
    assert not (tmp_path / "~").exists()
