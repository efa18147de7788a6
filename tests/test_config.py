"""Config nodes are constructor calls: their schema is read from the source, every problem is one line."""

from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Lt, MinLen

from runner import fits
from runner.config import build, check_node
from runner.signature import TargetError, signature_of


def problems(**node: Any) -> list[str]:
    return list(check_node({"_target_": "runner.train.Plan", **node}, "train"))


PLAN = {"steps": 10, "micro_batch": 2, "seq_len": 8, "tokens_per_step": None}


def test_a_correct_node_has_no_problem() -> None:
    assert problems(**PLAN) == []


def test_a_negative_zero_is_zero() -> None:
    assert str(fits.convert(-0.0, Annotated[float, Ge(0)])) == "0.0"


def test_texts_of_a_list_are_texts() -> None:
    node = {"_target_": "runner.launch.Run", "tags": [1, "x", 2]}
    assert list(check_node(node, "run")) == []
    assert fits.convert([1, "x", 2], list[str]) == ["1", "x", "2"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"steps": "abc"}, "train.steps: expected a whole number, got 'abc'"),
        ({"steps": -1}, "train.steps: must be >= 1, got -1"),
        (
            {"steps": "5"},
            "train.steps: expected a whole number, got '5' (a text: write it without quotes; from the "
            "environment by ${oc.decode:${oc.env:NAME}})",
        ),
        ({"steps": 1000.0}, "train.steps: expected a whole number, got 1000.0 (write 1000)"),
        ({"steps": True}, "train.steps: expected a whole number, got true"),
        ({"steps": None}, "train.steps: expected a whole number, got null"),
        ({"steps": "???"}, "train.steps: is required, give it on the command line (train.steps=...)"),
        ({"stepz": 10}, "train.stepz: no such option (did you mean train.steps?)"),
        ({"tokens_per_step": 0}, "train.tokens_per_step: must be >= 1, got 0 (null is allowed)"),
    ],
)
def test_each_mistake_is_one_line(change: dict[str, Any], line: str) -> None:
    assert problems(**{**PLAN, **change}) == [line]


def test_all_mistakes_come_at_once_and_a_missing_key_is_one() -> None:
    found = problems(steps=0, micro_batch="x", extra=1)
    assert [line.split(":")[0] for line in found] == [
        "train.steps",
        "train.micro_batch",
        "train.extra",
        "train.seq_len",
    ]


def test_what_the_program_supplies_cannot_be_configured() -> None:
    assert problems(**PLAN, world=2)[0].startswith("train.world: no such option")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("os.system", "outside the trusted packages"),
        ("runner.cli.os.system", "there is no module"),
        ("runner.config.difflib", "defines no class or function"),
        ("runner.train.Plam", "did you mean Plan"),
        ("runner", "outside the trusted packages"),
    ],
)
def test_untrusted_and_unknown_targets_are_refused(target: str, text: str) -> None:
    found = list(check_node({"_target_": target}, "optimizer"))
    assert len(found) == 1
    assert text in found[0]
    with pytest.raises(TargetError):
        build({"_target_": target})


def test_a_trusted_package_may_be_named() -> None:
    node = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    assert list(check_node(node, "x", ("runner", "fractions"))) == []
    assert build(node, trust=("fractions",)) == 0.5


def test_functions_become_partials_and_context_fills_nulls() -> None:
    plan = build({"_target_": "runner.train.Plan", **PLAN}, world=2)
    assert (plan.tokens, plan.world) == (32, 2)
    scheduler = build({"_target_": "runner.scheduler.constant", "peak_lr": 1})
    assert scheduler(3) == 1.0


def test_keyword_names_lose_their_underscore() -> None:
    signature = signature_of("runner.inject.Inject")
    assert set(signature.parameters) >= {"nan_loss_at", "nan_grad_at"}


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, float, None),
        (float("nan"), float, "must be a finite number"),
        (float("inf"), float, "must be a finite number"),
        (True, float, "expected a number"),
        ("a", Literal["a", "b"], None),
        ("aa", Literal["a", "b"], "must be one of a, b"),
        (True, Literal["auto", "on", "off"], None),
        ([1, 2], tuple[float, float], None),
        ([1], tuple[float, float], "expected 2 entries"),
        ("ab", list[str], "expected a list"),
        ([1, "x"], list[int], "entry 1 expected a whole number"),
        (0.5, Annotated[float, Gt(0), Lt(1)], None),
        (1.0, Annotated[float, Gt(0), Lt(1)], "must be < 1"),
        (-1, Annotated[int, Ge(0)] | None, "must be >= 0"),
        ([], Annotated[list[int], MinLen(1)], "at least 1"),
        ({"a": 1}, dict[str, int], None),
        (7, str, None),
        (1.5, str, "expected text"),
        (object(), Any, None),
    ],
)
def test_values_against_annotations(value: Any, annotation: Any, expected: str | None) -> None:
    wrong = fits.problem(value, annotation)
    assert (wrong is None) if expected is None else (wrong is not None and expected in wrong)


def test_conversion_gives_what_the_annotation_says() -> None:
    assert fits.convert(True, Literal["on", "off"]) == "on"
    assert fits.convert([0.9, 0.95], tuple[float, float]) == (0.9, 0.95)
    assert fits.convert(20, str | None) == "20"
    assert isinstance(fits.convert(1, Annotated[float, Ge(0)]), float)
