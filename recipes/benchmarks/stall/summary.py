"""Summarize measured stalls: medians, ratios within each interval, and the goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from recipes.benchmarks.quiet import QUIET
from recipes.benchmarks.side_by_side.targets import Target
from recipes.benchmarks.stall.growth import Cut
from recipes.benchmarks.stall.modes import LINKS, ON_WRITE, OURS, Stall

CUT, WHOLE, GROWTH, LINKED = 0.1, 0.35, 1.3, 1.1
"""Goals: the cut, and with all protection, in times of the gather; the cut's growth; the cut where
rows are stored as differences, in times of the other."""
_SUMS = ("cut", "protection", "longest", "memory", "row", "whole", "busy")


def summarize(
    stalls: Sequence[dict[str, Stall]], growth: Sequence[Sequence[Cut]]
) -> dict[str, Any]:
    """Return the document's figures, of those intervals in which no other program was busy just
    before a stall of this package; of all if there is none.
    """
    quiet = [of for of in stalls if max(of[n].busy for n in of if n in OURS) <= QUIET]
    used = quiet or stalls
    modes = {name: _mode(name, used) for name in used[0]}
    found: dict[str, Any] = {
        "intervals": len(stalls),
        "quiet_intervals": len(quiet),
        "modes": modes,
        "growth": [_grown([cuts[i] for cuts in growth]) for i in range(len(growth[0]))],
    }
    grown = median(large.cut / small.cut for small, large in growth)
    small, large = (f"{cut.rows / 1e6:.3g}" for cut in growth[0])
    linked = median(of[LINKS].cut / of[ON_WRITE].cut for of in used)
    ours = modes[ON_WRITE]
    targets = [
        Target("copy on write's cut, times the bare gather", ours["cut_ratio"], CUT, True),
        Target("its cut and all protection, times the gather", ours["ratio"], WHOLE, True),
        Target(
            f"a narrow table's cut, {large} million rows, times that of {small}",
            grown,
            GROWTH,
            True,
        ),
        Target("the cut of differences, times that of rows of 4 bits", linked, LINKED, True),
    ]
    return {**found, "targets": [target.to_json() for target in targets]}


def raw(stalls: Sequence[dict[str, Stall]], growth: Sequence[Sequence[Cut]]) -> dict[str, Any]:
    """Return all measured figures."""
    return {
        "stalls": [{name: asdict(one) for name, one in of.items()} for of in stalls],
        "growths": [[asdict(cut) for cut in cuts] for cuts in growth],
    }


def _mode(name: str, stalls: Sequence[dict[str, Stall]]) -> dict[str, Any]:
    """Return a mode's medians. Ratios are medians too, of each interval's."""
    own = [of[name] for of in stalls]
    gathered = [one for one in own if one.gather is not None]

    def ratio(part: str) -> float | None:
        if not gathered:
            return None
        return median(getattr(one, part) / one.gather for one in gathered)

    return {
        **{part: median(getattr(one, part) for one in own) for part in _SUMS},
        "parts": {part: median(one.parts[part] for one in own) for part in own[0].parts},
        "gather": median(one.gather for one in gathered if one.gather) if gathered else None,
        "cut_ratio": ratio("cut"),
        "ratio": ratio("whole"),
        "of_on_write": median(of[name].whole / of[ON_WRITE].whole for of in stalls),
        "rows": median(one.rows for one in own),
        "protected_rows": median(one.protected_rows for one in own),
        "steps": median(len(one.steps) for one in own),
        "copied_at_cut": sorted({table for one in own for table in one.copied_at_cut}),
    }


def _grown(cuts: Sequence[Cut]) -> dict[str, float]:
    return {
        "rows": cuts[0].rows,
        "modified": median(cut.modified for cut in cuts),
        "cut": median(cut.cut for cut in cuts),
        "protection": median(cut.protection for cut in cuts),
    }
