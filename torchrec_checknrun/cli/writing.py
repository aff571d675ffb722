"""``compact`` and ``export``: checkpoints made of checkpoints."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer

from torchrec_checknrun.cli.output import (
    AsJson,
    MaybeId,
    Root,
    open_root,
    print_json,
    progress,
    say,
)
from torchrec_checknrun.store.retry import masked


class Format(str, Enum):
    """What ``export`` writes."""

    dcp = "dcp"
    safetensors = "safetensors"


class RowForm(str, Enum):
    """How it writes rows."""

    full = "full"
    fused = "fused"


def compact(root: Root, id: MaybeId = None, as_json: AsJson = False) -> None:
    """Writes a full checkpoint that restores to the same bits as a chain does."""
    from torchrec_checknrun.tools import compact as compaction

    with progress("compacting") as step:
        report = compaction.compact(open_root(root).url, id, progress=step)
    if as_json:
        print_json({"compacted": None if report is None else report.to_json()})
    elif report is None:
        say("it is full already: nothing to compact")
    else:
        say(str(report))


def export(
    root: Root,
    target: Annotated[str, typer.Argument(help="A new or empty folder.", show_default=False)],
    id: MaybeId = None,
    form: Annotated[
        Format, typer.Option("--format", help="DCP, for stock dcp.load, or a file for each table.")
    ] = Format.dcp,
    rows: Annotated[
        RowForm, typer.Option(help="safetensors: as a restore gives them, or as they are stored.")
    ] = RowForm.full,
    optimizer: Annotated[bool, typer.Option(help="The tables' optimizer state, too.")] = True,
    scratch: Annotated[
        str | None, typer.Option(help="Folder for scratch files as large as the tables.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Writes a checkpoint for those who don't have this package."""
    if rows is RowForm.fused and form is Format.dcp:
        raise typer.BadParameter("rows as they are stored need --format safetensors")
    from torchrec_checknrun.cli.reading import chain_of
    from torchrec_checknrun.tools import export as exporting

    folder, into = open_root(root), open_root(target)
    chain = chain_of(folder, id)
    with progress("exporting") as step:
        if form is Format.dcp:
            done = exporting.export_dcp(
                folder, chain, target, optimizer=optimizer, scratch=scratch, progress=step
            )
        else:
            done = exporting.export_safetensors(
                folder,
                chain,
                target,
                rows=rows.value,
                optimizer=optimizer,
                scratch=scratch,
                progress=step,
            )
    if as_json:
        print_json({"target": masked(target), **asdict(done)})
        return
    say(
        f"{done.id} to {into}: {len(done.tensors)} tensors; what is none of them in values.json: "
        f"{len(done.values)}"
    )
    for stored, tables in Counter(done.tables.values()).items():
        say(f"rows of {tables} tables: {stored}")
