"""Protect the rows of all tables but one while they are being saved."""

from __future__ import annotations

from tests.crash.sabotage import protection, replace, report, train


def sabotage() -> None:
    protection.one_table(replace, report)


if __name__ == "__main__":
    sabotage()
    train()
