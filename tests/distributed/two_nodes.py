"""A life of a run on two nodes: train and be killed, or go on after one node is gone."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from tests.distributed.partial_lives import Lives, bytes_read, differing, from_storage, of_tables
from torchrec_checknrun.elastic import init_process_group
from torchrec_checknrun.memory.partial import PeerCopies

SHARED_MEMORY = "/dev/shm"


def train_and_die(lives: Lives, notes: Path) -> None:
    """Train to step 11, with checkpoints of steps 4 and 8, and be killed."""
    lives.begin()
    lives.saver.restore()
    lives.train(8)
    at_8 = lives.values()
    lives.train(3)
    notes.write_bytes(pickle.dumps((at_8, lives.values())))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(lives: Lives, notes: Path, lost: list[int]) -> None:
    """Go on where some ranks have lost their memory; note what was read, and from where."""
    at_8, at_11 = pickle.loads(notes.read_bytes())
    lives._number = 1
    lives.begin()
    with bytes_read(within=str(lives.root)) as counts:
        report = lives.saver.restore()
    assert report is not None
    found, rows = lives.values(), at_8 if dist.get_rank() in lost else at_11
    assert differing(of_tables(found, sharded=True), of_tables(rows, sharded=True)) == []
    assert differing(of_tables(found, sharded=False), of_tables(at_11, sharded=False)) == []
    lives.train(5)
    assert differing(from_storage(lives), lives.values()) == []
    sources = [rank.source for rank in report.ranks]
    notes.with_suffix(".json").write_text(json.dumps([sum(counts), sources, report.step]))
    lives.end()


def main() -> None:
    """Live on this rank."""
    folder, lost = Path(sys.argv[1]), json.loads(sys.argv[2])
    init_process_group()
    lives = Lives(str(folder), SHARED_MEMORY, peers=PeerCopies())
    notes = folder / f"rank-{dist.get_rank()}"
    if lost is None:
        train_and_die(lives, notes)
    go_on(lives, notes, lost)
    dist.barrier()
    os._exit(0)  # libraries may hang at exit


if __name__ == "__main__":
    main()
