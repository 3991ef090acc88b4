"""One trainer for all arms: same data order, same recipe, same protocol of timing and evaluation. Source: ours.

Training time has the controllers' own cost and the calibration inside; evaluation, checkpoints and logging to disk are outside,
and so is one warm-up pass in the arm's own format, the same for every arm. Final accuracy is that of the last weights, in FP32.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from baselines import make_arm
from triaccel.calibration import Calibration, unchanged
from triaccel.memory import MemoryProbe, live_tensor_bytes
from triaccel.trace import Trace
from triaccel.types import Precision

from .cells import Cell
from .record import Log
from .timing import ForeignLoad, Stopwatch
from .workloads import ResidentImages, build_model, held_out, load_images, statistics

__all__ = ["Diverged", "Preempted", "Run", "train"]

LOG_EVERY = 10
EVALUATION_BATCH = 512


class Diverged(RuntimeError):
    """The loss is not finite and stays so."""


class Preempted(RuntimeError):
    """Asked to stop; a checkpoint is written."""


@dataclass
class Run:
    """What a cell's training needs from outside.

    Attributes:
        cell: what to train.
        device: where.
        log: the cell's log, already cut to the checkpoint's position.
        root: folder of data sets.
        download: whether data sets may be fetched.
        calibration: measured earlier for the same key, or ``None``.
        trace: the trace to replay, or ``None``.
        force_unsupported: run formats that the device does not accelerate.
        checkpoint: content of the newest checkpoint, or ``None``.
        save: writes a checkpoint.
        due: whether a checkpoint is due.
        stopping: whether to stop now.
        progress: called now and then with (share done, samples seen, last loss).
        memory: probe of bytes; ``None``: the device's own.
    """

    cell: Cell
    device: torch.device
    log: Log
    root: Path = Path("data")
    download: bool = False
    calibration: Calibration | None = None
    trace: Trace | None = None
    force_unsupported: bool = False
    checkpoint: dict[str, Any] | None = None
    save: Callable[[dict[str, Any]], None] = lambda _: None
    due: Callable[[], bool] = lambda: False
    stopping: Callable[[], bool] = lambda: False
    progress: Callable[[float, int, float], None] = lambda *_: None
    memory: MemoryProbe | None = None
    measured: Calibration | None = field(default=None, init=False)
    """Set by ``train`` to the calibration in force."""
    model: nn.Module | None = field(default=None, init=False)
    """Set by ``train`` to the model that it trains."""


def train(run: Run) -> dict[str, Any]:
    """Train one cell to its end.

    Returns:
        ``{"metrics": ..., "report": ..., "trace": Trace, "shared_machine": bool}``.

    Raises:
        Unsupported: the device does not accelerate the arm's format.
        Diverged: the loss is not finite at 20 logged steps in a row.
        Preempted: ``run.stopping()`` said so; ``run.save`` was called.
        torch.OutOfMemoryError: as it came, where the arm does not recover.
    """
    cell, settings = run.cell, run.cell.settings
    train_set, test_set, classes = _data(run)
    model = build_model(cell.model, num_classes=classes, seed=cell.seed, device=run.device)
    run.model = model
    forward = torch.compile(model) if settings["compile"] else model
    optimizer = _optimizer(model, cell, run.device)
    arm = make_arm(
        cell.arm,
        forward,
        optimizer,
        config=cell.config,
        calibration=run.calibration,
        memory=run.memory,
        trace=run.trace,
        force_unsupported=run.force_unsupported,
    )
    if settings["recipe"]["schedule"] == "cosine":
        arm.schedule(lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)))
    loss_fn = nn.CrossEntropyLoss()
    arm.total_samples = len(train_set) * settings["epochs"]
    first = train_set.fetch(torch.arange(min(cell.batch, len(train_set))), 0)
    _warm_up(arm, forward, first, loss_fn)
    if run.checkpoint is None and hasattr(arm, "calibrate"):
        run.measured = arm.calibrate(first, loss_fn)

    watch, load = Stopwatch(run.device), ForeignLoad()
    evaluations: list[dict[str, Any]] = []
    state = {"evaluation_seconds": 0.0, "peak_live": 0, "last_loss": math.nan, "bad": 0, "logged": 0}
    if run.checkpoint is not None:
        watch = _restore(run, model, optimizer, arm, state, evaluations)
    else:
        torch.manual_seed(cell.seed)
    calibration = getattr(arm, "calibration", None)
    calibration_seconds = calibration.seconds if calibration else 0.0
    epoch_samples = len(train_set)
    total = epoch_samples * settings["epochs"]
    steps_done = arm.report()["steps"]

    watch.start()
    for batch in arm.batches(train_set, epochs=settings["epochs"]):
        tracked = steps_done == 1 and not state["peak_live"] and not arm.measures_bytes
        with live_tensor_bytes() if tracked and run.device.type == "cpu" else nullcontext() as tracker:
            report = arm.step(batch, loss_fn)
        if tracked and tracker is not None:
            state["peak_live"] = tracker.peak_bytes
        steps_done += 1
        with (
            watch.paused()
            if _eventful(report, state, epoch_samples, total) or run.stopping() or run.due()
            else nullcontext()
        ):
            _log_step(run, arm, report, watch, state, total)
            if report.samples_seen % epoch_samples == 0 or report.samples_seen >= total:
                last = report.samples_seen >= total
                if settings["evaluate"] == "epoch" or last:
                    evaluations.append(
                        _evaluate(
                            run, arm, forward, test_set, watch, state, report.samples_seen, epoch_samples
                        )
                    )
            if report.samples_seen < total and (run.stopping() or run.due()):
                run.save(_checkpoint(run, model, optimizer, arm, watch, state, evaluations))
                if run.stopping():
                    raise Preempted(
                        f"stopped after {report.samples_seen} of {total} samples, checkpoint written"
                    )
    watch.stop()
    if not math.isfinite(evaluations[-1]["loss"]):
        raise Diverged(
            f"the loss on the {evaluations[-1]['split']} split is {evaluations[-1]['loss']} at the end"
        )
    metrics = _metrics(run, arm, watch, state, evaluations, calibration_seconds)
    return {
        "metrics": metrics | {"foreign_cores": load.cores},
        "report": arm.report(),
        "trace": arm.trace,
        "shared_machine": load.disturbs,
    }


def _warm_up(arm: Any, model: nn.Module, batch: Any, loss_fn: nn.Module) -> None:
    """Forward and backward twice, nothing kept: caches of kernels fill before the clock starts, for every arm alike."""
    device, fixed = batch[0].device, getattr(arm, "precision", Precision.FP32)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with unchanged(model):
        for _ in range(2):
            with torch.autocast(
                device.type,
                torch.bfloat16 if fixed is Precision.FP32 else fixed.torch_dtype,
                enabled=fixed is not Precision.FP32,
            ):
                loss = loss_fn(model(batch[0]), batch[1])
            torch.autograd.grad(loss, parameters)


def _data(run: Run) -> tuple[ResidentImages, ResidentImages, int]:
    settings = run.cell.settings
    train_images, test_images = load_images(run.cell.dataset, root=run.root, download=run.download)
    if settings["split"] == "validation":
        train_images, test_images = held_out(train_images)
    train_images = train_images.subset(settings["train_samples"])
    test_images = test_images.subset(settings["test_samples"])
    mean, std = statistics(train_images)
    common = {"mean": mean, "std": std, "device": run.device, "seed": run.cell.seed}
    return (
        ResidentImages(train_images, augment=settings["recipe"]["augment"], **common),
        ResidentImages(test_images, augment=False, **common),
        train_images.classes,
    )


def _optimizer(model: nn.Module, cell: Cell, device: torch.device) -> torch.optim.Optimizer:
    """SGD in its fastest form on the device (fused on CUDA, foreach on CPU), the rate following the first batch."""
    recipe, base = cell.settings["recipe"], cell.settings["base_batch"]
    ratio = cell.batch / base
    rate = recipe["rate_per_256"] * base / 256 * (ratio if recipe["batch_rule"] == "linear" else ratio**0.5)
    fast: dict[str, Any] = {"fused": True} if device.type == "cuda" else {"foreach": True}
    return torch.optim.SGD(
        model.parameters(), lr=rate, momentum=recipe["momentum"], weight_decay=recipe["weight_decay"], **fast
    )


def _eventful(report: Any, state: dict[str, Any], epoch: int, total: int) -> bool:
    return (
        report.step % LOG_EVERY == 0
        or bool(report.changes)
        or report.samples_seen % epoch == 0
        or report.samples_seen >= total
    )


def _log_step(run: Run, arm: Any, report: Any, watch: Stopwatch, state: dict[str, Any], total: int) -> None:
    entries = arm.trace.entries
    if report.step % LOG_EVERY == 0 or report.samples_seen >= total:
        loss = float(report.loss)
        state["last_loss"] = loss
        state["bad"] = 0 if math.isfinite(loss) else state["bad"] + 1
        run.log.append(
            "step",
            step=report.step,
            samples_seen=report.samples_seen,
            loss=loss if math.isfinite(loss) else None,
            batch_size=report.batch_size,
            rate_factor=report.rate_factor,
            train_seconds=watch.seconds,
            used_bytes=entries[-1].used_bytes if entries else None,
            loss_scale=report.loss_scale,
            stepped=report.stepped,
            map_version=report.map_version,
        )
        run.progress(report.samples_seen / total, report.samples_seen, loss)
        if state["bad"] >= 20:
            raise Diverged(
                f"the loss was not finite at the last {state['bad']} logged steps (step {report.step})"
            )
    for entry in entries[state["logged"] :]:
        _log_entry(run.log, entry, entries[state["logged"] - 1] if state["logged"] else None)
        state["logged"] += 1


def _log_entry(log: Log, entry: Any, before: Any) -> None:
    """One control tick: its changes, and what moved since the tick before."""
    when = {"step": entry.step, "samples_seen": entry.samples_seen}
    for change in entry.changes:
        log.append(
            "change",
            **when,
            component=change.component,
            layer=change.layer,
            before=change.before,
            after=change.after,
            why=change.why,
        )
    if before is not None and entry.verified and entry.verified != before.verified:
        _log_map(log, when, before, verified=entry.verified)  # what the map in force until now really ran in
    if before is None or entry.map_version != before.map_version:
        _log_map(log, when, entry, verified={})
    if entry.probe_id >= 0 and (before is None or entry.probe_id != before.probe_id):
        log.append(
            "curvature",
            samples_seen=entry.samples_seen,
            probe_id=entry.probe_id,
            layers={
                name: {
                    "curvature": value,
                    "eigenvalues": list(entry.eigenvalues.get(name, ())),
                    "sample_variance": entry.sample_variance.get(name),
                    "scale": entry.scales.get(name, 1.0),
                }
                for name, value in entry.curvature.items()
            },
            noise_scale=entry.noise.value if entry.noise else None,
        )
    if entry.decided_by:
        log.append("decided_by", samples_seen=entry.samples_seen, counts=dict(entry.decided_by))


def _log_map(log: Log, when: dict[str, int], entry: Any, *, verified: Any) -> None:
    formats = {name: str(value) for name, value in entry.precision_map.items()}
    log.append("precision_map", **when, version=entry.map_version, map=formats, verified=dict(verified))


def _evaluate(
    run: Run,
    arm: Any,
    model: nn.Module,
    test_set: ResidentImages,
    watch: Stopwatch,
    state: dict[str, Any],
    samples_seen: int,
    epoch_samples: int,
) -> dict[str, Any]:
    clock = Stopwatch(run.device)
    clock.start()
    correct = torch.zeros((), dtype=torch.int64, device=run.device)
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    with arm.evaluation():
        for start in range(0, len(test_set), EVALUATION_BATCH):
            images, labels = test_set.fetch(
                torch.arange(start, min(start + EVALUATION_BATCH, len(test_set))), 0
            )
            outputs = model(images).float()
            correct += (outputs.argmax(1) == labels).sum()
            loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").double()
    clock.stop()
    state["evaluation_seconds"] += clock.seconds
    found = {
        "samples_seen": samples_seen,
        "epoch": samples_seen // epoch_samples,
        "train_seconds": watch.seconds,
        "split": run.cell.settings["split"],
        "accuracy": correct.item() / len(test_set),
        "loss": loss.item() / len(test_set),
    }
    run.log.append("eval", **{**found, "loss": found["loss"] if math.isfinite(found["loss"]) else None})
    return found


def _metrics(
    run: Run,
    arm: Any,
    watch: Stopwatch,
    state: dict[str, Any],
    evaluations: list[dict[str, Any]],
    calibration_seconds: float,
) -> dict[str, Any]:
    report = arm.report()
    final = evaluations[-1]
    peaks = [entry.used_bytes for entry in arm.trace.entries if entry.used_bytes is not None]
    cuda = run.device.type == "cuda"
    validation = run.cell.settings["split"] == "validation"
    seconds = watch.seconds + calibration_seconds
    return {
        "test_accuracy": None if validation else final["accuracy"],
        "validation_accuracy": final["accuracy"] if validation else None,
        "test_loss": final["loss"],
        "final_train_loss": state["last_loss"],
        "train_seconds": seconds,
        "calibration_seconds": calibration_seconds,
        "controller_seconds": report["controller_seconds"],
        "evaluation_seconds": state["evaluation_seconds"],
        "images_per_second": report["samples_seen"] / seconds,
        "samples_seen": report["samples_seen"],
        "steps": report["steps"],
        "updates": report["updates"],
        "skipped_steps": report["skipped_steps"],
        "recovered_oom": report["recovered_oom"],
        "peak_live_tensor_bytes": None if cuda else max([state["peak_live"], *peaks]),
        "peak_rss_bytes": _peak_rss(),
        "peak_cuda_reserved_bytes": torch.cuda.max_memory_reserved(run.device) if cuda else None,
        "peak_cuda_allocated_bytes": torch.cuda.max_memory_allocated(run.device) if cuda else None,
    }


def _peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _checkpoint(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    arm: Any,
    watch: Stopwatch,
    state: dict[str, Any],
    evaluations: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "cell": run.cell.id,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "arm": arm.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(run.device) if run.device.type == "cuda" else None,
        "train_seconds": watch.seconds,
        "state": dict(state),
        "evaluations": list(evaluations),
        "log_bytes": run.log.size,
    }


def _restore(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    arm: Any,
    state: dict[str, Any],
    evaluations: list[dict[str, Any]],
) -> Stopwatch:
    saved = run.checkpoint
    assert saved is not None
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    arm.load_state_dict(saved["arm"])
    torch.set_rng_state(saved["rng"])
    if saved["cuda_rng"] is not None:
        torch.cuda.set_rng_state(saved["cuda_rng"], run.device)
    state.update(saved["state"])
    evaluations.extend(saved["evaluations"])
    return Stopwatch(run.device, seconds=saved["train_seconds"])
