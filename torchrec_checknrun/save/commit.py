"""Write and commit a checkpoint: one file per rank that ends in its own index, the manifest last.

``save_checkpoint`` is the engine of every save: the ranks plan, write and commit together, and an
error on one rank is an error on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from torchrec_checknrun.delta.digest import text_of
from torchrec_checknrun.errors import CheckpointExists, InvalidPlan
from torchrec_checknrun.format.manifest import Manifest, TableDigests
from torchrec_checknrun.format.names import is_plain_name, require_sequence
from torchrec_checknrun.format.rank_file import (
    FileSummary,
    Job,
    WriteRankFile,
    sum_tables,
    write_rank_file,
)
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.checkpoints import highest_sequence
from torchrec_checknrun.root.writer import commit
from torchrec_checknrun.save.plan import GlobalPlan, LocalPlan, Prepared, Share, make_global_plan
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import gc_paused
from torchrec_checknrun.version import __version__
from torchrec_checknrun.writers.claims import latest_claim


def save_checkpoint(
    ranks: Ranks, writer: CheckpointWriter, prepare: Callable[[], Prepared]
) -> Manifest:
    """Plan, write and commit one checkpoint. A collective.

    Args:
        prepare: returns this rank's part of the checkpoint.

    Returns:
        The manifest, on all ranks.

    Raises:
        Exception: an error of any rank, the same on all ranks; see ``Ranks.reduce``.
    """
    prepared: Prepared | None = None
    whole: GlobalPlan | None = None

    def plan() -> LocalPlan:
        nonlocal prepared
        prepared = prepare()
        writer.check(ranks.rank == 0)
        return prepared.local_plan

    def share_out(plans: list[LocalPlan]) -> list[Share]:
        nonlocal whole
        assert prepared is not None
        shares, whole = make_global_plan(plans, prepared.differences)
        writer.create()
        return shares

    share = ranks.reduce_scatter(plan, share_out)

    def write() -> FileSummary:
        assert prepared is not None
        summary = writer.write(ranks.rank, prepared.jobs(share))
        return replace(summary, digests=prepared.digests())

    def finish(summaries: list[FileSummary]) -> Manifest:
        assert whole is not None
        return writer.commit(whole, summaries)

    return ranks.reduce(write, finish)


class CheckpointWriter:
    """A writer of one checkpoint into a directory of its own.

    Args:
        folder: the checkpoint's directory, which must be empty or missing. Differential checkpoints
            must lie beside their parents.
        write: a function that writes a rank's file.
        before_commit: called on rank 0; each raises an error if the commit must not happen.
        after_commit: called on rank 0; raises an error if the commit doesn't count. None: the
            checkpoint must count under the root's latest claim.
        root: the root in which a run has made the name of the directory; None: the directory's
            parent, and a name of the user's.

    Attributes:
        folder: the checkpoint's directory.
        written: a summary of this rank's file; None until it is written.
    """

    def __init__(
        self,
        folder: Folder,
        write: WriteRankFile = write_rank_file,
        before_commit: Sequence[Callable[[], object]] = (),
        after_commit: Callable[[], object] | None = None,
        root: Folder | None = None,
    ) -> None:
        self.folder = folder
        self._root = folder.parent if root is None else root
        self._of_user = root is None
        self.written: FileSummary | None = None
        self._write = write
        self._before_commit = before_commit
        self._after_commit = after_commit

    def check(self, on_rank_0: bool) -> None:
        """Check the directory before anything is written; only rank 0 lists its files.

        Raises:
            InvalidPlan: the directory's name is not allowed.
            CheckpointExists: the directory holds files, which could be mistaken for new ones.
        """
        if self._of_user and not is_plain_name(self.folder.name):
            raise InvalidPlan(
                f"{self.folder} can't be a checkpoint: its name {self.folder.name!r} must have 1 "
                "to 255 characters without backslash, '::' and control characters"
            )
        if on_rank_0 and (names := self.folder.names()):
            raise CheckpointExists(
                f"{self.folder} already holds {names[:3]}: a checkpoint directory is written "
                "once; save into a new one, or remove it if it is not needed"
            )

    def create(self) -> None:
        """Create the directory durably, on rank 0."""
        self.folder.create(durable=True)

    def write(self, rank: int, jobs: Iterable[Job]) -> FileSummary:
        """Write a rank's file, durably."""
        self.folder.create()
        self.written = self._write(self.folder, rank, jobs)
        return self.written

    @gc_paused()
    def commit(self, plan: GlobalPlan, summaries: Sequence[FileSummary]) -> Manifest:
        """Commit on rank 0, once all files are durable: the manifest makes the checkpoint exist.

        Args:
            summaries: of the written files, by rank.

        Raises:
            InvalidPlan: a rank has written other chunks than planned.
            SaveFailed: the checkpoint was not committed, or its files are gone.
        """
        written = tuple(summary.file.chunks for summary in summaries)
        if written != plan.chunks:
            raise InvalidPlan(f"ranks were to write {plan.chunks} chunks, but wrote {written}")
        manifest = self._manifest(plan, summaries)
        commit(
            self._root, self.folder, manifest, before=self._before_commit, after=self._after_commit
        )
        return manifest

    def _manifest(self, plan: GlobalPlan, summaries: Sequence[FileSummary]) -> Manifest:
        """Make the manifest; a checkpoint without a number gets the root's next one."""
        header = plan.header
        root, sequence, epoch = self._root, header.sequence, header.epoch
        if sequence is None:
            sequence = highest_sequence(root) + 1
            require_sequence(sequence)
        if epoch is None:
            epoch = claim.epoch if (claim := latest_claim(root)) else 0
        settings = {name: _settings(plan, name) for name in plan.tables}
        differences = any(summary.needs_parent for summary in summaries)
        return Manifest.of(
            header,
            id=self.folder.name,
            sequence=sequence,
            epoch=epoch,
            world_size=len(summaries),
            created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            created_by=f"torchrec_checknrun {__version__}",
            tables=sum_tables(plan.tables, [summary.tables for summary in summaries], settings),
            states=plan.states,
            dense_bytes=sum(summary.dense_bytes for summary in summaries),
            files=tuple(summary.file for summary in summaries),
            deltas=_deltas(summaries),
            differences=differences,
        )


def _settings(plan: GlobalPlan, table: str) -> dict[str, Any]:
    """Return a table's fields of the manifest beside the sums over its chunks."""
    progress = plan.progress.get(table)
    return {
        "fp32_bytes": plan.fp32_bytes[table],
        "optimizer_step": progress.step if progress else None,
        "learning_rate": progress.learning_rate if progress else None,
        "optimizer_options": dict(progress.options) if progress else {},
    }


def _deltas(summaries: Sequence[FileSummary]) -> dict[str, TableDigests]:
    """Add up the ranks' digests of tables stored as differences."""
    sums: dict[str, tuple[int | None, int]] = {}
    for summary in summaries:
        for table, (before, after) in summary.digests.items():
            known = sums.get(table)
            if known is None:
                sums[table] = before, after
                continue
            if (known[0] is None) != (before is None):
                raise InvalidPlan(f"some ranks store {table} as differences, others whole")
            base = None if before is None or known[0] is None else known[0] + before
            sums[table] = base, known[1] + after
    return {
        table: TableDigests(None if before is None else text_of(before), text_of(after))
        for table, (before, after) in sums.items()
    }
