"""Seeded run folders in the harness's format, for the tests of the analysis: every state, every event, no training."""

import json
import math
from pathlib import Path

import numpy as np

ARMS = (
    "fp32",
    "amp-bf16",
    "amp-fp16",
    "profiled-static",
    "off",
    "precision",
    "curvature",
    "batch",
    "precision+curvature",
    "precision+batch",
    "curvature+batch",
    "tri-accel",
    "tri-accel-paper",
    "replay",
)
TIME = {"precision": 0.80, "curvature": 1.03, "batch": 0.85}
POINTS = {"precision": -0.2, "curvature": 0.4, "batch": -0.5}
BYTES = {"precision": 0.88, "curvature": 1.0, "batch": 1.25}
LAYERS = ("conv1", "layer1.0.conv1", "layer1.0.conv2", "layer2.0.conv1", "layer2.0.downsample.0", "fc")
DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MIB = 2**20


def components(arm: str) -> set[str]:
    base = arm.partition("@")[0]
    if base.startswith("tri-accel") or base == "replay":
        return {"precision", "curvature", "batch"}
    if base in ("amp-bf16", "amp-fp16", "profiled-static"):
        return {"precision"}
    return set(base.split("+")) & {"precision", "curvature", "batch"}


def make_cell(
    arm: str, model: str, dataset: str, seed: int, *, epochs: int = 5, engine: bool = False
) -> dict:
    base, _, batch = arm.partition("@")
    cell = {
        "schema": 1,
        "id": f"{base}-{model}-{dataset}-{seed}-{batch or 96}-{int(engine)}".replace(":", "-").replace(
            "/", "-"
        ),
        "arm": arm,
        "model": model,
        "dataset": dataset,
        "seed": seed,
        "batch": int(batch or 96),
        "epochs": epochs,
        "block": f"{model}-{dataset}-{seed}",
        "config": {
            "engine": {"gradient_release": engine},
            "batch": {"budget_bytes": 512 * MIB},
            "seed": seed,
        },
    }
    return cell


def make_result(
    cell: dict, *, state: str = "done", reason=None, shared=False, cpu="Test CPU", sources="aaaa", noise=1.0
):
    rng = np.random.default_rng([cell["seed"], *cell["arm"].encode()])
    block = np.random.default_rng([cell["seed"], *cell["model"].encode()]).normal(size=2)
    on = components(cell["arm"])
    seconds = 60.0 * math.exp(0.05 * block[0] + noise * 0.01 * rng.normal())
    points = 72.0 + 0.8 * block[1] + noise * 0.3 * rng.normal()
    peak = 163.0 * MIB * (0.8 if cell["config"]["engine"]["gradient_release"] else 1.0)
    for one in on:
        seconds, points, peak = seconds * TIME[one], points + POINTS[one], peak * BYTES[one]
    if on == set(TIME):
        points += 0.3
    metrics = {
        "test_accuracy": round(points / 100, 4),
        "test_loss": 0.8,
        "validation_accuracy": None,
        "train_seconds": seconds,
        "calibration_seconds": 1.5 if "precision" in on else 0.0,
        "controller_seconds": 0.02 * seconds if on else 0.0,
        "evaluation_seconds": 2.0,
        "samples_seen": 10_000 * cell["epochs"],
        "steps": 500,
        "updates": 500,
        "skipped_steps": 0,
        "images_per_second": 10_000 * cell["epochs"] / seconds,
        "peak_live_tensor_bytes": int(peak),
        "peak_rss_bytes": int(peak + 500 * MIB),
        "peak_cuda_reserved_bytes": None,
        "peak_cuda_allocated_bytes": None,
        "final_train_loss": 0.7,
    }
    return {
        "schema": 1,
        "cell": cell,
        "state": state,
        "reason": reason,
        "metrics": metrics if state == "done" else {},
        "report": {"decided_by": {"variance": 0.5, "cost": 0.5}, "map_version": 3} if on else {},
        "provenance": {
            "git_commit": "0" * 40,
            "sources_hash": sources,
            "packages": {"torch": "2.11.0"},
            "cpu": cpu,
            "gpu": None,
            "driver": None,
            "threads": 2,
            "deterministic": True,
        },
        "shared_machine": shared,
    }


