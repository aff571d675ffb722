"""Draw the measurements of the other recipes with matplotlib, knowing only their numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = ("fig09", "fig10", "fig11", "fig12", "fig13", "shannon")
POLICY_NAMES = ("fig05", "fig06", "fig15", "fig16")
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme, which colour-blind people can tell apart."""
_MARKERS = "osD^vP*"
_STYLES = {"asymmetric": ":", "adaptive": "--"}


def require_matplotlib() -> None:
    """End the program with a hint if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("figures are drawn with matplotlib: pip install 'torchrec_checknrun[figures]'")
    matplotlib.use("Agg")  # files only: there may be no screen


@contextmanager
def figure(
    path: Path, panels: int = 1, width: float = 6.4, sharey: bool = True
) -> Iterator[list[Axes]]:
    """Yield axes side by side, and write them to a PNG."""
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, panels, figsize=(width, 4.2), squeeze=False, sharey=sharey)
    for ax in axes[0]:
        ax.grid(True, which="major", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    try:
        yield list(axes[0])
        drawn.tight_layout()
        drawn.savefig(path, dpi=150)
    finally:
        pyplot.close(drawn)


def draw(numbers: dict[str, Any], folder: Path) -> None:
    """Draw all figures as PNG files into a folder."""
    with figure(folder / "fig09.png", width=9) as (ax,):
        _errors(ax, numbers)
    for name, sweep, x, y in (
        ("fig10", "by_bins", "num_bins", "improvement"),
        ("fig11", "by_ratio", "ratio", "improvement"),
        ("fig12", "by_bins", "num_bins", "seconds_per_gb"),
        ("fig13", "by_ratio", "ratio", "seconds_per_gb"),
    ):
        with figure(folder / f"{name}.png", width=7) as (ax,):
            _sweep(ax, numbers, sweep, x, y)
    with figure(folder / "shannon.png", panels=2, width=10) as axes:
        for ax, rows in zip(axes, ("gaussian", "given"), strict=True):
            _rate_distortion(ax, numbers, rows)


def _errors(ax: Axes, numbers: dict[str, Any]) -> None:
    errors = [error for error in numbers["errors"] if error["rows"] == "given"]
    methods = list(dict.fromkeys(error["method"] for error in errors))
    widths = sorted({error["bits"] for error in errors})
    bar = 0.8 / len(methods)
    for i, method in enumerate(methods):
        own = sorted((e for e in errors if e["method"] == method), key=lambda e: e["bits"])
        x = np.array([widths.index(e["bits"]) + (i - (len(methods) - 1) / 2) * bar for e in own])
        ax.bar(x, [e["relative"] for e in own], bar, color=COLOURS[i], label=method)
        limits = [e["shannon"] for e in own]
        label = "Gaussian limit at as many bits in all" if i == 0 else ""
        ax.hlines(limits, x - bar / 2, x + bar / 2, color="black", linewidth=1.2, label=label)
    ax.set_yscale("log")
    ax.set_ylim(bottom=min(e["relative"] for e in errors if e["bits"] == 8) / 5)
    ax.set_xticks(range(len(widths)), [f"{bits} bit" for bits in widths])
    ax.set_ylabel("mean relative l2 error of a row")
    ax.set_title(f"{numbers['rows']} rows of dim {numbers['dim']}")
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _sweep(ax: Axes, numbers: dict[str, Any], sweep: str, x: str, y: str) -> None:
    percent = 100 if y == "improvement" else 1
    for i, choice in enumerate(numbers["chosen"]):
        bits = choice["bits"]
        points = [p for p in numbers[sweep] if p["bits"] == bits]
        label = f"{bits} bit" if x == "num_bins" else f"{bits} bit, {choice['num_bins']} bins"
        xs, ys = [p[x] for p in points], [percent * p[y] for p in points]
        ax.plot(xs, ys, color=COLOURS[i], marker=_MARKERS[i], markersize=4, label=label)
        at = xs.index(choice[x])
        ax.plot(xs[at], ys[at], "o", markersize=11, markerfacecolor="none", color=COLOURS[i])
        for other in numbers["others"]:
            if other["bits"] == bits and other[y] != 0:
                style = _STYLES[other["method"]]
                ax.axhline(percent * other[y], color=COLOURS[i], linestyle=style, linewidth=1)
    for method, style in _STYLES.items():
        if any(other["method"] == method and other[y] != 0 for other in numbers["others"]):
            ax.plot([], [], color="black", linestyle=style, linewidth=1, label=method)
    ax.plot([], [], "o", markersize=9, markerfacecolor="none", color="black", label="chosen")
    ax.set_ylim(bottom=0)
    ax.set_xlabel(x.replace("_", " of ").replace("num of", "number of"))
    if y == "improvement":
        ax.set_ylabel("less error than asymmetric (%)")
    else:
        ax.set_ylabel(f"seconds per GB of fp32 rows, {numbers['threads']} threads")
    ax.set_title("the paper's greedy search")
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _rate_distortion(ax: Axes, numbers: dict[str, Any], rows: str) -> None:
    errors = [error for error in numbers["errors"] if error["rows"] == rows]
    for i, method in enumerate(dict.fromkeys(error["method"] for error in errors)):
        own = sorted((e for e in errors if e["method"] == method), key=lambda e: e["bits"])
        ax.plot(
            [e["total_bits"] for e in own],
            [e["rms"] for e in own],
            color=COLOURS[i],
            marker=_MARKERS[i],
            markersize=4,
            linewidth=1,
            label=method,
        )
    # Centroids of 8 bit take more than the rows themselves: far outside.
    bits = np.array([1.0, 12.0])
    ax.set_xlim(*bits)
    ax.set_ylim(2.0**-12, 1)
    ax.plot(bits, 2.0**-bits, color="black", linewidth=1.5, label="Gaussian limit, $2^{-R}$")
    ax.set_yscale("log")
    ax.set_xlabel("bits stored per value, R")
    ax.set_title("Gaussian rows" if rows == "gaussian" else "trained rows")
    if rows == "gaussian":
        ax.set_ylabel("relative l2 error (root mean square)")
        ax.legend(fontsize=8)


def draw_policies(numbers: dict[str, Any], folder: Path) -> None:
    """Draw the figures of `policies` as PNG files into a folder."""
    for name, curves in (("fig05", _growth(numbers)), ("fig06", _per_interval(numbers))):
        with figure(folder / f"{name}.png", width=7.5) as (ax,):
            for i, (label, xs, ys) in enumerate(curves):
                ax.plot(
                    xs,
                    [100 * y for y in ys],
                    color=COLOURS[i],
                    marker=_MARKERS[i],
                    markersize=3,
                    label=label,
                )
            ax.set_ylim(bottom=0)
            ax.xaxis.set_major_formatter(lambda samples, _: f"{samples:,.0f}")
            ax.tick_params(axis="x", labelsize=8)
            ax.set_xlabel("samples trained")
            ax.set_ylabel("modified rows (%)")
            ax.set_title(f"{numbers['source']}: {numbers['rows']:,} rows")
            ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    widths = list(dict.fromkeys(run["bits"] for run in numbers["runs"]))
    for name, of, label in (
        ("fig15", _written, "bytes written (% of a full checkpoint)"),
        ("fig16", _kept, "bytes kept (full checkpoints)"),
    ):
        with figure(folder / f"{name}.png", len(widths), 2.6 + 4.2 * len(widths)) as axes:
            for ax, bits in zip(axes, widths, strict=True):
                runs = [run for run in numbers["runs"] if run["bits"] == bits]
                of(ax, runs)
                ax.set_title("exact rows" if bits is None else f"{bits} bit rows")
                ax.set_xlabel(f"interval ({numbers['interval_samples']:,} samples each)")
            axes[0].set_ylim(bottom=0)
            axes[0].set_ylabel(label)
            axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _growth(numbers: dict[str, Any]) -> Iterator[tuple[str, list[int], list[float]]]:
    for line in numbers["growth"]:
        xs = [line["start"] + samples for samples in (0, *line["samples"])]
        yield f"since sample {line['start']:,}", xs, [0.0, *line["fractions"]]


def _per_interval(numbers: dict[str, Any]) -> Iterator[tuple[str, list[int], list[float]]]:
    for line in numbers["per_interval"]:
        yield f"every {line['interval_samples']:,} samples", line["ends"], line["fractions"]


def _written(ax: Axes, runs: list[dict[str, Any]]) -> None:
    for i, run in enumerate(runs):
        ys = [100 * checkpoint["fraction"] for checkpoint in run["checkpoints"]]
        ax.plot(ys, color=COLOURS[i], marker=_MARKERS[i], markersize=4, label=run["policy"])
        if run["policy"] == "Intermittent":
            decided = run["baselines"][1:]  # the first one is full in any case
            ax.plot(
                decided,
                [ys[at] for at in decided],
                "o",
                markersize=11,
                markerfacecolor="none",
                color=COLOURS[i],
                label="predictor: a new baseline",
            )


def _kept(ax: Axes, runs: list[dict[str, Any]]) -> None:
    for i, run in enumerate(runs):
        full = run["checkpoints"][0]["bytes"]
        for key, style in (("kept_bytes", "-"), ("peak_bytes", ":")):
            ys = [checkpoint[key] / full for checkpoint in run["checkpoints"]]
            marker = _MARKERS[i] if style == "-" else ""
            label = run["policy"] if style == "-" else ""
            ax.plot(ys, color=COLOURS[i], linestyle=style, marker=marker, markersize=4, label=label)
    ax.plot([], [], color="black", linestyle=":", label="while it is written")
