"""Match a checkpoint's tables with a model's, and refuse incompatible ones before any change.

By default a checkpoint fits the model that was saved, whatever the sharding. Any other restore
(renamed, missing or shrunk tables, weights without optimizer state) must be asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.ranks import listed
from torchrec_checknrun.shards import LocalShard, TableShape

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")


@dataclass(frozen=True)
class Fit:
    """Differences that a restore allows between a checkpoint and the model.

    Attributes:
        rename: the model's table name by saved name; full names, or last parts where unique.
        strict: require the same tables, optimizer states and state keys on both sides. Otherwise
            tables, states and keys on one side only are skipped and listed.
        shrink: allow tables with fewer rows than were saved (the last ones are dropped). More rows
            are always allowed: the new ones keep their initialisation.
        optimizer: restore the rows' optimizer state with them.
        only: restore these tables of the model and nothing else; None: everything.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True
    shrink: bool = False
    optimizer: bool = True
    only: tuple[str, ...] | None = None


@dataclass
class Match:
    """A mapping of saved tables to the model's.

    Attributes:
        target: the model's table by saved name.
        resized: whether a table has another number of rows or another name now, or is left out.
        skipped: descriptions of tables on one side only, for the user.
    """

    target: dict[str, str]
    resized: bool
    skipped: list[str]


def match_tables(
    wanted: Mapping[str, TableShape], saved: Mapping[str, TableShape], fit: Fit
) -> Match:
    """Match tables by name.

    Raises:
        IncompatibleCheckpoint: a table has no counterpart or another size, and ``fit`` doesn't
            allow that; names the table, both sizes, and the remedy.
    """
    rename = _renames(wanted, saved, fit)
    only = None if fit.only is None else {full_name(n, wanted, "the model") for n in fit.only}
    target, skipped = {}, []
    resized = bool(rename)
    for name, shape in saved.items():
        into = rename.get(name, name if name not in rename.values() else None)
        if into is None or into not in wanted:
            skipped.append(f"table {name!r} ({_size(shape)}): only in the checkpoint")
        elif only is None or into in only:
            resized |= _check_size(into, shape, wanted[into], fit)
            target[name] = into
    missing = wanted.keys() - set(target.values())
    if only is None and skipped and fit.strict:
        raise IncompatibleCheckpoint(
            f"{listed(skipped)}. The model has {listed(sorted(wanted))}: restore into the model "
            "that was saved, give new names with map={old: new}, or skip the tables with "
            "strict=False"
        )
    for name in sorted(missing if only is None else missing & only):
        message = f"table {name!r} ({_size(wanted[name])}): only in the model"
        if fit.strict:
            remedy = (
                "restore into the model that was saved, give new names with map={old: new}, or "
                "keep the table's initialisation with strict=False"
                if only is None
                else "give its name there with map={old: new}, or leave it out of the tables to "
                "load"
            )
            raise IncompatibleCheckpoint(
                f"{message}. The checkpoint has {listed(sorted(saved))}: {remedy}"
            )
        skipped.append(message)
    return Match(target, resized or bool(skipped) or only is not None, skipped)


def _renames(wanted: Collection[str], saved: Collection[str], fit: Fit) -> dict[str, str]:
    """Return the model's table by saved name, where they differ.

    A job that torchrun restarts gives the same names again, when what it has saved since has the
    new ones already.

    Raises:
        IncompatibleCheckpoint: there is no such table, or two go into one.
    """
    into = {old: full_name(new, wanted, "the model") for old, new in fit.rename.items()}
    if len(set(into.values())) < len(into):
        raise IncompatibleCheckpoint(f"map={dict(fit.rename)!r} sends two tables into one")
    gone = [old for old in into if not _named(old, saved)]
    done = [old for old in gone if into[old] in saved]
    if gone and set(into.values()) <= set(saved):
        done = list(into)
    if done:
        logger.warning(
            "map=%r: the checkpoint has %s under the new names already",
            dict(fit.rename),
            ", ".join(sorted(into[old] for old in done)),
        )
    elif into and all(_named(old, wanted) for old in into):
        logger.warning(
            "map=%r gives tables names that others of the model had: give it once only. What this "
            "run saves has both names, and a restart with the same map would rename again",
            dict(fit.rename),
        )
    return {
        full_name(old, saved, "the checkpoint"): new for old, new in into.items() if old not in done
    }


