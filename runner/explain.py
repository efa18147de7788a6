"""Turn what Hydra, OmegaConf and YAML raise into one line each that a person can act on."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import traceback
from collections.abc import Sequence
from typing import Any

from runner.arguments import to_type
from runner.config import GROUPS, MULTIPLE, elsewhere, option_list, option_names

_COMPOSER = "hydra._internal.config_loader_impl"
RECIPES = ("experiment", "sweep")
"""Groups that are null unless one is chosen."""


def explain(error: BaseException, arguments: Sequence[str] = ()) -> list[str] | None:
    """Return the lines for a composition error, or None if it is not the user's to mend.

    `arguments` are the command's overrides, for errors that do not say which one is meant.
    """
    chain = _chain(error)
    for link in chain:
        if type(link).__name__ == "OverrideParseException":
            return [_override(str(getattr(link, "override", "")), str(link))]
        if "Config group override must be a string or a list" in str(link):
            return [_not_an_option(arguments)]
    for link in chain:
        lines = _translate(link)
        if lines:
            return lines
    return _uncomposed(error)


def _uncomposed(error: BaseException) -> list[str] | None:
    """Return the line for whatever else went wrong while Hydra composed; None if it was not then."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(frame.f_globals.get("__name__") == _COMPOSER for frame in frames):
        return None
    seen = [v for frame in frames for v in frame.f_locals.values() if isinstance(v, str)]
    file = next((f"{text}: " for text in reversed(seen) if text.endswith((".yaml", ".yml"))), "")
    return [f"{file}{_one_line(error)} (it must be a YAML file with keys and values, in UTF-8)"]


