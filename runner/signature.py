"""Read a constructor's schema from its source, without importing it.

A config node names a `_target_`; the target's annotated signature says what the node may hold.
Reading it with `ast` keeps torch out of the way of `--help`, `--cfg job` and every config error.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import keyword
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import annotated_types

_NAMES: dict[str, Any] = {
    **{n: getattr(typing, n) for n in ("Any", "Literal", "Annotated", "Optional", "Union")},
    **{n: getattr(annotated_types, n) for n in ("Ge", "Gt", "Le", "Lt", "MinLen", "MaxLen", "MultipleOf")},
    "Sequence": Sequence,
    "Mapping": Mapping,
    "Callable": Callable,
    "Path": Path,
    "typing": typing,
    "annotated_types": annotated_types,
}


@dataclass(frozen=True)
class Parameter:
    """One argument of a target; `annotation` is `Any` where the source does not say."""

    name: str
    annotation: Any
    required: bool


@dataclass(frozen=True)
class Signature:
    """What a target takes. `open` is the leading argument that callers pass later, if any."""

    parameters: dict[str, Parameter]
    takes_any: bool = False
    open: str | None = None


class TargetError(ValueError):
    """A `_target_` that cannot be used; the message says why."""


def config_name(name: str) -> str:
    """Return the key under which a parameter appears in YAML (`async_` is written `async`)."""
    stem = name.removesuffix("_")
    return stem if keyword.iskeyword(stem) else name


@lru_cache(maxsize=256)
def signature_of(target: str) -> Signature:
    """Return the schema of `package.module.Name`.

    Raises:
        TargetError: the module or the name does not exist, or is not a class or function.
    """
    module, _, name = target.rpartition(".")
    source = _source(module) if module else None
    if source is None:
        if module:
            return _from_import(module, name)
        raise TargetError(f"'{target}' is not of the form package.module.Name")
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _from_arguments(node.args, tree, skip_first=False)
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _from_class(node, tree) or _from_import(module, name)
    if module.split(".")[0] == "runner":
        raise TargetError(f"'{module}' defines no class or function '{name}'{_close(name, tree)}")
    return _from_import(module, name)


def _source(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        spec = None
    if spec is None:
        raise TargetError(f"there is no module '{module}'")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin).read_text(encoding="utf-8")


def _close(name: str, tree: ast.Module) -> str:
    return _closest(name, [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)])


def _closest(name: str, names: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _from_class(node: ast.ClassDef, tree: ast.Module) -> Signature | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _from_arguments(item.args, tree, skip_first=True)
    fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
    marks = [ast.unparse(d).split("(")[0].rsplit(".", 1)[-1] for d in node.decorator_list]
    bases = [ast.unparse(b).rsplit(".", 1)[-1] for b in node.bases]
    if "dataclass" not in marks and "NamedTuple" not in bases:
        return Signature({}) if not node.bases else None
    found = {}
    for item in fields:
        assert isinstance(item.target, ast.Name)
        if item.value is None or "init=False" not in ast.unparse(item.value):
            name = item.target.id
            found[name] = Parameter(name, _annotation(item.annotation, tree), item.value is None)
    return Signature(found)


def _from_arguments(args: ast.arguments, tree: ast.Module, *, skip_first: bool) -> Signature:
    found: dict[str, Parameter] = {}
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    pairs = list(zip(positional, [*defaults, *args.defaults], strict=True))
    pairs = pairs[1:] if skip_first else pairs
    leading = None
    if not skip_first and pairs and pairs[0][1] is None:
        leading = pairs[0][0].arg
        pairs = pairs[1:]
    for arg, default in [*pairs, *zip(args.kwonlyargs, args.kw_defaults, strict=True)]:
        found[arg.arg] = Parameter(arg.arg, _annotation(arg.annotation, tree), default is None)
    return Signature(found, takes_any=args.kwarg is not None, open=leading)


def _annotation(node: ast.expr | None, tree: ast.Module) -> Any:
    if node is None:
        return Any
    names = _Names(tree)
    try:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        return eval(compile(ast.Expression(node), "<annotation>", "eval"), {"__builtins__": {}}, names)
    except Exception:
        return Any


class _Names(dict[str, Any]):
    """Resolve the few names that annotations use, and aliases defined at the module's top level."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(_NAMES)
        self.update({t.__name__: t for t in (int, float, bool, str, bytes, list, tuple, dict, set)})
        self._tree = tree

    def __missing__(self, name: str) -> Any:
        for node in self._tree.body:
            if isinstance(node, ast.Assign) and any(_is_name(t, name) for t in node.targets):
                return _annotation(node.value, self._tree)
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.module == "runner.api":
                        return Any
        raise KeyError(name)


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _from_import(module: str, name: str) -> Signature:
    try:
        package = importlib.import_module(module)
        if not hasattr(package, name):
            raise TargetError(f"'{module}' has no '{name}'{_closest(name, dir(package))}")
        found = getattr(package, name)
        signature = inspect.signature(found)
    except TargetError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise TargetError(f"cannot use '{module}.{name}': {error}") from error
    hints = _hints(found)
    parameters, takes_any, leading = {}, False, None
    for i, p in enumerate(_parameters(signature)):
        if p.kind is p.VAR_KEYWORD:
            takes_any = True
        elif p.kind is not p.VAR_POSITIONAL:
            if (
                i == 0
                and not inspect.isclass(found)
                and p.default is p.empty
                and p.kind is not p.KEYWORD_ONLY
            ):
                leading = p.name
                continue
            parameters[p.name] = Parameter(p.name, hints.get(p.name, Any), p.default is p.empty)
    return Signature(parameters, takes_any, leading)


def _parameters(signature: inspect.Signature) -> Iterator[inspect.Parameter]:
    return iter(signature.parameters.values())


def _hints(found: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(found.__init__ if inspect.isclass(found) else found, include_extras=True)
    except Exception:
        return {}