def check_rows(
    shard: LocalShard, header: RowsHeader, fit: Fit, with_state: bool = False
) -> str | None:
    """Refuse rows of another data type, or with other optimizer state.

    Args:
        with_state: whether any rows of the table were stored with optimizer state. Then rows
            without state are older than the optimizer's first step, and newer rows replace them.

    Returns:
        A description of optimizer state that is left out, for the user; None if there is none.

    Raises:
        IncompatibleCheckpoint: the data type or optimizer state differs; names the table, the saved
            and the live one.
    """
    if header.dtype != shard.weight.dtype:
        raise IncompatibleCheckpoint(
            f"table {shard.table!r} was saved as {header.dtype}, the model has "
            f"{shard.weight.dtype}: build the model with the saved data type"
        )
    if not fit.optimizer or (with_state and not header.optimizer):
        return None
    wanted = {name: (s.dtype, s.dim() == 1) for name, s in shard.optimizer.items()}
    if wanted.keys() == header.optimizer.keys():
        return None
    saved, live = _describe(header.optimizer), _describe(wanted)
    if fit.strict:
        others = (
            "skip state on one side only with strict=False, or load the weights alone with "
            "load_tables"
            if fit.only is None
            else "or load the weights alone, without optimizer=True"
        )
        raise IncompatibleCheckpoint(
            f"table {shard.table!r} was saved with optimizer state {saved}, the model's optimizer "
            f"has {live}: {_of_replica(shard)}use the optimizer it was trained with, {others}"
        )
    return f"table {shard.table!r}: optimizer state was saved as {saved}, the model has {live}"


def _of_replica(shard: LocalShard) -> str:
    """Return the remedy for a table that is data-parallel now: perhaps it was sharded before."""
    if not shard.replicated:
        return ""
    return (
        "the table is data-parallel here, where the fused optimizer doesn't step it. TorchRec's "
        "planner shards a small table on some numbers of ranks only: shard it on any, by "
        f"EmbeddingShardingPlanner(constraints={{{shard.table.rpartition('.')[2]!r}: "
        'ParameterConstraints(sharding_types=["table_wise", "row_wise"])}). Or else '
    )


def is_rounded(shard: LocalShard, header: RowsHeader) -> bool:
    """Return whether a shard's optimizer state has a narrower type than was stored.

    Dense optimizers keep state in the table's own type, fused ones in fp32.
    """
    return any(
        torch.promote_types(dtype, shard.optimizer[name].dtype) != shard.optimizer[name].dtype
        for name, (dtype, _) in header.optimizer.items()
        if name in shard.optimizer
    )


def common_states(shard: LocalShard, header: RowsHeader, fit: Fit) -> set[str]:
    """Name the optimizer states to restore with some rows.

    ``momentum1`` is the first state of any fused optimizer, so two optimizers mean the same by that
    name only if both have Adam's second moment beside it, or neither has.
    """
    own, stored = shard.optimizer.keys(), header.optimizer.keys()
    if not fit.optimizer or ("exp_avg_sq" in own) != ("exp_avg_sq" in stored):
        return set()
    return own & stored


def full_name(name: str, tables: Collection[str], where: str) -> str:
    """Return a table's full name.

    Args:
        name: the full name, or its last part if no other table has the same.
        tables: all tables' full names.
        where: the tables' owner in errors.

    Raises:
        IncompatibleCheckpoint: there is no such table, or several.
    """
    found = _named(name, tables)
    if len(found) == 1:
        return found[0]
    names = sorted(found or tables)
    if not names:
        raise IncompatibleCheckpoint(f"{where} has no table {name!r}, nor any other")
    raise IncompatibleCheckpoint(
        f"{where} has {'several tables' if found else 'no table'} {name!r}: give one of "
        + ", ".join(names[:8])
        + (f" or {len(names) - 8} more" if len(names) > 8 else "")
    )


def _named(name: str, tables: Collection[str]) -> list[str]:
    if name in tables:
        return [name]
    return [table for table in tables if table.endswith(f".{name}")]


def _check_size(name: str, saved: TableShape, wanted: TableShape, fit: Fit) -> bool:
    if saved.dim != wanted.dim or (saved.rows > wanted.rows and not fit.shrink):
        remedy = (
            f"build the model with the saved dimension, or {_ANEW[fit.only is None]}"
            if saved.dim != wanted.dim
            else "build it with the saved number of rows, or drop the last ones with shrink=True"
        )
        raise IncompatibleCheckpoint(
            f"table {name!r} was saved as {_size(saved)}, the model has {_size(wanted)}: {remedy}"
        )
    return saved.rows != wanted.rows


_ANEW = {
    True: "give the table another name and let it begin anew with strict=False",
    False: "leave the table out of the tables to load",
}
"""Remedies for a table of another dimension: in a restore of all, and of some tables."""


def _size(shape: TableShape) -> str:
    return f"{shape.rows} × {shape.dim}"


def _describe(states: Mapping[str, tuple[torch.dtype, bool]]) -> str:
    if not states:
        return "none"
    return ", ".join(
        f"{name} ({'row-wise' if rowwise else 'pointwise'} {str(dtype).removeprefix('torch.')})"
        for name, (dtype, rowwise) in states.items()
    )
