"""What the controller did in one run: precision map, batch and memory, curvature per layer.

Maps show the lowest seed that finished, said in the title; the batch trace shows every seed. Layers stand from input (top) to
output. Dark is FP32, light FP16, so the map reads in grey. Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .compare import peak_bytes
from .figures import MAX_LINES, arm_style, legend_below, new_figure, subtitle
from .groups import Group
from .record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["batch_and_memory", "curvature", "map_grid", "precision_map"]

MIB = 2**20
FORMATS = ("fp32", "bf16", "fp16")
_FORMAT_COLOURS = ("#16324f", "#56b4e9", "#f7e6a1")
_FORMAT_HATCHES = ("", "///", "...")


def map_grid(record: Record) -> tuple[list[str], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Layers, edges of the intervals in samples (k+1,), and format index per layer and interval (layers, k)."""
    maps = record.series.maps
    layers = list(dict.fromkeys(layer for change in maps for layer in change["map"]))
    starts = [0.0, *(float(change["samples_seen"]) for change in maps[1:])]
    end = float(record.metrics.get("samples_seen") or starts[-1] + 1)
    now: dict[str, str] = {}
    columns = []
    for change in maps:
        now |= change["map"]
        columns.append([FORMATS.index(now.get(layer, "fp32")) for layer in layers])
    return layers, np.array([*starts, max(end, starts[-1] + 1)]), np.array(columns).T.reshape(len(layers), -1)


def _first(group: Group, label: str, part: str) -> Record | None:
    return next((r for r in group.done(label) if getattr(r.series, part)), None)


def _name_layers(axes: Axes, layers: Sequence[str], ignored: Sequence[str] = ()) -> None:
    size = 6.5 if len(layers) <= 30 else 4.6
    labels = [f"{layer}{' *' if layer in ignored else ''}" for layer in layers]
    axes.set_yticks(np.arange(len(layers)) + 0.5, labels, fontsize=size)
    axes.set_ylim(len(layers), 0)
    axes.grid(False)
    axes.tick_params(axis="y", length=0, pad=2)


def _height(layers: int) -> float:
    return 1.9 + (0.15 if layers <= 30 else 0.088) * layers


def precision_map(group: Group) -> Figure | None:
    """Layer x samples, one panel an arm that adapts precision (tri-accel, and by the paper's rules)."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    found = [(label, _first(group, label, "maps")) for label in ("tri-accel", "tri-accel-paper")]
    shown = [(label, record) for label, record in found if record is not None]
    if not shown:
        return None
    grids = [map_grid(record) for _, record in shown]
    figure, axes_grid = new_figure(
        3.3 + 2.3 * len(shown),
        _height(max(len(g[0]) for g in grids)),
        1,
        len(shown),
        sharey=len({tuple(g[0]) for g in grids}) == 1,
    )
    ignored_any = False
    for axes, (label, record), (layers, edges, values) in zip(axes_grid[0], shown, grids, strict=True):
        axes.pcolormesh(
            edges / 1000, np.arange(len(layers) + 1), values, cmap=ListedColormap(_FORMAT_COLOURS), vmin=-0.5, vmax=2.5,
            linewidth=0,
        )  # fmt: skip
        for index in (1, 2):
            _hatch(axes, edges / 1000, values == index, _FORMAT_HATCHES[index])
        ignored = sorted({layer for change in record.series.maps for layer in change.get("ignored", ())})
        ignored_any |= bool(ignored)
        _name_layers(axes, layers, ignored)
        axes.set_xlabel("samples seen, thousands")
        axes.set_title(f"{label}, seed {record.seed}", loc="left", fontsize=8.5)
    present = sorted({int(v) for g in grids for v in np.unique(g[2])})
    handles = [
        Patch(
            facecolor=_FORMAT_COLOURS[i],
            hatch=_FORMAT_HATCHES[i],
            edgecolor="#333333",
            linewidth=0.4,
            label=FORMATS[i].upper(),
        )
        for i in present
    ]
    if ignored_any:
        handles.append(Patch(facecolor="none", edgecolor="none", label="* ran in another format than asked"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"Precision map: {subtitle(group)}", x=0.01, ha="left", fontsize=9.5)
    return figure


def _hatch(axes: Axes, edges: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], hatch: str) -> None:
    """One hatched bar per stretch of one layer in one format."""
    for row in range(mask.shape[0]):
        start = None
        for column in range(mask.shape[1] + 1):
            inside = column < mask.shape[1] and mask[row, column]
            if inside and start is None:
                start = column
            elif not inside and start is not None:
                axes.barh(
                    row + 0.5, edges[column] - edges[start], left=edges[start], height=1.0, facecolor="none",
                    edgecolor="#00000055", hatch=hatch, linewidth=0,
                )  # fmt: skip
                start = None


def batch_and_memory(group: Group) -> Figure | None:
    """Batch size and bytes in use over samples, every seed of the arms that adapt the batch, fp32 as the reference."""
    arms = [
        label
        for label in ("fp32", "batch", "tri-accel-paper", "tri-accel")
        if any(r.series.steps for r in group.done(label))
    ]
    if not arms:
        return None
    figure, grid = new_figure(6.4, 5.0, 2, 1, sharex=True)
    top, bottom = grid[0, 0], grid[1, 0]
    budgets = set()
    for label in arms:
        look = arm_style(label)
        records = [r for r in group.done(label) if r.series.steps][:MAX_LINES]
        for index, record in enumerate(records):
            steps = record.series.steps
            seen = np.array(steps["samples_seen"], dtype=float) / 1000
            options: dict[str, Any] = {
                "color": look.colour, "linestyle": look.line, "linewidth": look.width * (1.0 if index == 0 else 0.6),
                "alpha": 1.0 if index == 0 else 0.35,
            }  # fmt: skip
            if "batch_size" in steps:
                sizes = np.array(steps["batch_size"], dtype=float)
                full = _without_tails(sizes)
                top.step(
                    seen[full], sizes[full], where="post", label=label if index == 0 else None, **options
                )
            if "used_bytes" in steps:
                bottom.step(seen, np.array(steps["used_bytes"], dtype=float) / MIB, where="post", **options)
            elif (peak := peak_bytes(record)) is not None:  # a fixed batch: one peak for the whole run
                bottom.plot(seen[[0, -1]], [peak / MIB] * 2, **options)
            budget = (record.config.get("batch") or {}).get("budget_bytes") or record.cell.get("budget_bytes")
            budgets |= {budget} if budget else set()
    for budget in sorted(budgets):
        bottom.axhline(budget / MIB, color="#000000", linewidth=1.0, linestyle=(0, (1, 1)))
        bottom.annotate(
            f"budget {budget / MIB:.0f} MiB",
            (0.01, budget / MIB),
            xycoords=("axes fraction", "data"),
            va="bottom",
            fontsize=7.5,
        )
    top.set_ylabel("batch size, samples")
    bottom.set_ylabel(
        "peak of a step, MiB\n"
        + ("(reserved by CUDA)" if group.on_cuda else "(live tensors, without oneDNN scratch)")
    )
    top.set_ylim(bottom=0)
    bottom.set_ylim(bottom=0)
    if budgets:
        bottom.set_ylim(top=1.12 * max(max(budgets) / MIB, bottom.get_ylim()[1] / 1.05))
    bottom.set_xlim(left=0)
    bottom.set_xlabel("samples seen, thousands (thin lines: further seeds)")
    top.set_title(f"Batch and memory: {subtitle(group)}", loc="left")
    legend_below(figure, top)
    return figure


def _without_tails(sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Steps that are not the short rest of an epoch: smaller than both neighbours."""
    keep = np.ones(len(sizes), dtype=bool)
    if len(sizes) > 2:
        keep[1:-1] = ~((sizes[1:-1] < sizes[:-2]) & (sizes[1:-1] < sizes[2:]))
    if len(sizes) > 1 and sizes[-1] < sizes[-2]:
        keep[-1] = False
    return keep


