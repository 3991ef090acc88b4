"""``python -m ablations.publish OUT``: finished cells of a run to Weights & Biases, once, from the local records.

One W&B run a cell: run id = cell id, group = grid, job type = arm, x-axis ``samples_seen``. What was sent is noted beside the
record, so a second call sends nothing; one that was interrupted sends that run again in its place. Tables and figures go as
artifacts of one more run. The comparison to open (axes, groups, panels) is ``COMPARISON``; it is sent in every run's config
under ``comparison``. The local log stays the truth. Source: ours.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from triaccel.types import TriAccelError

from .folder import FINAL, RunFolder
from .record import RecordError, read_json, read_lines, write_json

__all__ = ["COMPARISON", "Arguments", "PublishError", "history", "main", "publish"]

COMPARISON: dict[str, Any] = {
    "x_axis": "samples_seen",
    "group_by": ["group", "job_type"],
    "compare": "arms of one block: filter config.block, colour by job_type",
    "panels": [
        {"title": "Accuracy", "y": ["eval/accuracy"], "unit": "fraction"},
        {"title": "Accuracy against time", "x": "train/seconds", "y": ["eval/accuracy"], "unit": "fraction"},
        {"title": "Training loss", "y": ["train/loss"], "unit": "nats"},
        {"title": "Batch size", "y": ["train/batch_size"], "unit": "samples"},
        {"title": "Peak bytes", "y": ["train/used_bytes"], "unit": "bytes"},
        {
            "title": "Layers by format",
            "y": ["precision/fp16", "precision/bf16", "precision/fp32"],
            "unit": "layers",
        },
        {"title": "Learning-rate factor", "y": ["train/rate_factor"], "unit": "1"},
        {"title": "Noise scale", "y": ["curvature/noise_scale"], "unit": "samples"},
    ],
    "bars": ["summary.test_accuracy", "summary.train_seconds", "summary.peak_live_tensor_bytes"],
}
"""The comparison to open in W&B, as data; ``y`` are keys of the history, ``bars`` are keys of the summary."""

NOTE = "published.json"


class PublishError(TriAccelError):
    """Nothing could be sent; the message says why and what works instead."""


def history(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows for W&B, one a log event that has numbers, each with ``samples_seen``; non-finite numbers are left out."""
    for event in events:
        kind, seen = event["event"], event.get("samples_seen", 0)
        row: dict[str, Any] = {}
        if kind == "step":
            names = ("loss", "batch_size", "rate_factor", "used_bytes", "loss_scale")
            row = {f"train/{name}": event.get(name) for name in names}
            row["train/seconds"] = event["train_seconds"]
        elif kind == "eval":
            row = {
                "eval/accuracy": event["accuracy"],
                "eval/loss": event["loss"],
                "train/seconds": event["train_seconds"],
            }
        elif kind == "precision_map":
            formats = Counter(event["map"].values())
            row = {f"precision/{name}": formats[name] for name in ("fp16", "bf16", "fp32")}
        elif kind == "curvature":
            row = {"curvature/noise_scale": event.get("noise_scale")}
            for layer, values in event["layers"].items():
                row |= {
                    f"curvature/layer/{layer}": values["curvature"],
                    f"rate/layer/{layer}": values["scale"],
                }
        elif kind == "decided_by":
            row = {f"decided_by/{name}": count for name, count in event["counts"].items()}
        row = {name: value for name, value in row.items() if _number(value)}
        if row:
            yield {"samples_seen": seen, **row}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def publish(
    folder: Path,
    *,
    mode: Literal["offline", "online"] = "offline",
    project: str = "tri-accel",
    entity: str | None = None,
    figures: Path | None = None,
) -> int:
    """Send what was not sent before.

    Args:
        folder: a run's folder.
        mode: ``offline`` writes W&B's own files under ``folder/wandb`` (``wandb sync`` sends them); ``online`` sends.
        project: W&B project.
        entity: W&B team or user; ``None``: the account's default.
        figures: folder of tables and figures to send as artifacts.

    Returns:
        Cells sent now.

    Raises:
        PublishError: no login, no network, or W&B refuses.
        RecordError: a record is missing or corrupt.
    """
    grid = read_json(folder / "grid.json")
    run = RunFolder(folder)
    target = f"{mode}:{entity or ''}/{project}"
    sender = _Sender(folder, mode=mode, project=project, entity=entity, group=str(grid["grid"]))
    sent = 0
    for path in sorted((folder / "cells").glob("*/result.json")):
        result = read_json(path)
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        note = _noted(path.with_name(NOTE))
        if result["state"] not in FINAL or run.claimed(path.parent.name) or note.get(target) == content:
            continue
        log = path.with_name("log.jsonl")
        sender.cell(result, list(read_lines(log)) if log.is_file() else [])
        write_json(path.with_name(NOTE), {**note, target: content})
        sent += 1
    if figures is not None:
        _send_figures(sender, folder, figures, target, str(grid["hash"]))
    return sent


