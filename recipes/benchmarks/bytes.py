"""Compare the bytes of checkpoints in the store with a prediction from their rows.

    python -m recipes.benchmarks.bytes [--json out.json]

Train the recipe's synthetic job with each width and list the store. The prediction knows only the
number of stored rows of each table, its width (small tables are exact), the row format and the
table's size: fused rows (or fp32), four bytes of row-wise optimizer state a row, and for the row
ids the smaller of one bit for each row of the table and four bytes for each stored row, which is
more than the compressed ids take.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.dlrm_criteo.job import Job

WIDTHS: tuple[int | None, ...] = (None, 8, 4, 3, 2)
_TAIL_BYTES = {8: 8, 4: 4, 3: 4, 2: 4}
"""Scale and bias of a fused row: fp32 at 8 bit, fp16 below."""


def row_bytes(bits: int, dim: int) -> int:
    """Return the bytes of a stored row's weights."""
    return 4 * dim if bits == 32 else dim * bits // 8 + _TAIL_BYTES[bits]


def predict(manifest: dict[str, Any]) -> float:
    """Predict the bytes of table rows, their ids and optimizer state in a checkpoint."""
    total = 0.0
    for table in manifest["tables"].values():
        stored = table["stored_values"] / table["dim"]
        ids = 0.0 if stored == table["rows"] else min(table["rows"] / 8, 4 * stored)
        total += stored * (row_bytes(table["value_bits"], table["dim"]) + 4) + ids
    return total


def measure(bits: int | None, dim: int, root: Path, policy: str) -> list[dict[str, Any]]:
    """Train with one width; return one row per checkpoint, oldest first."""
    overrides = [
        "dataset.samples=200_000",
        f"model.embedding_dim={dim}",
        f"model.bottom_mlp=[64,{dim}]",
        "trainer.steps=80",
        "trainer.batch_size=1024",
        "trainer.eval_samples=0",
        "checkpoint=check_n_run",
        "checkpoint.every_steps=20",
        f"checkpoint.policy={policy}",
        f"checkpoint.bits={'null' if bits is None else bits}",
    ]
    run = root / f"bits-{bits}"
    with Job(run, overrides) as job:
        ids = [e["id"] for e in job.events() if e["event"] == "checkpoint"]
    rows = []
    for name in ids:
        folder = run / "checkpoints" / name
        listed = sum(path.stat().st_size for path in folder.iterdir())
        manifest = json.loads((folder / "manifest.json").read_bytes())["manifest"]
        tables = manifest["tables"].values()
        payload = sum(t["weight_bytes"] + t["ids_bytes"] + t["optimizer_bytes"] for t in tables)
        fp32 = sum(table["fp32_bytes"] for table in tables) + manifest["dense_bytes"]
        rows.append(
            {
                "bits": bits,
                "kind": manifest["kind"],
                "modified_fraction": sum(t["stored_values"] for t in tables)
                / sum(t["rows"] * t["dim"] for t in tables),
                "tables_and_ids": payload,
                "predicted": round(predict(manifest)),
                "dense": manifest["dense_bytes"],
                "manifest_and_indexes": listed - payload - manifest["dense_bytes"],
                "total": listed,
                "of_full_fp32": listed / fp32,
            }
        )
    return rows


def main() -> int:
    """Run the command; return 1 if a prediction is off by more than 5 %."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.bytes", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--dim", type=int, default=64, help="columns of every table")
    parser.add_argument("--policy", default="consecutive", help="checkpoint.policy")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        measured = [
            measure(bits, options.dim, Path(root), options.policy)
            for bits in tqdm(WIDTHS, desc="widths", unit="run")
        ]
    # Each width's baseline and last differential.
    rows = [row for of_width in measured for row in (of_width[0], of_width[-1])]
    table = Table(title=f"26 tables, dim {options.dim}, row-wise Adagrad, {options.policy}")
    columns = list(rows[0])
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(
            *(
                "exact"
                if value is None
                else f"{value:.1%}"
                if isinstance(value, float)
                else f"{value:,}"
                if isinstance(value, int) and name != "bits"
                else str(value)
                for name, value in row.items()
            )
        )
    Console(width=140).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    off = max(abs(row["tables_and_ids"] / row["predicted"] - 1) for row in rows)
    print(f"largest difference between measured and predicted table bytes: {off:.2%}")
    return 0 if off <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
