"""`python -m runner`: compose, check, launch. One clear line per mistake, and nothing created for it.

Exit codes: 0 done; 1 the run failed or diverged; 2 the command is wrong; 124 the watchdog ended a hung
run; 130 / 143 / 129 / 138 / 140 stopped by SIGINT / SIGTERM / SIGHUP / SIGUSR1 / SIGUSR2 after saving,
or before there was anything to save.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from runner import CONF, __version__
from runner.arguments import as_meant, home_paths
from runner.streams import settle_streams

if TYPE_CHECKING:
    from runner.launch import Outcome
    from runner.ranks import Leader, Place


class ConfigError(ValueError):
    """A command that cannot run; `problems` are its one-line reasons."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def main() -> None:
    """Run the command line and leave with its exit code."""
    settle_streams()
    # Imports make only what stays: searching it for garbage takes an eighth of the start-up.
    gc.disable()
    try:
        sys.argv = [sys.argv[0], *as_meant(sys.argv[1:])]
        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written and closed by now; tearing torch down would only cost half a second.
    os._exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Compose, check and launch what `arguments` ask for; return the exit code."""
    if "--version" in arguments or list(arguments) == ["-V"]:
        print(f"runner {__version__}")
        return 0
    if list(arguments) in (["--help"], ["-h"]):
        from runner.usage import usage

        print(usage())
        return 0
    from runner.home import settle_home
    from runner.ranks import Leader, placed
    from runner.stop import StartUp

    try:
        os.getcwd()
    except FileNotFoundError:
        return _refuse(["the folder that this command was given in is gone; go to one that is there"])
    try:
        place = placed()
    except ValueError as error:
        return _refuse([str(error)])
    settle_home(tell=place is None or place.rank == 0)
    if place is not None and place.rank > 0:
        return _follow(place)
    with StartUp():
        return _lead(arguments, leader=Leader(place) if place is not None else None)


def _lead(arguments: Sequence[str], *, leader: Leader | None) -> int:
    from runner.stop import Interrupted

    try:
        code = _run(arguments, leader=leader)
    except Interrupted as error:
        print(f"runner: {error}", file=sys.stderr)
        code = error.code
    if leader is None:
        return code
    try:
        leader.dismiss(code)
    except ValueError as error:
        return _refuse([str(error)])
    return code


def _run(arguments: Sequence[str], *, leader: Leader | None) -> int:
    from runner.explain import explain, wrong_flag
    from runner.stop import heed, interruption
    from runner.sweep.cells import CellError
    from runner.unread import unread

    if leader is not None and {"-m", "--multirun"} & set(arguments):
        return _refuse(["-m: a sweep starts its own processes; run it without torchrun or srun"])
    if wrong := wrong_flag(arguments):
        return _refuse([wrong])
    if useless := unread(arguments):
        return _refuse(useless)
    asked = "HYDRA_FULL_ERROR" in os.environ
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    outcomes: list[Outcome | Exception] = []
    try:
        _hydra_app(outcomes, restore_env=not asked, leader=leader)()
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 1 if leave.code else 0
    except ConfigError as error:
        return _refuse(error.problems)
    except CellError:
        return 1
    except Exception as error:
        if (came := interruption()) is not None:
            raise came from None
        lines = explain(error, arguments)
        return _settle(error) if lines is None else _refuse(lines)
    heed()
    codes = [_settle(outcome) for outcome in outcomes]
    return max(codes, default=0)


def _settle(outcome: Outcome | Exception) -> int:
    from runner.fault import fault_line, stack
    from runner.launch import RankError

    if isinstance(outcome, ConfigError):
        return _refuse(outcome.problems)
    if isinstance(outcome, RankError):
        print(f"{outcome.trace}runner: error: {outcome}", file=sys.stderr)
        return outcome.code
    if isinstance(outcome, Exception):
        print(f"{stack(outcome)}runner: error: {fault_line(outcome)}", file=sys.stderr)
        return 1
    return outcome.code


def _refuse(problems: Sequence[str]) -> int:
    for line in problems:
        print(f"runner: error: {line}", file=sys.stderr)
    return 2


def _follow(place: Place) -> int:
    """Be one of the ranks that another program started; only what rank 0 cannot say is said here."""
    from runner.launch import follow

    try:
        outcome = follow(place)
    except ValueError as error:
        return _refuse(error.problems if isinstance(error, ConfigError) else [str(error)])
    except Exception as error:
        return _settle(error)
    return outcome if isinstance(outcome, int) else outcome.code


def _hydra_app(outcomes: list[Outcome | Exception], *, restore_env: bool, leader: Leader | None) -> Any:
    import hydra

    from runner.sweep.plugin import register

    # Hydra 1.4 warns about a version base; 1.3 needs it.
    base = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
    register()

    def app(cfg: Any) -> float | None:
        if restore_env:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        try:
            outcome = start(cfg, leader=leader)
        except Exception as error:
            # Kept, not raised: Hydra would print its own text about the failed job.
            outcomes.append(error)
            return None
        outcomes.append(outcome)
        return outcome.val_loss

    # A sweep's launcher never calls the app; this is where it leaves what the command came to.
    app.outcomes = outcomes  # type: ignore[attr-defined]
    return hydra.main(config_path=str(CONF), config_name="config", **base)(app)


def start(cfg: Any, *, leader: Leader | None = None) -> Outcome:
    """Check one composed configuration and run it.

    Raises:
        ConfigError: with every problem found; nothing was created then.
        Interrupted: a signal came before anything was trained.
    """
    from runner.launch import launch
    from runner.stop import heed

    heed()
    return launch(resolve(cfg), leader=leader, spare=True)


def resolve(cfg: Any) -> dict[str, Any]:
    """Return the composed configuration as checked plain containers.

    Raises:
        ConfigError: with every problem found.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from runner.config import check, check_node
    from runner.explain import explain
    from runner.rules import cross_check

    try:
        config = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            _originals(list(_unresolved(cfg)), cfg) or explain(error) or [str(error)]
        ) from error
    assert isinstance(config, dict)
    plain = {str(key): home_paths(value) for key, value in config.items() if key != "hydra"}
    problems = [*check(plain), *check_node(plain.pop("sweep", {}), "sweep")]
    wrong = {re.split(r"[.:]", line)[0] for line in problems}
    problems = [*_originals(problems, cfg), *cross_check(plain, wrong=wrong)]
    if problems:
        raise ConfigError(problems)
    return plain


def _unresolved(node: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each value whose interpolation or resolver fails."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    for key in node:
        where = f"{path}.{key}" if path else str(key)
        try:
            value = node[key]
        except MissingMandatoryValue:
            yield f"{where}: is required, give it on the command line ({where}=...)"
            continue
        except OmegaConfBaseException as error:
            yield f"{where}: {str(error).splitlines()[0]} (check the ${{...}} in its value)"
            continue
        if OmegaConf.is_dict(value) and where != "hydra":
            yield from _unresolved(value, where)


def _originals(problems: list[str], cfg: Any) -> list[str]:
    """Drop the lines of values that only repeat another one (`${train.steps}`) which has a line itself."""
    from omegaconf import OmegaConf

    paths = {line.split(":")[0] for line in problems}

    def repeats(line: str) -> bool:
        path = line.split(":")[0]
        group, _, key = path.rpartition(".")
        node: Any = OmegaConf.select(cfg, group) if group else None
        if not OmegaConf.is_dict(node) or key not in node or not OmegaConf.is_interpolation(node, key):
            return False
        raw = OmegaConf.to_container(node, resolve=False)
        assert isinstance(raw, dict)
        return str(raw[key]).strip("${}") in paths

    return [line for line in problems if not repeats(line)]
