"""Use this package's planners and storage under dcp.save and dcp.load, without a Checkpointer.

torchrun --nproc-per-node=2 examples/dcp_only.py /tmp/checkpoints
"""

import sys
from pathlib import Path

import torch.distributed.checkpoint as dcp
from small_model import batches, make_model, train_step

from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.elastic import init_process_group
from torchrec_checknrun.tracking import track


def main(root: str) -> None:
    """Save a full and a differential checkpoint, and load the second into a new model."""
    init_process_group()
    model, optimizer = make_model()
    tracked = track(model, [optimizer])  # once, before training
    state = {"model": model, "optimizer": optimizer}
    first, second = Path(root, "10"), Path(root, "20")
    for path, number in ((first, 0), (second, 10)):
        for data in batches(number, number + 10):
            train_step(model, optimizer, data)
        dcp.save(state, planner=SavePlanner(tracked), storage_writer=StorageWriter(path))
    tracked.close()

    fresh, fresh_optimizer = make_model()
    tracked = track(fresh, [fresh_optimizer])
    dcp.load(
        {"model": fresh, "optimizer": fresh_optimizer},
        planner=LoadPlanner(tracked),
        storage_reader=StorageReader(second),
    )
    (data,) = batches(20, 21)
    losses = [train_step(*one, data) for one in ((model, optimizer), (fresh, fresh_optimizer))]
    assert losses[0] == losses[1]
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in (first, second)]
    print(f"full {sizes[0]} bytes, differential {sizes[1]} bytes, loss after both {losses[0]}")


if __name__ == "__main__":
    main(sys.argv[1])