def curvature(group: Group) -> Figure | None:
    """Largest eigenvalues of each layer's block, and the scale on its rate that follows, layer x samples."""
    from matplotlib.colors import LogNorm

    label, record = next(
        (
            (name, r)
            for name in ("tri-accel", "curvature")
            if (r := _first(group, name, "curvature")) is not None
        ),
        ("", None),
    )
    if record is None:
        return None
    data = record.series.curvature
    layers, seen = data["layers"], np.array(data["samples_seen"], dtype=float) / 1000
    end = float(record.metrics.get("samples_seen") or seen[-1] * 1000) / 1000
    shown = max(1, int((seen < end).sum()))  # a probe at the very end has no stretch of its own
    edges = np.append(seen[:shown], max(end, seen[shown - 1] + 1e-3))
    panels = []
    for key, name in (
        ("curvature", "λ: mean of the top eigenvalues"),
        ("scale", "scale on the learning rate"),
    ):
        values = np.array([[np.nan if x is None else x for x in row] for row in data[key]], dtype=float).T[
            :, :shown
        ]
        values = np.where(values > 0, values, np.nan)
        if np.isfinite(values).any():
            panels.append((name, np.ma.masked_invalid(values)))
    if not panels:
        return None
    figure, grid = new_figure(3.4 + 2.4 * len(panels), _height(len(layers)), 1, len(panels), sharey=True)
    for axes, (name, values) in zip(grid[0], panels, strict=True):
        low, high = float(values.min()), float(values.max())
        norm = LogNorm(low, high) if high > low else LogNorm(low / 1.1, low * 1.1)
        axes.set_facecolor("#dddddd")
        mesh = axes.pcolormesh(
            edges, np.arange(len(layers) + 1), values, cmap="cividis", norm=norm, linewidth=0
        )
        bar = figure.colorbar(
            mesh, ax=axes, location="bottom", shrink=0.9, aspect=30, pad=0.25 / _height(len(layers))
        )
        ticks = _ticks(low, high)
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.minorticks_off()
        bar.set_label(name)
        axes.set_xlabel("samples seen, thousands")
        _name_layers(axes, layers)
    text = f"Curvature per layer ({label}, seed {record.seed}): {subtitle(group)}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=9.5)
    return figure


def _ticks(low: float, high: float) -> list[float]:
    """Five values evenly spaced in the logarithm, or whole powers of ten where the range has at least three."""
    decades = [10.0**k for k in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    if len(decades) >= 3:
        return decades[:: 1 + len(decades) // 7]
    return list(dict.fromkeys(float(f"{tick:.2g}") for tick in np.geomspace(low, high, 5)))
