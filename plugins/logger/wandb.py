"""Send a run to Weights & Biases from a thread of its own, so that it can neither slow nor stop training."""

from __future__ import annotations

import contextlib
import html
import logging
import os
import queue
import secrets
import shlex
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from runner.api import Event, RunInfo, Sample, State, TrainStep, metrics

_LOG = logging.getLogger(__name__)
_QUEUE_EVENTS = 100_000
_HEAD_START_S = 5.0  # importing wandb beside the first step would only delay it
_BURST_S = 1.0  # rows wait for each other: one on its own costs a small model's loop four times as much
_PROJECT = "runner"
_LONG_TEXT = 1000  # a manifest's diff is no setting that anybody compares


class WandbLogger:
    """Log every event's metrics to one wandb run, which a resumed run continues under the same id.

    wandb is imported, started and called only in the worker thread, after the first training step;
    events wait in a bounded queue until it is ready. The first thing that fails is reported once, then
    wandb is off and training goes on: `main.log` and `metrics.jsonl` are the record, this is a view.
    Metrics use `train/step` as their step, never wandb's own counter, which refuses to go back. So the
    steps that a crash threw away and the resumed run repeats are accepted: they appear twice, at the
    same place on the curve.

    What is None here is taken from wandb's own environment variables and settings files; the run's id, name
    and folder are always ours, so that a variable left over from another run cannot join the two.

    `mode: auto` is online if an API key is configured (environment, netrc or wandb's settings files)
    and offline otherwise. If the server cannot be reached the run is written offline.
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        every: Annotated[int, Ge(1)] = 1,
        group: str | None = None,
        job_type: str = "train",
        tags: list[str] | None = None,
        notes: str | None = None,
        close_s: Annotated[float, Gt(0)] = 30.0,
    ) -> None:
        self._about = {"entity": entity, "job_type": job_type, "notes": notes}
        self._project = project
        self._mode = mode
        self._every = every
        self._group = group
        self._tags = tags or []
        self._close_s = close_s
        self._id = secrets.token_hex(4)
        self._saved_id: str | None = None
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._go = threading.Event()  # the first step is done
        self._started = threading.Event()  # wandb is ready, or has failed
        self._closing = threading.Event()
        self._connecting = False
        self._steps = 0
        self._exit_code = 0
        self._off = False
        self._hint = ""

    def open(self, run: RunInfo) -> None:
        """Start the worker; a resumed run keeps the id that `load_state_dict` brought."""
        if self._mode == "disabled":
            self._off = True
            return
        if run.resumed and self._saved_id:
            self._id = self._saved_id
        self._steps = run.steps
        self._worker = threading.Thread(target=self._work, args=(run,), name="wandb-logger", daemon=True)
        self._worker.start()

    def log(self, event: Event) -> None:
        """Hand the event to the worker; never waits."""
        if self._off or not self._wanted(event):
            return
        if self._queue.qsize() >= _QUEUE_EVENTS:
            self._give_up(f"it is {_QUEUE_EVENTS} events behind")
            return
        self._queue.put(event)
        if isinstance(event, TrainStep) and not self._go.is_set():
            self._go.set()

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Send what is left and end the wandb run, within `close_s` seconds."""
        if self._worker is None:
            return
        deadline = time.monotonic() + self._close_s
        self._exit_code = 1 if status == "failed" else 0
        self._go.set()
        self._closing.set()
        if not self._started.wait(0.5 * self._close_s) and self._connecting:
            _release_service()  # ends the wait for a silent server; the rows then go to an offline run
        self._queue.put(None)
        self._worker.join(max(0.0, deadline - time.monotonic()))
        if self._worker.is_alive():
            self._give_up(f"it did not finish within {self._close_s:g} s (logger.wandb.close_s)")
            _release_service()
            self._worker.join(1.0)

    def state_dict(self) -> State:
        """Keep the run's id, so that a resume continues the same curve."""
        return {"id": self._id}

    def load_state_dict(self, state: State) -> None:
        """Take the id of the run that is resumed; comes before `open`."""
        assert self._worker is None, "load_state_dict() comes before open()"
        self._saved_id = state["id"]

    def hint(self) -> str:
        """Return one line that tells where to look at the run; empty when there is nothing to see."""
        return self._hint

    def _wanted(self, event: Event) -> bool:
        if isinstance(event, TrainStep):
            return not event.applied or event.step % self._every == 0 or event.step == self._steps - 1
        return isinstance(event, Sample) or bool(metrics(event))

    def _give_up(self, why: str) -> None:
        if not self._off:
            self._off = True
            _LOG.warning("wandb is switched off, training goes on: %s", why)

    def _work(self, run: RunInfo) -> None:
        try:
            self._go.wait(_HEAD_START_S)
            wandb_run = self._start(run)
            self._started.set()
            while (event := self._queue.get()) is not None:
                wandb_run.log(_row(event))
                if self._queue.empty():
                    self._closing.wait(_BURST_S)
            wandb_run.finish(exit_code=self._exit_code)
        except (Exception, SystemExit) as error:
            self._give_up(_one_line(error))
            _release_service()
        finally:
            self._started.set()

    def _start(self, run: RunInfo) -> Any:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else a silent server delays the exit
        import wandb

        settings = _quiet_setup(wandb).settings
        mode = _resolve_mode(self._mode, settings=settings)
        about: dict[str, Any] = self._about | {
            "project": self._project or settings.project or _PROJECT,
            "id": self._id,
            "name": run.name,
            "group": run.group or self._group,
            "tags": sorted({*self._tags, *run.tags}) or None,  # an empty list would hide WANDB_TAGS
            "config": run.config | {"manifest": _short(run.manifest)},
            "dir": str(run.dir),
            "resume": "allow",
            "settings": self._settings(wandb),
        }
        wandb_run = self._init(wandb, about, mode=mode)
        wandb_run.define_metric("train/step", hidden=True)
        wandb_run.define_metric("*", step_metric="train/step")
        self._hint = _hint(wandb_run)
        return wandb_run

    def _init(self, wandb: Any, about: dict[str, Any], *, mode: str) -> Any:
        if mode != "online":
            return wandb.init(mode=mode, **about)
        try:
            self._connecting = True
            return wandb.init(mode=mode, **about)
        except Exception as error:
            _LOG.warning("wandb cannot log online, writing offline instead (%s)", _one_line(error))
            _quiet_setup(wandb)
            return wandb.init(mode="offline", **about)
        finally:
            self._connecting = False

    def _settings(self, wandb: Any) -> Any:
        wanted = {
            "console": "off",
            "silent": True,
            "init_timeout": 30.0,
            "finish_timeout": 0.7 * self._close_s,
            "finish_timeout_raises": True,
            "x_transaction_log_flush_interval": 1.0,  # seconds of rows that a killed run may lose
        }
        known = wandb.Settings.model_fields
        return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def _row(event: Event) -> dict[str, Any]:
    """Return one wandb row: the event's metrics and the step they belong to."""
    values: dict[str, Any] = {"train/step": event.step, **metrics(event)}
    if isinstance(event, Sample):
        import wandb

        values["sample"] = wandb.Html(f"<pre>{html.escape(event.prompt + event.text)}</pre>", inject=False)
    return values


