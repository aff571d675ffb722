"""Train into a hook that waits for memory, and get a SIGTERM meanwhile.

Started by ``test_sigterm`` with the root, in a process of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch.distributed as dist

from tests.distributed.on_write import build, checkpointer, held_copiers, little_memory
from torchrec_checknrun import OnSigterm


def main(root: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with little_memory(), held_copiers() as held:
        job = build()
        saver = checkpointer(root, job, triggers=[OnSigterm(20)], timeout_seconds=60)
        job.train(2)
        saver.step()
        held.hold()
        saver.save(wait=False)
        held.wait()
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        threading.Timer(1.5, held.let_go).start()
        for _ in range(200):
            job.train()
            print("trained", job.steps, flush=True)
            saver.step()


if __name__ == "__main__":
    main(sys.argv[1])
