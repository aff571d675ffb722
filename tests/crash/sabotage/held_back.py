"""Copy everything after training's next step: harmless, all is protected."""

from __future__ import annotations

from tests.crash.sabotage import protection, replace, report, train


def sabotage() -> None:
    protection.hold_back(replace)
    report("the background is held back")


if __name__ == "__main__":
    sabotage()
    train()
