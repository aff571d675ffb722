"""Reports on checkpoints and restores, for logs, callbacks and programs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchrec_checknrun.format.losses import portion
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.marks.protection import Protection


@dataclass
class Progress:
    """The times of a checkpoint's stages on this rank, in seconds since it began.

    Attributes:
        cut_parts: seconds of each part of the wait before ``staged``, by name.
        staged: when training resumed.
        encoded, written: when the last chunk was encoded, and the rank's file durable.
        committed: when the checkpoint was known to exist.
        in_parts: whether staging had to wait for memory.
        protection: price of copying rows before training overwrote them.
        copied_at_cut: tables that were not copied on write though that was asked for, with the
            reasons.
    """

    cut_parts: dict[str, float] = field(default_factory=dict)
    staged: float = 0.0
    encoded: float = 0.0
    written: float = 0.0
    committed: float = 0.0
    in_parts: bool = False
    protection: Protection = field(default_factory=Protection)
    copied_at_cut: dict[str, str] = field(default_factory=dict)

    def lap(self, part: str, begun: float) -> None:
        """Note that a part of the wait ends now, which began with the last one's end.

        Args:
            begun: when the whole began, by the monotonic clock.
        """
        self.cut_parts[part] = time.monotonic() - begun - sum(self.cut_parts.values())


@dataclass(frozen=True)
class CheckpointReport:
    """A report on one committed checkpoint, the same on all ranks except for the times.

    Attributes:
        parent: id of the checkpoint that a differential one needs, None if full.
        modified_rows, total_rows: stored and all rows of the sharded tables.
        modified_fraction: stored values over all values.
        table_fractions: the same, by table.
        bytes: in storage, by kind: weights, ids, optimizer, dense, manifest, other (indexes and
            footers).
        full_fp32_bytes: of a full checkpoint in fp32.
        modified_bytes: of the stored rows with their optimizer state in memory, and of the dense
            part.
        encoded_bytes: of the same encoded, with row ids, before compression.
        stall_seconds: how long training waited on this rank: the cut and all protection.
        cut_seconds: how long training waited at the cut, until it went on.
        cut_parts: the same by part; what is left was waiting for the checkpoint before.
        protection_seconds: how long training waited, in all steps until the rows were copied, for
            copies of rows that it was about to overwrite; 0 where all rows were copied at the cut.
        longest_protection_seconds: the longest of these waits, in one backward pass of a kernel.
        memory_wait_seconds: the part of the protection spent waiting for memory.
        row_wait_seconds: the longest wait for a row that the background was just copying.
        protected_rows: number of rows copied before training overwrote them.
        copied_at_cut: tables whose rows were copied at the cut although ``staging`` asks for copy
            on write, with the reasons.
        encoded_seconds, written_seconds, committed_seconds: when, since the same begin, the rank's
            last chunk was encoded, its file durable, and the checkpoint known to exist.
        in_parts: whether training also waited for the storage, for lack of staging memory.
        lossy_restores: restores from lossy checkpoints in this lineage so far.
        chain_length: number of checkpoints that a restore of this one reads.
        error_mean, error_max: measured relative l2 error of stored rows, None if exact.
        unchanged: whether nothing was written because this checkpoint, of the same step, already
            holds the same content. The times are then of its own save, or 0 if it was restored.
        pls: the portion of lost samples in all partial recoveries of this run so far.
        reproducible: whether the run could be repeated bit for bit: False after such a recovery.
    """

    id: str
    step: int
    sequence: int
    kind: str
    parent: str | None
    modified_rows: int
    total_rows: int
    modified_fraction: float
    table_fractions: dict[str, float]
    bytes: dict[str, int]
    full_fp32_bytes: int
    modified_bytes: int
    encoded_bytes: int
    stall_seconds: float
    encoded_seconds: float
    written_seconds: float
    committed_seconds: float
    in_parts: bool
    lossy_restores: int
    chain_length: int
    error_mean: float | None
    error_max: float | None
    unchanged: bool = False
    cut_seconds: float = 0.0
    cut_parts: dict[str, float] = field(default_factory=dict)
    protection_seconds: float = 0.0
    longest_protection_seconds: float = 0.0
    memory_wait_seconds: float = 0.0
    row_wait_seconds: float = 0.0
    protected_rows: int = 0
    copied_at_cut: dict[str, str] = field(default_factory=dict)
    pls: float = 0.0
    reproducible: bool = True

    @property
    def total_bytes(self) -> int:
        """Return all bytes in storage."""
        return sum(self.bytes.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, with ``total_bytes``."""
        return {**asdict(self), "total_bytes": self.total_bytes}

    def metrics(self, prefix: str = "checkpoint/") -> dict[str, float]:
        """Return all numbers as one flat dict, as TensorBoard, MLflow and W&B take them.

        Args:
            prefix: of all names. ``bytes/weights`` and the like follow, ``fraction/<table>`` for
                each table, ``full`` (1 or 0), ``unchanged`` (1 or 0); numbers that are None are
                left out. Log them at ``report.step``.
        """
        values = self.to_json()
        by_table, parts = values.pop("table_fractions"), values.pop("bytes")
        cut, at_cut = values.pop("cut_parts"), values.pop("copied_at_cut")
        return _floats(
            prefix,
            {
                **values,
                "full": self.kind == "full",
                **{f"bytes/{name}": size for name, size in parts.items()},
                **{f"cut/{name}": seconds for name, seconds in cut.items()},
                "copied_at_cut": len(at_cut),
                **{f"fraction/{table}": fraction for table, fraction in by_table.items()},
            },
        )

    def __str__(self) -> str:
        error = "exact" if self.error_mean is None else f"error {self.error_mean:.2e}"
        lost = "" if self.reproducible else f", {self.pls:.3g} of the samples lost"
        return (
            f"{self.kind} checkpoint {self.id}: {self.modified_rows} of {self.total_rows} rows "
            f"({self.modified_fraction:.1%}), {self.total_bytes / 1e6:.2f} MB "
            f"({self.total_bytes / max(1, self.full_fp32_bytes):.1%} of full fp32), {error}, "
            f"stall {self.stall_seconds * 1e3:.0f} ms{' (in parts)' if self.in_parts else ''}, "
            f"durable after {self.committed_seconds:.2f} s, chain of {self.chain_length}{lost}"
        )


