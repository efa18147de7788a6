"""Check a composed configuration and build its parts: a config node is a constructor call."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from runner import fits
from runner.signature import Signature, TargetError, config_name, signature_of

SUPPLIED: Mapping[str, frozenset[str]] = {
    "train": frozenset({"world"}),
    "scheduler": frozenset({"tokens_per_step"}),
    "parallel": frozenset({"rank", "world", "device"}),
    "optimizer": frozenset({"segments", "rng", "params"}),
    "checkpoint": frozenset({"dir", "rank", "any_rank", "barrier"}),
    "meter": frozenset({"flops_per_token", "device_name", "dtype", "world"}),
}
"""Arguments that the program passes itself, by group; a configuration may not set them."""

OPTIONS: Mapping[str, str] = {"optimizer": "runner.optimizer.options.Options"}
"""Whose arguments every node of a group may also set; the program takes them out before it builds."""

GROUPS = (
    *("run", "train", "data", "model", "optimizer", "scheduler", "clip", "outlier", "precision", "parallel"),
    *("checkpoint", "evaluate", "logger", "meter", "debug"),
)
MULTIPLE = ("evaluate", "logger")
UNFIT: Mapping[str, str] = {
    "LBFGS": "it computes the loss several times per step, the loop once; choose optimizer=adamw, or another",
    "SparseAdam": "it takes sparse gradients, and here they are dense; choose optimizer=adamw, or another",
    "Muon": "it takes matrices only; choose optimizer=muon, which gives all others to AdamW",
}
"""Optimizers of torch.optim that cannot train a whole model step by step, and what to do."""
TRUSTED = ("runner", "torch.optim")

Config = dict[str, Any]


def check(config: Config) -> list[str]:
    """Return every problem of a resolved configuration, one line each, config path first."""
    problems = [f"{key}: {_no_group(key)}" for key in config if key not in GROUPS and key != "sweep"]
    trust = _trusted(config)
    for group in GROUPS:
        node = config.get(group)
        if group in MULTIPLE:
            problems += _check_many(node, group, trust)
        elif not isinstance(node, Mapping):
            problems.append(
                f"{group}: expected the settings of one option, got {fits.show(node)}{option_list(group)}"
            )
        else:
            problems += check_node(node, group, trust)
    return problems


def _no_group(key: str) -> str:
    if key == "experiment":  # a file without the directive puts its settings below its group's name
        return "its settings have no place here; begin its file with the line `# @package _global_`"
    return _unknown(key, GROUPS)


def _check_many(node: Any, group: str, trust: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(node, Mapping):
        yield f"{group}: expected named entries, got {fits.show(node)} (write {group}=none for none)"
        return
    for name, entry in node.items():
        if isinstance(entry, Mapping):
            yield from check_node(entry, f"{group}.{name}", trust)
        elif entry is not None:
            yield f"{group}.{name}: expected the settings of one {group} entry, got {fits.show(entry)}"


def option_names(group: str) -> list[str]:
    """Return the options that the packaged configuration has for a group."""
    from runner import CONF

    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


def option_list(group: str) -> str:
    """Return the end of an error line that names a group's options."""
    names = option_names(group)
    return f"; choose one of {', '.join(names)}" if names else ""


def elsewhere(group: str, key: str) -> str:
    """Return the end of a line about a key that its group's chosen option lacks and another one has."""
    from runner import CONF

    if group not in GROUPS or group in MULTIPLE:
        return ""
    mark = re.compile(rf"^{re.escape(key)}:", re.M)
    having = [
        name for name in option_names(group) if mark.search((CONF / group / f"{name}.yaml").read_text())
    ]
    return f" of the chosen {group}; {group}={' or '.join(having[:3])} has it" if having else ""


def check_node(node: Mapping[str, Any], path: str, trust: tuple[str, ...] = TRUSTED) -> Iterator[str]:
    """Yield the problems of one constructor call."""
    target = node.get("_target_")
    if not isinstance(target, str):
        yield f"{path}: needs a _target_ (the class or function to call)"
        return
    if not _allowed(target, trust):
        root = target.split(".")[0] or "PACKAGE"
        yield (
            f"{path}._target_: '{target}' is outside the trusted packages ({', '.join(trust)}); "
            f"add run.trust=[{root}] if you trust it"
        )
        return
    package, _, name = target.rpartition(".")
    if path == "optimizer" and package.startswith("torch.optim") and name in UNFIT:
        yield f"{path}._target_: {target} cannot train here: {UNFIT[name]}"
        return
    try:
        signature = signature_of(target)
    except TargetError as error:
        yield f"{path}._target_: {error}"
        return
    yield from _check_arguments(node, path, signature, trust)


