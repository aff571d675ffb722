"""Forecast the cost of a job's checkpoints before it runs: bytes, bandwidth, capacity, stall.

Plain arithmetic after Check-N-Run (section 5); the policies decide on manifests of assumed sizes,
as in a run. With ``f`` the fraction of rows modified in one interval:

- modified in ``i`` intervals: ``min(1, f · i^g)``, the slow growth of production traces, or
  ``1 − (1 − f)^i`` if every interval modifies other rows, at random;
- a stored row: ``4·dim`` bytes exact, ``dim·bits/8 + 4`` at 2, 3 and 4 bit, ``dim + 8`` at 8 bit,
  and its optimizer state; ids: a bit for each row of the table, none in a full checkpoint;
- stall: the bytes in memory of the rows that are copied, over the bandwidth of all ranks together;
- failures: ``nodes · job hours / node MTBF``, each loses half an interval and a restore;
- the interval that wastes the least: ``√(2 · stall · hours between failures)`` (Young).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as shown

from torchrec_checknrun.bitwidth import (
    delta_reference_bytes,
    expected_restores,
    lc_reference_bytes,
    row_bytes,
    width_for,
)
from torchrec_checknrun.format.manifest import Kind, Manifest, RankFile, TableTotals
from torchrec_checknrun.root import policy as policies
from torchrec_checknrun.root.policy import Decision, Policy

POLICIES = {name.replace("_", "-"): make() for name, make in policies.POLICIES.items()}
MOST_CHECKPOINTS = 10_000
"""Number of a job's checkpoints to forecast; later ones would repeat them."""

NODE_COPY_BANDWIDTH = 6e9
"""Default bytes a second at which a node copies rows, from the stall that
``recipes.benchmarks.stall`` measures on two processor cores."""

_TABLE = "tables"
_LEAST, _MOST = 1e-9, 1e18
"""Bounds of any number, so that all results stay finite."""


