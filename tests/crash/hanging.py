"""Let a store stop answering: an fsspec file system (``hanging://``) in memory, and a script on it.

From a chosen call on, calls wait for ever; the script trains, saves, closes or just ends.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

CALLS = ("ls", "info", "exists", "cat_file", "makedirs", "open", "pipe_file", "rm_file")
"""The calls that can hang; ``write`` and ``close`` of files as well."""


class HangingFile:
    """A file that is being written."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> Any:
        HangingStore.meet("write")
        return self._file.write(data)

    def close(self) -> None:
        HangingStore.meet("close")
        self._file.close()

    def tell(self) -> Any:
        return self._file.tell()

    def discard(self) -> None:
        pass


class HangingStore(MemoryFileSystem):
    """A store of objects in memory.

    Attributes:
        hangs: names of the calls that don't return; ``manifest``: puts of a manifest.
        released: lets them return after all.
    """

    protocol = "hanging"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    hangs: ClassVar[set[str]] = set()
    released: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def meet(cls, name: str) -> None:
        if name in cls.hangs:
            cls.released.wait()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        plain: str = super()._strip_protocol(str(path).removeprefix("hanging://"))
        return plain

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.meet("open")
        file = super().open(path, mode, **options)
        return HangingFile(file) if "w" in mode else file

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.meet("pipe_file")
        if path.endswith("manifest.json"):
            self.meet("manifest")
        with MemoryFileSystem.open(self, path, "wb") as file:
            file.write(value)


def _hanging(name: str) -> Any:
    def call(self: HangingStore, *args: Any, **options: Any) -> Any:
        self.meet(name)
        return getattr(super(HangingStore, self), name)(*args, **options)

    return call


for _name in set(CALLS) - {"open", "pipe_file"}:
    setattr(HangingStore, _name, _hanging(_name))
fsspec.register_implementation("hanging", HangingStore, clobber=True)
kept = ExitStack()
"""Keeps ``main``'s checkpointer alive, as a script that doesn't tidy up does."""


def main(how: str, what: str, timeout_seconds: float) -> None:
    """Save once, then have the store hang and do ``how``: save, close or exit; print seconds."""
    from tests.crash.save_sweep import SPEC, alone
    from tests.distributed.models import Job, uniform_plan
    from torchrec_checknrun import Checkpointer
    from torchrec_checknrun.errors import SaveFailed

    kept.enter_context(alone())
    job = Job.build(SPEC, uniform_plan(SPEC, "table_wise", 1), seed=0)
    saver = Checkpointer(
        "hanging://run",
        model=job.model,
        state={"optimizer": job.optimizer},
        timeout_seconds=timeout_seconds,
        chunk_bytes=1000,
    )
    job.train()
    saver.step()
    saver.save()
    job.train()
    saver.step()
    HangingStore.hangs.update([what] if what != "all" else [*CALLS, "write", "close"])
    started = time.monotonic()
    try:
        saver.save(wait=how == "save")
        if how == "close":
            saver.close()
    except SaveFailed as error:
        print("failed:", error)
    print(f"seconds: {time.monotonic() - started:.2f}", flush=True)
    if how == "save":
        saver.close()
        print(f"closed: {time.monotonic() - started:.2f}", flush=True)


if __name__ == "__main__":
    from tests.crash import hanging

    hanging.main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