@dataclass(frozen=True)
class RankSource:
    """The source of one rank's rows.

    Attributes:
        source: ``images``, the ``checkpoint`` in storage, or its copy in a ``peer``'s memory.
        step: the step that the rows are of.
    """

    source: str
    step: int


@dataclass(frozen=True)
class RestoreReport:
    """A report on one restore.

    Attributes:
        chain: ids of the checkpoints read, oldest first.
        passed_over: newer checkpoints that could not be used, with the reasons.
        lossy: whether rows were read that had been stored with a loss.
        skipped: content that only the checkpoint or only the model has, or that has another shape
            or type there (with ``strict=False``).
        seconds: from the call to the end, on this rank.
        source: what the rows come from: the ``checkpoint``, or ``images`` in shared memory, which
            are of a later step; then ``id`` is the checkpoint that they descend from, or empty; or
            ``both``, in a partial recovery.
        without_images: why images were not used, though they are asked for.
        ranks: of a partial recovery, each rank's source of rows and their step, in rank order.
        pls: the portion of lost samples in all partial recoveries of this run so far.
        reproducible: whether the run could be repeated bit for bit: False after such a recovery.
        memory_bytes: bytes that this rank has read from copies in this machine's memory
            (``HostCopies``) in place of the storage.
    """

    id: str
    step: int
    sequence: int
    chain: tuple[str, ...]
    passed_over: tuple[str, ...]
    lossy: bool
    seconds: float
    skipped: tuple[str, ...] = ()
    source: str = "checkpoint"
    without_images: tuple[str, ...] = ()
    ranks: tuple[RankSource, ...] = ()
    pls: float = 0.0
    reproducible: bool = True
    memory_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def metrics(self, prefix: str = "restore/") -> dict[str, float]:
        """Return all numbers as one flat dict, as TensorBoard, MLflow and W&B take them; of
        ``passed_over`` and ``skipped`` and of the chain, how many there are.
        """
        names = ("chain", "passed_over", "skipped")
        lengths = {name: len(getattr(self, name)) for name in names}
        return _floats(prefix, {**self.to_json(), **lengths})


def _floats(prefix: str, values: Mapping[str, object]) -> dict[str, float]:
    """Keep numbers, by prefixed names."""
    return {
        prefix + name: float(value)
        for name, value in values.items()
        if isinstance(value, (bool, int, float))
    }


def checkpoint_report(
    manifest: Manifest, chain_length: int, progress: Progress
) -> CheckpointReport:
    """Build the report on a committed checkpoint."""
    tables = manifest.tables.values()
    parts = {
        "weights": sum(t.weight_bytes for t in tables),
        "ids": sum(t.ids_bytes for t in tables),
        "optimizer": sum(t.optimizer_bytes for t in tables),
        "dense": manifest.dense_bytes,
        "manifest": manifest.size,
    }
    payload = sum(parts.values()) - parts["manifest"]
    measured = [t for t in tables if t.error_rows]
    sampled = sum(t.error_rows for t in measured)
    return CheckpointReport(
        id=manifest.id,
        step=manifest.step,
        sequence=manifest.sequence,
        kind=manifest.kind,
        parent=manifest.parent.id if manifest.parent else None,
        modified_rows=sum(t.stored_values // max(1, t.dim) for t in tables),
        total_rows=sum(t.rows for t in tables),
        modified_fraction=manifest.modified_fraction,
        table_fractions={
            name: t.stored_values / max(1, t.rows * t.dim) for name, t in manifest.tables.items()
        },
        bytes={**parts, "other": manifest.stored_bytes - payload},
        full_fp32_bytes=manifest.full_fp32_bytes,
        modified_bytes=sum(t.modified_bytes for t in tables) + manifest.dense_bytes,
        encoded_bytes=sum(t.encoded_bytes for t in tables) + manifest.dense_bytes,
        stall_seconds=progress.staged + progress.protection.seconds,
        cut_seconds=progress.staged,
        cut_parts=dict(progress.cut_parts),
        protection_seconds=progress.protection.seconds,
        longest_protection_seconds=progress.protection.longest_seconds,
        memory_wait_seconds=progress.protection.memory_seconds,
        row_wait_seconds=progress.protection.row_seconds,
        protected_rows=progress.protection.rows,
        copied_at_cut=dict(progress.copied_at_cut),
        encoded_seconds=progress.encoded,
        written_seconds=progress.written,
        committed_seconds=progress.committed,
        in_parts=progress.in_parts,
        lossy_restores=manifest.lossy_restores,
        chain_length=chain_length,
        error_mean=sum((t.error_mean or 0.0) * t.error_rows for t in measured) / sampled
        if sampled
        else None,
        error_max=max((t.error_max or 0.0 for t in measured), default=None),
        pls=portion(manifest.losses),
        reproducible=not manifest.losses,
    )
