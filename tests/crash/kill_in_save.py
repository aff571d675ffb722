"""Run the trainer with a bomb: SIGKILL at the point that the plan has for this attempt.

Before each restore the committed checkpoints are written down, found by their manifests alone: the
restore is compared with them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from recipes.dlrm_criteo.train import main
from tests.crash import kills
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.marks.row_copies import KernelCopies, ShardCopies
from torchrec_checknrun.restore.plan import ChainRestore
from torchrec_checknrun.root.deletion import Deletion
from torchrec_checknrun.run import saver
from torchrec_checknrun.save.commit import CheckpointWriter
from torchrec_checknrun.save.plan import Prepared, Share
from torchrec_checknrun.snapshot import late_copies, staging
from torchrec_checknrun.snapshot.late_copies import LateCopies
from torchrec_checknrun.snapshot.staged import StagedJob
from torchrec_checknrun.snapshot.staging import Staging
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.new_file import NewFile
from torchrec_checknrun.writers.lease import Lease

RUN_DIR = Path(next(a.split("=", 1)[1] for a in sys.argv if a.startswith("run_dir=")))
RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
PATIENCE = 60.0
"""Seconds until a rank that should meet its own training thread gives up."""


class TornFile:
    """A file whose process dies in the middle of one of the writes."""

    def __init__(self, file: NewFile, bomb: Bomb) -> None:
        self._file = file
        self._bomb = bomb

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        if self._bomb.is_last_chunk():
            view = memoryview(data)
            self._file.write(view[: len(view) // 2])
            self._bomb.explode()
        return self._file.write(data)


class Bomb:
    """A bomb that goes off once, at the planned point of the planned save or restore."""

    def __init__(self, kill: kills.Kill) -> None:
        self.kill = kill
        self._saves = self._begun = 0
        self._chunks_left = 0
        self._checkpoint = ""

    def arm(self) -> None:
        """Patch all functions that a save and a restore go through."""
        if self.kill.rank == RANK:
            self._arm_begin()
            self._arm_save()
            self._arm_late_copies()
            self._arm_copies()
            self._arm_retention()
        self._arm_restore()

    def explode(self) -> None:
        """Kill the victims; don't return if this rank is among them."""
        victims = self.kill.victims or (RANK,)
        pids = {rank: int(_pid_file(rank).read_text()) for rank in victims}
        event = {"attempt": ATTEMPT, "pid": pids[victims[0]], "checkpoint": self._checkpoint}
        _append("killed.jsonl", {**event, "pids": list(pids.values())})
        for rank in sorted(pids, key=lambda rank: rank == RANK):  # itself last
            os.kill(pids[rank], signal.SIGKILL)
        assert RANK not in victims, "not reached"
        self.kill = replace(self.kill, point="over")

    def is_last_chunk(self) -> bool:
        """Count the chunks of a file or restore, down to the one that is not to be outlived."""
        self._chunks_left -= 1
        return self._chunks_left == 0

    def _will_have(self, chunks: int) -> None:
        self._chunks_left = int(self.kill.part * chunks) + 1

    def _is_at(self, point: str) -> bool:
        return (self.kill.point, self.kill.save) == (point, self._saves)

    def _arm_begin(self) -> None:
        claim, snapshot = Lease._take, saver.take_snapshot
        publish, encode = Staging._publish, StagedJob.encode

        def claim_and_die(*args: Any) -> Any:
            made = claim(*args)
            if self.kill.point == kills.CLAIM:
                self.explode()
            return made

        def cut_and_die(*args: Any) -> Any:
            self._begun += 1
            self._checkpoint = ""
            taken = snapshot(*args)
            if (self.kill.point, self.kill.save) == (kills.CUT, self._begun):
                self.explode()
            return taken

        def publish_and_die(*args: Any) -> None:
            publish(*args)
            if (self.kill.point, self.kill.save) == (kills.STAGE, self._begun):
                self.explode()

        def die_or_encode(job: StagedJob) -> Any:
            if self._is_at(kills.ENCODE):
                self.explode()
            return encode(job)

        _replace(Lease, "_take", claim_and_die)
        _replace(saver, "take_snapshot", cut_and_die)
        _replace(Staging, "_publish", publish_and_die)
        _replace(StagedJob, "encode", die_or_encode)

    def _begins(self, point: str) -> bool:
        """Return whether this is the point, of a save whose file is still to be written."""
        return (self.kill.point, self.kill.save) == (point, self._begun)

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < deadline, f"{self.kill.point}: training does not come by"
            time.sleep(0.001)

    def _arm_late_copies(self) -> None:
        make = LateCopies.make

        def copy_one_and_die(copies: LateCopies) -> None:
            if self._begins(kills.LATE_COPIES) and len(copies._left) > 1:
                copies._left[-1].make()
                self.explode()
            make(copies)

        _replace(LateCopies, "make", copy_one_and_die)
        if self.kill.point == kills.LATE_COPIES:  # the job's parameters are small
            for module in (late_copies, staging):
                mock.patch.object(module, "LEAST_BYTES", 1).start()

    def _arm_copies(self) -> None:
        """Patch the thread that copies rows, and the hook that is to come first."""
        stage, protect = ShardCopies.stage, KernelCopies.before_update
        chunks = [0]  # of the planned save: this rank dies in it

        def stage_and_die(copies: ShardCopies, rows: Any, *arguments: Any) -> None:
            chunks[0] += self._begins(kills.BETWEEN_CHUNKS)
            if chunks[0] == 2:
                self.explode()
            if self._begins(kills.HOOK):
                time.sleep(PATIENCE)  # training comes first
            if self._begins(kills.STREAM):
                stage(copies, rows[: len(rows) // 2], *arguments)
                self.explode()
            if self._begins(kills.MERGE):
                self._wait_until(lambda: copies.native.held() > 0)
                for row in rows.split(1):
                    held = copies.native.held()
                    stage(copies, row, *arguments)
                    if copies.native.held() < held:
                        self.explode()
                raise AssertionError("the chunk has no row that training has copied")
            stage(copies, rows, *arguments)

        def protect_half_and_die(
            copies: KernelCopies, values: Any, offsets: list[int], shards: list[int]
        ) -> None:
            if self._begins(kills.HOOK):
                half = len(values) // 2
                protect(copies, values[:half], [min(at, half) for at in offsets], shards)
                if copies.native.protected_rows():
                    self.explode()
            protect(copies, values, offsets, shards)

        _replace(ShardCopies, "stage", stage_and_die)
        _replace(KernelCopies, "before_update", protect_half_and_die)

    def _arm_retention(self) -> None:
        delete_all, delete = Deletion._delete, Folder.delete
        deleting: list[str] = []

        def delete_all_here(deletion: Deletion, id: str, *args: Any) -> bool:
            deleting.append(id)
            return delete_all(deletion, id, *args)

        def delete_and_die(folder: Folder, name: str) -> None:
            delete(folder, name)
            if self.kill.point == kills.RETENTION and deleting and name != MANIFEST_NAME:
                self.explode()

        _replace(Deletion, "_delete", delete_all_here)
        _replace(Folder, "delete", delete_and_die)

    def _arm_save(self) -> None:
        write_file, write, put = CheckpointWriter.write, Folder.write, Folder.put
        jobs = Prepared.jobs

        def jobs_and_count(prepared: Prepared, share: Share) -> Any:
            self._will_have(len(share.items))
            return jobs(prepared, share)

        def write_file_or_die(writer: CheckpointWriter, *args: Any) -> Any:
            self._saves += 1
            self._checkpoint = writer.folder.name
            if self._is_at(kills.BEFORE_FILES):
                self.explode()
            result = write_file(writer, *args)
            if self._is_at(kills.AFTER_FILE):
                self.explode()
            return result

        @contextmanager
        def write_or_die(folder: Folder, name: str) -> Iterator[Any]:
            with write(folder, name) as file:
                yield TornFile(file, self) if self._is_at(kills.IN_FILE) else file

        def put_or_die(folder: Folder, name: str, data: bytes, new: bool = False) -> None:
            if name != MANIFEST_NAME:
                put(folder, name, data, new)
                return
            if self._is_at(kills.BEFORE_MANIFEST):
                self.explode()
            if self._is_at(kills.IN_MANIFEST):
                _replace(os, "link", self._instead_of(os.link))
            put(folder, name, data, new)
            if self._is_at(kills.AFTER_MANIFEST):
                self.explode()

        _replace(Prepared, "jobs", jobs_and_count)
        _replace(CheckpointWriter, "write", write_file_or_die)
        _replace(Folder, "write", write_or_die)
        _replace(Folder, "put", put_or_die)

    def _instead_of(self, act: Callable[..., None]) -> Callable[..., None]:
        def explode(*args: Any, **options: Any) -> None:
            self.explode()
            act(*args, **options)  # another rank was the victim

        return explode

    def _arm_restore(self) -> None:
        load, load_chunk = ChainRestore.load, ChainRestore.load_chunk

        def load_and_count(restore: ChainRestore, *args: Any) -> None:
            self._will_have(len(restore.keys))
            load(restore, *args)

        def load_chunk_or_die(restore: ChainRestore, chunk: Any) -> None:
            load_chunk(restore, chunk)
            if self.is_last_chunk():
                self.explode()

        if self.kill.point == kills.IN_RESTORE and self.kill.rank == RANK:
            _replace(ChainRestore, "load", load_and_count)
            _replace(ChainRestore, "load_chunk", load_chunk_or_die)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    mock.patch.object(owner, name, function).start()


def _pid_file(rank: int) -> Path:
    return RUN_DIR / f"pid-{ATTEMPT}-{rank}"


def _append(name: str, event: dict[str, Any]) -> None:
    with (RUN_DIR / name).open("a") as lines:
        lines.write(json.dumps(event) + "\n")


def _list_before_restoring() -> None:
    restore = Checkpointer.restore

    def list_and_restore(checkpointer: Checkpointer, *args: Any, **kwargs: Any) -> Any:
        if RANK == 0:
            manifests = (RUN_DIR / "checkpoints").glob("*/manifest.json")
            ids = {
                json.loads(m.read_text())["manifest"]["sequence"]: m.parent.name for m in manifests
            }
            newest = ids[max(ids)] if ids else None
            _append("restores.jsonl", {"attempt": ATTEMPT, "newest": newest})
        return restore(checkpointer, *args, **kwargs)

    _replace(Checkpointer, "restore", list_and_restore)


if __name__ == "__main__":
    _list_before_restoring()
    _pid_file(RANK).write_text(str(os.getpid()))
    for kill in kills.read_plan(RUN_DIR)[ATTEMPT : ATTEMPT + 1]:
        Bomb(kill).arm()
    main()
