"""Draw the learning rate of a run: `python -m runner.schedule scheduler=wsd train.steps=1000 [out=lr.png]`.

Takes the overrides of the run itself and composes the same configuration, so the curve is the one that
the run will follow.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner import CONF
from runner.arguments import as_meant, quoted
from runner.command import HELP, keyed, leave, told
from runner.config import build, check_node, trusted
from runner.explain import explain
from runner.home import settle_home
from runner.rules import tokens_per_step
from runner.scheduler import curve, decay_start, scaled
from runner.unread import unread

if TYPE_CHECKING:
    from runner.api import Scheduler

WIDTH, HEIGHT, LABEL = 80, 12, 10  # of the drawing in the terminal, and of the numbers on its left
POINTS = 2000  # of the curve in the image, which is as wide
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Plan(NamedTuple):
    """A composed schedule: the config node, steps with their learning rates, and steps worth naming.

    `steps` are all of a short run, else steps at equal distances and the named ones, in order.
    """

    node: dict[str, Any]
    steps: list[int]
    lr: list[float]
    marks: dict[str, int]

    def rate(self, step: int) -> float:
        """Return the learning rate of one of `steps`."""
        return self.lr[self.steps.index(step)]


def compose_plan(overrides: list[str], *, conf: Path = CONF) -> Plan:
    """Compose the run's configuration and evaluate its schedule."""
    import hydra
    from hydra import compose, initialize_config_dir  # 0.2 s that importing this module need not cost
    from omegaconf import OmegaConf

    base = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
    try:
        with initialize_config_dir(config_dir=str(conf), **base):
            config = compose("config", overrides=overrides)
        node = OmegaConf.to_container(config.scheduler, resolve=True)
        train = OmegaConf.to_container(config.train, resolve=True)
        run = OmegaConf.to_container(config.get("run", OmegaConf.create()), resolve=True)
    except Exception as error:
        lines = explain(error, overrides)
        if lines is None:
            raise
        raise ValueError("\n".join(lines)) from None
    assert isinstance(node, dict)
    assert isinstance(train, dict)
    trust, steps = trusted({"run": run}), train["steps"]
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"train.steps={steps} must be a whole number of at least 1 to draw a schedule")
    if problems := list(check_node({str(key): value for key, value in train.items()}, "train", trust)):
        raise ValueError("\n".join(problems))
    settings = {str(key): value for key, value in node.items()}
    tokens = tokens_per_step(config.train, world=config.parallel.get("processes") or 1)
    bound = partial(
        scaled, schedule=_bind(settings, tokens=tokens, trust=trust), factor=_factor(config, tokens=tokens)
    )
    marks = _marks(settings, steps=steps, tokens=tokens)
    at = sorted({*_spread(steps, count=POINTS), *_spread(steps, count=WIDTH - LABEL), *marks.values()})
    return Plan(settings, at, curve(bound, steps, at=at), marks)


def _spread(steps: int, *, count: int) -> list[int]:
    """Return at most `count` steps of a run at equal distances, the first and the last among them."""
    count = min(count, steps)
    return [round(i * (steps - 1) / max(count - 1, 1)) for i in range(count)]


def _factor(config: Any, *, tokens: int) -> float:
    """Return what `optimizer.lr_scaling` multiplies the schedule by."""
    if config.optimizer.get("lr_scaling", "none") == "none":
        return 1.0
    from runner.optimizer.options import NAMES, Options  # imports torch

    options = Options(**{str(name): value for name, value in config.optimizer.items() if name in NAMES})
    return options.lr_factor(tokens)


def draw(plan: Plan, *, height: int = HEIGHT) -> str:
    """Draw learning rates over steps as text of `height` rows, 0 at the bottom and the highest at the top."""
    last = plan.steps[-1]
    columns = _spread(last + 1, count=WIDTH - LABEL)
    top = max(plan.lr) or 1.0
    levels = [math.ceil(plan.rate(step) / top * height * 8) for step in columns]
    rows = []
    for row in reversed(range(height)):
        name = f"{top:.2e}" if row == height - 1 else "0" if row == 0 else ""
        bars = "".join(_BLOCKS[min(max(level - row * 8, 0), 8)] for level in levels)
        rows.append(f"{name:>{LABEL - 1}} {bars}".rstrip())
    rows.append(" " * LABEL + "0" + (str(last).rjust(len(columns) - 1) if last else ""))
    return "\n".join(rows)


