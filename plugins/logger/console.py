"""Show a run to the person who watches it: one live line on a terminal, plain lines in a pipe."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from typing import Annotated, Literal

from annotated_types import Gt

from runner.api import Event, Note, RunInfo, Sample, Saved, Score, TrainStep, ValLoss

_REFRESH_S = 0.1
_ENDS = {"finished": "bold", "stopped": "warning", "failed": "error"}
_STYLES = {"bold": "1", "dim": "2", "warning": "33", "error": "31"}


class ConsoleLogger:
    """Print progress and what happened to standard output.

    `progress` keeps one line up to date on a terminal; in a pipe it prints that line at the first
    step, every `every_s` seconds, before each other line and at the end. `llmc` prints llm.c's own
    line for every step. No colour in a pipe or where NO_COLOR is set. The time left is that of the
    training steps alone, from this session's step time; evaluations and checkpoints come on top.
    """

    def __init__(
        self, *, style: Literal["progress", "llmc"] = "progress", every_s: Annotated[float, Gt(0)] = 10.0
    ) -> None:
        self._style = style
        self._every_s = every_s
        self._steps = 0
        self._live = False  # whether a progress line can be refreshed in place
        self._colour = False
        self._pace = _Pace()
        self._last: TrainStep | None = None
        self._val = ""  # how the closing line names the last validation loss
        self._shown_step = -1
        self._shown_at = -math.inf
        self._opened_at = 0.0

    def open(self, run: RunInfo) -> None:
        """Say which run this is, where it writes and where it starts."""
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._live = terminal and self._style == "progress"
        self._colour = terminal and not os.environ.get("NO_COLOR")
        self._steps = run.steps
        self._opened_at = time.monotonic()
        start = f"resumes at step {run.start_step}" if run.resumed else "starts"
        self._print(f"run {run.name} {start}, {run.steps} steps, in {run.dir}", style="bold")

    def log(self, event: Event) -> None:
        """Refresh the progress line, or print what happened."""
        if isinstance(event, TrainStep):
            self._train_step(event)
            return
        text = llmc_text(event) if self._style == "llmc" else self._text(event)
        if isinstance(event, ValLoss):
            self._val = f", val loss {event.loss:.4f}"
        if text is not None:
            if not self._live:
                self._show_progress()
            self._print(text, style=_style(event))

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Leave the last progress line standing and say how the run ended."""
        self._show_progress()
        if self._live and self._last is not None:
            self._write("\n")
        self._live = False
        if self._style == "llmc" and self._pace.count > 1:
            self._print(f"total average iteration time: {self._pace.mean_ms:f} ms")
        at = f" at step {self._last.step + 1}/{self._steps}" if self._last else ""
        took = clock(time.monotonic() - self._opened_at)
        self._print(f"{status}{at} after {took}{self._val}", style=_ENDS[status])

    def _train_step(self, event: TrainStep) -> None:
        self._pace.add(event.step_ms)
        self._last = event
        if not event.applied:
            text = llmc_skip(event) if self._style == "llmc" else self._skip(event)
            self._print(text, style="warning")
        if self._style == "llmc":
            self._print(llmc_step(event, steps=self._steps))
            return
        if time.monotonic() - self._shown_at >= (_REFRESH_S if self._live else self._every_s):
            self._show_progress()

    def _show_progress(self) -> None:
        event = self._last
        if event is None or self._style == "llmc" or event.step == self._shown_step:
            return
        self._shown_step = event.step
        self._shown_at = time.monotonic()
        width = shutil.get_terminal_size().columns - 1 if self._live else 0
        left_s = (self._steps - event.step - 1) * self._pace.recent_ms / 1e3
        text = progress(event, steps=self._steps, eta_s=left_s, width=width)
        self._write(f"\r\x1b[2K{text}" if self._live else f"{text}\n")

    def _print(self, text: str, *, style: str = "") -> None:
        """Print a line that stays; on a terminal the progress line moves below it."""
        if style and self._colour:
            text = f"\x1b[{_STYLES[style]}m{text}\x1b[0m"
        self._write(f"\r\x1b[2K{text}\n" if self._live else f"{text}\n")
        if self._live:
            self._shown_step = -1
            self._show_progress()

    def _text(self, event: Event) -> str | None:
        at = f"step {event.step}/{self._steps}"
        if isinstance(event, ValLoss):
            ppl = f"  ppl {math.exp(event.loss):.4g}" if event.loss < 700 else ""
            bits = f"  bits/byte {event.bits_per_byte:.4f}" if math.isfinite(event.bits_per_byte) else ""
            return f"{at}  val loss {event.loss:.4f}{ppl}{bits}"
        if isinstance(event, Score):
            return f"{at}  {event.name} {event.value:.4f}"
        if isinstance(event, Saved):
            cost = f"{event.bytes / 1e6:.1f} MB  training waited {event.blocked_ms:.0f} ms"
            return f"{at}  saved {os.path.basename(event.path)}  {cost}"
        if isinstance(event, Sample):
            return f"{at}  sample\n{_indented(event.prompt + event.text)}"
        if isinstance(event, Note):
            return event.text if event.level == "info" else f"{event.level}: {event.text}"
        return None

    def _skip(self, event: TrainStep) -> str:
        values = f"loss {event.loss:.4f}, norm {event.norm:.4g}"
        return f"step {event.step + 1}/{self._steps}  update skipped: {event.reason} ({values})"

    def _write(self, text: str) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        try:
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads any more, as after `| head`; training goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Pace:
    """Step time of this session in milliseconds, without the first step (compilation, warm-up)."""

    def __init__(self) -> None:
        self.count = 0
        self.recent_ms = 0.0
        self._total_ms = 0.0

    def add(self, step_ms: float) -> None:
        self.count += 1
        if self.count <= 2:  # the second step replaces the first
            self.recent_ms = step_ms
        else:
            weight = max(0.02, 1.0 / (self.count - 1))
            self.recent_ms += weight * (step_ms - self.recent_ms)
        if self.count > 1:
            self._total_ms += step_ms

    @property
    def mean_ms(self) -> float:
        return self._total_ms / (self.count - 1)


