"""Leave one optimizer state of one table unprotected while its rows are being saved."""

from __future__ import annotations

from tests.crash.sabotage import protection, replace, report, train


def sabotage() -> None:
    protection.one_state(replace, report)


if __name__ == "__main__":
    sabotage()
    train()
