"""Convert a script that calls dcp.save: delete the lines marked `# -`, add those marked `# +`.

torchrun --nproc-per-node=2 examples/convert_dcp_script.py before /tmp/stock
torchrun --nproc-per-node=2 examples/convert_dcp_script.py after /tmp/checkpoints
"""

import sys
from pathlib import Path

import torch.distributed.checkpoint as dcp  # -
from small_model import batches, make_model, train_step

from torchrec_checknrun import Checkpointer, Consecutive  # +
from torchrec_checknrun.elastic import init_process_group

STEPS, EVERY = 30, 10


def before(root: str) -> float:
    """Save all rows every time while training waits; find the newest checkpoint by hand."""
    model, optimizer = make_model()
    state = {"model": model, "optimizer": optimizer}  # -
    done = [int(path.parent.name) for path in Path(root).glob("*/.metadata")]  # -
    first = max(done, default=0)  # -
    if first:  # -
        dcp.load(state, checkpoint_id=f"{root}/{first}")  # -
    loss = 0.0
    for step, data in enumerate(batches(first, STEPS), first + 1):
        loss = train_step(model, optimizer, data)
        if step % EVERY == 0:  # -
            dcp.save(state, checkpoint_id=f"{root}/{step}")  # -
    return loss


def after(root: str) -> float:
    """Save modified rows while training continues; skip damaged checkpoints."""
    model, optimizer = make_model()
    checkpointer = Checkpointer(  # +
        root,
        model=model,
        state={"optimizer": optimizer},
        every_steps=EVERY,
        policy=Consecutive(),
        when_busy="wait",  # skips no due save, as dcp.save; the default is "skip"
    )  # +
    checkpointer.restore()  # +
    loss = 0.0
    for data in batches(checkpointer.steps, STEPS):
        loss = train_step(model, optimizer, data)
        checkpointer.step()  # +
    checkpointer.close()  # +
    return loss


if __name__ == "__main__":
    init_process_group()
    print("loss", {"before": before, "after": after}[sys.argv[1]](sys.argv[2]))
