"""Define ``verify``, ``cat`` and ``diff``, which read checkpoints as a restore would.

``verify`` reads and checks every byte; ``cat`` shows rows; ``diff`` shows which rows changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrec_checknrun.cli.output import (
    AsJson,
    Id,
    Ids,
    MaybeId,
    Root,
    number,
    open_root,
    print_json,
    print_table,
    progress,
    reproducible,
    say,
    size,
)
from torchrec_checknrun.errors import CheckpointNotFound
from torchrec_checknrun.root.checkpoints import describe_empty

if TYPE_CHECKING:
    from torchrec_checknrun.root.chain import Chain
    from torchrec_checknrun.store.folder import Folder
    from torchrec_checknrun.tools.diff import Difference
    from torchrec_checknrun.tools.verify import Verified

_SHOWN = 8
"""Values of a row, or names, unless all are asked for."""
_MOST_ROWS = 100_000


def verify(root: Root, ids: Ids = None, as_json: AsJson = False) -> None:
    """Read and check all bytes of checkpoints and their parents; exit code 1 on any problem."""
    from torchrec_checknrun.tools import verify as verification

    folder = open_root(root)
    with progress("verifying") as step:
        found = verification.verify(folder, ids or None, progress=step)
    if not found:
        raise CheckpointNotFound(f"no committed checkpoint: {describe_empty(folder)}")
    sound = not any(one.problems for one in found)
    if as_json:
        print_json({"sound": sound, "checkpoints": [asdict(one) for one in found]})
    else:
        rows = [[one.id, size(one.bytes), str(one.chunks), _judgement(one)] for one in found]
        print_table(("id", ">bytes", ">chunks", ""), rows)
        for one in found:
            for problem in one.problems:
                say(f"{one.id}: {problem}", style="red")
            if not one.reproducible:
                say(f"{one.id}: {reproducible(one.reproducible, one.pls)}")
    if not sound:
        raise typer.Exit(1)


def _judgement(one: Verified) -> str:
    if one.unread:
        return "can't be read"
    return "damaged" if one.problems else "sound"


def chain_of(root: Folder, id: str | None) -> Chain:
    """Return a checkpoint's chain; without an id the newest complete one.

    Raises:
        CheckpointNotFound, ChainBroken, CorruptCheckpoint, UnsupportedFormat: there is no such
            chain.
    """
    from torchrec_checknrun.root.chain import newest_required, resolve

    return newest_required(root) if id is None else resolve(root, id)


def cat(
    root: Root,
    id: MaybeId = None,
    *,
    table: Annotated[
        str, typer.Option(help="A table's full name, or its last part.", show_default=False)
    ],
    rows: Annotated[
        str, typer.Option(help="Row ids and ranges: 1,5,9 or 10-20.", show_default=False)
    ],
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Show optimizer state, too.")
    ] = False,
    all_columns: Annotated[
        bool, typer.Option("--all-columns", help=f"Show all values, not only {_SHOWN}.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show values of rows."""
    wanted = parse_rows(rows)
    from torchrec_checknrun.restore.chunks import read_content
    from torchrec_checknrun.restore.fit import full_name
    from torchrec_checknrun.tools.tables import ChunkCache, TableReader

    folder = open_root(root)
    chain = chain_of(folder, id)
    name = full_name(table, chain.head.tables, chain.head.id)
    reader = TableReader(read_content(folder, chain), name, ChunkCache(folder))
    found = reader.rows(wanted)
    values: dict[str, Any] = {"weight": found.weight.tolist()}
    if optimizer:
        values |= {state: tensor.tolist() for state, tensor in found.optimizer.items()}
    if as_json:
        listed = [
            {"row": row, **{key: of_rows[i] for key, of_rows in values.items()}}
            for i, row in enumerate(wanted)
        ]
        print_json({"checkpoint": chain.head.id, "table": name, "rows": listed})
        return
    norms = found.weight.double().norm(dim=1).tolist()
    say(f"{name} in {chain.head.id}")
    print_table(
        (">row", ">norm", *values),
        [
            [str(row), number(norms[i]), *(_text(v[i], all_columns) for v in values.values())]
            for i, row in enumerate(wanted)
        ],
    )


def parse_rows(text: str) -> list[int]:
    """Parse row ids from a text like ``1,5,10-12``.

    Raises:
        BadParameter: the text is no such list, or names too many rows.
    """
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            start, stop = int(first), int(last if dash else first) + 1
            if start >= stop:
                raise ValueError(part)
            if stop - start + len(found) > _MOST_ROWS:
                raise typer.BadParameter(
                    f"{text!r} names more than {_MOST_ROWS:,} rows: ask for fewer at a time, or "
                    "`checknrun export` the table"
                )
            found += range(start, stop)
    except ValueError:
        found = []
    if not found:
        raise typer.BadParameter(
            f"{text!r} is no list of row ids: write 1,5,9 or 10-20, lower ids first"
        )
    return list(dict.fromkeys(found))


def _text(value: Any, everything: bool) -> str:
    if not isinstance(value, list):
        return number(value, ".6g")
    shown = value if everything else value[:_SHOWN]
    return " ".join(f"{v:.6g}" for v in shown) + (" …" if len(shown) < len(value) else "")


def diff(root: Root, before: Id, after: Id, as_json: AsJson = False) -> None:
    """Compare two checkpoints: changed rows and the size of the change, by table."""
    from torchrec_checknrun.tools.diff import compare

    with progress("comparing") as step:
        found = compare(open_root(root), before, after, progress=step)
    if as_json:
        print_json(asdict(found))
        return
    counts = (">rows", ">changed", ">", ">states changed")
    norms = (">norm", ">relative", ">mean of a row", ">largest")
    rows = [
        [
            t.table,
            f"{t.rows:,}",
            f"{t.changed_rows:,}",
            f"{t.changed_rows / max(1, t.rows):.1%}",
            f"{t.changed_states:,}",
            number(t.norm),
            number(t.relative),
            number(t.mean_row_norm),
            number(t.max_row_norm),
        ]
        for t in found.tables
    ]
    print_table(("table", *counts, *norms), rows)
    for line in _others(found):
        say(line)


def _others(found: Difference) -> list[str]:
    lines = [
        f"{t.table}: {t.not_finite} changed rows are not finite"
        for t in found.tables
        if t.not_finite
    ]
    lines += [f"{name}: {text}" for name, text in found.reshaped.items()]
    for names, text in (
        (found.only_before, "tables only before"),
        (found.only_after, "tables only after"),
        (found.dense_only_before, "values only before"),
        (found.dense_only_after, "values only after"),
    ):
        if names:
            lines.append(f"{text}: {_some(names)}")
    changed = f"of {found.dense_values} other values {len(found.dense_changed)} changed"
    lines.append(changed + (f": {_some(found.dense_changed)}" if found.dense_changed else ""))
    return lines


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
