"""Refuse differences between the ranks that must not be, before any rank waits for another.

Ranks that were started with other arguments, or that don't see the same storage, would wait in
different collectives until a timeout, or each save a part of a different checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torchrec_checknrun.ranks import Ranks, ranks_text

T = TypeVar("T")

_ABSENT = "absent"


def agreed(
    ranks: Ranks,
    make: Callable[[], T],
    describe: Callable[[T], Mapping[str, str]],
    some_lack: bool = False,
) -> T:
    """Make an object on every rank and require that the ranks' objects agree; a collective.

    Args:
        make: makes this rank's object.
        describe: returns, by name, the parts that must not differ.
        some_lack: whether a part may be absent on some ranks.

    Returns:
        This rank's object.

    Raises:
        Exception: the error of the first rank whose ``make`` failed, on every rank.
        ValueError: the objects differ; see ``require_agreement``.
    """
    made: list[T] = []

    def act() -> Mapping[str, str]:
        made.append(make())
        return describe(made[0])

    try:
        require_agreement(ranks.on_all_ranks(act), some_lack)
    except BaseException:
        for each in made:
            getattr(each, "close", lambda: None)()
        raise
    return made[0]


def require_agreement(described: Sequence[Mapping[str, str]], some_lack: bool = False) -> None:
    """Refuse arguments that differ between ranks.

    Args:
        described: each rank's arguments by name, in rank order.
        some_lack: whether an argument may be absent on some ranks.

    Raises:
        ValueError: names each argument that differs, its values and their ranks.
    """
    names = dict.fromkeys(name for one in described for name in one)
    problems = []
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(described):
            if some_lack and name not in one:
                continue
            by_value.setdefault(one.get(name, _ABSENT), []).append(rank)
        if len(by_value) > 1:
            found = "; ".join(f"{value} on {ranks_text(on)}" for value, on in by_value.items())
            problems.append(f"{name} differs between the ranks: {found}")
    if problems:
        raise ValueError(
            f"{'. '.join(problems)}. Give every rank the same arguments, and a model with "
            "tables of the same size"
        )