def wrong_flag(arguments: Sequence[str]) -> str | None:
    """Return the line for a flag that does not exist or lacks its value, or None."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    known = {option for action in parser._actions for option in action.option_strings}
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and len(name) > 2 and not any(k.startswith(name) for k in known):
            return f"{argument}: no such flag; settings are written key=value (train.steps=1000), see --help"
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:  # argparse prints its usage and leaves
            parser.parse_args(list(arguments))
    except SystemExit:
        return f"{said.getvalue().strip().rpartition('error: ')[2]}; see --help"
    return None


def _not_an_option(arguments: Sequence[str]) -> str:
    for argument in arguments:
        group, _, value = argument.lstrip("+~").partition("=")
        if not group:
            return f"{argument!r}: a setting has a name, as in train.steps=1000"
        if group in RECIPES and value in ("null", "None"):
            return f"{group}: null is what it is anyway; leave {argument} out{option_list(group)}"
        if group in GROUPS and (value in ("null", "None") or not re.match(r"[A-Za-z_\[]", value)):
            return f"{group}: expected the name of an option, got {value or 'nothing'}{option_list(group)}"
    return "a config group was given something that is not the name of an option; see --help for the groups"


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in links:
        links.append(current)
        current = current.__cause__ or current.__context__
    # The innermost cause knows best where the mistake is.
    return links[::-1]


def _translate(error: BaseException) -> list[str] | None:
    from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException
    from yaml.error import MarkedYAMLError

    if isinstance(error, MarkedYAMLError):
        return [_yaml(error)]
    if isinstance(error, MissingConfigException):
        return [_missing(error)]
    if isinstance(error, OmegaConfBaseException):
        return [_omegaconf(error)]
    if isinstance(error, ConfigCompositionException | HydraException):
        return [_composition(str(error))]
    if isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError) and error.filename:
        return [f"{error.filename}: {error.strerror}"]
    return None


def _yaml(error: Any) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"{mark.name}:{mark.line + 1}:{mark.column + 1}: " if mark else ""
    return f"{place}{error.problem or 'cannot be read as YAML'} (mend the YAML at that place)"


def _missing(error: Any) -> str:
    path = str(error.missing_cfg_file or "")
    group, _, name = path.rpartition("/")
    options = list(error.options or option_names(group))
    if "primary config" in str(error):
        return (
            f"--config-name: there is no {path}.yaml; leave the flag out, or name its folder by --config-dir"
        )
    if not options or not group:
        return _one_line(error)
    near = difflib.get_close_matches(name, options, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{group}: no option '{name}'; choose one of {', '.join(options)}{hint}"


# What Hydra's override grammar takes without quotes, but for the lists and calls that have brackets.
_UNQUOTED = re.compile(r"[\w./\\+$%*@?|-]*", re.ASCII)


def _override(override: str, text: str) -> str:
    key, equals, value = override.partition("=")
    reason = _one_line(text)
    if not key.strip("+~"):
        return f"{override!r}: a setting has a name, as in train.steps=1000 (is a shell variable empty?)"
    if not equals:
        return f"{override}: not a setting; settings are written key=value (train.steps=1000), see --help"
    if value.count("${") > value.count("}"):
        return f"{key}: in {value!r} the ${{ is not closed; write a }} at its end"
    if not _UNQUOTED.fullmatch(value):
        plain = value.strip(" '\"")
        return (
            f"{key}: cannot read the value {value!r}; quote it inside the shell quotes: {to_type(key, plain)}"
        )
    return f"{override}: {reason}"


def _omegaconf(error: Any) -> str:
    key = str(getattr(error, "full_key", None) or getattr(error, "key", None) or "")
    text = str(getattr(error, "msg", None) or error).split("\n")[0]
    if type(error).__name__ in ("ConfigKeyError", "ConfigAttributeError"):
        near = _near(error, key)
        return f"{key}: no such option{near}"
    if "Cannot merge DictConfig with ListConfig" in text:  # which is which it does not say
        what = "a list and a mapping cannot stand for each other"
        return (
            f"{key}: {what}"
            if key
            else f"{what}; in a file, loggers are chosen by `override /logger: [llmc]`"
        )
    if "nterpolation" in type(error).__name__:
        return f"{key or 'a value'}: {text} (check the ${{...}} in its value)"
    return f"{key}: {text}" if key and key not in text else text


def _near(error: Any, key: str) -> str:
    """Suggest the closest sibling of an unknown key."""
    parent = getattr(error, "parent_node", None)
    prefix, _, last = key.rpartition(".")
    if prefix in MULTIPLE and last in option_names(prefix):
        return f" among the chosen ones; choose it with them: {prefix}=[...,{last}]"
    if prefix in ("sweep.search", "sweep.branches"):
        return f"; it needs sweep={'search' if prefix == 'sweep.search' else 'wsd_branches'}"
    if others := elsewhere(prefix, last):
        return others
    try:
        names = [str(name) for name in parent] if parent is not None else []
    except Exception:
        names = []
    near = difflib.get_close_matches(last, names, n=1, cutoff=0.5)
    deeper = [f"{n}.{last}" for n in names if _has(parent, n, last)] if not prefix else []
    if deeper:
        return f" (did you mean {' or '.join(deeper)}?)"
    if near:
        return f" (did you mean {prefix + '.' if prefix else ''}{near[0]}?)"
    return f"; there is {', '.join(n for n in names if n not in ('_target_', 'hydra'))}" if names else ""


def _has(parent: Any, group: str, key: str) -> bool:
    node: Any = parent._get_child(group) if group != "hydra" else None
    return hasattr(node, "keys") and not node._is_none() and key in node


_SWEEP = re.compile(r"Ambiguous value for argument '([^']*)'")


def _composition(text: str) -> str:
    ambiguous = _SWEEP.search(text)
    if ambiguous:
        key, _, value = ambiguous.group(1).partition("=")
        return (
            f"{key}: '{value}' is several values; add -m to sweep over them, "
            f"or write [{value}] for a list, or quote it for one text"
        )
    for pattern, line in _PREFIXED.items():
        if match := re.search(pattern, text):
            return line.format(*match.groups())
    return _one_line(text)


# What Hydra says of +, ++ and ~ in its own terms, and what a person has to type.
_PREFIXED = {
    r"An item is already at '([^']*)'": "{0}: is there already; write {0}=... without the +",
    r"Could not delete from config\. '([^']*)' does not exist": "~{0}: nothing of this name is there",
    r"Multiple values for ([^.\s]*)\.": "{0}: one is chosen already; write {0}=... without the +",
    r"force-add of config groups is not supported: '\+\+([^=']*)": "{0}: write {0}=... without the ++",
}


def _one_line(error: object) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return " ".join(lines[:3])
