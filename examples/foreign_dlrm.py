"""Add checkpoints to a foreign training loop, TorchRec's DLRM example, by the lines marked `# +`.

torchrun --nproc-per-node=2 examples/foreign_dlrm.py /tmp/checkpoints
"""

import sys

import torch
import torch.distributed as dist
from small_model import DEVICE, batches, make_model
from torch.optim.lr_scheduler import StepLR
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torchrec_checknrun import AtEnd, Checkpointer, elastic  # +

EPOCHS, EPOCH_STEPS = 2, 20


def main(root: str) -> None:
    """Train all epochs, from the place that an earlier attempt reached."""
    join = dist.init_process_group
    join = elastic.init_process_group  # + a restarted job never looks for a dead process's address
    join("gloo")
    model, _ = make_model()
    dense = KeyedOptimizerWrapper(
        {n: p for n, p in model.named_parameters() if "embedding_bags" not in n},
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    schedule = StepLR(dense, step_size=15, gamma=0.5)
    checkpointer = Checkpointer(  # +
        root,  # +
        model=model,  # +
        state={"optimizer": optimizer, "schedule": schedule},  # +
        every_steps=10,  # +
        triggers=[AtEnd()],  # +
    )  # +
    checkpointer.restore()  # +
    done, loss = 0, torch.zeros(())
    done = checkpointer.steps  # + continue the data from the checkpoint's place
    for epoch in range(done // EPOCH_STEPS, EPOCHS):
        pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
        data = batches(done, (epoch + 1) * EPOCH_STEPS)
        while True:
            try:
                loss, *_ = pipeline.progress(data)
            except StopIteration:
                break
            schedule.step()
            done += 1
            checkpointer.step()  # +
        print(f"epoch {epoch}: step {done}")
    checkpointer.close()  # +
    print("final loss", float(loss))


if __name__ == "__main__":
    main(sys.argv[1])
