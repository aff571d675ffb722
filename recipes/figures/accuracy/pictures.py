"""Draw what `python -m recipes.figures.accuracy` measured: Figure 14's curves, bytes by loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipes.figures.accuracy.summary import FLOOR, Effect, Size
from recipes.figures.plots import COLOURS, figure

_MARKERS = "osD^vP*Xh<>"
_PAPER = 0.01
"""The paper's limit, in per cent."""


def draw(
    task: str, title: str, found: Sequence[Effect], bytes_of: Sequence[Size], out: Path
) -> None:
    """Draw both pictures of a task into a folder, as `fig14-TASK.png` and `pareto-TASK.png`."""
    _restores(title, found, out / f"fig14-{task}.png")
    _pareto(title, found, bytes_of, out / f"pareto-{task}.png")


def _style(number: int) -> tuple[str, str]:
    return COLOURS[number % len(COLOURS)], _MARKERS[number // len(COLOURS) % len(_MARKERS)]


def _restores(title: str, found: Sequence[Effect], path: Path) -> None:
    """Draw the change of the loss by the number of restores, with 95 % intervals."""
    own = [effect for effect in found if effect.after == 0 and effect.method != "exact"]
    numbers = sorted({effect.restores for effect in own})
    with figure(path, width=8.5) as (ax,):
        methods = [m for m in dict.fromkeys(e.method for e in own) if m != FLOOR]
        for number, method in enumerate(methods):
            colour, marker = _style(number)
            points = [e for e in own if e.method == method]
            x = [e.restores for e in points]
            y = [100 * e.loss.mean for e in points]
            ax.plot(x, y, color=colour, marker=marker, markersize=4, label=method)
            ax.vlines(
                x,
                [100 * e.loss.low for e in points],
                [100 * e.loss.high for e in points],
                color=colour,
                linewidth=0.8,
            )
        floor = [e for e in own if e.method == FLOOR]
        if floor:
            ax.fill_between(
                [e.restores for e in floor],
                [100 * e.loss.low for e in floor],
                [100 * e.loss.high for e in floor],
                color="#bbbbbb",
                label=FLOOR,
                zorder=1,
            )
        ax.axhline(_PAPER, color="black", linewidth=0.8, linestyle=(0, (1, 3)))
        ax.set_yscale("symlog", linthresh=0.01)
        ax.set_xscale("log")
        ax.set_xticks(numbers, [str(number) for number in numbers])
        ax.minorticks_off()
        ax.set_xlabel("restores")
        ax.set_ylabel("change of the loss (%)")
        ax.set_title(title)
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _pareto(title: str, found: Sequence[Effect], bytes_of: Sequence[Size], path: Path) -> None:
    """Draw the change of the loss after all restores by the bytes of a modified row."""
    last = max(effect.restores for effect in found)
    at_end = {e.method: e.loss for e in found if (e.restores, e.after) == (last, 0)}
    with figure(path, width=8.5) as (ax,):
        if FLOOR in at_end:
            noise = at_end[FLOOR]
            ax.axhspan(100 * noise.low, 100 * noise.high, color="#dddddd", label=FLOOR, zorder=1)
        rows = [size for size in bytes_of if size.kind == "differential"]
        for number, size in enumerate(rows):
            colour, marker = _style(number)
            loss = at_end[size.method]
            ax.plot(size.row, 100 * loss.mean, marker, color=colour, label=size.method)
            ax.vlines(size.row, 100 * loss.low, 100 * loss.high, color=colour, linewidth=0.8)
        ax.axhline(_PAPER, color="black", linewidth=0.8, linestyle=(0, (1, 3)))
        ax.set_yscale("symlog", linthresh=0.01)
        ax.set_xscale("log", base=2)
        ax.set_xlabel("bytes of a modified row: weights, id, optimizer state")
        ax.set_ylabel(f"change of the loss after {last} restores (%)")
        ax.set_title(title)
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
