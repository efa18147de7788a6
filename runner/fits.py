"""Compare plain config values with annotations: what is wrong, and what the value becomes."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import annotated_types as at

_BOUNDS = ((at.Ge, "ge", ">="), (at.Gt, "gt", ">"), (at.Le, "le", "<="), (at.Lt, "lt", "<"))


def problem(value: Any, annotation: Any) -> str | None:
    """Return what is wrong with `value`, or None. The text reads after 'path: '."""
    origin = typing.get_origin(annotation)
    if annotation is Any or annotation is object:
        return None
    if origin is Annotated:
        return _bounded(value, annotation)
    if origin in (Union, types.UnionType):
        return _union(value, typing.get_args(annotation))
    if annotation is None or annotation is type(None):
        return None if value is None else f"must be null, got {show(value)}"
    if origin is Literal:
        return _literal(value, typing.get_args(annotation))
    if origin in (list, Sequence, tuple, set):
        return _sequence(value, origin, typing.get_args(annotation))
    if origin in (dict, Mapping) or annotation is dict:
        return None if isinstance(value, Mapping) else f"expected a mapping, got {show(value)}"
    return _scalar(value, annotation)


def is_plain(annotation: Any) -> bool:
    """Whether only a number, a text, a switch or null fits, so that no constructor call can stand there."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return is_plain(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return all(is_plain(option) for option in typing.get_args(annotation))
    return origin is Literal or annotation in (bool, int, float, str, Path, None, type(None))


def _as_text(value: Any) -> str:
    """Say how a number that came as a text is written: an environment variable's always does."""
    try:
        number = isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        number = False
    way = "write it without quotes; from the environment by ${oc.decode:${oc.env:NAME}}"
    return f" (a text: {way})" if number else ""


def _scalar(value: Any, kind: Any) -> str | None:
    if kind is bool:
        return None if isinstance(value, bool) else f"expected true or false, got {show(value)}"
    if kind is int:
        if isinstance(value, float) and value.is_integer():
            digits = f" (write {int(value)})" if abs(value) < 2**53 else ""  # exact only up to there
            return f"expected a whole number, got {show(value)}{digits}"
        fits = isinstance(value, int) and not isinstance(value, bool)
        return None if fits else f"expected a whole number, got {show(value)}{_as_text(value)}"
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"expected a number, got {show(value)}{_as_text(value)}"
        return None if math.isfinite(value) else f"must be a finite number, got {show(value)}"
    if kind in (str, Path):
        fits = isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
        return None if fits else f"expected text, got {show(value)}"
    return None


def _bounded(value: Any, annotation: Any) -> str | None:
    inner, *marks = typing.get_args(annotation)
    wrong = problem(value, inner)
    if wrong:
        return wrong
    for mark in marks:
        for kind, attribute, sign in _BOUNDS:
            if isinstance(mark, kind) and not _holds(value, sign, getattr(mark, attribute)):
                return f"must be {sign} {getattr(mark, attribute)}, got {show(value)}"
        if isinstance(mark, at.MinLen) and len(value) < mark.min_length:
            return f"must have at least {mark.min_length} entries, got {show(value)}"
        if isinstance(mark, at.MultipleOf) and value % mark.multiple_of:
            return f"must be a multiple of {mark.multiple_of}, got {show(value)}"
    return None


def _holds(value: Any, sign: str, bound: Any) -> bool:
    if sign == ">=":
        return bool(value >= bound)
    if sign == ">":
        return bool(value > bound)
    return bool(value <= bound) if sign == "<=" else bool(value < bound)


def _union(value: Any, options: tuple[Any, ...]) -> str | None:
    wrong = [problem(value, option) for option in options]
    if None in wrong:
        return None
    named = [w for w, option in zip(wrong, options, strict=True) if w and option is not type(None)]
    text = named[0] if len(named) == 1 else "; or: ".join(named)
    return f"{text} (null is allowed)" if type(None) in options else text


def _literal(value: Any, choices: tuple[Any, ...]) -> str | None:
    if _switch(value, choices) in choices:
        return None
    near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    listed = ", ".join(choice if isinstance(choice, str) else show(choice) for choice in choices)
    return f"must be one of {listed}, got {show(value)}{hint}"


def _switch(value: Any, choices: tuple[Any, ...]) -> Any:
    # YAML reads a bare on/off as a boolean.
    if isinstance(value, bool) and value not in choices:
        return "on" if value else "off"
    return value


def _sequence(value: Any, origin: Any, inner: tuple[Any, ...]) -> str | None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return f"expected a list, got {show(value)}"
    fixed = origin is tuple and inner and inner[-1] is not Ellipsis
    if fixed and len(value) != len(inner):
        return f"expected {len(inner)} entries, got {show(value)}"
    for i, item in enumerate(value):
        wrong = problem(item, inner[i] if fixed else (inner[0] if inner else Any))
        if wrong:
            return f"entry {i} {wrong}"
    return None


def convert(value: Any, annotation: Any) -> Any:
    """Return a fitting `value` as its annotation wants it (a tuple for a list, text for `run.name=7`)."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return convert(value, typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        fitting = [o for o in typing.get_args(annotation) if problem(value, o) is None]
        return convert(value, fitting[0]) if fitting else value
    if origin is Literal:
        return _switch(value, typing.get_args(annotation))
    if origin is tuple:
        return tuple(value)
    if origin is list and typing.get_args(annotation) == (str,):
        return [str(item) for item in value]
    if annotation is float:
        return float(value) + 0.0  # -0.0, which would be logged as such, becomes 0.0
    if annotation is str:
        return str(value)
    return Path(value) if annotation is Path else value


def show(value: Any) -> str:
    """Return a value as a person would type it, cut at 60 characters."""
    text = "null" if value is None else repr(value) if isinstance(value, str) else str(value)
    text = {"True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 60 else text[:57] + "..."
