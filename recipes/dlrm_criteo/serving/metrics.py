"""Count what the server does, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from torchrec_checknrun import Follower
from torchrec_checknrun.serve import Version

SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self.samples = Counter("dlrm_predictions", "samples predicted", registry=own)
        self.refused = Counter(
            "dlrm_refused", "requests that got an error", ["status"], registry=own
        )
        self.seconds = Histogram(
            "dlrm_predict_seconds",
            "a request, from its last byte on",
            buckets=SECONDS,
            registry=own,
        )
        self._versions = Counter("dlrm_versions", "versions shown", registry=own)
        self._rows = Counter("dlrm_rows_applied", "rows written into the model", registry=own)
        self._bytes = Counter("dlrm_bytes_read", "bytes of chunks read", registry=own)

    def shown(self, version: Version) -> None:
        """Count a version that became visible."""
        self._versions.inc()
        self._rows.inc(version.rows_applied)
        self._bytes.inc(version.bytes_read)

    def watch(self, follower: Follower) -> None:
        """Tell, whenever asked, what a follower serves and how far it is behind."""
        failing = Gauge(
            "dlrm_following_fails",
            "1 if the last look at the root ended in an error",
            registry=self.registry,
        )
        failing.set_function(lambda: float(follower.error is not None))
        for name, meaning, of in (
            ("version_step", "training steps of the version that is served", _step),
            ("lag_seconds", "between the newest commit in the root and this version", _seconds),
            ("lag_steps", "training steps between these", _steps),
        ):
            gauge = Gauge(f"dlrm_{name}", meaning, registry=self.registry)
            gauge.set_function(partial(_now, of, follower))


def _now(of: Callable[[Version | None], float], follower: Follower) -> float:
    return of(follower.version)


def _step(version: Version | None) -> float:
    return -1.0 if version is None else float(version.step)


def _seconds(version: Version | None) -> float:
    return float("nan") if version is None else version.lag_seconds


def _steps(version: Version | None) -> float:
    return float("nan") if version is None else float(version.lag_steps)