def save_png(plan: Plan, path: Path) -> None:
    """Write the curve, with its named steps, as an image."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(plan.steps, plan.lr, color="tab:blue")
    for name, step in plan.marks.items():
        axes.plot(step, plan.rate(step), "o", color="tab:blue", markersize=4)
        axes.annotate(name, (step, plan.rate(step)), textcoords="offset points", xytext=(4, 6), fontsize=8)
    axes.set_xlabel("step")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.set_title(plan.node["_target_"].rpartition(".")[2])
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None, *, conf: Path = CONF) -> int:
    """Draw from the command line; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if HELP & set(arguments):
        print(__doc__)
        return 0
    settle_home()
    try:
        out = _image([a for a in arguments if a.startswith("out=")])
        settings = [a for a in arguments if not a.startswith("out=")]
        if useless := unread(settings):
            raise ValueError("\n".join(useless))
        plan = compose_plan(_overrides(settings), conf=conf)
        _save(plan, out)
    except (ValueError, OSError) as error:
        return told("runner.schedule", error)
    print(_printable(draw(plan)))
    for name, step in plan.marks.items():
        print(f"{name:>12}  step {step:<8} lr {plan.rate(step):.9g}")
    print(f"{'image':>12}  {out}")
    return 0


def _printable(drawing: str) -> str:
    """Return a drawing as standard output can show it: with # where there are no block characters."""
    try:
        drawing.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return drawing.translate({ord(block): "#" for block in _BLOCKS[1:]})
    return drawing


def _save(plan: Plan, out: Path) -> None:
    try:
        save_png(plan, out)
    except OSError as error:
        raise ValueError(f"out={out}: {error.strerror or error}; name another file with out=") from None


def _image(arguments: Sequence[str]) -> Path:
    """Return the image's path; ValueError if `out=` names none that can be written."""
    from matplotlib.backend_bases import FigureCanvasBase

    found = keyed(arguments, known=["out"], paths=["out"])
    if found.problems:
        raise ValueError("\n".join(found.problems))
    out = Path(found.text("out") or "schedule.png")
    if out.is_dir():
        raise ValueError(f"out={out}: is a folder; name a file, as in out={out / 'schedule.png'}")
    if not out.suffix:
        return out.with_name(f"{out.name}.png")
    kinds = FigureCanvasBase.get_supported_filetypes()
    if out.suffix[1:].lower() not in kinds:
        raise ValueError(f"out={out}: no image is called {out.suffix}; use .{', .'.join(sorted(kinds))}")
    return out


def _overrides(arguments: Sequence[str]) -> list[str]:
    """Return a run's arguments as `compose` takes them; ValueError for flags that no single curve has."""
    overrides, rest = [], list(as_meant(arguments))
    while rest:
        argument = rest.pop(0)
        flag, equals, folder = argument.partition("=")
        if flag in ("-m", "--multirun"):
            raise ValueError(f"{argument}: a sweep has no one schedule; draw one of its cells")
        if flag not in ("--config-dir", "-cd"):
            overrides.append(argument)
            continue
        if not equals and not rest:
            raise ValueError(f"{flag}: needs a folder, as in {flag} my_conf")
        place = Path(folder if equals else rest.pop(0)).expanduser().absolute()
        if not place.is_dir():
            raise ValueError(f"{flag} {place}: no such folder")
        overrides.append(f"hydra.searchpath=[{quoted(f'file://{place}')}]")
    return overrides


def _bind(node: dict[str, Any], *, tokens: int, trust: tuple[str, ...]) -> Scheduler:
    problems = list(check_node(node, "scheduler", trust))
    if problems:
        raise ValueError("\n".join(problems))
    scheduler: Scheduler = build(node, trust=trust, tokens_per_step=tokens)
    return scheduler


def _marks(node: dict[str, Any], *, steps: int, tokens: int) -> dict[str, int]:
    marks = {"first": 0}
    warmup, decay = (_in_steps(node, name, tokens=tokens) for name in ("warmup", "decay"))
    warmup = warmup or 0
    if 0 < warmup <= steps:
        marks["warmup end"] = warmup - 1
    if "total_steps" in node:
        start = warmup
        if "decay_frac" in node:
            frac = node["decay_frac"]
            start = max(warmup, decay_start(node["total_steps"], decay_frac=frac, decay_steps=decay))
        if start < steps:
            marks["decay start"] = start
    marks["last"] = steps - 1
    return marks


def _in_steps(node: dict[str, Any], phase: str, *, tokens: int) -> int | None:
    """Return the length of a phase that may be given in tokens."""
    given = node.get(f"{phase}_tokens")
    steps: int | None = node.get(f"{phase}_steps") if given is None else -(-given // tokens)
    return steps


if __name__ == "__main__":
    leave("runner.schedule", main)
