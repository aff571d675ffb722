"""``prune``, ``pin`` and ``unpin``: which checkpoints stay."""

from __future__ import annotations

from typing import Annotated

import typer

from torchrec_checknrun.cli.output import (
    AsJson,
    Id,
    Root,
    open_root,
    print_json,
    print_table,
    say,
    size,
)
from torchrec_checknrun.errors import CheckpointNotFound
from torchrec_checknrun.root import prune as pruning
from torchrec_checknrun.root.checkpoints import require_root
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.root.retention import pin as pin_checkpoint
from torchrec_checknrun.root.retention import unpin as unpin_checkpoint


def prune(
    root: Root,
    *,
    keep: Annotated[
        int, typer.Option(min=1, help="The newest so many restorable ones.", show_default=False)
    ],
    every_hours: Annotated[
        float | None, typer.Option(help="Also the first one of every so many hours.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Deletes checkpoints that no kept one needs, and leftovers of crashed saves."""
    try:
        retention = Retention(keep, every_hours)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    folder = open_root(root)
    require_root(folder)
    done = pruning.prune(folder, retention, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "keep": dict(done.verdict.keep),
                "delete": dict(done.verdict.delete),
                "leftovers": list(done.leftovers),
                "bytes": done.bytes,
                "problems": list(done.problems),
            }
        )
        return
    goes = "would go" if dry_run else "deleted"
    rows = [[id, "stays", why] for id, why in done.verdict.keep.items()]
    rows += [[id, goes, why] for id, why in done.verdict.delete.items()]
    rows += [[id, goes, "never committed"] for id in done.leftovers]
    rows.sort(reverse=True)
    print_table(None, {"id": "left", "": "left", "why": "left"}, rows)
    count = len(done.verdict.delete) + len(done.leftovers)
    say(f"{goes}: {count}, {size(done.bytes)}")
    for problem in done.problems:
        say(problem, style="red")


def pin(root: Root, id: Id) -> None:
    """Keeps a checkpoint, and what it needs, until it is unpinned."""
    pin_checkpoint(open_root(root), id)
    say(f"{id} stays until it is unpinned")


def unpin(root: Root, id: Id) -> None:
    """Takes a pin away."""
    folder = open_root(root)
    if id not in folder.names():
        raise CheckpointNotFound(f"no checkpoint {id!r} in {folder}: see `checknrun ls`")
    unpin_checkpoint(folder, id)
    say(f"{id} is not pinned")