def _send_figures(sender: _Sender, folder: Path, figures: Path, target: str, grid_hash: str) -> None:
    if not figures.is_dir():
        raise PublishError(f"no folder {figures} with tables and figures: run python -m analysis.make first")
    files = sorted(p for p in figures.iterdir() if p.suffix in (".md", ".csv", ".tex", ".png", ".pdf"))
    content = hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in files)).hexdigest()
    note = _noted(folder / NOTE)
    if note.get(target) != content:
        sender.artifacts(files, run_id=f"{grid_hash}-tables")
        write_json(folder / NOTE, {**note, target: content})


def _noted(path: Path) -> dict[str, str]:
    return dict(read_json(path)) if path.is_file() else {}


class _Sender:
    """W&B's client, one run at a time."""

    def __init__(self, folder: Path, *, mode: str, project: str, entity: str | None, group: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        self._folder, self._mode, self._project, self._entity, self._group = (
            folder,
            mode,
            project,
            entity,
            group,
        )

    def _start(self, *, run_id: str, job_type: str, name: str, config: dict[str, Any]) -> Any:
        # What an interrupted call left of this run would be sent a second time.
        for left in (self._folder / "wandb").glob(f"offline-run-*-{run_id}"):
            shutil.rmtree(left)
        settings = self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        try:
            return self._wandb.init(
                id=run_id,
                project=self._project,
                entity=self._entity,
                group=self._group,
                job_type=job_type,
                name=name,
                config=config,
                dir=str(self._folder),
                mode=self._mode,
                reinit="finish_previous",
                settings=settings,
            )
        except self._wandb.errors.Error as error:
            raise PublishError(
                f"Weights & Biases cannot be reached or refuses ({error}): log in with `wandb login`, or use --mode offline and "
                "send the files later with `wandb sync`; the local records are complete either way"
            ) from error

    def cell(self, result: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> None:
        """One run: config, history over samples seen, summary."""
        cell = result["cell"]
        keys = ("arm", "model", "dataset", "seed", "batch", "epochs", "block", "config")
        config = {key: cell[key] for key in keys} | {
            "state": result["state"],
            "reason": result["reason"],
            "shared_machine": result.get("shared_machine"),
            "provenance": result.get("provenance", {}),
            "comparison": COMPARISON,
        }
        run = self._start(
            run_id=cell["id"],
            job_type=cell["arm"],
            name=f"{cell['arm']} {cell['model']} seed {cell['seed']}",
            config=config,
        )
        run.define_metric("samples_seen")
        run.define_metric("*", step_metric="samples_seen")
        for row in history(events):
            run.log(row)
        summary = {"state": result["state"], **{k: v for k, v in result["metrics"].items() if _number(v)}}
        run.summary.update(summary)
        run.finish(exit_code=0 if result["state"] == "done" else 1)

    def artifacts(self, files: Sequence[Path], *, run_id: str) -> None:
        """Tables and figures of the whole grid."""
        run = self._start(
            run_id=run_id, job_type="analysis", name="tables and figures", config={"comparison": COMPARISON}
        )
        for kind, endings in (("table", (".md", ".csv", ".tex")), ("figure", (".png", ".pdf"))):
            chosen = [path for path in files if path.suffix in endings]
            if chosen:
                artifact = self._wandb.Artifact(f"{self._group}-{kind}s", type=kind)
                for path in chosen:
                    artifact.add_file(str(path), name=path.name)
                run.log_artifact(artifact)
        run.finish()


@dataclass
class Arguments:
    """Send finished cells to Weights & Biases, once."""

    out: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    mode: Literal["offline", "online"] = "offline"
    """offline writes W&B's files under OUT/wandb; online sends."""
    project: str = "tri-accel"
    """W&B project."""
    entity: str | None = None
    """W&B team or user; none: the account's default."""
    figures: Path | None = None
    """Folder of tables and figures (from analysis.make) to send as artifacts."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 sent, 2 bad input or no connection."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m ablations.publish")
    try:
        sent = publish(
            arguments.out,
            mode=arguments.mode,
            project=arguments.project,
            entity=arguments.entity,
            figures=arguments.figures,
        )
    except (TriAccelError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    where = (
        f"; send them with: wandb sync {arguments.out / 'wandb'}/offline-run-*"
        if arguments.mode == "offline"
        else ""
    )
    print(f"{sent} cells {'written' if arguments.mode == 'offline' else 'sent'}" + (where if sent else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
