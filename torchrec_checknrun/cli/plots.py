"""Draws a run's checkpoints; knows matplotlib, and nothing of where the numbers come from."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from torchrec_checknrun.cli.reporting import Point

_COLOURS = ("#4477aa", "#228833", "#ccbb44", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme, which the colour-blind can tell apart."""


def draw(points: list[Point]) -> bytes:
    """Bytes by what they are spent on, capacity, modified rows and stall, checkpoint by checkpoint.

    Returns:
        A PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), layout="constrained")
    FigureCanvasAgg(figure)  # files only: there may be no screen
    axes = figure.subplots(2, 2)
    _bytes(axes[0][0], points)
    _kept(axes[0][1], points)
    _fractions(axes[1][0], points)
    _stalls(axes[1][1], points)
    for ax in axes.flat:
        ax.grid(True, axis="y", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(bottom=0)
    for ax in axes[1]:
        ax.set_xlabel("checkpoint")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _bytes(ax: Axes, points: list[Point]) -> None:
    below = [0.0] * len(points)
    for colour, part in zip(_COLOURS, points[0].bytes, strict=True):
        height = [point.bytes[part] / 1e6 for point in points]
        ax.bar(range(len(points)), height, bottom=below, color=colour, label=part)
        below = [low + more for low, more in zip(below, height, strict=True)]
    ax.set_ylabel("MB written")
    ax.legend(fontsize=8)


def _kept(ax: Axes, points: list[Point]) -> None:
    kept = [float("nan") if p.kept_bytes is None else p.kept_bytes / 1e6 for p in points]
    ax.plot(kept, "o-", color=_COLOURS[0], markersize=4, label="to restore it")
    if any(p.full_fp32_bytes for p in points):
        full = [p.full_fp32_bytes / 1e6 for p in points]
        ax.plot(full, ":", color="black", label="full in fp32")
    ax.set_ylabel("MB kept")
    ax.legend(fontsize=8)


def _fractions(ax: Axes, points: list[Point]) -> None:
    shares = [100 * p.modified_fraction for p in points]
    for kind, colour in (("full", _COLOURS[1]), ("differential", _COLOURS[0])):
        at = [i for i, point in enumerate(points) if point.kind == kind]
        ax.plot(at, [shares[i] for i in at], "o", color=colour, markersize=5, label=kind)
    ax.set_ylabel("rows written (%)")
    ax.legend(fontsize=8)


def _stalls(ax: Axes, points: list[Point]) -> None:
    at = [i for i, point in enumerate(points) if point.stall_seconds is not None]
    ax.bar(at, [points[i].stall_seconds or 0.0 for i in at], color=_COLOURS[3])
    ax.set_xlim(-0.6, len(points) - 0.4)
    ax.set_ylabel("stall (s)")
    if not at:
        ax.text(0.5, 0.5, "no log was given", ha="center", transform=ax.transAxes)