def _quiet_setup(wandb: Any) -> Any:
    return wandb.setup(settings=wandb.Settings(silent=True))


def _resolve_mode(mode: str, *, settings: Any) -> str:
    """Decide between online and offline from what is configured, without touching the network."""
    if mode == "offline":
        return mode
    if mode == "auto" and settings.mode in ("offline", "dryrun", "disabled"):
        return str(settings.mode)
    if settings.api_key or settings.identity_token_file or _netrc_has(settings.base_url):
        return "online"
    if mode == "online":
        _LOG.warning("logger.wandb.mode=online, but no API key is set (`wandb login`): writing offline")
    return "offline"


def _netrc_has(base_url: str) -> bool:
    """Whether netrc has a key, by wandb's own rule: it knows several names for its server."""
    from wandb.sdk.lib import wbauth

    try:
        return wbauth.read_netrc_auth(host=base_url) is not None
    except Exception:  # a key of the wrong form: wandb says so better when it is used
        return True


def _short(manifest: dict[str, Any]) -> dict[str, Any]:
    """Leave out the configuration, which wandb has already, and long texts such as a diff."""

    def long(value: Any) -> bool:
        return isinstance(value, str) and len(value) > _LONG_TEXT

    return {name: value for name, value in manifest.items() if name != "config" and not long(value)}


def _hint(wandb_run: Any) -> str:
    if wandb_run.disabled:
        return ""
    if not wandb_run.offline:
        return f"wandb: {wandb_run.url}"
    folder = Path(wandb_run.dir).parent  # of its `files`
    parts = f"offline-run-*-{wandb_run.id}"
    here, upload = shlex.quote(str(folder)), f"wandb sync {shlex.quote(str(folder))}"
    if len(list(folder.parent.glob(parts))) > 1:  # one for each time that the run was continued
        upload = f"wandb sync --id {wandb_run.id} {shlex.quote(str(folder.parent))}/{parts}"
    return f"wandb: look with `wandb leet {here}`, upload with `{upload}`"


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return text if len(text) <= 200 else text[:197] + "..."


def _release_service() -> None:
    """Part from a wandb service process that is dead or hangs: its exit hook would wait for ever.

    Afterwards wandb can be started anew in this process. Takes two seconds at most.
    """
    releaser = threading.Thread(target=_kill_service, name="wandb-release", daemon=True)
    releaser.start()
    releaser.join(2.0)


def _kill_service() -> None:
    with contextlib.suppress(Exception, SystemExit):  # wandb calls sys.exit() with the service's status
        import wandb

        service: Any = wandb.setup().assert_service()
        service._proc._process.kill()
        wandb.teardown(exit_code=1)  # forgets the service and its exit hook, then fails to reach it
