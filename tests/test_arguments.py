"""What a person types is what Hydra gets, and what we print can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from runner.arguments import as_meant, to_type
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
    assert "nothing to do: the run is at step 4" in run(
        *SMALL, "train.steps=3", "run.name='a=b c'", cwd=tmp_path
    )


def test_nothing_is_offered_that_would_start_again(tmp_path: Path) -> None:
    printed = run(*SMALL, "train.steps=2", "run.name=a", "checkpoint.every=0", cwd=tmp_path)
    assert "train on" not in printed
