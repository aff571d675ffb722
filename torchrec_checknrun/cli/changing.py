"""Define the commands that change a root or write elsewhere: ``compact``, ``export``, ``prune``, …

``pin`` and ``unpin`` decide which checkpoints stay; ``unlock``, ``repair`` and ``adopt`` which
process may write to a root, and which checkpoints count.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from functools import partial
from typing import Annotated

import typer

from torchrec_checknrun.cli.output import (
    AsJson,
    Id,
    MaybeId,
    Root,
    SomeIds,
    open_root,
    print_json,
    print_table,
    progress,
    say,
    size,
)
from torchrec_checknrun.errors import CheckNRunError, CheckpointNotFound
from torchrec_checknrun.root import prune as pruning
from torchrec_checknrun.root.checkpoints import require_root
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.root.retention import pin as pin_checkpoint
from torchrec_checknrun.root.retention import unpin as unpin_checkpoint
from torchrec_checknrun.store.retry import masked
from torchrec_checknrun.tools.control_records import Damage, find_damage
from torchrec_checknrun.writers.claims import latest_claim, read_claims
from torchrec_checknrun.writers.liveness import standing_of

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


class Format(str, Enum):
    """The format that ``export`` writes."""

    dcp = "dcp"
    safetensors = "safetensors"


class RowForm(str, Enum):
    """The form in which ``export`` writes rows."""

    full = "full"
    fused = "fused"


class Layout(str, Enum):
    """The layout in which ``export`` writes fused rows."""

    stored = "stored"
    inference = "inference"


def compact(root: Root, id: MaybeId = None, as_json: AsJson = False) -> None:
    """Write a full checkpoint that restores to the same bits as a chain does."""
    from torchrec_checknrun.compaction import compact as compaction

    with progress("compacting") as step:
        report = compaction.compact(open_root(root), id, progress=step)
    if as_json:
        print_json({"compacted": None if report is None else report.to_json()})
    elif report is None:
        say("the checkpoint is full already: nothing to compact")
    else:
        say(str(report))


def export(
    root: Root,
    target: Annotated[str, typer.Argument(help="A new or empty folder.", show_default=False)],
    id: MaybeId = None,
    form: Annotated[
        Format,
        typer.Option("--format", help="dcp for stock dcp.load, or a file for each table."),
    ] = Format.dcp,
    rows: Annotated[
        RowForm, typer.Option(help="safetensors: rows as restored, or fused rows as stored.")
    ] = RowForm.full,
    layout: Annotated[
        Layout, typer.Option(help="Fused rows: as stored, or as TorchRec's inference has them.")
    ] = Layout.stored,
    optimizer: Annotated[bool, typer.Option(help="Include the tables' optimizer state.")] = True,
    scratch: Annotated[
        str | None, typer.Option(help="Folder for scratch files as large as the tables.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint that other programs read without this package."""
    if rows is RowForm.fused and form is Format.dcp:
        raise typer.BadParameter("--rows fused needs --format safetensors")
    if layout is Layout.inference and rows is not RowForm.fused:
        raise typer.BadParameter("--layout inference needs --rows fused")
    from torchrec_checknrun.cli.reading import chain_of
    from torchrec_checknrun.tools import export as exporting

    folder, into = open_root(root), open_root(target)
    chain = chain_of(folder, id)
    write = partial(exporting.export_safetensors, rows=rows.value, layout=layout.value)
    if form is Format.dcp:
        write = partial(exporting.export_dcp)
    with progress("exporting") as step:
        done = write(folder, chain, into, optimizer=optimizer, scratch=scratch, progress=step)
    if as_json:
        print_json({"target": masked(target), **asdict(done)})
        return
    say(
        f"{done.id} to {into}: {len(done.tensors)} tensors, and {len(done.values)} other values in "
        "values.json"
    )
    for stored, tables in Counter(done.tables.values()).items():
        say(f"rows of {tables} tables: {stored}")