def _check_arguments(
    node: Mapping[str, Any], path: str, signature: Signature, trust: tuple[str, ...]
) -> Iterator[str]:
    supplied = SUPPLIED.get(path, frozenset())
    known = {config_name(name): p for name, p in signature.parameters.items()}
    if path in OPTIONS:
        known = {**signature_of(OPTIONS[path]).parameters, **known}
    allowed = [name for name in known if name not in supplied]
    for key, value in node.items():
        if key == "_target_":
            continue
        if key in known and key not in supplied:
            yield from _check_value(value, f"{path}.{key}", known[key].annotation, trust)
        elif not signature.takes_any or key in supplied:
            yield f"{path}.{key}: {_no_argument(key, node, allowed, path)}"
    for name, parameter in known.items():
        if parameter.required and name not in node and name not in supplied:
            yield f"{path}.{name}: is required, give it on the command line ({path}.{name}=...)"


def _check_value(value: Any, path: str, annotation: Any, trust: tuple[str, ...]) -> Iterator[str]:
    if value == "???":
        yield f"{path}: is required, give it on the command line ({path}=...)"
    elif isinstance(value, Mapping) and "_target_" in value and not fits.is_plain(annotation):
        yield from check_node(value, path, trust)
    else:
        wrong = fits.problem(value, annotation)
        if wrong:
            yield f"{path}: {wrong}"


def _no_argument(key: str, node: Mapping[str, Any], allowed: Any, path: str) -> str:
    """Say what to do about a key that a target does not take; the option that it replaced may have had it."""
    target = str(node["_target_"])
    if (
        path != "optimizer"
        or target.startswith("runner.")
        or difflib.get_close_matches(key, list(allowed), n=1, cutoff=0.8)
    ):
        return _unknown(key, allowed, path)
    return f"{target} has no such option; leave it out with ~{path}.{key} (it has {', '.join(allowed)})"


def _unknown(key: str, allowed: Any, path: str = "") -> str:
    if others := elsewhere(path, key):
        return f"no such option{others}"
    near = difflib.get_close_matches(key, list(allowed), n=1, cutoff=0.5)
    prefix = f"{path}." if path else ""
    hint = (
        f" (did you mean {prefix}{near[0]}?)"
        if near
        else f"; there is {', '.join(allowed)}"
        if allowed
        else ""
    )
    return f"no such option{hint}"


def _trusted(config: Config) -> tuple[str, ...]:
    run = config.get("run")
    extra = run.get("trust") if isinstance(run, Mapping) else None
    return (*TRUSTED, *(str(p) for p in extra)) if isinstance(extra, list | tuple) else TRUSTED


def _allowed(target: str, trust: tuple[str, ...]) -> bool:
    return any(target.startswith(f"{package}.") for package in trust)


def build(node: Mapping[str, Any], *, trust: tuple[str, ...] = TRUSTED, **context: Any) -> Any:
    """Call a node's target; `context` fills the arguments that the node leaves out or null.

    A function whose leading argument is left open (a scheduler's `step`) comes back as a partial.

    Raises:
        TargetError: the target is not allowed or does not exist.
        ValueError: whatever the constructor says of its arguments.
    """
    target = str(node["_target_"])
    if not _allowed(target, trust):
        root = target.split(".")[0]
        raise TargetError(
            f"'{target}' is outside the trusted packages ({', '.join(trust)}); "
            f"if you trust it, runner.generate and runner.export take trust={root}"
        )
    signature = signature_of(target)
    arguments: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        value = node.get(config_name(name))
        if value is None and name in context:
            arguments[name] = context[name]
        elif config_name(name) in node:
            arguments[name] = _value(value, parameter.annotation, trust)
    if signature.takes_any:
        extra = set(node) - {config_name(n) for n in signature.parameters} - {"_target_"}
        arguments |= {key: node[key] for key in extra}
    module, _, name = target.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if signature.open and not inspect.isclass(found):
        return functools.partial(found, **arguments)
    return found(**arguments)


def _value(value: Any, annotation: Any, trust: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return build(value, trust=trust)
    return fits.convert(value, annotation)


def trusted(config: Config) -> tuple[str, ...]:
    """Return the package prefixes whose targets this configuration may call."""
    return _trusted(config)
