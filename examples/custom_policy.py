"""Write a policy of your own: a full checkpoint once differential ones have used up a budget.

Python:  python examples/custom_policy.py /tmp/checkpoints
Hydra:   python examples/hydra_app.py checkpoint.root=/tmp/checkpoints \\
             'checkpoint.policy={_target_: custom_policy.Budget, fraction: 0.5}'
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from small_model import batches, make_model, train_step

from torchrec_checknrun import Checkpointer
from torchrec_checknrun.elastic import init_process_group
from torchrec_checknrun.policy import Decision, Manifest


@dataclass(frozen=True)
class Budget:
    """Write the rows modified since the last checkpoint until their bytes use up a budget.

    A restore then reads at most the baseline and a budget, and one checkpoint more.

    Attributes:
        fraction: the budget, as a fraction of the full checkpoint's bytes.
    """

    fraction: float = 1.0

    def decide(self, history: Sequence[Manifest]) -> Decision:
        """Choose the content of the next checkpoint; called on rank 0, for all ranks.

        Args:
            history: the last full checkpoint and those upon it, oldest first.
        """
        baseline, *later = history
        spent = sum(checkpoint.stored_bytes for checkpoint in later)
        full = spent >= self.fraction * baseline.stored_bytes
        return Decision.FULL if full else Decision.SINCE_LAST


def main(root: str) -> None:
    """Train with the policy, and print the kinds of the checkpoints."""
    init_process_group()
    model, optimizer = make_model()
    state, policy = {"optimizer": optimizer}, Budget(0.5)
    with Checkpointer(
        root, model=model, state=state, policy=policy, callbacks=[print]
    ) as checkpointer:
        checkpointer.restore()
        for data in batches(checkpointer.steps, checkpointer.steps + 6):
            train_step(model, optimizer, data)
            checkpointer.step()
            checkpointer.save()


if __name__ == "__main__":
    main(sys.argv[1])
