"""Use the config group ``checkpoint`` in a Hydra app; name your own classes in its config.

python examples/hydra_app.py checkpoint.root=/tmp/checkpoints checkpoint.every_steps=10
"""

from importlib import import_module

import hydra
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from small_model import batches, make_model, train_step

from torchrec_checknrun.elastic import init_process_group

CONFIG = {
    "defaults": [{"checkpoint": "check_n_run"}, "_self_"],
    "steps": 12,  # of this run
    "imports": [],  # modules that register something, such as your own file system
    "hydra": {"run": {"dir": "."}, "output_subdir": None},
}
ConfigStore.instance().store(name="app", node=CONFIG)


@hydra.main(version_base="1.3", config_path=None, config_name="app")
def main(cfg: DictConfig) -> None:
    """Train with the checkpointer that the config describes."""
    for name in cfg.imports:
        import_module(name)
    init_process_group()
    model, optimizer = make_model()
    checkpointer = hydra.utils.instantiate(
        cfg.checkpoint, model=model, state={"optimizer": optimizer}, callbacks=[print]
    )
    with checkpointer:
        checkpointer.restore()
        for data in batches(checkpointer.steps, checkpointer.steps + cfg.steps):
            train_step(model, optimizer, data)
            checkpointer.step()
    print("trained to step", checkpointer.steps)
    dist.destroy_process_group()  # the next job of a multirun (-m) begins in this process


if __name__ == "__main__":
    main()
