"""How figures look, and where they are drawn and saved.

Colour-blind safe (seaborn's ``colorblind`` palette) and readable in grey: every arm has its own line style and marker beside
its colour, maps run from dark to light. One font, fixed sizes, dates and versions stripped from the files, arms and seeds in
the tables' order: the same records give the same bytes under one set of library versions (``constraints.txt``).
Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compact import slug
from .groups import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "MAX_LINES",
    "ArmStyle",
    "arm_style",
    "draw_all",
    "featured",
    "legend_below",
    "new_figure",
    "save",
    "style",
    "subtitle",
]

MAX_LINES = 10
"""Seeds whose own lines are drawn, lowest first; points are drawn for every seed."""
_COLOURS = (
    "#0173b2",
    "#de8f05",
    "#029e73",
    "#d55e00",
    "#cc78bc",
    "#ca9161",
    "#fbafe4",
    "#949494",
    "#b5a900",
    "#56b4e9",
)
"""seaborn's ``colorblind``, with its yellow darkened to be seen on white."""
_DASH = (0, (5, 2))
_STYLES: dict[str, tuple[str, Any, str]] = {
    "fp32": ("#000000", "-", "o"),
    "amp-bf16": (_COLOURS[9], _DASH, "s"),
    "amp-fp16": (_COLOURS[6], (0, (2, 2)), "v"),
    "profiled-static": (_COLOURS[2], (0, (6, 2, 1, 2)), "D"),
    "off": (_COLOURS[7], "-", "x"),
    "precision": (_COLOURS[0], _DASH, "<"),
    "curvature": (_COLOURS[1], _DASH, "^"),
    "batch": (_COLOURS[5], _DASH, ">"),
    "precision+curvature": (_COLOURS[0], (0, (1, 1)), "h"),
    "precision+batch": (_COLOURS[5], (0, (1, 1)), "H"),
    "curvature+batch": (_COLOURS[1], (0, (1, 1)), "8"),
    "tri-accel": (_COLOURS[3], "-", "*"),
    "tri-accel-paper": (_COLOURS[8], (0, (8, 2)), "P"),
    "replay": (_COLOURS[4], (0, (3, 1, 1, 1, 1, 1)), "X"),
}
_RC: dict[str, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 8.5,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "figure.dpi": 150,
    "savefig.dpi": "figure",
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.05,
    "pdf.fonttype": 42,
    "pdf.compression": 6,
    "text.usetex": False,
    "text.parse_math": False,
    "path.simplify": True,
}


@dataclass(frozen=True, slots=True)
class ArmStyle:
    """How an arm is drawn everywhere."""

    colour: str
    line: Any
    marker: str
    width: float


def arm_style(label: str) -> ArmStyle:
    """Style of an arm label; an arm at another batch or with the engine keeps its colour and has a thin dotted line."""
    name = label.partition(" ")[0]
    base, at, _ = name.partition("@")
    colour, line, marker = _STYLES.get(base, (_COLOURS[7], (0, (1, 3)), "."))
    plain = not at and " " not in label
    return ArmStyle(colour, line if plain else (0, (1, 2)), marker, 2.0 if label == "tri-accel" else 1.3)


def featured(group: Group) -> list[str]:
    """Arms of the line plots, in drawing order: references, then variants, tri-accel on top."""
    wanted = (
        "fp32",
        "amp-bf16",
        "profiled-static",
        group.best_static,
        "replay",
        "tri-accel-paper",
        "tri-accel",
    )
    return [label for label in dict.fromkeys(wanted) if label and group.done(label)]


@contextmanager
def style() -> Iterator[None]:
    """Fixed look, whatever the user's matplotlib settings are."""
    import matplotlib
    import seaborn

    from .figure_font import small_font

    with matplotlib.rc_context(), small_font() as family:
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(seaborn.axes_style("ticks"))
        matplotlib.rcParams.update(_RC | {"font.family": family})
        yield


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, Any]:
    """A figure outside pyplot's state, inches, with constrained layout; axes as a 2-D array."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def subtitle(group: Group) -> str:
    """Where it was measured."""
    return f"{group.name}, {group.epochs:g} epochs\n{group.hardware}"


def legend_below(figure: Figure, axes: Axes, *, columns: int = 4) -> None:
    """One legend under the axes, clear of the data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(columns, len(handles)),
            frameon=False,
            handlelength=3.2,
        )


def save(figure: Figure, out: Path, name: str, formats: Sequence[str]) -> list[Path]:
    """Write the figure without dates or versions.

    Args:
        figure: it.
        out: folder.
        name: file name without suffix.
        formats: of ``png`` and ``pdf``.
    """
    metadata: dict[str, dict[str, None]] = {
        "png": {"Software": None},
        "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    }
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)  # places everything once, for all formats
    figure.set_layout_engine("none")
    written = []
    for suffix in formats:
        file = out / f"{name}.{suffix}"
        figure.savefig(file, format=suffix, metadata=metadata[suffix])
        written.append(file)
    return written


def draw_all(
    groups: Sequence[Group], out: Path, *, formats: Sequence[str], margin: float | None = None
) -> list[Path]:
    """Every figure that the records allow; one set a group and one for the paper's figures.

    Args:
        groups: as ``make_groups`` gives them.
        out: folder.
        formats: of ``png`` and ``pdf``.
        margin: accuracy points, for the target; ``None``: each grid's own.

    Returns:
        Files written, in name order.
    """
    from . import figure_curves, figure_effects, figure_traces
    from .parallel import in_two

    out.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, Callable[[Group], Figure | None]] = {
        "accuracy_against_time": figure_curves.accuracy_against_time,
        "time_to_target": partial(figure_curves.time_to_target_figure, margin=margin),
        "efficiency": figure_curves.efficiency,
        "precision_map": figure_traces.precision_map,
        "batch_and_memory": figure_traces.batch_and_memory,
        "curvature": figure_traces.curvature,
        "factorial_effects": figure_effects.factorial_figure,
    }
    tasks: list[tuple[str, Callable[[], Figure | None]]] = [
        (f"{kind}--{name}", partial(draw, group))
        for group, name in zip(groups, group_slugs(groups), strict=True)
        for kind, draw in kinds.items()
    ]
    tasks.append(("beside_the_paper", partial(figure_effects.paper_figure, groups)))

    def work(some: Sequence[tuple[str, Callable[[], Figure | None]]]) -> list[Path]:
        written = []
        with style():
            for name, draw in some:
                figure = draw()
                if figure is not None:
                    written += save(figure, out, name, formats)
        return written

    return sorted(in_two(work, tasks))


def group_slugs(groups: Sequence[Group]) -> list[str]:
    """File-name part of each group: model and data set, then grid, epochs and hardware as far as needed to tell them apart."""
    for parts in (
        lambda g: (g.model, g.dataset),
        lambda g: (g.model, g.dataset, g.grid),
        lambda g: (g.model, g.dataset, g.grid, f"{g.epochs:g}ep", g.hardware),
    ):
        names = [slug(*parts(group)) for group in groups]
        if len(set(names)) == len(names):
            break
    return names