def progress(event: TrainStep, *, steps: int, eta_s: float, width: int = 0) -> str:
    """Return one progress line, without its least important fields where `width` > 0 needs it."""
    done = event.step + 1
    fields = [  # what, and its rank when space is short
        (f"step {done}/{steps}", 0),
        (f"{100 * done // steps}%", 1),
        (f"loss {event.loss:.4f}", 0),
        (f"lr {event.lr:.2e}", 5),
        (f"norm {event.norm:.2f}", 4),
        (f"{_si(event.tokens_per_s)} tok/s", 3),
        (f"MFU {100 * event.mfu:.1f}%" if event.mfu >= 0 else "", 6),
        (f"skipped {event.skipped}" if event.skipped else "", 1),
        (f"ETA {clock(eta_s)}" if done < steps else "", 2),
    ]
    fields = [(text, rank) for text, rank in fields if text]
    for limit in range(6, -1, -1):
        line = "  ".join(text for text, rank in fields if rank <= limit)
        if not width or len(line) <= width:
            return line
    return line[:width]


def llmc_step(event: TrainStep, *, steps: int) -> str:
    """Return the line that llm.c prints for a step (train_gpt2.cu), with `step + 1` as it does."""
    text = (
        f"step {event.step + 1:4d}/{steps} | loss {event.loss:7.6f} ({event.loss_z:+.2f}z)"
        f"| norm {event.norm:6.4f} ({event.norm_z:+.2f}z)| lr {event.lr:.2e} | {event.step_ms:.2f} ms"
    )
    return f"{text} | {100 * event.mfu:.1f}% bf16 MFU | {event.tokens_per_s:.0f} tok/s"


def llmc_skip(event: TrainStep) -> str:
    """Return llm.c's line for a skipped update; our other reasons in the same form."""
    if event.reason == "loss z-score":
        return f"skipping update due to loss z-score of {event.loss_z:f}"
    if event.reason == "gradient norm z-score":
        return f"skipping update due to grad z-score of {event.norm_z:f}"
    return f"skipping update due to {event.reason}"


def llmc_text(event: Event) -> str | None:
    """Return what llm.c prints for an event other than a step; None where it prints nothing."""
    if isinstance(event, ValLoss):
        return f"val loss {event.loss:f}"
    if isinstance(event, Score):
        return f"{event.name}: {event.value:f}"
    if isinstance(event, Sample):
        return f"generating:\n---\n{_printable(event.prompt + event.text)}\n---"
    if isinstance(event, Saved):
        return f"Writing checkpoint at step {event.step}"
    if isinstance(event, Note) and event.level != "info":
        return f"{event.level}: {event.text}"
    return None


def clock(seconds: float) -> str:
    """Format a duration as 0:42, 12:34, 3:07:09 or 4d 03:07."""
    if math.isnan(seconds):
        return "?"
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02d}:{m:02d}"
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _si(value: float) -> str:
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.1f}{unit}"
    return f"{value:.0f}"


def _style(event: Event) -> str:
    if isinstance(event, Note):
        return "" if event.level == "info" else event.level
    return "bold" if isinstance(event, ValLoss | Score) else "dim" if isinstance(event, Saved) else ""


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in _printable(text).splitlines())


def _printable(text: str) -> str:
    """Replace control characters: a model may write any, and a terminal would obey them."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "�" for c in text)
