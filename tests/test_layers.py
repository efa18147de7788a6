"""Dependencies point down only, and the hot path reads no device value."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOT = ("train", "update", "outlier", "clip", "cuda_graphs", "zscore_device", "triton_kernels", "triton_guard")
READS = {"item", "tolist", "cpu", "numpy"}

# What each layer may import of this package; a layer may always import itself.
CONTRACT = {"runner.api"}
PARTS = {
    "runner.scheduler",
    "runner.clip",
    "runner.outlier",
    "runner.rng",
    "runner.meter",
    "runner.flops",
    "runner.evaluate",
    "runner.norm",
    "runner.model",
    "runner.optimizer",
    "runner.data",
    "runner.parallel",
    "runner.checkpoint",
}
LOOP = {"runner.train", "runner.update", "runner.readback"}
HYDRA_ALLOWED = {"runner/cli.py", "runner/config.py", "runner/explain.py", "runner/schedule.py"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, *, checked_only: bool = True) -> set[str]:
    """Return the modules that a file imports, leaving out what only type checkers see."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if checked_only and id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def of_package(names: set[str]) -> set[str]:
    return {n for n in names if n.split(".")[0] == "runner"}


@pytest.mark.parametrize("name", HOT)
def test_the_hot_path_reads_nothing_from_the_device(name: str) -> None:
    tree = ast.parse((ROOT / "runner" / f"{name}.py").read_text())
    calls = {
        n.func.attr for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    assert not calls & READS


def test_the_contract_imports_nothing_of_the_package() -> None:
    assert all(n.startswith("runner.events") for n in of_package(imports(ROOT / "runner" / "api.py")))
    assert not of_package(imports(ROOT / "runner" / "events.py"))


@pytest.mark.parametrize("path", modules("plugins"), ids=str)
def test_plugins_know_only_the_contract(path: Path) -> None:
    own = {n for n in imports(path) if n.startswith("runner.plugins")}
    extra = {n for n in of_package(imports(path)) - own if not n.startswith("runner.api")}
    assert extra <= {"runner"}


@pytest.mark.parametrize("name", sorted(n.split(".")[1] for n in LOOP))
def test_the_loop_knows_the_contract_and_itself(name: str) -> None:
    names = of_package(imports(ROOT / "runner" / f"{name}.py"))
    assert all(n.startswith("runner.api") or any(n.startswith(m) for m in LOOP) for n in names - {"runner"})


def test_parts_know_neither_the_loop_nor_the_composition() -> None:
    above = LOOP | {"runner.session", "runner.opening", "runner.job", "runner.launch", "runner.cli"}
    above |= {"runner.config"}
    for part in PARTS:
        stem = ROOT / Path(*part.split("."))
        files = [stem.with_suffix(".py")] if stem.with_suffix(".py").is_file() else sorted(stem.rglob("*.py"))
        assert files, f"{part} has no files"
        for path in files:
            bad = {n for n in imports(path) if any(n == a or n.startswith(f"{a}.") for a in above)}
            assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


def test_only_the_front_door_knows_hydra() -> None:
    for path in modules("runner"):
        name = path.relative_to(ROOT).as_posix()
        if name in HYDRA_ALLOWED or name.startswith("runner/sweep/"):
            continue
        bad = {n for n in imports(path) if n.split(".")[0] in ("hydra", "omegaconf")}
        assert not bad, f"{name} imports {bad}"


@pytest.mark.parametrize("path", [*modules("runner"), *modules("plugins")], ids=str)
def test_modules_and_functions_keep_their_size(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"


def test_no_module_keeps_state() -> None:
    """A `global` statement is module-level state; two runs in one process must not meet."""
    for path in [*modules("runner"), *modules("plugins")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Global)], path
