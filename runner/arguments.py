"""Say on a command line what is meant: what Hydra reads otherwise, and what a shell would take apart."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import Any

VALUED = frozenset(
    ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
) | {"--experimental-rerun"}
INFO, TOPICS = ("--info", "-i"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Hydra's flags that take a value, and the one that may: a test compares them with Hydra's own parser."""

_NAME = r"(\+{0,2}(?:run|sweep)\.(?:name|root|group|label))"
_NAMES = re.compile(_NAME + r"=([\d_.e+-]+|true|false|nan|inf)", re.IGNORECASE)
_HOME = re.compile(r"([\w.+]+)=(~(?:/[^,'\"]*)?)")
_TILDE = re.compile(r"~(?:/|$)")
_PLAIN = re.compile(r"[\w./+:@%-]+", re.ASCII)


def as_meant(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra has to get them: flags first, and quoted what it would misread.

    A chosen `sweep=` option means several runs, with or without -m: Hydra takes the mode from the command
    line or the primary config only. A name is text: as a number, 2026_11_30 would be read as 20261130. And
    a shell leaves the ~ of `run.root=~/runs` alone.
    """
    given = []
    for argument in arguments:
        text = _NAMES.fullmatch(argument) or _HOME.fullmatch(argument)
        given.append(f"{text[1]}={quoted(text[2])}" if text else argument)
        if re.fullmatch(r"sweep=(?!null$).+", argument) and not {"-m", "--multirun"} & {*arguments}:
            given.append("hydra.mode=MULTIRUN")
    return flags_first(given)


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Move flags, with their values, before the settings; between them Hydra takes none."""
    flags: list[str] = []
    settings: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        (flags if argument.startswith("-") else settings).append(argument)
        if rest and (argument in VALUED or (argument in INFO and rest[0] in TOPICS)):
            flags.append(rest.pop(0))
    return [*flags, *settings]


def home_paths(value: Any) -> Any:
    """Return config values with the ~ of every path that begins with it replaced."""
    if isinstance(value, dict):
        return {key: home_paths(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [home_paths(entry) for entry in value]
    return os.path.expanduser(value) if isinstance(value, str) and _TILDE.match(value) else value


def quoted(value: str) -> str:
    """Return text as a value that Hydra's override grammar reads back unchanged."""
    # A backslash escapes only before a quote; anywhere else it is itself.
    escaped = re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), value)
    return f"'{escaped}'"


def to_type(key: str, value: str) -> str:
    """Return a setting as a person has to type it in a shell."""
    if _PLAIN.fullmatch(value) and value.lower() != "null":
        return f"{key}={value}"
    text = f"{key}={quoted(value)}"
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'
