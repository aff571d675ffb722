"""What each policy decides, and what all of them promise of their bytes and their restores."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_checknrun import Consecutive, Decision, Full, OneShot, Policy
from torchrec_checknrun.manifest import Manifest

BASELINE = Manifest("seq-1", 1, 10, "full", None, None, 1, "", "", 0, None, {}, {}, 0, ()).sealed()
HISTORIES = st.integers(1, 30).map(
    lambda n: (
        BASELINE,
        *(
            replace(
                BASELINE, id=f"seq-{i}", sequence=i, kind="differential", parent=BASELINE.link
            ).sealed()
            for i in range(2, n + 1)
        ),
    )
)


@pytest.mark.parametrize(
    ("policy", "decision"),
    [
        (Full(), Decision.FULL),
        (OneShot(), Decision.SINCE_BASELINE),
        (Consecutive(), Decision.SINCE_LAST),
    ],
)
@settings(max_examples=20, deadline=None)
@given(history=HISTORIES)
def test_decisions(policy: Policy, decision: Decision, history: tuple[Manifest, ...]) -> None:
    assert policy.decide(history) is decision
