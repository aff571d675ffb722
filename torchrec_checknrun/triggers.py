"""Choose when to save: all triggers, and a base class for your own."""

from torchrec_checknrun.schedule.triggers import (
    AtEnd,
    EverySeconds,
    EverySteps,
    Moment,
    OnSigterm,
    Trigger,
)

__all__ = ["AtEnd", "EverySeconds", "EverySteps", "Moment", "OnSigterm", "Trigger"]