@dataclass(frozen=True)
class Job:
    """A job to plan checkpoints for.

    Args:
        rows: number of rows of all tables.
        dim: columns of every table.
        optimizer_bytes: bytes of a row's optimizer state.
        dense_bytes: bytes that every checkpoint holds outside the tables.
        fraction: fraction of the rows modified in one interval.
        growth: the exponent ``g``; None: every interval modifies other rows at random.
        interval_minutes: minutes between two checkpoints.
        job_hours: hours of training.
        nodes: number of nodes; the job fails when one of them does.
        mtbf_hours: mean time between failures of one node.
        bits: width of stored rows; 32 is exact; None: as the expected restores allow.
        copy_bandwidth: bytes a second at which all ranks together copy rows out of the tables;
            None: ``NODE_COPY_BANDWIDTH`` on each node.
        read_bandwidth: bytes a second at which all ranks together read the storage; None: not
            known.

    Raises:
        ValueError: out of range.
    """

    rows: int
    dim: int
    optimizer_bytes: int = 4
    dense_bytes: int = 0
    fraction: float = 0.26
    growth: float | None = 0.33
    interval_minutes: float = 30.0
    job_hours: float = 72.0
    nodes: int = 16
    mtbf_hours: float = 1000.0
    bits: int | None = None
    copy_bandwidth: float | None = None
    read_bandwidth: float | None = None

    def __post_init__(self) -> None:
        positive = ("rows", "dim", "interval_minutes", "job_hours", "nodes", "mtbf_hours")
        for name in (*positive, "copy_bandwidth", "read_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, not {shown(value)}")
            if value is not None and not _LEAST <= value <= _MOST:
                raise ValueError(f"{name} must be from {_LEAST:g} to {_MOST:g}, not {shown(value)}")
        for name in ("optimizer_bytes", "dense_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
            if getattr(self, name) > _MOST:
                raise ValueError(f"{name} must be at most {_MOST:g}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {self.fraction}")
        if self.growth is not None and not 0 <= self.growth <= 1:
            raise ValueError(f"growth must be between 0 and 1, not {self.growth}")
        if self.bits not in (None, 2, 3, 4, 8, 32):
            raise ValueError(f"bits must be 2, 3, 4, 8 or 32, not {self.bits}")

    @property
    def restores(self) -> float:
        """Return the expected number of failures, each with a restore."""
        return expected_restores(self.nodes, self.mtbf_hours, self.job_hours)

    @property
    def width(self) -> int:
        """Return the bits of a stored value."""
        return width_for(self.restores) if self.bits is None else self.bits

    @property
    def full_fp32_bytes(self) -> int:
        """Return the bytes of a full exact checkpoint: an interval's bytes without this package."""
        return self.rows * (4 * self.dim + self.optimizer_bytes) + self.dense_bytes

    @property
    def reference_bytes(self) -> dict[str, int]:
        """Return all ranks' memory, in bytes, for the rows of the last checkpoint, by the methods
        that store rows as differences to them; with ``optimizer="logdelta"`` for one row-wise
        state.
        """
        by_row = {
            "delta": delta_reference_bytes(self.dim),
            "delta and logdelta": delta_reference_bytes(self.dim, states=1),
            "lc": lc_reference_bytes(self.dim),
        }
        return {method: self.rows * size for method, size in by_row.items()}

    @property
    def stalling_bandwidth(self) -> float:
        """Return the bytes a second at which rows are copied while training waits."""
        return self.copy_bandwidth or self.nodes * NODE_COPY_BANDWIDTH

    def modified(self, intervals: int) -> float:
        """Return the fraction of the rows that so many intervals modify."""
        if self.growth is None:
            return 1 - (1 - self.fraction) ** intervals
        return min(1.0, self.fraction * intervals**self.growth)

    def stored_bytes(self, fraction: float) -> int:
        """Return the bytes of a checkpoint with this fraction of the rows."""
        row = 4 * self.dim if self.width == 32 else row_bytes(self.dim, self.width)
        ids = 0 if fraction == 1 else math.ceil(self.rows / 8)
        return round(self.rows * fraction) * (row + self.optimizer_bytes) + ids + self.dense_bytes

    def copied_bytes(self, fraction: float) -> int:
        """Return the bytes in memory that such a checkpoint copies while training waits."""
        return round(self.rows * fraction) * (4 * self.dim + self.optimizer_bytes)


@dataclass(frozen=True)
class Forecast:
    """The cost of one policy.

    Attributes:
        checkpoints: number of checkpoints in the job.
        baseline_every: checkpoints from one baseline to the next; None if there is only one.
        mean_bytes, largest_bytes: bytes of one checkpoint.
        mean_bandwidth: bytes a second that write a mean checkpoint within an interval.
        full_bandwidth: bytes a second that write a full one of this width within an interval.
        reduction: factor of bytes saved, against full exact checkpoints.
        kept_bytes: most bytes that a restore needs.
        peak_bytes: most bytes kept during a save, the previous chain included.
        capacity_reduction: factor of peak bytes saved, against two full exact checkpoints.
        longest_chain: most checkpoints that a restore reads.
        mean_stall, longest_stall: seconds that training waits for one checkpoint.
        stalled: share of the time that training waits for checkpoints.
        longest_read: seconds of reading the longest chain; None without a known bandwidth.
        lost: share of the time that failures cost: half an interval each, and that read.
        best_interval_minutes: the interval that wastes the least, at the same stall.
    """

    policy: str
    checkpoints: int
    baseline_every: float | None
    mean_bytes: float
    largest_bytes: int
    mean_bandwidth: float
    full_bandwidth: float
    reduction: float
    kept_bytes: int
    peak_bytes: int
    capacity_reduction: float
    longest_chain: int
    mean_stall: float
    longest_stall: float
    stalled: float
    longest_read: float | None
    lost: float
    best_interval_minutes: float


def forecast(job: Job, policy: str) -> Forecast:
    """Forecast the cost of a job's checkpoints under a policy.

    Args:
        policy: a name in ``POLICIES``.

    Raises:
        ValueError: the job ends before its first checkpoint.
    """
    interval = 60 * job.interval_minutes
    count = min(MOST_CHECKPOINTS, int(3600 * job.job_hours / interval + 1e-9))
    if count < 1:
        raise ValueError(
            f"{job.job_hours} hours are less than one interval of {job.interval_minutes} minutes"
        )
    fractions, chains = _run(job, POLICIES[policy], count)
    written = [job.stored_bytes(fraction) for fraction in fractions]
    kept = [sum(written[i] for i in chain) for chain in chains]
    peaks = [
        sum(written[i] for i in {*chain, *(chains[at - 1] if at else ())})
        for at, chain in enumerate(chains)
    ]
    full = [i for i, fraction in enumerate(fractions) if chains[i] == (i,)]
    mean = sum(written) / count
    stalls = [job.copied_bytes(fraction) / job.stalling_bandwidth for fraction in fractions]
    mean_stall = sum(stalls) / count
    read = max(kept) / job.read_bandwidth if job.read_bandwidth else None
    between = 3600 * job.job_hours / job.restores
    return Forecast(
        policy=policy,
        checkpoints=count,
        baseline_every=(full[-1] - full[0]) / (len(full) - 1) if len(full) > 1 else None,
        mean_bytes=mean,
        largest_bytes=max(written),
        mean_bandwidth=mean / interval,
        full_bandwidth=job.stored_bytes(1) / interval,
        reduction=job.full_fp32_bytes / mean,
        kept_bytes=max(kept),
        peak_bytes=max(peaks),
        capacity_reduction=2 * job.full_fp32_bytes / max(peaks),
        longest_chain=max(map(len, chains)),
        mean_stall=mean_stall,
        longest_stall=max(stalls),
        stalled=mean_stall / (interval + mean_stall),
        longest_read=read,
        lost=(interval / 2 + (read or 0)) / between,
        best_interval_minutes=math.sqrt(2 * mean_stall * between) / 60,
    )


def _run(job: Job, policy: Policy, count: int) -> tuple[list[float], list[tuple[int, ...]]]:
    """Return each checkpoint's fraction of the rows, and the chain that ends with it."""
    fractions: list[float] = []
    chains: list[tuple[int, ...]] = []
    history: list[Manifest] = []
    baseline = 0
    for at in range(count):
        decision = policy.decide(history) if history else Decision.FULL
        if decision is Decision.FULL:
            fractions.append(1.0)
            chains.append((at,))
            history, baseline = [_manifest(job, 1.0, ())], at
            continue
        since_last = decision is Decision.SINCE_LAST
        fractions.append(job.modified(1 if since_last else at - baseline))
        chains.append((*chains[at - 1 if since_last else baseline], at))
        # A policy reads the baseline and the last manifest, which has the sizes of the others.
        history = [history[0], _manifest(job, fractions[-1], history)]
    return fractions, chains


def _manifest(job: Job, fraction: float, history: Sequence[Manifest]) -> Manifest:
    """Return a manifest with the fields that a policy reads."""
    parent = history[0].link if history else None
    kind: Kind = "differential" if parent else "full"
    size = job.stored_bytes(fraction)
    earlier: tuple[float, ...] = ()
    if parent and history[-1].kind == "differential":
        last = history[-1]
        earlier = (*last.earlier_fractions, last.fraction_of(history[0]))
    return Manifest(
        id=kind,
        sequence=1,
        step=0,
        kind=kind,
        parent=parent,
        previous=None,
        world_size=1,
        created_at="",
        created_by="",
        lossy_restores=0,
        bits=None,
        tables={
            _TABLE: TableTotals(
                job.rows,
                job.dim,
                stored_values=round(job.rows * fraction) * job.dim,
                value_bits=job.width,
            )
        },
        states={},
        dense_bytes=job.dense_bytes,
        files=(RankFile("", size, 0, 0, "", 1),),
        earlier_fractions=earlier,
    )
