"""Write TensorBoard event files, without importing torch's or TensorFlow's writers."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from runner.api import Event, Ranks, RunInfo, Sample, State, TrainStep, metrics


class TensorboardLogger:
    """Write every event's metrics to `<run folder>/tensorboard`, one record per event, unbuffered.

    A resumed run adds a file to the same folder that tells TensorBoard to forget what earlier files hold
    from the checkpoint's step on, so the curves show each step once. That also forgets the evaluations of
    the checkpoint's own step, which the resumed run does not repeat: they are kept in the checkpoint
    and written again.
    """

    def __init__(self, *, every: Annotated[int, Ge(1)] = 1) -> None:
        self._every = every
        self._steps = 0
        self._writer: Any = None
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})  # the newest step's, for a resume

    def open(self, run: RunInfo) -> None:
        """Start an event file; the first one of a run removes what another run left there."""
        try:
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise ValueError(
                "logger.tensorboard: the package is not installed; `pip install tensorboard`, "
                "or leave tensorboard out of `logger=[...]`"
            ) from None

        folder = run.dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        files = list(folder.glob("events.out.tfevents.*"))
        if not run.resumed:
            for file in files:
                file.unlink()
            files = []
        self._steps = run.steps
        self._writer = RecordWriter(_next_file(folder, files).open("wb", buffering=0))
        self._write(file_version="brain.Event:2")
        if run.resumed:
            self._forget_from(run.start_step)

    def log(self, event: Event) -> None:
        """Write the event's metrics as one record."""
        if isinstance(event, Sample):
            self._write(step=event.step, summary=_text("sample", event.prompt + event.text))
            return
        if isinstance(event, TrainStep):
            last = event.step == self._steps - 1
            if event.applied and event.step % self._every and not last:
                return
        self._scalars(event.step, metrics(event))
        if not isinstance(event, TrainStep | Ranks):
            step, values = self._evaluated
            self._evaluated = (event.step, (values if step == event.step else {}) | metrics(event))

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def state_dict(self) -> State:
        """Keep the evaluations of the newest step, which a resume has to write again."""
        step, values = self._evaluated
        return {"step": step, "values": dict(values)}

    def load_state_dict(self, state: State) -> None:
        """Take what `state_dict` kept; comes before `open`."""
        self._evaluated = (state["step"], dict(state["values"]))

    def _forget_from(self, start_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=start_step, session_log=SessionLog(status=SessionLog.START))
        step, values = self._evaluated
        if step == start_step:
            self._scalars(step, values)

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if values:
            rows = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._write(step=step, summary=Summary(value=rows))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        self._writer.write(Record(wall_time=time.time(), **fields).SerializeToString())


def _next_file(folder: Path, files: list[Path]) -> Path:
    """Name a file that sorts after the ones there, as TensorBoard reads them in order of their names."""
    newest = max((int(file.name.split(".")[3]) for file in files), default=0)
    second = max(int(time.time()), newest + 1)
    return folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.0"


def _text(tag: str, text: str) -> Any:
    """Return a summary for TensorBoard's text tab, which renders Markdown: indented, it stays as it is."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    verbatim = "\n".join("    " + line for line in text.splitlines())
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[verbatim.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)])
