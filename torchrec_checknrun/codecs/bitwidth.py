"""How many bits a job can afford, from how often it will be restored (Check-N-Run, section 5.2).

Each restore from quantized rows disturbs training once; the more often that will happen, the less
each may.
"""

from __future__ import annotations

_WIDTHS = ((1, 2), (3, 3), (20, 4))
"""Up to so many restores, so many bits."""
MOST = 8
"""The width that any number of restores may have."""


def width_for(restores: float) -> int:
    """Bits for a job that expects so many restores.

    Raises:
        ValueError: it is negative or not a number.
    """
    if not (isinstance(restores, (int, float)) and restores >= 0):
        raise ValueError(f"expected restores must be 0 or more, not {restores!r}")
    return next((bits for limit, bits in _WIDTHS if restores <= limit), MOST)


def expected_restores(nodes: int, mtbf_hours: float, job_hours: float) -> float:
    """How often a job will fail, and so be restored, if nodes fail independently of each other.

    Args:
        nodes: how many the job runs on; it fails when one of them does.
        mtbf_hours: mean time between failures of one node.
        job_hours: how long the job trains.

    Raises:
        ValueError: an argument is not positive.
    """
    if not (nodes > 0 and mtbf_hours > 0 and job_hours > 0):
        raise ValueError(
            f"nodes {nodes}, mtbf_hours {mtbf_hours} and job_hours {job_hours} must be positive"
        )
    return nodes * job_hours / mtbf_hours
