"""Fail a save as in `failing_save`, and lose the marks that were cleared for it."""

from __future__ import annotations

from tests.crash.sabotage import failing_save, replace, train
from torchrec_checknrun.model.tracked import TrackedModel


def sabotage() -> None:
    failing_save.sabotage()
    replace(TrackedModel, "merge", lambda *_: None)


if __name__ == "__main__":
    sabotage()
    train()
