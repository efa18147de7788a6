"""Lay out the wandb workspace of a project: `python tools/wandb_workspace.py ENTITY PROJECT [--save]`.

Needs `pip install wandb-workspaces`, and an API key to save. Without `--save` the layout is printed, so it
can be read and tried without an account. The panels are the ones that tell whether a run is well.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

SECTIONS: dict[str, list[tuple[str, list[str], bool]]] = {
    "Loss": [
        ("validation loss, nats per token", ["val/loss"], False),
        ("training loss, nats per token", ["train/loss"], False),
        ("validation perplexity", ["val/ppl"], True),
    ],
    "Optimization": [
        ("learning rate", ["train/lr"], False),
        ("gradient norm before clipping", ["train/grad_norm"], True),
        ("z-scores of loss and norm", ["train/loss_z", "train/norm_z"], False),
        ("skipped updates so far", ["train/skipped"], False),
    ],
    "Speed": [
        ("tokens per second", ["perf/tokens_per_s"], False),
        ("milliseconds per step", ["perf/step_ms"], False),
        ("model FLOPs utilization", ["perf/mfu"], False),
    ],
}
"""Section -> panels: title, metrics, logarithmic."""

SETTINGS = ("optimizer.lr", "scheduler.warmup_steps", "clip.max_norm", "run.seed")


def main() -> None:
    """Build the workspace; save it, or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entity")
    parser.add_argument("project")
    parser.add_argument("--save", action="store_true", help="write it to wandb")
    given = parser.parse_args()
    try:
        built = workspace(given.entity, given.project)
    except ImportError as error:
        parser.exit(1, f"wandb_workspace: error: {error}; pip install wandb-workspaces\n")
    if given.save:
        built.save()
        print(built.url)
    else:
        print(
            json.dumps(built._to_model().model_dump(by_alias=True, exclude_none=True), indent=1, default=str)
        )


def workspace(entity: str, project: str) -> Any:
    """Return the layout: curves by section, and the sweep's settings against the final loss."""
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(
            name=name,
            is_open=name != "Speed",
            panels=[
                panels.LinePlot(title=title, x="train/step", y=metrics, log_y=log or None)
                for title, metrics, log in lines
            ],
        )
        for name, lines in SECTIONS.items()
    ]
    columns = [panels.ParallelCoordinatesPlotColumn(metric=f"c::{key}") for key in SETTINGS]
    columns.append(panels.ParallelCoordinatesPlotColumn(metric="val/loss", inverted=True))
    swept = [panels.ParallelCoordinatesPlot(title="settings and final loss", columns=columns)]
    return ws.Workspace(
        entity=entity,
        project=project,
        name="runner",
        sections=[*sections, ws.Section(name="Sweep", is_open=True, panels=swept)],
        settings=ws.WorkspaceSettings(x_axis="train/step", group_by_prefix="first"),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Metric("Group")], order=[ws.Ordering(ws.Summary("val/loss"))]
        ),
    )


if __name__ == "__main__":
    main()
