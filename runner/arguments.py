"""Say on a command line what is meant: what Hydra reads otherwise, and what a shell would take apart."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_NAMES = re.compile(
    r"(\+{0,2}(?:run|sweep)\.(?:name|root|group|label))=([\d_.eE+-]+|true|false|nan|inf)", re.I
)
_PLAIN = re.compile(r"[\w./+:@%-]+", re.ASCII)


def as_meant(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra has to get them.

    A chosen `sweep=` option means several runs, with or without -m: Hydra takes the mode from the command
    line or the primary config only. A name is text: as a number, 2026_11_30 would be read as 20261130.
    """
    given = []
    for argument in arguments:
        name = _NAMES.fullmatch(argument)
        given.append(f"{name[1]}={quoted(name[2])}" if name else argument)
        if re.fullmatch(r"sweep=(?!null$).+", argument) and not {"-m", "--multirun"} & {*arguments}:
            given.append("hydra.mode=MULTIRUN")
    return given


def quoted(value: str) -> str:
    """Return text as a value that Hydra's override grammar reads back unchanged."""
    # A backslash escapes only before a quote; anywhere else it is itself.
    escaped = re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), value)
    return f"'{escaped}'"


def to_type(key: str, value: str) -> str:
    """Return a setting as a person has to type it in a shell."""
    if _PLAIN.fullmatch(value) and value != "null":
        return f"{key}={value}"
    text = f"{key}={quoted(value)}"
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'
