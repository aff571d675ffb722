"""Restore, train, save: the smallest job. Run it twice: the second run continues the first.

torchrun --nproc-per-node=2 examples/minimal.py /tmp/checkpoints
"""

import sys

from small_model import batches, make_model, train_step

from torchrec_checknrun import AtEnd, Checkpointer, Quantization, RngState
from torchrec_checknrun.elastic import init_process_group


def main(root: str, steps: int = 30) -> None:
    """Train a number of further steps, and save every 10 steps."""
    init_process_group()
    model, optimizer = make_model()
    with Checkpointer(
        root,
        model=model,
        state={"optimizer": optimizer, "rng": RngState()},
        quantization=Quantization(bits=8),
        every_steps=10,
        triggers=[AtEnd()],
        callbacks=[print],
    ) as checkpointer:
        checkpointer.restore()
        first = checkpointer.steps
        for data in batches(first, first + steps):
            train_step(model, optimizer, data)
            checkpointer.step()
    print(f"trained steps {first} to {checkpointer.steps}")


if __name__ == "__main__":
    main(sys.argv[1])
