"""Choose when to save: all triggers, and the base of your own."""

from torchrec_checknrun.run.triggers import (
    AtEnd,
    EverySeconds,
    EverySteps,
    Moment,
    OnSigterm,
    Trigger,
)

__all__ = ["AtEnd", "EverySeconds", "EverySteps", "Moment", "OnSigterm", "Trigger"]
