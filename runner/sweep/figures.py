"""Draw a sweep: validation loss over what was swept, and the cells' curves over each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.history import History
from runner.plot import COLOURS, STYLE, overlay
from runner.sweep.naming import short_names, show
from runner.sweep.rows import SEEDS, Row, is_number, keys_of, numeric_keys

_CURVES = 24  # more than this many lines over each other tell nothing
_BAD = "#d1d5db"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write one picture of a sweep; `rows` best first."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 10), dpi=130, layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=[1.25, 1, 1])
        _draw_values(figure, figure.add_subplot(grid[0, 0]), rows)
        curves = [(row.history, row.label) for row in rows if row.history][:_CURVES]
        rate = figure.add_subplot(grid[0, 1])
        _curves(rate, curves, metric="train/lr", title="learning rate")
        rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        rate.set_xlabel("step")
        told = False
        for line, metric, title in (
            (1, "val/loss", "validation loss"),
            (2, "train/loss", "training loss, smoothed"),
        ):
            axes = figure.add_subplot(grid[line, :])
            _curves(axes, curves, metric=metric, title=title)
            axes.set_ylabel("nats per token")
            if not told and axes.get_legend_handles_labels()[0]:  # without validation the second has it
                told = bool(axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8))
        axes.set_xlabel("step")
        figure.savefig(path)


def _curves(axes: Any, curves: Sequence[tuple[History, str]], *, metric: str, title: str) -> None:
    overlay(axes, [h for h, _ in curves], metric=metric, title=title, labels=[name for _, name in curves])


def _draw_values(figure: Any, axes: Any, rows: Sequence[Row]) -> None:
    """Draw the final losses over the swept values, in the form that fits them."""
    numeric = numeric_keys(rows)
    if len(numeric) >= 2 and is_grid(rows, numeric[0], numeric[1]):
        _heatmap(figure, axes, rows, numeric[0], numeric[1])
    elif len(numeric) >= 2:
        _scatter(figure, axes, rows, numeric[0], numeric[1])
    elif len(numeric) == 1:
        _line(axes, rows, numeric[0])
    else:
        _dots(axes, rows)


def is_grid(rows: Sequence[Row], down: str, across: str) -> bool:
    """Whether enough of the plane of two keys is filled for a heatmap."""
    pairs = {(row.values[down], row.values[across]) for row in rows}
    places = len({a for a, _ in pairs}) * len({b for _, b in pairs})
    return len(pairs) >= 0.5 * places


def table(rows: Sequence[Row], down: str, across: str) -> tuple[list[Any], list[Any], Any]:
    """Return the values of two keys and the mean loss at each pair: inf diverged, nan nothing there."""
    ys = sorted({row.values[down] for row in rows if is_number(row.values[down])})
    xs = sorted({row.values[across] for row in rows if is_number(row.values[across])})
    means = np.full((len(ys), len(xs)), math.nan)
    for i, y in enumerate(ys):
        for j, x in enumerate(xs):
            losses = [r.val_loss for r in rows if r.values[down] == y and r.values[across] == x]
            finite = [loss for loss in losses if math.isfinite(loss)]
            bad = math.inf if any(math.isinf(loss) for loss in losses) else math.nan
            means[i, j] = sum(finite) / len(finite) if finite else bad
    return ys, xs, means


def _heatmap(figure: Any, axes: Any, rows: Sequence[Row], down: str, across: str) -> None:
    import matplotlib as mpl

    ys, xs, means = table(rows, down, across)
    finite = np.where(np.isfinite(means), means, np.nan)
    colours = mpl.colormaps["viridis"].with_extremes(bad=_BAD)
    # A few bad cells do not wash out the differences among the good.
    known = finite[np.isfinite(finite)]
    low, top = (float(known.min()), float(np.percentile(known, 90))) if len(known) else (0.0, 1.0)
    picture = axes.imshow(finite, cmap=colours, aspect="auto", vmin=low, vmax=max(top, low + 1e-9))
    names = short_names(keys_of(rows))
    axes.set_xticks(range(len(xs)), [show(x) for x in xs], rotation=0 if len(xs) <= 7 else 60)
    axes.set_yticks(range(len(ys)), [show(y) for y in ys])
    axes.set_xlabel(names[across])
    axes.set_ylabel(names[down])
    axes.set_title("final validation loss, best outlined")
    for spine in axes.spines.values():
        spine.set_visible(False)
    if means.size <= 100:
        _numbers(axes, means, picture)
    if len(known):
        i, j = np.unravel_index(np.nanargmin(finite), finite.shape)
        box = mpl.patches.Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor="#ea580c", linewidth=2.5)
        axes.add_patch(box)
    figure.colorbar(
        picture, ax=axes, shrink=0.9, extend="max" if len(known) and known.max() > top else "neither"
    )


def _numbers(axes: Any, means: Any, picture: Any) -> None:
    """Write each loss into its square, in the colour that can be read there."""
    for (i, j), value in np.ndenumerate(means):
        if math.isnan(value):
            continue
        text = "diverged" if math.isinf(value) else f"{value:.3f}"
        red, green, blue, _ = (
            picture.cmap(picture.norm(value)) if math.isfinite(value) else (0.8, 0.8, 0.8, 1)
        )
        bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.55
        axes.text(j, i, text, ha="center", va="center", fontsize=9, color="#111827" if bright else "white")


def _scatter(figure: Any, axes: Any, rows: Sequence[Row], down: str, across: str) -> None:
    shown = [row for row in rows if is_number(row.values[down]) and is_number(row.values[across])]
    good = [row for row in shown if math.isfinite(row.val_loss)]
    bad = [row for row in shown if not math.isfinite(row.val_loss)]
    names = short_names(keys_of(rows))
    xs, ys = ([row.values[key] for row in good] for key in (across, down))
    losses = [row.val_loss for row in good]
    if good:
        top = float(np.percentile(losses, 90))
        points = axes.scatter(
            xs, ys, c=losses, cmap="viridis", s=70, vmax=max(top, min(losses) + 1e-9), zorder=3
        )
        figure.colorbar(points, ax=axes, shrink=0.9)
        axes.scatter([xs[0]], [ys[0]], s=190, facecolors="none", edgecolors="#ea580c", linewidths=2)
    axes.scatter([r.values[across] for r in bad], [r.values[down] for r in bad], marker="x", color="#9ca3af")
    _scale(axes.set_xscale, [row.values[across] for row in shown])
    _scale(axes.set_yscale, [row.values[down] for row in shown])
    axes.set_xlabel(names[across])
    axes.set_ylabel(names[down])
    axes.set_title("final validation loss, best circled")
    axes.grid(visible=True)


def _line(axes: Any, rows: Sequence[Row], key: str) -> None:
    """Draw the loss over one number: a line for each setting of the rest, a bar for the seeds' spread."""
    names = short_names(keys_of(rows))
    rest = [k for k in keys_of(rows) if k != key and k not in SEEDS]
    groups: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if math.isfinite(row.val_loss) and is_number(row.values[key]):
            about = " ".join(f"{names[k]}={show(row.values[k])}" for k in rest)
            groups.setdefault(about, {}).setdefault(float(row.values[key]), []).append(row.val_loss)
    for number, (about, points) in enumerate(sorted(groups.items())):
        xs = sorted(points)
        means = [sum(points[x]) / len(points[x]) for x in xs]
        ends = [[m - min(points[x]) for x, m in zip(xs, means, strict=True)]]
        ends.append([max(points[x]) - m for x, m in zip(xs, means, strict=True)])
        colour = COLOURS[number % len(COLOURS)]
        axes.errorbar(xs, means, yerr=ends, marker="o", color=colour, capsize=3, label=about or None)
    _scale(axes.set_xscale, [row.values[key] for row in rows if is_number(row.values[key])])
    axes.set_xlabel(names[key])
    axes.set_ylabel("nats per token")
    axes.set_title("final validation loss")
    axes.grid(visible=True)
    if len(groups) > 1:
        axes.legend(fontsize=8)


def _dots(axes: Any, rows: Sequence[Row]) -> None:
    """Draw one line of dots for each setting, best on top; its seeds share a line."""
    names = short_names(keys_of(rows))
    rest = [k for k in keys_of(rows) if k not in SEEDS]
    groups: dict[str, list[float]] = {}
    for row in rows:
        about = " ".join(f"{names[k]}={show(row.values[k])}" for k in rest) or "all"
        groups.setdefault(about, []).append(row.val_loss)
    for place, losses in enumerate(groups.values()):
        finite = [loss for loss in losses if math.isfinite(loss)]
        axes.scatter(finite, [place] * len(finite), color=COLOURS[place % len(COLOURS)], s=45, zorder=3)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlabel("nats per token")
    axes.set_title("final validation loss")
    axes.grid(visible=True)


def _scale(set_scale: Any, values: Sequence[float]) -> None:
    if values and min(values) > 0 and max(values) / min(values) >= 20:
        set_scale("log")
