"""Draw the curves of one run, and several runs over each other; matplotlib is imported when needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.history import Curve, History

STYLE: Any = {
    "axes.edgecolor": "#c9ced6",
    "axes.labelcolor": "#3b4252",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": "#1f2530",
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "grid.color": "#e8ebef",
    "legend.frameon": False,
    "xtick.color": "#6b7280",
    "ytick.color": "#6b7280",
}
_TRAIN, _VAL, _LR, _NORM, _SKIP = "#2563eb", "#ea580c", "#059669", "#7c3aed", "#dc2626"
COLOURS = ("#2563eb", "#ea580c", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#ca8a04", "#db2777", "#4b5563")


def plot_run(history: History, path: str | Path) -> None:
    """Write a PNG of one run: losses, learning rate and gradient norm, with the skipped steps marked."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 7.2), dpi=140, layout="constrained")
        loss, lr, norm = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1.4])
        _draw_loss(loss, history)
        _draw_line(lr, history.curves.get("train/lr"), colour=_LR, title="learning rate")
        lr.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        _draw_line(
            norm, history.curves.get("train/grad_norm"), colour=_NORM, title="gradient norm before clipping"
        )
        _log_scale(norm)
        norm.set_xlabel("step")
        for axes in (loss, lr, norm):
            _mark_skips(axes, history)
        figure.savefig(path)


def plot_runs(histories: Sequence[History], path: str | Path, *, labels: Sequence[str]) -> None:
    """Write a PNG with the validation and training losses of several runs over each other."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 6.4), dpi=140, layout="constrained")
        val, train = figure.subplots(2, 1, sharex=True)
        for axes, metric, title in (
            (val, "val/loss", "validation loss"),
            (train, "train/loss", "training loss, smoothed"),
        ):
            overlay(axes, histories, metric=metric, title=title, labels=labels)
            axes.set_ylabel("nats per token")
        train.set_xlabel("step")
        if len(histories) <= 12:
            val.legend(loc="upper right")
        figure.savefig(path)


def overlay(
    axes: Any, histories: Sequence[History], *, metric: str, title: str, labels: Sequence[str]
) -> None:
    """Draw one metric of several runs into `axes`, each run in the colour of its place in the list."""
    curves = [_smoothed(history, metric) for history in histories]
    for number, (curve, label) in enumerate(zip(curves, labels, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        dash = ("-", "--", ":")[number // len(COLOURS) % 3]
        if curve is not None:
            marker = "o" if len(curve.steps) == 1 else ""
            axes.plot(*curve, color=colour, linestyle=dash, linewidth=1.6, marker=marker, label=label)
    axes.set_title(title + _zoom(axes, [curve for curve in curves if curve is not None]))
    axes.grid(visible=True)


def smooth(values: npt.NDArray[np.float64], *, window: int) -> npt.NDArray[np.float64]:
    """Return the centred moving average, cut short at both ends so that no value is made up.

    At the start it shrinks on both sides, as a steep curve would bend it otherwise.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    reach = np.minimum(window // 2, at)
    end = np.minimum(at + reach + 1, len(values))
    averaged: npt.NDArray[np.float64] = (sums[end] - sums[at - reach]) / (end - at + reach)
    return averaged


def _draw_loss(axes: Any, history: History) -> None:
    train, val = (_finite(history.curves.get(name)) for name in ("train/loss", "val/loss"))
    if train is not None:
        applied = _applied(train, history)
        window = _window(applied)
        if window > 1:
            averaged = smooth(applied.values, window=window)
            axes.plot(*train, color=_TRAIN, alpha=0.28, linewidth=0.8)
            axes.plot(applied.steps, averaged, color=_TRAIN, label=f"train, mean of {window}")
        else:
            axes.plot(*train, color=_TRAIN, label="train")
    if val is not None:
        marker = "o" if len(val.steps) <= 60 else ""
        label = f"validation, last {val.values[-1]:.4f}"
        axes.plot(*val, color=_VAL, linewidth=1.8, marker=marker, markersize=3.5, label=label)
    axes.set_title(f"{history.name}: loss")
    axes.set_ylabel("nats per token")
    axes.grid(visible=True)
    _limit(axes, [curve.values for curve in (train, val) if curve])
    if history.skipped:
        axes.plot([], [], color=_SKIP, linewidth=1.0, label=f"{len(history.skipped)} skipped")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right")


def _draw_line(axes: Any, curve: Curve | None, *, colour: str, title: str) -> None:
    finite = _finite(curve)
    if finite is not None:
        axes.plot(*finite, color=colour, linewidth=1.2)
    axes.set_title(title)
    axes.grid(visible=True)


def _smoothed(history: History, metric: str) -> Curve | None:
    """Return a curve ready to lay over others: training losses averaged, other metrics as they are."""
    finite = _finite(history.curves.get(metric))
    if finite is None or not metric.startswith("train/"):
        return finite
    applied = _applied(finite, history)
    return Curve(applied.steps, smooth(applied.values, window=_window(applied)))


def _applied(curve: Curve, history: History) -> Curve:
    """Leave out the skipped steps, whose losses would bend an average that no update followed."""
    kept = ~np.isin(curve.steps, list(history.skipped))
    return Curve(curve.steps[kept], curve.values[kept]) if kept.any() else curve


def _zoom(axes: Any, curves: Sequence[Curve]) -> str:
    """Cut the steep start off where it would hide how the runs differ; return the title's remark on it."""
    if not curves:
        return ""
    start = 0.1 * max(float(curve.steps[-1]) for curve in curves)
    late = [curve.values[curve.steps >= start] for curve in curves]
    if min(len(values) for values in late) < 3:
        return ""  # too few points to tell a start from the rest
    rest = np.concatenate(late)
    everything = np.concatenate([curve.values for curve in curves])
    if not len(rest):
        return ""
    low, high, top = float(rest.min()), float(np.percentile(rest, 99.5)), float(everything.max())
    if top - low <= 2 * (high - low) or high == low:
        return ""
    axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    return f" (the start, up to {top:.3g}, is cut off)"


def _mark_skips(axes: Any, history: History) -> None:
    """Mark the skipped steps by ticks at the foot of the axes, whatever the scale of the curve."""
    if history.skipped:
        foot = axes.get_xaxis_transform()  # x in steps, y in parts of the axes
        axes.vlines(list(history.skipped), 0.0, 0.07, color=_SKIP, linewidth=1.0, transform=foot)


def _finite(curve: Curve | None) -> Curve | None:
    if curve is None:
        return None
    good = np.isfinite(curve.values)
    return Curve(curve.steps[good], curve.values[good]) if good.any() else None


def _window(curve: Curve) -> int:
    """Return an odd number of steps to average, about a fiftieth of the run; 1 for a short one."""
    count = len(curve.values)
    return 1 if count < 100 else min(501, count // 50 | 1)


def _limit(axes: Any, values: Sequence[npt.NDArray[np.float64]]) -> None:
    """Keep a few huge spikes from pressing the curve flat; the top stays above the first values."""
    if not values:
        return
    together = np.concatenate(values)
    together = together[np.isfinite(together)]
    if not len(together):
        return
    first = max((float(v[0]) for v in values if len(v) and np.isfinite(v[0])), default=-np.inf)
    top = max(float(np.percentile(together, 99.5)), first)
    low = float(together.min())
    if together.max() > top:
        axes.set_ylim(low - 0.05 * (top - low), top + 0.08 * (top - low))


def _log_scale(axes: Any) -> None:
    positive = [line for line in axes.lines if (np.asarray(line.get_ydata()) > 0).any()]
    if positive:
        axes.set_yscale("log", nonpositive="mask")
