"""Draw the figures of `partial_recovery` with matplotlib, knowing only their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.figures.plots import COLOURS, figure

PARTS = {
    "saving": "training waits for saves",
    "lost": "steps are trained again",
    "recovering": "restart and load",
    "journal": "images are kept (assumed)",
}
PAPER = {"full": (8.2, 8.5), "naive partial": (4.4, 4.4), "partial": (0.53, 0.68)}
"""The paper's figures, in per cent: lowest and highest."""


def draw_overhead(numbers: dict[str, Any], path: Path) -> None:
    """Draw the emulated overhead by its parts; diamonds: closed form; black: the paper."""
    rows = numbers["overhead"]
    labels = [
        row["recovery"]
        + (f"\n{row['process_deaths']:.0%} process deaths" if row["process_deaths"] else "")
        for row in rows
    ]
    at = np.arange(len(rows))[::-1]
    with figure(path, width=9) as (ax,):
        left = np.zeros(len(rows))
        for i, (part, label) in enumerate(PARTS.items()):
            width = np.array([100 * row["emulated"][part] for row in rows])
            ax.barh(at, width, 0.6, left=left, color=COLOURS[i], label=label)
            left += width
        closed = [100 * row["overhead"] for row in rows]
        ax.plot(closed, at, "D", color="white", markeredgecolor="black", label="closed form")
        for y, row in zip(at, rows, strict=True):
            if row["recovery"] in PAPER:
                low, high = PAPER[row["recovery"]]
                ax.plot([low, high], [y - 0.4] * 2, "k|-", label="the paper" if y == at[0] else "")
        ax.set_yticks(at, labels, fontsize=8)
        ax.set_xlabel(
            f"overhead of a job of {numbers['job']['job_hours']:g} hours (%), "
            f"PLS at most {numbers['max_pls']}"
        )
        ax.legend(fontsize=8, loc="lower right")


def draw_accuracy(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the change of logloss and of AUC by scheme; bars: one standard error."""
    lost = sorted({row["lost"] for row in summary if row["lost"]})
    schemes = list(dict.fromkeys(row["scheme"] for row in summary if row["lost"]))
    floor = next(row for row in summary if not row["lost"])
    with figure(path, panels=2, width=10, sharey=False) as axes:
        for ax, name in zip(axes, ("logloss", "auc"), strict=True):
            bar = 0.8 / len(lost)
            for i, count in enumerate(lost):
                own = {row["scheme"]: row for row in summary if row["lost"] == count}
                x = np.arange(len(schemes)) + (i - (len(lost) - 1) / 2) * bar
                heights = [100 * own[scheme][name] for scheme in schemes]
                errors = [100 * (own[scheme][f"{name}_error"] or 0) for scheme in schemes]
                label = f"{count} of 8 ranks lost, PLS {own[schemes[0]]['pls']:.2f}"
                ax.bar(x, heights, bar, yerr=errors, capsize=2, color=COLOURS[i], label=label)
            noise = 100 * abs(floor[name])
            ax.axhspan(-noise, noise, color="#bbbbbb", label="noise of 1e-7")
            ax.set_xticks(range(len(schemes)), schemes, rotation=30, ha="right", fontsize=8)
            ax.set_ylabel(f"change of {'AUC' if name == 'auc' else name} at the end (%)")
        axes[0].legend(fontsize=8)
