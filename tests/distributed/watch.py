"""Compare the rows in a run's checkpoints with the rows that have changed; catch warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.distributed.zoo import Rows, Zoo, changed_rows, stored_rows, table_arrays
from torchrec_checknrun import Checkpointer, Consecutive


class Watch:
    """A count of the rows that a run's checkpoints hold or miss, against the rows that changed."""

    def __init__(self, zoo: Zoo, root: str) -> None:
        self.zoo = zoo
        self.saver = Checkpointer(
            root,
            model=zoo.model,
            retention=None,
            state={"optimizer": zoo.optimizer},
            policy=Consecutive(),
            chunk_bytes=700,
        )
        self._root = Path(root)
        assert self.saver.save() is not None
        self._before = table_arrays(zoo)
        self.stored: Rows = set()
        self.counts = {"changed": 0, "missed": 0, "extra": 0, "wrong": 0}

    def check(self) -> None:
        """Save a differential checkpoint and compare it."""
        self.saver.steps += 1
        report = self.saver.save()
        assert report is not None
        self.compare(report)

    def compare(self, report: Any) -> None:
        """Compare a differential checkpoint with the rows changed since the last comparison."""
        assert report.kind == "differential"
        after = table_arrays(self.zoo)
        changed = changed_rows(self._before, after)
        self.stored, wrong = stored_rows(self._root / report.id, after)
        self.counts["changed"] += len(changed)
        self.counts["missed"] += len(changed - self.stored)
        self.counts["extra"] += len(self.stored - changed)
        self.counts["wrong"] += len(wrong)
        self._before = after
        dist.barrier()


def judge(counts: dict[str, int], extra: int = 0) -> None:
    """Assert that all changed rows were stored, and at most ``extra`` others."""
    ratio = (counts["changed"] + counts["extra"]) / max(1, counts["changed"])
    print(f"over-marking ratio {ratio:.3f} of {counts['changed']} changed rows")
    assert counts["changed"] > 0
    assert (counts["missed"], counts["wrong"]) == (0, 0)
    assert counts["extra"] <= extra


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def warnings_said() -> Iterator[list[str]]:
    """Collect the messages that the package logs in the block."""
    lines, logger = _Lines(), logging.getLogger("torchrec_checknrun")
    level = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    logger.addHandler(lines)
    try:
        yield lines.lines
    finally:
        logger.removeHandler(lines)
        logging.disable(level)
