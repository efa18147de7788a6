"""What a command says of itself: the help, without Hydra's half second, and a wrong argument's one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

import yaml

from runner import CONF


def usage() -> str:
    """Fill the help template of `config.yaml` with the groups that stand beside it."""
    settings = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["hydra"]["help"]
    options = (
        (folder.name, sorted(path.stem for path in folder.glob("*.yaml")))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and folder.name != "hydra"
    )
    groups = "\n".join(f"{group}: {', '.join(names)}" for group, names in options if names)
    text: str = settings["template"]
    text = text.replace("$APP_CONFIG_GROUPS", groups)
    for part in ("header", "footer"):
        text = text.replace(f"${{hydra.help.{part}}}", settings[part])
    return text


class Parser(argparse.ArgumentParser):
    """The standard library's parser, saying what is wrong in one line instead of repeating the usage."""

    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2."""
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: error: {message}; see --help\n")


def count(text: str) -> int:
    """Return a whole number of at least 1, as the `type` of an argument.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
