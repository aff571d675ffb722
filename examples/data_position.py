"""Continue in the data, with loader processes: torchdata's StatefulDataLoader in ``state``.

pip install 'torchrec_checknrun[torchdata]'
torchrun --nproc-per-node=2 examples/data_position.py /tmp/checkpoints 17
"""

import sys

import torch.distributed as dist
from small_model import batch, make_model, train_step
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchrec_checknrun import AtEnd, Checkpointer, PerRank
from torchrec_checknrun.elastic import init_process_group

BATCHES = 40


class Numbers(Dataset[int]):
    """A data set of a rank's own batch numbers."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.numbers = range(rank, BATCHES * ranks, ranks)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]


def main(root: str, stop: int) -> list[int]:
    """Train until a step; return the batches' numbers. Another run continues with the next one."""
    init_process_group()
    model, optimizer = make_model()
    data = Numbers(dist.get_rank(), dist.get_world_size())
    # Workers read ahead; the loader's state counts the batches handed out, not those read.
    loader = StatefulDataLoader(data, batch_size=None, num_workers=2, shuffle=True)
    # Each rank has its own: PerRank(loader, merge=…) shares them out on another number of ranks.
    state = {"optimizer": optimizer, "loader": PerRank(loader)}
    with Checkpointer(root, model=model, state=state, triggers=[AtEnd()]) as checkpointer:
        checkpointer.restore()  # before iteration begins
        seen: list[int] = []
        numbers = iter(loader)
        while checkpointer.steps < stop and (number := next(numbers, None)) is not None:
            train_step(model, optimizer, batch(number))
            seen.append(number)
            checkpointer.step()
    print(f"step {checkpointer.steps}: trained {len(seen)} batches")
    return seen


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
