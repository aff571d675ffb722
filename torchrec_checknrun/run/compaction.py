"""Run a compaction in a niced process behind training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass

from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.save.isolated_start import start
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_MODULE = "torchrec_checknrun.compaction.compact_behind"
_MOST_ANSWER = 1 << 16
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Copied:
    """The outcome of a compaction.

    Attributes:
        original: id of the checkpoint that was compacted.
        copy: the full checkpoint of the same content; None: the compaction failed.
    """

    original: str
    copy: Manifest | None


class CompactionProcess:
    """A compaction in another process, which ends with this one. Used on rank 0 only.

    Start it in a thread that lives as long as the process may run: on Linux the process ends with
    the thread that started it.

    Attributes:
        outcome: once the process has ended; None until then.
    """

    def __init__(self, root: Folder, original: Manifest) -> None:
        self._root = root
        self._original = original
        self.outcome: Copied | None = None
        self._ended = threading.Event()
        ours, its = os.pipe()
        try:
            url, timeout = root.url, root.patience.timeout_seconds
            self._process = start(_MODULE, its, url, timeout, original.id, descriptors=(its,))
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        self._thread = threading.Thread(
            target=self._listen, args=(ours,), name="checknrun-compact", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:  # nobody would listen to the process
            os.close(ours)
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            raise

    def wait(self, seconds: float | None = None) -> Copied | None:
        """Wait for the outcome; None if it doesn't come in time."""
        self._thread.join(seconds)
        return self.outcome

    def end(self) -> None:
        """End the process; what it has not committed yet is a leftover."""
        self._ended.set()
        self._process.kill()
        self._thread.join(_END_SECONDS)

    def _listen(self, pipe: int) -> None:
        copy: Manifest | None = None
        try:
            with os.fdopen(pipe, "rb") as answers:
                answer = answers.read(_MOST_ANSWER)
            self._process.wait()
            copy = self._read(answer)
        except (CheckNRunError, OSError, ValueError, subprocess.SubprocessError) as error:
            if self._ended.is_set():  # no failure, which -9 looks like
                logger.info("compacting %s behind training was given up", self._original.id)
            else:
                logger.warning("compacting %s behind training failed: %s", self._original.id, error)
        finally:
            self.outcome = Copied(self._original.id, copy)

    def _read(self, answer: bytes) -> Manifest:
        """Return the manifest of the copy that an answer names.

        Raises:
            ValueError: there is no copy.
        """
        if not answer:
            raise ValueError(f"its process ended with status {self._process.returncode}")
        said = json.loads(answer)
        if not said.get("id"):
            raise ValueError(said.get("error", "it is a full checkpoint"))
        copy = read_manifest(self._root, said["id"])
        if copy.kind != "full" or copy.previous != self._original.link:
            raise ValueError(f"{copy.id} is not a copy of it")
        return copy