def publish(
    root: Root,
    target: Annotated[str, typer.Argument(help="Folder or URL for followers.", show_default=False)],
    bits: Annotated[
        int | None, typer.Option(help="8, 4 or 2 bits a value; 32, the default, as they are.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Newest publications to keep; by default all stay."),
    ] = None,
    keep_hours: Annotated[
        float | None,
        typer.Option(help="With --keep: also keep the first publication of every so many hours."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy what predictions depend on into a root for followers; run again, what is new since."""
    from torchrec_checknrun.serve import publish as publishing

    into = open_root(target)
    if keep is None and keep_hours is not None:
        raise typer.BadParameter("--keep-hours needs --keep")
    try:
        with progress("publishing") as step:
            done = publishing.publish(
                open_root(root),
                into,
                bits=bits,
                keep=keep,
                every_hours=keep_hours,
                progress=step,
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        ids = [manifest.id for manifest in done.published]
        deleted = list(done.deleted)
        print_json({"head": done.head, "published": ids, "bytes": done.bytes, "deleted": deleted})
        return
    if not done.published:
        say(f"{into} has {done.head} already")
    else:
        count = len(done.published)
        say(f"{into} is at {done.head}: {count} publications added, {size(done.bytes)}")
    if done.deleted:
        say(f"{len(done.deleted)} old publications deleted")


def prune(
    root: Root,
    *,
    keep: Annotated[
        int, typer.Option(min=1, help="Newest restorable checkpoints to keep.", show_default=False)
    ],
    every_hours: Annotated[
        float | None, typer.Option(help="Also keep the first checkpoint of every so many hours.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be deleted, and delete nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints that no kept one needs, and leftovers of crashed saves."""
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
    goes = "would be deleted" if dry_run else "deleted"
    rows = [[id, "kept", why] for id, why in done.verdict.keep.items()]
    rows += [[id, goes, why] for id, why in done.verdict.delete.items()]
    rows += [[id, goes, "never committed"] for id in done.leftovers]
    rows.sort(reverse=True)
    print_table(("id", "", "why"), rows)
    count = len(done.verdict.delete) + len(done.leftovers)
    say(f"{goes}: {count}, {size(done.bytes)}")
    for problem in done.problems:
        say(problem, style="red")


def pin(root: Root, id: Id) -> None:
    """Keep a checkpoint, and the checkpoints it needs, until it is unpinned."""
    pin_checkpoint(open_root(root), id)
    say(f"{id} is kept until it is unpinned")


def unpin(root: Root, id: Id) -> None:
    """Remove a pin."""
    folder = open_root(root)
    if id not in folder.names():
        raise CheckpointNotFound(f"no checkpoint {id!r} in {folder}: see `checknrun ls`")
    unpin_checkpoint(folder, id)
    say(f"{id} is not pinned")


def unlock(root: Root, yes: Yes = False) -> None:
    """Revoke the right to commit from the process that holds it."""
    from torchrec_checknrun.tools import takeover

    folder = open_root(root)
    require_root(folder)
    claim = latest_claim(folder)
    if claim is None:
        say(f"{folder} is free: nobody has claimed it; the next run claims it at once")
        return
    standing = standing_of(folder, claim)
    if standing.free:
        why = f"{claim.holder} {standing.why}"
        say(f"{folder} is free: {why}; the next run claims it at once")
        return
    age = "at a time unknown to the store"
    if standing.age is not None:
        age = f"{abs(standing.age):.0f} s " + ("ago" if standing.age >= 0 else "in the future")
    say(f"{folder} is held by {claim.holder}, which {standing.why}; its claim was renewed {age}")
    say(
        "If that process lives, its next save fails on all its ranks: it commits nothing more to "
        "this root, and its training since its last checkpoint is lost unless it saves elsewhere"
    )
    _confirm("Revoke its right to commit?", yes)
    takeover.unlock(folder, expected=claim.epoch)
    say(f"{folder} is free; {takeover.restores(folder)}")


def repair(
    root: Root,
    *,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Id of a checkpoint that must not count.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Rewrite damaged claims and pins, after showing which checkpoints will count."""
    from torchrec_checknrun.tools import takeover

    folder = open_root(root)
    require_root(folder)
    read_claims(folder).require_readable()
    damage = find_damage(folder)
    for path, what in (damage.claims | damage.forbidden).items():
        say(f"{path}: {what}", style="red")
    for problem in damage.pins.values():
        say(problem, style="red")
    if damage.undecided is not None and not damage.claims:
        say(damage.undecided, style="red")
    if not (damage.claims or damage.pins or damage.undecided or ignore):
        what = "all other claims and pins" if damage.forbidden else "the claims and pins"
        say(f"{what} of {folder} are sound: nothing to repair")
        if damage.hidden:
            say("but no checkpoint counts: see `checknrun ls` and `checknrun adopt`")
        return
    if damage.undecided is not None or ignore:
        rows = [[id, _will(damage, id, ignore or [])] for id in damage.will_count]
        print_table(("id", "after it"), rows)
        say(
            "'presumably': only the lost claim could tell whether a replaced writer committed that "
            "checkpoint too late; --ignore ID excludes it. A process that still writes here "
            "commits nothing more"
        )
    _confirm("Rewrite them?", yes)
    takeover.repair(folder, ignore or (), expected=damage.highest)
    say(f"repaired; {takeover.restores(folder)}")


def _will(damage: Damage, id: str, ignore: list[str]) -> str:
    if not damage.will_count[id] or id in ignore:
        return "does not count"
    return "counts, presumably" if id in damage.doubtful else "counts"


def adopt(root: Root, ids: SomeIds, yes: Yes = False) -> None:
    """Make checkpoints count that `ls` shows as ignored."""
    from torchrec_checknrun.tools import takeover

    folder = open_root(root)
    require_root(folder)
    new = takeover.adopt(folder, ids, dry_run=True)
    if not new:
        say(f"{', '.join(ids)}: counts already; {takeover.restores(folder)}")
        return
    say(
        f"{', '.join(new)}: committed after another writer had taken over {folder}; once they "
        "count, a restore may choose them, and their steps replace that other writer's training"
    )
    _confirm("Make them count?", yes)
    new = takeover.adopt(folder, new)
    say(f"{len(new)} more count now; {takeover.restores(folder)}")


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():  # None: closed
        raise CheckNRunError("nothing was changed: add --yes to do it without being asked")
    sure = False
    with suppress(typer.Abort):  # the end of the input, or an interrupt
        sure = typer.confirm(question)
    if not sure:
        raise CheckNRunError("nothing was changed")
