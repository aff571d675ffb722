"""Choose the width of stored rows from how often a job will be restored (Check-N-Run, 5.2), and
count the bytes of a row: stored, or kept in memory.

Without torch, so that ``checknrun plan`` starts at once.
"""

from __future__ import annotations

MOST = 8
"""Bits that allow for any number of restores."""


_BITS_BY_RESTORES = ((1, 2), (3, 3), (20, 4))
"""Restores up to which a width is enough, with that width."""


def width_for(restores: float) -> int:
    """Return the bits for a job that expects so many restores (Check-N-Run, section 5.2).

    Each restore from quantized rows disturbs training once: the more restores, the less each may
    disturb.

    Raises:
        ValueError: ``restores`` is negative or not a number.
    """
    is_number = isinstance(restores, (int, float)) and not isinstance(restores, bool)
    if not is_number or not restores >= 0:  # not NaN, either
        raise ValueError(f"expected restores must be 0 or more, not {restores!r}")
    return next((bits for limit, bits in _BITS_BY_RESTORES if restores <= limit), MOST)


def row_bytes(dim: int, bits: int) -> int:
    """Return the bytes of a fused row: codes, then scale and bias (fp32 at 8 bits, else fp16).

    FBGEMM's rows of 2 and 4 bits fill their last 16-bit word.
    """
    if bits == 8:
        return dim + 8
    codes = -(-dim * bits // 8) if bits == 3 else -(-dim * bits // 16) * 2
    return codes + 4


LEAST_SLOT_BYTES = 8
"""Memory for the codes of the narrowest row that ``method="delta"`` keeps: a digest, or a place."""
_WIDE_PART = 8
"""One row of so many is taken to need 16 bits a code there."""


STATE_CODE_BYTES = 2
"""Memory for the code of a row's optimizer state that ``optimizer="logdelta"`` keeps."""


def delta_reference_bytes(dim: int, states: int = 0) -> int:
    """Estimate a rank's memory for what a row of ``method="delta"`` restores to: a byte a code, its
    form and its exponent, and the codes of optimizer states stored by ``logdelta``.

    Args:
        states: number of these.
    """
    return 2 + max(LEAST_SLOT_BYTES, dim) + 2 * dim // _WIDE_PART + STATE_CODE_BYTES * states


def lc_reference_bytes(dim: int, states: int = 0) -> int:
    """Return a rank's memory for what a row of ``method="lc"`` restores to: fp32 values and a byte
    that tells if they are known.
    """
    return 1 + 4 * dim + STATE_CODE_BYTES * states


def expected_restores(nodes: int, mtbf_hours: float, job_hours: float) -> float:
    """Estimate how often a job will fail, and so be restored, if nodes fail independently.

    Args:
        nodes: number of nodes the job runs on; it fails when one of them does.
        mtbf_hours: mean time between failures of one node.
        job_hours: time the job trains.

    Raises:
        ValueError: an argument is not positive.
    """
    if not (nodes > 0 and mtbf_hours > 0 and job_hours > 0):
        raise ValueError(
            f"nodes {nodes}, mtbf_hours {mtbf_hours} and job_hours {job_hours} must be positive"
        )
    return nodes * job_hours / mtbf_hours
