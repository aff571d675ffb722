"""Show a run's figures as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from recipes.benchmarks.side_by_side.systems import DCP
from recipes.benchmarks.side_by_side.targets import Rows, Target


def tables(found: dict[str, Any], aims: Sequence[Target]) -> Iterator[Table]:
    """Yield the tables of all measured parts."""
    yield _traces(found["traces"])
    training: Rows = found.get("training", [])
    for ranks, trace in dict.fromkeys((row["ranks"], row["trace"]) for row in training):
        own = [row for row in training if (row["ranks"], row["trace"]) == (ranks, trace)]
        limits = [row for row in found["limits"] if row["ranks"] == ranks]
        if limits and trace == "skewed":
            yield _limits(limits, ranks)
        yield _training(own, ranks, trace)
    if "bytes" in found:
        yield _bytes(found["bytes"])
    if "restore" in found:
        yield _restores(found["restore"])
    if "instants" in found:
        yield _instants(found["instants"])
    if aims:
        yield _targets(aims)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _add(
    table: Table, row: dict[str, Any], cells: Callable[[dict[str, Any]], Sequence[str]]
) -> None:
    """Add a system's cells to a table, or the reason why there are none."""
    table.add_row(row["name"], *([_shortened(row["error"])] if "error" in row else cells(row)))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.2f}"


def more_memory(size: float) -> str:
    """Format the MB of memory that a system held beyond training without checkpoints; below zero,
    the difference is the noise of two measurements.
    """
    return "none" if size < 0 else f"{size / 1e6:,.0f}"


def _traces(traces: dict[str, dict[str, list[float]]]) -> Table:
    shown = (1, 2, 3, 5, 7, 10, 12)
    table = _table("rows modified within a number of intervals", ["trace", *map(str, shown)])
    for kind, trace in traces.items():
        for name in ("promised", "since_baseline"):
            values = [trace[name][i - 1] for i in shown]
            table.add_row(f"{kind}, {name.replace('_', ' ')}", *(f"{v:.3f}" for v in values))
    return table


def _limits(rows: Rows, ranks: int) -> Table:
    title = f"the machine's limits, {ranks} rank{'s' if ranks > 1 else ''}"
    table = _table(title, ["what", "ms", "MB", "GB/s"])
    for row in rows:
        size = f"{row['bytes'] / 1e6:.0f}"
        table.add_row(row["name"], f"{row['seconds'] * 1e3:.1f}", size, f"{row['gbps']:.2f}")
    return table


def _training(rows: Rows, ranks: int, trace: str) -> Table:
    title = (
        f"training, {ranks} rank{'s' if ranks > 1 else ''}, {trace} trace; ms a save costs: in the "
        "call / by the wall difference / longest step"
    )
    columns = ["system", "set-up s", "first", "after idle", "warm", "samples/s", "of without"]
    columns += [
        "durable s (first)",
        "peak MB more",
        "tables+ids MB",
        "optimizer",
        "dense",
        "manifest",
    ]
    table = _table(title, columns)

    def cells(row: dict[str, Any]) -> list[str]:
        costs = []
        for label in ("first", "idle", "warm"):
            cost = row.get(label)
            parts = (cost["call"], cost["extra"], cost["longest"]) if cost else ()
            costs.append(" / ".join(_ms(part) for part in parts))
        size = row.get("bytes")
        durable = f"{row['warm']['listed']:.2f} ({row['first']['listed']:.2f})" if size else ""
        stored = [size[n] for n in ("tables", "optimizer", "dense", "manifest")] if size else []
        return [
            f"{row['setup']:.2f}",
            *costs,
            f"{row['samples_per_second']:,.0f}",
            f"{row['of_without']:.1%}",
            durable,
            more_memory(row.get("memory_beyond", row["memory"])),
            *(_mb(part) for part in stored),
        ]

    for row in rows:
        _add(table, row, cells)
    return table


def _bytes(rows: Rows) -> Table:
    title = (
        "bytes of a checkpoint, MB (means; share: of dcp.save's rows: tables, ids and optimizer; "
        "capacity: keep = 1, and while one is written)"
    )
    columns = ["system", "trace", "mean over", "tables+ids", "optimizer", "dense", "manifest"]
    table = _table(title, [*columns, "total", "share", "capacity", "peak"])
    dcp = next((r["rows"] for r in rows if r["name"] == DCP and "error" not in r), None)

    def cells(row: dict[str, Any]) -> list[str]:
        parts = [row[n] for n in ("tables", "optimizer", "dense", "manifest", "total")]
        share = "" if dcp is None else f"1/{dcp / row['rows']:.2f}"
        capacity = [_mb(row["kept"]), _mb(row["peak"])]
        return [row["trace"], row["over"], *map(_mb, parts), share, *capacity]

    for row in rows:
        _add(table, row, cells)
    return table


def _restores(rows: Rows) -> Table:
    title = "restores, files in the system's cache"
    columns = ["what", "ranks", "checkpoints", "MB", "s to read", "s to restore", "times dcp.load"]
    table = _table(title, columns)
    loads = {r["ranks"]: r["median"] for r in rows if r["name"] == DCP and "error" not in r}

    def cells(row: dict[str, Any]) -> list[str]:
        load = loads.get(row["ranks"])
        ratio = "" if load is None else f"{row['median'] / load:.2f}"
        seconds = [f"{row[name]:.2f}" for name in ("median_reading", "median")]
        return [str(row["ranks"]), str(row["checkpoints"]), _mb(row["bytes"]), *seconds, ratio]

    for row in rows:
        _add(table, row, cells)
    return table


def _instants(rows: Rows) -> Table:
    title = "weights overwritten after the save returned: does the checkpoint hold those before?"
    table = _table(title, ["system", "one instant", "tables with later rows"])

    def cells(row: dict[str, Any]) -> list[str]:
        return ["yes" if row["one_instant"] else "no", ", ".join(row["later"])]

    for row in rows:
        _add(table, row, cells)
    return table


def _targets(aims: Sequence[Target]) -> Table:
    table = _table(
        "targets, on 2 cores, one rank, dim 64", ["target", "measured", "wanted", "", ""]
    )
    for aim in aims:
        wanted = f"{'≤' if aim.at_most else '≥'} {aim.limit:g}"
        value = "" if aim.value is None else f"{aim.value:.4g}"
        table.add_row(
            aim.claim, value, wanted, "met" if aim.met else "missed", _shortened(aim.note)
        )
    return table