def make_events(cell: dict, metrics: dict, *, points: int = 30) -> list[dict]:
    rng = np.random.default_rng([7, cell["seed"], *cell["arm"].encode()])
    on = components(cell["arm"])
    total, seconds, final = metrics["samples_seen"], metrics["train_seconds"], metrics["test_accuracy"]
    events: list[dict] = []
    formats = dict.fromkeys(LAYERS, "fp32")
    for i in range(1, points + 1):
        t = i / points
        seen, clock = int(total * t), seconds * (1 - (1 - t) ** 1.1 if "precision" in on else t)
        batch = cell["batch"] * (1 if "batch" not in on or t < 0.3 else 2 if t < 0.7 else 4)
        if "precision" in on and i in (1, 4, 12, 20):
            before = dict(formats)
            formats |= dict.fromkeys(LAYERS[1 : 1 + i // 4], "bf16")
            verified = {layer: DTYPE[f] for layer, f in before.items()}  # what ran until now
            events.append(
                {
                    "event": "precision_map",
                    "step": i,
                    "samples_seen": seen,
                    "version": i,
                    "map": dict(formats),
                    "verified": verified,
                }
            )
        if "curvature" in on and i % 3 == 0:
            layers = {
                layer: {
                    "curvature": float((k + 1) * math.exp(-2 * t + 0.2 * rng.normal())),
                    "eigenvalues": [1.0],
                    "sample_variance": 1.0,
                    "scale": float(1.5 - 0.2 * k + 0.1 * t),
                }
                for k, layer in enumerate(LAYERS)
            }
            events.append(
                {
                    "event": "curvature",
                    "samples_seen": seen,
                    "probe_id": i // 3,
                    "layers": layers,
                    "noise_scale": 200.0 * t,
                }
            )
        events.append(
            {
                "event": "step",
                "step": i,
                "samples_seen": seen,
                "loss": float(2.3 * math.exp(-1.5 * t)),
                "batch_size": batch,
                "rate_factor": math.sqrt(batch / 96),
                "train_seconds": float(clock),
                "used_bytes": int(metrics["peak_live_tensor_bytes"] * (0.6 + 0.4 * batch / (4 * 96))),
                "loss_scale": None,
                "stepped": True,
                "map_version": 1,
            }
        )
        if i % (points // cell["epochs"]) == 0:
            accuracy = final * (1 - 0.6 * math.exp(-4 * t)) / (1 - 0.6 * math.exp(-4))
            events.append(
                {
                    "event": "eval",
                    "samples_seen": seen,
                    "epoch": i * cell["epochs"] // points,
                    "train_seconds": float(clock),
                    "split": "test",
                    "accuracy": round(accuracy, 4),
                    "loss": 0.9,
                }
            )
            events.append({"event": "decided_by", "samples_seen": seen, "counts": {"variance": 3, "cost": 3}})
    return events


def write_cell(folder: Path, cell: dict, result: dict | None, events: list[dict]) -> Path:
    place = folder / "cells" / cell["id"]
    place.mkdir(parents=True)
    (place / "cell.json").write_text(json.dumps(cell))
    if result is not None:
        (place / "result.json").write_text(json.dumps(result))
    (place / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return place


def write_run(
    folder: Path,
    *,
    arms=ARMS,
    models=("resnet18",),
    datasets=("cifar10-jpeg",),
    seeds=range(10),
    grid="cpu",
    states=None,
    spec=None,
    shared=(),
    cpu=lambda cell: "Test CPU",
    sources=lambda cell: "aaaa",
    points=30,
    noise=1.0,
) -> Path:
    """A run folder. `states` maps (arm, seed) to a state; `shared` lists (arm, seed) that ran beside others."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "grid.json").write_text(
        json.dumps({"schema": 1, "grid": grid, "spec": spec or {}, "hash": "h"})
    )
    for model in models:
        for dataset in datasets:
            for seed in seeds:
                for arm in arms:
                    cell = make_cell(arm, model, dataset, seed)
                    default = "unsupported" if arm.startswith("amp-fp16") else "done"
                    state = (states or {}).get((arm, seed), default)
                    reason = None if state == "done" else f"{arm}: {state} in this test"
                    if state == "missing":
                        write_cell(folder, cell, None, [])
                        continue
                    result = make_result(
                        cell,
                        state=state,
                        reason=reason,
                        shared=(arm, seed) in shared,
                        cpu=cpu(cell),
                        sources=sources(cell),
                        noise=noise,
                    )
                    events = (
                        make_events(cell, result["metrics"], points=points)
                        if state == "done" and points
                        else []
                    )
                    write_cell(folder, cell, result, events)
    return folder
