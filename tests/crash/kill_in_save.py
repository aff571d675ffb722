"""The trainer with a bomb in it: SIGKILLs itself at the point that the plan has for this attempt.

Also writes down which checkpoints are committed before each restore, by looking for manifests
itself: what the restore is then compared with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner

from recipes.dlrm_criteo.train import main
from tests.crash import kills
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.load_planner import LoadPlanner
from torchrec_checknrun.manifest import MANIFEST_NAME
from torchrec_checknrun.storage import StorageReader, StorageWriter

RUN_DIR = Path(next(a.split("=", 1)[1] for a in sys.argv if a.startswith("run_dir=")))
RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class TornFile:
    """A file whose process dies in the middle of one of the writes."""

    def __init__(self, file: IO[bytes], bomb: Bomb) -> None:
        self._file = file
        self._bomb = bomb

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        if self._bomb.is_last_chunk():
            view = memoryview(data)
            self._file.write(view[: len(view) // 2])
            self._file.flush()
            self._bomb.explode()
        return self._file.write(data)


class Bomb:
    """Goes off once, at the planned point of the planned save or restore."""

    def __init__(self, kill: kills.Kill) -> None:
        self.kill = kill
        self._saves = 0
        self._chunks_left = 0
        self._checkpoint = ""

    def arm(self) -> None:
        """Puts itself into all that a save and a restore go through."""
        self._arm_save()
        self._arm_restore()

    def explode(self) -> NoReturn:
        event = {"attempt": ATTEMPT, "pid": os.getpid(), "checkpoint": self._checkpoint}
        _append("killed.jsonl", event)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    def is_last_chunk(self) -> bool:
        """Counts the chunks of a file or restore, down to the one that is not to be outlived."""
        self._chunks_left -= 1
        return self._chunks_left == 0

    def _will_have(self, chunks: int) -> None:
        self._chunks_left = int(self.kill.part * chunks) + 1

    def _is_at(self, point: str) -> bool:
        return (self.kill.point, self.kill.save) == (point, self._saves)

    def _arm_save(self) -> None:
        write_data, write, put = StorageWriter.write_data, Folder.write, Folder.put

        def write_data_or_die(writer: StorageWriter, plan: SavePlan, planner: SavePlanner) -> Any:
            self._saves += 1
            self._will_have(len(plan.items))
            self._checkpoint = Path(writer.storage_meta().checkpoint_id or "").name
            if self._is_at(kills.BEFORE_FILES):
                self.explode()
            result = write_data(writer, plan, planner)
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
                _replace(os, "link", lambda *_: self.explode())
            put(folder, name, data, new)
            if self._is_at(kills.AFTER_MANIFEST):
                self.explode()

        if self.kill.rank == RANK:
            _replace(StorageWriter, "write_data", write_data_or_die)
            _replace(Folder, "write", write_or_die)
            _replace(Folder, "put", put_or_die)

    def _arm_restore(self) -> None:
        read_data, load_bytes = StorageReader.read_data, LoadPlanner.load_bytes

        def read_data_and_count(reader: StorageReader, plan: LoadPlan, planner: LoadPlanner) -> Any:
            self._will_have(len(plan.items))
            return read_data(reader, plan, planner)

        def load_bytes_or_die(planner: LoadPlanner, item: Any, value: Any) -> None:
            load_bytes(planner, item, value)
            if self.is_last_chunk():
                self.explode()

        if self.kill.point == kills.IN_RESTORE and self.kill.rank == RANK:
            _replace(StorageReader, "read_data", read_data_and_count)
            _replace(LoadPlanner, "load_bytes", load_bytes_or_die)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    mock.patch.object(owner, name, function).start()


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
    for kill in kills.read_plan(RUN_DIR)[ATTEMPT : ATTEMPT + 1]:
        Bomb(kill).arm()
    main()
