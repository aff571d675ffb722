"""Match the names of an inference model with those of the checkpoints that training has written.

The two differ: TorchRec's inference modules leave out wrappers, rename some parts, and name tables
by collection only; a model that is served is often a part of the one that was trained. Names are
compared without these parts, behind one prefix that all tables share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.serve.inference.tables import KINDS

_LEFT_OUT = frozenset(
    {
        "_embedding_bag_collection",
        "_embedding_module",
        "_dmp_wrapped_module",
        "_orig_mod",
        "module",
        *KINDS,
    }
)
"""Parts of paths that only one of training and inference has: TorchRec's, and compiled modules'."""
_RENAMED = {"_feature_processors": "feature_processor"}


@dataclass
class Names:
    """A mapping of a model's names to a checkpoint's.

    Attributes:
        tables: the saved table by the model's.
        dense: the saved name by the model's.
        missing: names that only the model has.
    """

    tables: dict[str, str] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def plain(name: str) -> tuple[str, ...]:
    """Return a path's parts as both sides have them."""
    return tuple(_RENAMED.get(p, p) for p in name.split(".") if p and p not in _LEFT_OUT)


def match_names(
    tables: Iterable[str],
    dense: Iterable[str],
    saved_tables: Collection[str],
    saved_dense: Collection[str],
    given: Mapping[str, str],
) -> Names:
    """Match tables and dense values by name.

    Args:
        tables, dense: the model's paths; of tables in kernels ``<collection>.<table>``.
        given: the model's path by saved name, as the user gave it.

    Raises:
        IncompatibleCheckpoint: a name of the model could be several saved ones, or a given name
            doesn't exist.
    """
    tables, dense = list(tables), list(dense)
    _check_given(given, {*tables, *dense}, {*saved_tables, *saved_dense})
    _check_kinds(given, tables, saved_tables)
    chosen = {into: saved for saved, into in given.items()}
    # As for a restore: what has another name in the model is nothing of its old name there.
    saved_tables = [saved for saved in saved_tables if saved not in given]
    saved_dense = [saved for saved in saved_dense if saved not in given]
    by_parts: dict[tuple[str, ...], list[str]] = {}
    for saved in saved_tables:
        by_parts.setdefault(plain(saved), []).append(saved)
    found = Names()
    prefixes: set[tuple[str, ...]] = set()
    for name in tables:
        old = chosen.get(name) or _table(name, by_parts, saved_tables)
        if old is None:
            found.missing.append(f"table {name!r}")
            continue
        found.tables[name] = old
        parts, own = plain(old), plain(name)
        if name not in chosen and parts[len(parts) - len(own) :] == own:
            prefixes.add(parts[: len(parts) - len(own)])
    dense_parts: dict[tuple[str, ...], list[str]] = {}
    for saved in saved_dense:
        dense_parts.setdefault(plain(saved), []).append(saved)
    for name in dense:
        old = chosen.get(name) or _value(name, dense_parts, saved_dense, prefixes or {()})
        if old is None:
            found.missing.append(repr(name))
        else:
            found.dense[name] = old
    return found


def _check_given(given: Mapping[str, str], model: Collection[str], saved: Collection[str]) -> None:
    for old, new in given.items():
        if new not in model or old not in saved:
            where, name, all = (
                ("the model", new, model) if new not in model else ("the checkpoint", old, saved)
            )
            raise IncompatibleCheckpoint(
                f"map={{{old!r}: {new!r}}}: {where} has no {name!r}, it has "
                + ", ".join(sorted(all)[:8])
            )


def _check_kinds(
    given: Mapping[str, str], tables: Collection[str], saved_tables: Collection[str]
) -> None:
    """Refuse given names that take a table for another value, or two names into one."""
    if len({*given.values()}) < len(given):
        raise IncompatibleCheckpoint(
            f"map={dict(given)!r} sends two saved names into one of the model"
        )
    for old, new in given.items():
        if (old in saved_tables) != (new in tables):
            table, other = (old, new) if old in saved_tables else (new, old)
            raise IncompatibleCheckpoint(
                f"map={{{old!r}: {new!r}}}: {table!r} is a table, and {other!r} is none"
            )


def _table(
    name: str, by_parts: Mapping[tuple[str, ...], list[str]], saved: Collection[str]
) -> str | None:
    """Return the saved name of a table; None if there is none."""
    if name in saved:
        return name
    own = plain(name)
    equal = by_parts.get(own, [])
    ends = equal or [
        one for parts, names in by_parts.items() if parts[-len(own) :] == own for one in names
    ]
    if len(ends) > 1:
        raise IncompatibleCheckpoint(
            f"table {name!r} of the model could be any of {sorted(ends)}: say which with "
            f"map={{saved name: {name!r}}}"
        )
    return ends[0] if ends else None


def _value(
    name: str,
    by_parts: Mapping[tuple[str, ...], list[str]],
    saved: Collection[str],
    prefixes: Collection[tuple[str, ...]],
) -> str | None:
    """Return the saved name of a dense value; None if there is none."""
    if name in saved and () in prefixes:
        return name
    ends = [one for prefix in prefixes for one in by_parts.get((*prefix, *plain(name)), [])]
    if not ends and name in saved:
        return name
    if len(ends) > 1:
        raise IncompatibleCheckpoint(
            f"{name!r} of the model could be any of {sorted(ends)}: say which with "
            f"map={{saved name: {name!r}}}"
        )
    return ends[0] if ends else None
