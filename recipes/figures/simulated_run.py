"""Simulate a job's checkpoints without the job: their content and size under a policy.

The package's own policies and lineage decide, its encoders determine a row's bytes, and the
manifests are those of real checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recipes.figures.lookups import Lookups, Window
from torchrec_checknrun.codecs.quantization import Quantization, TableEncoding
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.manifest import Header, Manifest, RankFile, TableTotals
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.policy import Decision, Policy
from torchrec_checknrun.root.lineage import Lineage
from torchrec_checknrun.shards import RowBlock, TableShape

_SAMPLE_ROWS = 1024


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a simulated run.

    Attributes:
        samples: trained when the checkpoint was taken.
        modified_fraction: its rows over all.
        fraction: its bytes over the last full one's, the paper's S.
        kept_bytes: of the chain that a restore of it needs.
        peak_bytes: of that chain and of the previous one, which is dropped when this one is
            written.
    """

    samples: int
    kind: str
    modified_fraction: float
    fraction: float
    bytes: int
    kept_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class RowCost:
    """Bytes of one stored row."""

    weight: float
    optimizer: float

    @staticmethod
    def of(encoding: TableEncoding, dim: int) -> RowCost:
        """Encode rows with row-wise optimizer state by the package's encoder; return their cost."""
        generator = torch.Generator().manual_seed(0)
        rows = RowBlock(
            table="t",
            shape=TableShape(_SAMPLE_ROWS, dim),
            columns=(0, dim),
            ids=torch.arange(_SAMPLE_ROWS),
            weight=torch.randn((_SAMPLE_ROWS, dim), generator=generator),
            positions=None,
            optimizer={"momentum1": torch.rand(_SAMPLE_ROWS, generator=generator)},
        )
        entry = encode_rows(rows, encoding).entry
        assert isinstance(entry, RowsEntry)
        state = sum(part.bytes for part in entry.optimizer)
        return RowCost(entry.weight.bytes / _SAMPLE_ROWS, state / _SAMPLE_ROWS)


class Run:
    """The checkpoints of a job with one policy at one width."""

    def __init__(
        self, policy: Policy, bits: int | None, num_embeddings: Sequence[int], dim: int
    ) -> None:
        self.checkpoints: list[Checkpoint] = []
        self._policy = policy
        self._bits = bits
        self._rows = {f"t_cat_{i}": rows for i, rows in enumerate(num_embeddings)}
        self._dim = dim
        self._quantization = Quantization(bits=bits)
        self._widths = self._quantization.widths(self._rows)
        encodings = {n: self._quantization.for_table(n, rows) for n, rows in self._rows.items()}
        costs = {encoding: RowCost.of(encoding, dim) for encoding in set(encodings.values())}
        self._costs = {name: costs[encoding] for name, encoding in encodings.items()}
        self._lineage = Lineage()
        self._slots: list[int] = []  # slots of the checkpoints in the lineage's history

    def save(self, lookups: Lookups, samples: int) -> None:
        """Take a checkpoint after the slots so far, full or differential as the policy decides."""
        sequence = len(self.checkpoints) + 1
        proposal = self._lineage.propose(
            self._policy, self._bits, self._widths, samples, sequence, 0
        )
        if proposal.decision is Decision.FULL:
            windows = [Window(rows, 0) for rows in lookups.num_embeddings]
            self._slots = []
        else:
            since_last = proposal.decision is Decision.SINCE_LAST
            windows = lookups.since(self._slots[-1 if since_last else 0])
        before = self._kept_bytes()
        tables = {
            name: self._totals(name, window)
            for name, window in zip(self._rows, windows, strict=True)
        }
        manifest = self._manifest(proposal.id, proposal.header, tables)
        self._lineage.committed(manifest)
        self._slots.append(lookups.slots)
        self.checkpoints.append(
            Checkpoint(
                samples=samples,
                kind=manifest.kind,
                modified_fraction=manifest.modified_fraction,
                fraction=manifest.fraction_of(self._lineage.history[0]),
                bytes=manifest.stored_bytes,
                kept_bytes=self._kept_bytes(),
                peak_bytes=before + manifest.stored_bytes,
            )
        )

    def _totals(self, name: str, window: Window) -> TableTotals:
        rows, cost = self._rows[name], self._costs[name]
        return TableTotals(
            rows=rows,
            dim=self._dim,
            stored_values=window.count * self._dim,
            weight_bytes=round(window.count * cost.weight),
            ids_bytes=window.ids_bytes,
            optimizer_bytes=round(window.count * cost.optimizer),
            value_bits=self._widths[name],
        )

    def _manifest(self, name: str, header: Header, tables: dict[str, TableTotals]) -> Manifest:
        size = sum(t.weight_bytes + t.ids_bytes + t.optimizer_bytes for t in tables.values())
        return Manifest(
            id=name,
            sequence=header.sequence or 0,
            step=header.step,
            kind=header.kind,
            parent=header.parent,
            previous=header.previous,
            world_size=1,
            created_at="",
            created_by="",
            lossy_restores=0,
            bits=header.bits,
            tables=tables,
            states={},
            dense_bytes=0,
            files=(RankFile("rank-00000.bin", size, size, 0, "", 0),),
            earlier_fractions=header.earlier_fractions,
        ).sealed()

    def _kept_bytes(self) -> int:
        """Return the bytes of the newest checkpoint and of the others that its restore reads."""
        by_id = {manifest.id: manifest for manifest in self._lineage.history}
        manifest, kept = self._lineage.previous, 0
        while manifest is not None:
            kept += manifest.stored_bytes
            manifest = by_id[manifest.parent.id] if manifest.parent else None
        return kept
