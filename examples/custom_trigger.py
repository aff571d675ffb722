"""Write a trigger of your own: save when a user asks for a checkpoint by making a file.

Python:  python examples/custom_trigger.py /tmp/checkpoints /tmp/save-now
Hydra:   python examples/hydra_app.py checkpoint.root=/tmp/checkpoints \\
             'checkpoint.triggers=[{_target_: custom_trigger.WhenAsked, path: /tmp/save-now}]'
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from small_model import batches, make_model, train_step

from torchrec_checknrun import Checkpointer
from torchrec_checknrun.elastic import init_process_group
from torchrec_checknrun.triggers import Moment


@dataclass(frozen=True)
class WhenAsked:
    """Save when a file appears, and delete the file: ``touch /tmp/save-now``.

    Attributes:
        path: the file, on the machine of rank 0.
    """

    path: str
    by_step = False  # depends on more than the step: only rank 0 is asked

    def due(self, now: Moment) -> bool:
        """Return whether the file is there; one yes is enough, the ranks then agree on a step."""
        try:
            Path(self.path).unlink()
        except FileNotFoundError:
            return False
        return True


def main(root: str, path: str) -> None:
    """Train, and ask for a checkpoint in the middle."""
    init_process_group()
    model, optimizer = make_model()
    with Checkpointer(
        root,
        model=model,
        state={"optimizer": optimizer},
        triggers=[WhenAsked(path)],
        callbacks=[print],
    ) as checkpointer:
        checkpointer.restore()
        for number, data in enumerate(batches(checkpointer.steps, checkpointer.steps + 20)):
            train_step(model, optimizer, data)
            if number == 5:
                Path(path).touch()
            checkpointer.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
