"""Draw the stalls of all modes, from the document of `recipes.benchmarks.stall`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.benchmarks.stall.modes import ON_WRITE
from recipes.figures.plots import figure

_BEYOND = 1.25
"""Part of the second longest bar that the axis shows of the longest one."""


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a bar for each mode, cut and protection stacked. The axis ends a little after the second
    longest bar: the longest, `dcp.save`'s, is cut off, with its length in writing.
    """
    modes = document["modes"]
    names = list(modes)
    cuts = [1e3 * modes[name]["cut"] for name in names]
    waits = [1e3 * modes[name]["protection"] for name in names]
    totals = [cut + wait for cut, wait in zip(cuts, waits, strict=True)]
    end = _BEYOND * sorted(totals)[-2]
    with figure(path, width=8) as (ax,):
        ax.barh(names, cuts, color="#4477aa", height=0.6, label="the cut")
        ax.barh(names, waits, left=cuts, color="#ee6677", height=0.6, label="protection")
        gather = 1e3 * modes[ON_WRITE]["gather"]
        ax.axvline(gather, color="black", linewidth=0.8, linestyle=":", label="bare gather")
        for place, total in enumerate(totals):
            if total > end:
                where, text, side, colour = end * 0.99, f"{total:,.0f} ms →", "right", "white"
            else:
                where, text, side, colour = total + end * 0.01, f"{total:,.1f} ms", "left", "black"
            ax.text(where, place, text, ha=side, va="center", fontsize=9, color=colour)
        ax.set_xlim(0, end)
        ax.invert_yaxis()
        ax.set_xlabel("stall (ms), median")
        rows = document["setting"]["rows"]
        ax.set_title(f"{rows / 1e6:.3g} million rows × {document['setting']['dim']}, 26 % modified")
        ax.legend(fontsize=8, loc="upper right", frameon=False)
