"""Track the rows that training modifies, for your own use: no checkpoints.

torchrun --nproc-per-node=2 examples/track_only.py
"""

from small_model import ROWS, batches, make_model, train_step

from torchrec_checknrun.elastic import init_process_group
from torchrec_checknrun.tracking import track


def main() -> dict[str, int]:
    """Print the modified rows of this rank's shards after every 5 steps."""
    init_process_group()
    model, optimizer = make_model()
    tracked = track(model)
    counts: dict[str, int] = {}
    for number in (0, 5, 10):
        for data in batches(number, number + 5):
            train_step(model, optimizer, data)
        counts = {table: len(ids) for table, ids in tracked.modified_rows().items()}
        print(number + 5, counts)
        tracked.clear()  # begins the next interval
    tracked.close()  # removes the hooks from the model
    assert len(counts) == len(ROWS)
    return counts


if __name__ == "__main__":
    main()
