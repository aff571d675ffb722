"""Show the costs that `recipes.benchmarks.tracking` measures, in a table for the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Cost:
    """The cost of one tracker. Times in seconds, memory in bytes."""

    dim: int
    tracker: str
    step: float
    """The median step without tracking."""
    isolated: float
    """The tracker's own work, median over the batches."""
    isolated_mean: float
    isolated_last: float
    """Median over the last tenth of the batches: with some trackers the cost grows."""
    of_step: float
    in_situ: float
    in_situ_low: float
    in_situ_high: float
    memory: int
    memory_half_way: int
    bytes_per_row: float


def table_of(costs: list[Cost], steps: int) -> Table:
    """Return the costs as a table; ``steps`` is the number of batches measured."""
    table = Table(title=f"cost of tracking; memory after {steps // 2} and {steps} steps")
    columns = ["tracker", "dim", "step ms", "isolated ms", "mean", "last tenth", "of step"]
    columns += ["in situ (95 %)", "memory MiB", "B/row"]
    for column in columns:
        table.add_column(column, justify="left" if column == "tracker" else "right")
    for c in costs:
        table.add_row(
            c.tracker,
            str(c.dim),
            f"{c.step * 1e3:.1f}",
            f"{c.isolated * 1e3:.3f}",
            f"{c.isolated_mean * 1e3:.3f}",
            f"{c.isolated_last * 1e3:.3f}",
            f"{c.of_step:.2%}",
            f"{c.in_situ:+.1%} ({c.in_situ_low:+.1%} to {c.in_situ_high:+.1%})",
            f"{c.memory_half_way / 2**20:.1f}, {c.memory / 2**20:.1f}",
            f"{c.bytes_per_row:.2f}",
        )
    return table
