"""Draw and compare runs: `python -m runner.report outputs/NAME [more runs]`.

Writes `report.png` and `report.html`, one page that needs nothing from outside. Given several runs,
or a folder of runs, it lays their curves over each other and tells what differs in their settings.
"""

from __future__ import annotations

import base64
import html
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runner.arguments import home_paths
from runner.command import leave
from runner.fault import fault_line
from runner.history import History, Summary, by_loss, differing, is_run, read_history, summarize
from runner.home import settle_home
from runner.plot import plot_run, plot_runs
from runner.usage import Parser

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2530; background: #f5f6f8; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 10px; }
p.note { color: #6b7280; margin: 0 0 20px; }
.card { background: #fff; border: 1px solid #e3e6eb; border-radius: 8px; padding: 14px; overflow-x: auto; }
img { display: block; max-width: 100%; margin: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: #6b7280; font-weight: 600; font-size: 13px; }
th, td { padding: 6px 11px; white-space: nowrap; border-bottom: 1px solid #eceef2; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; } tr.best td { background: #f0f7f2; }
pre { white-space: pre-wrap; margin: 0; font: 13px/1.5 ui-monospace, monospace; }
details { margin: 0 0 14px; } summary { cursor: pointer; padding: 4px 0; font-weight: 600; }
"""


def write_report(histories: Sequence[History], folder: str | Path) -> Path:
    """Write `report.png` and `report.html` about one or several runs; return the page's path."""
    folder = Path(folder)
    ranked = by_loss(histories)
    if len(ranked) == 1:
        plot_run(ranked[0], folder / "report.png")
    else:
        plot_runs(ranked, folder / "report.png", labels=labels(ranked))
    page = folder / "report.html"
    text = _page(ranked, picture=folder / "report.png")
    page.write_text(text, encoding="utf-8", errors="backslashreplace")  # a sample may hold half a character
    return page


def table(histories: Sequence[History]) -> list[list[str]]:
    """Return the comparison as rows of text, the headings first: what was reached, then what differs."""
    keys = differing(histories)
    rows = [["run", "steps", "val loss", "best val loss", "train loss", "skipped", "tokens/s", *keys]]
    for history in histories:
        settings = [history.settings.get(key, "") for key in keys]
        rows.append([*_cells(summarize(history)), *settings])
    return rows


def labels(histories: Sequence[History]) -> list[str]:
    """Name each run by what differs in its settings, or by its folder where that says too little."""
    keys = differing(histories)
    if not keys or len(keys) > 3:
        return [history.name for history in histories]
    named = [
        " ".join(f"{key.rpartition('.')[2]}={history.settings.get(key, '-')}" for key in keys)
        for history in histories
    ]
    return named if len(set(named)) == len(named) else [history.name for history in histories]


def find_runs(paths: Sequence[str]) -> list[Path]:
    """Return the run folders that the paths name; a folder of runs stands for all of them."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise ValueError(f"{path}: cannot be read: permission denied; name a folder that you may read")
        inside = sorted(child for child in path.iterdir() if is_run(child)) if path.is_dir() else []
        if not is_run(path) and not inside:
            raise ValueError(f"{path}: no run there (no metrics.jsonl, no main.log); name a run folder")
        found += [path] if is_run(path) else inside
    return list(dict.fromkeys(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = Parser(prog="python -m runner.report", description="Draw and compare runs.")
    parser.add_argument("runs", nargs="+", help="run folders, or folders that hold runs")
    parser.add_argument("--out", help="where to write (default: the run's folder, or the one they share)")
    given = parser.parse_args(home_paths(sys.argv[1:] if arguments is None else list(arguments)))
    settle_home()
    try:
        if len(given.runs) == 1 and os.path.isfile(Path(given.runs[0]) / "cells.json"):
            from runner.sweep.summary import main as summarize_sweep

            return summarize_sweep(Path(given.runs[0]), out=given.out)
        runs = find_runs(given.runs)
        histories = [_readable(run) for run in runs]
        folder = Path(given.out) if given.out else Path(os.path.commonpath(runs))
        folder.mkdir(parents=True, exist_ok=True)
        page = write_report(histories, folder)
    except ValueError as error:
        print(f"runner.report: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"runner.report: error: {fault_line(error)}; --out names another folder", file=sys.stderr)
        return 2
    print(text_table(table(by_loss(histories))))
    print(f"wrote {page} and {page.with_suffix('.png')}")
    return 0


def _readable(run: Path) -> History:
    """Return a run's history; ValueError if its files cannot be read, which no other --out would mend."""
    try:
        return read_history(run)
    except OSError as error:
        raise ValueError(f"{fault_line(error)}; name runs that you may read") from None


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: Summary) -> list[str]:
    best = f"{row.best_val_loss:.4f} at {row.best_step}" if math.isfinite(row.best_val_loss) else "-"
    speed = f"{row.tokens_per_s:,.0f}" if math.isfinite(row.tokens_per_s) else "-"
    val, train = (f"{loss:.4f}" if not math.isnan(loss) else "-" for loss in (row.val_loss, row.train_loss))
    return [row.name, str(row.steps), val, best, train, str(row.skipped), speed]


def _page(histories: Sequence[History], *, picture: Path) -> str:
    several = len(histories) > 1
    title = f"{len(histories)} runs" if several else histories[0].name
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _note(histories),
        html_table(table(histories), mark_best=several),
    ]
    parts += ["<h2>Curves</h2>", image(picture, title="loss curves")]
    if several:
        parts.append("<h2>Each run</h2>")
        parts += [_details(history) for history in histories]
    parts += [_sample(history) for history in histories if history.sample and not several]
    return document(parts, title=title)


def document(parts: Sequence[str], *, title: str) -> str:
    """Return a whole page that needs nothing from outside; `parts` are its HTML."""
    body = "\n".join(parts)
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{_CSS}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body><main>\n{body}\n</main></body></html>\n"


def _note(histories: Sequence[History]) -> str:
    if len(histories) > 1:
        return (
            "<p class='note'>Sorted by the last validation loss; settings that differ stand on the right.</p>"
        )
    reasons = histories[0].skipped.values()
    counts = [f"{list(reasons).count(reason)} for {html.escape(reason)}" for reason in dict.fromkeys(reasons)]
    skipped = f"Skipped updates: {', '.join(counts)}." if counts else "No update was skipped."
    return f"<p class='note'>{skipped}</p>"


def html_table(rows: Sequence[Sequence[str]], *, mark_best: bool) -> str:
    """Return rows as a table, the headings first."""
    lines = []
    for number, row in enumerate(rows):
        tag = "th" if number == 0 else "td"
        cells = [
            f"<{tag}{'' if column == 0 else ' class=n'}>{html.escape(cell)}</{tag}>"
            for column, cell in enumerate(row)
        ]
        best = " class=best" if mark_best and number == 1 else ""
        lines.append(f"<tr{best}>{''.join(cells)}</tr>")
    return f"<div class='card'><table>{''.join(lines)}</table></div>"


def _details(history: History) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.png"
        plot_run(history, path)
        picture = image(path, title=history.name)
    return f"<details><summary>{html.escape(history.name)}</summary>{picture}{_sample(history)}</details>"


def _sample(history: History) -> str:
    if not history.sample:
        return ""
    return f"<h2>Newest sample</h2><div class='card'><pre>{html.escape(history.sample)}</pre></div>"


def image(path: Path, *, title: str) -> str:
    """Return a picture that is part of the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<div class='card'><img alt='{html.escape(title)}' src='data:image/png;base64,{data}'></div>"


if __name__ == "__main__":
    leave("runner.report", main)
