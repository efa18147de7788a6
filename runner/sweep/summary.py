"""Sum a sweep up: a table on the terminal, `summary.csv`, `summary.png`, `summary.html`."""

from __future__ import annotations

import csv
import html
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path

from runner.report import document, html_table, image, text_table
from runner.sweep.naming import short_names, show
from runner.sweep.rows import Row, Spread, keys_of, read_rows, spreads
from runner.sweep.tell import Teller, duration, short

_SHOWN = 30  # rows of the table on a terminal


def report(folder: Path, *, tell: Teller) -> None:
    """Write the table to the terminal, and the files unless they are newer than every result."""
    rows = read_rows(folder)
    lines = text_table(table(rows)[: _SHOWN + 1]).splitlines()
    tell.line("")
    for line in lines:
        tell.line(f"  {line}")
    if len(rows) > _SHOWN:
        tell.line(f"  ... and {len(rows) - _SHOWN} more")
    groups = spreads(rows)
    if groups:
        tell.line("")
        for line in text_table(spread_table(groups)).splitlines():
            tell.line(f"  {line}")
    tell.line("")
    try:
        if not _up_to_date(folder, rows):
            write(folder, rows)
    except Exception as error:
        # A full disk, or a picture, is never worth the exit code of cells that are done.
        tell.line(f"  summary: could not be written ({type(error).__name__}: {error})")
        return
    tell.line(f"  summary: {short(folder / 'summary.html')} (also .png, .csv)")


def main(folder: Path, *, out: str | None = None) -> int:
    """Summarize a sweep on request; return the exit status."""
    rows = read_rows(folder)
    target = Path(out) if out else folder
    target.mkdir(parents=True, exist_ok=True)
    write(target, rows)
    print(text_table(table(rows)))
    if groups := spreads(rows):
        print()
        print(text_table(spread_table(groups)))
    print(f"wrote {target / 'summary.html'}, {target / 'summary.png'} and {target / 'summary.csv'}")
    return 0


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Write the three files; the page last, and each whole or not at all."""
    from runner.sweep.figures import draw

    _replace(folder / "summary.csv", csv_text(rows).encode())
    picture = folder / "summary.tmp.png"
    draw(rows, picture)
    os.replace(picture, folder / "summary.png")
    _replace(folder / "summary.html", page(folder, rows).encode())


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the sweep as rows of text, headings first, best cell on top."""
    keys = keys_of(rows)
    names = short_names(keys)
    lines = [
        [
            "cell",
            *(names[key] for key in keys),
            "val loss",
            "best",
            "train loss",
            "steps",
            "skipped",
            "time",
            "",
        ]
    ]
    for row in rows:
        numbers = [_loss(row.val_loss), _loss(row.best_val_loss), _loss(row.train_loss)]
        seconds = duration(row.seconds) if row.seconds else "-"
        values = [show(row.values[key]) for key in keys]
        state = "" if row.state == "finished" else row.state
        lines.append([f"#{row.number}", *values, *numbers, str(row.step), str(row.skipped), seconds, state])
    return lines


def spread_table(groups: Sequence[Spread]) -> list[list[str]]:
    """Return mean and spread over the seeds as rows of text, headings first."""
    lines = [["over the seeds", "cells", "mean val loss", "std", "min", "max"]]
    for group in groups:
        deviation = "-" if math.isnan(group.deviation) else f"{group.deviation:.4f}"
        low, high = _loss(group.low), _loss(group.high)
        lines.append([group.label, str(group.cells), _loss(group.mean), deviation, low, high])
    return lines


def csv_text(rows: Sequence[Row]) -> str:
    """Return the sweep as comma-separated values in full precision; keys are config paths."""
    keys = keys_of(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    facts = ("val_loss", "best_val_loss", "train_loss", "step", "skipped", "seconds", "state", "message")
    writer.writerow(["cell", *keys, *facts])
    for row in rows:
        values = [show(v) if not isinstance(v := row.values[key], float) else repr(v) for key in keys]
        writer.writerow([row.number, *values, *(getattr(row, name) for name in facts)])
    return text.getvalue()


def page(folder: Path, rows: Sequence[Row]) -> str:
    """Return the sweep's page; it needs nothing from outside."""
    ended = sum(row.state in ("finished", "pruned") for row in rows)
    ranked = keys_of(rows) != ["budget"]
    order = "Sorted by the final validation loss" if ranked else "The final validation loss by budget"
    note = f"{ended} of {len(rows)} cells finished. {order}, in nats per token."
    parts = [f"<h1>{html.escape(folder.resolve().name)}</h1>", f"<p class='note'>{note}</p>"]
    parts.append(html_table(table(rows), mark_best=ranked))
    if groups := spreads(rows):
        parts += ["<h2>Mean and spread over the seeds</h2>", html_table(spread_table(groups), mark_best=True)]
    parts += ["<h2>Curves</h2>", image(folder / "summary.png", title="the sweep's losses and curves")]
    bad = [row for row in rows if row.message and row.state in ("failed", "diverged")]
    if bad:
        lines = [["cell", "settings", "what happened", "log"]]
        lines += [[f"#{r.number}", r.label, r.message, f"{r.folder.name}/console.log"] for r in bad]
        parts += ["<h2>Failures</h2>", html_table(lines, mark_best=False)]
    return document(parts, title=folder.resolve().name)


def _loss(loss: float) -> str:
    return "-" if math.isnan(loss) else "inf" if math.isinf(loss) else f"{loss:.4f}"


def _up_to_date(folder: Path, rows: Sequence[Row]) -> bool:
    page_file = folder / "summary.html"
    files = [row.folder / name for row in rows for name in ("result.json", "cell.json", "metrics.jsonl")]
    if not page_file.is_file():
        return False
    return page_file.stat().st_mtime >= max(f.stat().st_mtime for f in files if f.is_file())


def _replace(path: Path, content: bytes) -> None:
    tmp = path.with_name(f"{path.name}.tmp")
    tmp.write_bytes(content)
    os.replace(tmp, path)
