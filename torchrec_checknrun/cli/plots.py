"""Draw a run's checkpoints with matplotlib, wherever the numbers come from."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#4477aa", "#228833", "#ccbb44", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme, which the colour-blind can tell apart."""
_MOST_LABELS = 8


@dataclass(frozen=True)
class Point:
    """One checkpoint of the run.

    Attributes:
        bytes: bytes in storage by part.
        kept_bytes: bytes of the chain that restores it; None if a parent is unknown.
        stall_seconds: how long training waited; None if no log has it.
        there: whether the checkpoint still is in the root.
    """

    id: str
    sequence: int
    step: int
    kind: str
    parent: str | None
    modified_fraction: float
    bytes: dict[str, int]
    full_fp32_bytes: int
    kept_bytes: int | None
    stall_seconds: float | None
    there: bool

    @property
    def total(self) -> int:
        """Return the checkpoint's bytes in storage."""
        return sum(self.bytes.values())


def draw(points: Sequence[Point]) -> bytes:
    """Draw the figure of ``figure_of`` as a PNG."""
    picture = io.BytesIO()
    figure_of(points).savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def figure_of(points: Sequence[Point]) -> Figure:
    """Plot bytes by part, capacity, rows written and stall, checkpoint by checkpoint.

    Checkpoints are spaced evenly, and labelled with their steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), layout="constrained")
    FigureCanvasAgg(figure)  # files only: there may be no screen
    panels = (
        (_bytes, "Written by each checkpoint", "MB"),
        (_kept, "Needed to restore each checkpoint", "MB"),
        (_fractions, "Rows written", "% of all rows"),
        (_stalls, "Stall of training", "ms"),
    )
    labelled = range(0, len(points), -(-len(points) // _MOST_LABELS))
    for ax, (plot, title, unit) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        plot(ax, points)
        ax.set_title(title)
        ax.set_ylabel(unit)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
        ax.grid(True, axis="y", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(bottom=0)
        ax.set_xlim(-0.6, len(points) - 0.4)
        ax.set_xticks(list(labelled), [f"{points[at].step:,}" for at in labelled])
        ax.set_xlabel("step of the checkpoint")
    return figure


def _bytes(ax: Axes, points: Sequence[Point]) -> None:
    below = [0.0] * len(points)
    for colour, part in zip(_COLOURS, points[0].bytes, strict=True):
        height = [point.bytes[part] / 1e6 for point in points]
        ax.bar(range(len(points)), height, bottom=below, color=colour, label=part)
        below = [low + more for low, more in zip(below, height, strict=True)]


def _kept(ax: Axes, points: Sequence[Point]) -> None:
    kept = [float("nan") if p.kept_bytes is None else p.kept_bytes / 1e6 for p in points]
    ax.plot(kept, "o-", color=_COLOURS[0], markersize=4, label="checkpoint and its parents")
    if any(p.full_fp32_bytes for p in points):
        full = [p.full_fp32_bytes / 1e6 for p in points]
        ax.plot(full, ":", color="black", label="full in fp32")


def _fractions(ax: Axes, points: Sequence[Point]) -> None:
    shares = [100 * p.modified_fraction for p in points]
    for kind, colour in (("full", _COLOURS[1]), ("differential", _COLOURS[0])):
        at = [i for i, point in enumerate(points) if point.kind == kind]
        ax.plot(at, [shares[i] for i in at], "o", color=colour, markersize=5, label=kind)


def _stalls(ax: Axes, points: Sequence[Point]) -> None:
    at = [i for i, point in enumerate(points) if point.stall_seconds is not None]
    ax.bar(at, [1000 * (points[i].stall_seconds or 0.0) for i in at], color=_COLOURS[3])
    if not at:
        ax.text(0.5, 0.5, "unknown without --log", ha="center", transform=ax.transAxes)
