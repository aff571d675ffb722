"""Choose between full and differential checkpoints: all policies, and a base class for your own."""

from torchrec_checknrun.bitwidth import expected_restores
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.policy import (
    Consecutive,
    Decision,
    Full,
    Intermittent,
    OneShot,
    Policy,
)

__all__ = [
    "Consecutive",
    "Decision",
    "Full",
    "Intermittent",
    "Manifest",
    "OneShot",
    "Policy",
    "expected_restores",
]
