"""Release leases after a test."""

from collections.abc import Iterator

import pytest

from torchrec_checknrun.writers.lease import Lease


@pytest.fixture
def leases() -> Iterator[list[Lease]]:
    made: list[Lease] = []
    yield made
    for lease in made:
        lease.release()
