"""Tell which checkpoint each one of a sequence must be differential to, from manifests alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.distributed.sequence_model import Begun, Event, Life

Manifests = Mapping[str, Mapping[str, Any]]
"""The manifests of listed checkpoints, by id."""


def wrong_parents(
    life: Life, events: list[Event], manifests: Manifests, rowwise: bool
) -> list[str]:
    """Name a life's checkpoints whose kind, parent, predecessor or recorded sizes are wrong.

    Args:
        rowwise: whether tables have row-wise optimizer state.
    """
    problems = []
    history: list[str] = []
    links = _References(life)
    for event in events:
        name = event.checkpoint.id
        if event.what == "restored":
            history = _chain(name, manifests)
            before = event.checkpoint.life
            same_state = not rowwise or before.log_state == life.log_state
            links.restored(name if same_state and before.links == life.links else None)
        elif event.what == "committed":
            history = [*history, name] if manifests[name]["parent"] else [name]
            continue
        if event.what != "begun":
            continue
        wanted = _parent(life, history, manifests, links.begin(event.checkpoint))
        links.base = wanted is None
        if name in manifests:
            previous = history[-1] if history else None
            if _linked(manifests[name]["previous"]) != previous:
                problems.append(f"{name} does not follow {previous}")
            if (parent := _linked(manifests[name]["parent"])) != wanted:
                problems.append(f"{name} is differential to {parent}, not to {wanted}")
            if manifests[name]["earlier_fractions"] != _sizes(name, manifests)[:-1]:
                problems.append(f"{name} tells other sizes than those before it have")
    return problems


class _References:
    """Predict which checkpoint each rank's references belong to, for links.

    Attributes:
        base: whether the checkpoint that was begun last must be one.
    """

    def __init__(self, life: Life) -> None:
        self._links = bool(life.links)
        self._known: list[str | None] = [None] * life.world_size
        self._last: Begun | None = None
        self.base = False

    def restored(self, name: str | None) -> None:
        known = name if self._links else None
        self._known, self._last = [known] * len(self._known), None

    def begin(self, begun: Begun) -> str | None:
        """Settle the checkpoint before; return what the next one can be a link to, on all ranks."""
        if self._last is not None:
            for rank in range(len(self._known)):
                if self._last.way.heard_by(rank):
                    self._known[rank] = self._last.id
                elif self.base:
                    self._known[rank] = None
        self._last = begun
        return self._known[0] if len(set(self._known)) == 1 else None


def _chain(name: str, manifests: Manifests) -> list[str]:
    parent = _linked(manifests[name]["parent"])
    return [*(_chain(parent, manifests) if parent else []), name]


def _linked(link: Mapping[str, str] | None) -> str | None:
    return link["id"] if link else None


def _parent(
    life: Life, history: list[str], manifests: Manifests, linkable: str | None
) -> str | None:
    """Return the id of the next checkpoint's required parent; None if it must be full.

    Args:
        history: ids restored or committed since the last full one, with that.
        linkable: the checkpoint that all ranks have references of.
    """
    if not history or life.policy == "full":
        return None
    widths = [
        table["value_bits"] for name in history for table in manifests[name]["tables"].values()
    ]
    if life.links:
        rises = life.lc_bits > min(widths)
        ends = rises or linkable != history[-1] or _exceeded(history, manifests)
        return None if ends else linkable
    if "deltas" in manifests[history[-1]]:
        return None
    if (life.bits or 32) > min(widths):
        return None
    if life.policy == "intermittent" and begins_anew(_sizes(history[-1], manifests)):
        return None
    return history[-1 if life.policy == "consecutive" else 0]


def _exceeded(history: list[str], manifests: Manifests) -> bool:
    """Tell whether the links since a base have more bytes than it."""
    kinds = ("weight_bytes", "ids_bytes", "optimizer_bytes")
    base, *links = (
        sum(table[kind] for table in manifests[name]["tables"].values() for kind in kinds)
        for name in history
    )
    return sum(links) > base


def begins_anew(sizes: list[float]) -> bool:
    """Tell whether a full checkpoint pays, by Check-N-Run's predictor (section 5.1).

    Args:
        sizes: of the differential ones since the last full one, as fractions of that.
    """
    return bool(sizes) and 1 + sum(sizes) <= (len(sizes) + 1) * sizes[-1]


def _sizes(name: str, manifests: Manifests) -> list[float]:
    """Return the sizes of all checkpoints since the last full one, up to this one.

    That includes those that no restore of this one reads.
    """
    since: list[Mapping[str, Any]] = []
    manifest = manifests[name]
    while manifest["parent"]:
        since.append(manifest)
        manifest = manifests[manifest["previous"]["id"]]
    return [_fraction(each, manifest) for each in reversed(since)]


def _fraction(manifest: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
    """Return a checkpoint's bytes over its baseline's, or values over all where widths differ."""
    tables = manifest["tables"]
    stored = {name: table for name, table in tables.items() if table["stored_values"]}
    if all(t["value_bits"] == baseline["tables"][name]["value_bits"] for name, t in stored.items()):
        sizes = [sum(file["size"] for file in each["files"]) for each in (manifest, baseline)]
        return sizes[0] / sizes[1]
    values = sum(table["rows"] * table["dim"] for table in tables.values())
    return sum(table["stored_values"] for table in stored.values()) / values
