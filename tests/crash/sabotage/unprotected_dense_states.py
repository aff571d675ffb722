"""Leave the states of dense optimizers unprotected while they are being saved."""

from __future__ import annotations

from tests.crash.sabotage import protection, replace, report, train


def sabotage() -> None:
    protection.dense_states(replace, report)


if __name__ == "__main__":
    sabotage()
    train()
