"""DCP's storage protocol: one file per rank that ends in its own index, and the manifest, last.

Nothing is ever unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchrec_checknrun.errors import (
    CheckpointExists,
    CorruptCheckpoint,
    InvalidPlan,
    SaveFailed,
)
from torchrec_checknrun.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    TableTotals,
    is_plain_name,
    require_sequence,
)
from torchrec_checknrun.format.rank_file import (
    FileSummary,
    WriteRankFile,
    add_totals,
    write_rank_file,
)
from torchrec_checknrun.root.chain import check_sizes
from torchrec_checknrun.root.checkpoints import highest_sequence
from torchrec_checknrun.root.claims import latest_claim
from torchrec_checknrun.root.lineage import note_number
from torchrec_checknrun.save.plan import CheckpointPlanner, GlobalPlan, OwnStorage
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import gc_paused
from torchrec_checknrun.version import __version__


class StorageWriter(DcpStorageWriter):
    """Writes one checkpoint into a directory of its own.

    Args:
        path: the checkpoint's directory, a path or fsspec URL; it must not hold anything yet.
            Differential checkpoints must be beside their parents. One that is open is not opened
            again, which some stores refuse at times.
        write: how a rank's file is written.
        before_commit: raises an error if the checkpoint must not come to be.
        after_commit: raises an error if it did not come to be after all, although it was written.

    Attributes:
        written: this rank's file, once it is.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Folder,
        write: WriteRankFile = write_rank_file,
        before_commit: Callable[[], object] = lambda: None,
        after_commit: Callable[[], object] = lambda: None,
    ) -> None:
        self._folder = path if isinstance(path, Folder) else Folder(path)
        self._write = write
        self._before_commit = before_commit
        self._after_commit = after_commit
        self.written: FileSummary | None = None
        self._rank = 0
        self._is_coordinator = True

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = Folder(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return OwnStorage(checkpoint_id=self._folder.url)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator
        self._rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuses a directory that was used before: its files could be mistaken for new ones."""
        if not is_plain_name(self._folder.name):
            raise InvalidPlan(
                f"{self._folder} can't be a checkpoint: its name {self._folder.name!r} must have 1 "
                "to 255 characters without backslash, '::' and control characters"
            )
        if self._is_coordinator and self._folder.names():
            raise CheckpointExists(
                f"{self._folder} already holds {self._folder.names()[:3]}: a checkpoint directory "
                "is written once; save into a new one, or remove it if it is not needed"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._folder.create()
        self._folder.sync()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._folder.create()
        if not isinstance(planner, CheckpointPlanner):
            raise InvalidPlan(
                "StorageWriter writes chunks that this package's SavePlanner encodes: pass "
                "planner=SavePlanner() to dcp.save as well"
            )
        jobs = (planner.job(item) for item in plan.items)
        self.written = summary = self._write(self._folder, self._rank, jobs)
        done: Future[list[WriteResult]] = Future()
        index = MetadataIndex(summary.file.name)
        done.set_result([WriteResult(index, summary.file.size, summary)])
        return done

    @gc_paused()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: everything is durable by now, and the manifest makes the checkpoint exist."""
        plan: GlobalPlan = metadata.planner_data
        summaries = [result.storage_data for of_rank in results for result in of_rank]
        written = tuple(summary.file.chunks for summary in summaries)
        if written != plan.chunks:
            raise InvalidPlan(f"ranks were to write {plan.chunks} chunks, but wrote {written}")
        header = plan.header
        root, sequence, epoch = self._folder.parent, header.sequence, header.epoch
        if sequence is None:
            sequence = highest_sequence(root) + 1
            require_sequence(sequence)
        if epoch is None:
            epoch = claim.epoch if (claim := latest_claim(root)) else 0
        manifest = Manifest(
            id=self._folder.name,
            sequence=sequence,
            step=header.step,
            kind=header.kind,
            parent=header.parent,
            previous=header.previous,
            world_size=len(summaries),
            created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            created_by=f"torchrec_checknrun {__version__}",
            lossy_restores=header.lossy_restores,
            bits=header.bits,
            tables=_sum_tables(plan, [summary.tables for summary in summaries]),
            states=plan.states,
            dense_bytes=sum(summary.dense_bytes for summary in summaries),
            files=tuple(summary.file for summary in summaries),
            earlier_fractions=header.earlier_fractions,
            lineage=header.lineage,
            epoch=epoch,
        ).sealed()
        self._before_commit()
        self._check_files(manifest, "while it was written")
        data = manifest.to_bytes()
        self._folder.put(MANIFEST_NAME, data, new=True)
        note_number(root, sequence)
        # Between the last look and the put this process may have been stopped for hours.
        self._check_files(manifest, "while it was committed")
        if self._folder.read(MANIFEST_NAME) != data:
            raise SaveFailed(f"{self._folder}/{MANIFEST_NAME} is another one than was written")
        claim = latest_claim(root) if header.epoch is None else None
        if claim is not None and not claim.admits(manifest.id, epoch):
            raise SaveFailed(
                f"a writer claimed {root} while {manifest.id} was committed, so that it doesn't "
                "count: save again, into another directory"
            )
        self._after_commit()
        # dcp.save gives every rank this metadata once all is done.
        metadata.planner_data = manifest

    def _check_files(self, manifest: Manifest, when: str) -> None:
        """Check that the files are as they were written.

        Raises:
            SaveFailed: somebody has taken them for leftovers.
        """
        try:
            check_sizes(self._folder.parent, manifest)
        except CorruptCheckpoint as error:
            raise SaveFailed(
                f"files of {manifest.id} went away {when}: {error}. Leave deleting to `retention` "
                "or `checknrun prune`"
            ) from error


def _sum_tables(plan: GlobalPlan, parts: list[dict[str, TableTotals]]) -> dict[str, TableTotals]:
    totals = {name: TableTotals(shape.rows, shape.dim) for name, shape in plan.tables.items()}
    # Rank by rank, as they lie in memory: a thousand ranks' parts fit in no processor's cache.
    for part in parts:
        for name, of_rank in part.items():
            if name in totals:
                totals[name] = add_totals(totals[name], of_rank)
    for name, total in totals.items():
        progress = plan.progress.get(name)
        totals[name] = replace(
            total,
            fp32_bytes=plan.fp32_bytes[name],
            optimizer_step=progress.step if progress else None,
            learning_rate=progress.learning_rate if progress else None,
            optimizer_options=dict(progress.options) if progress else {},
        )
    return totals
