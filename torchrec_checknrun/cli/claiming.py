"""``unlock``, ``repair`` and ``adopt``: who may write to a root, and which checkpoints count."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from torchrec_checknrun.cli.output import Root, SomeIds, open_root, print_table, say
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.root.checkpoints import require_root
from torchrec_checknrun.tools.control_records import Damage, find_damage

Yes = Annotated[bool, typer.Option("--yes", help="Do it without asking.")]


def unlock(root: Root, yes: Yes = False) -> None:
    """Takes the right to commit away from the process that holds it."""
    from torchrec_checknrun.tools import takeover

    folder = open_root(root)
    require_root(folder)
    found = takeover.holder_of(folder)
    if found is None or found[1].free:
        why = "nobody has claimed it" if found is None else f"{found[0].holder} {found[1].why}"
        say(f"{folder} is free: {why}; the next run claims it at once")
        return
    claim, standing = found
    age = "at a time that the store doesn't tell"
    if standing.age is not None:
        age = f"{abs(standing.age):.0f} s " + ("ago" if standing.age >= 0 else "in the future")
    say(f"{folder} is held by {claim.holder}, which {standing.why}; its claim was renewed {age}")
    say(
        "If that process lives, its next save fails, on all its ranks: it commits nothing more to "
        "this root, and what it trained since its last checkpoint is lost unless it saves elsewhere"
    )
    _confirm("Take its right to commit away?", yes)
    takeover.unlock(folder, expected=claim.epoch)
    say(f"{folder} is free; {takeover.restores(folder)}")


def repair(
    root: Root,
    *,
    ignore: Annotated[
        list[str] | None, typer.Option(help="A checkpoint that is not to count.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Writes damaged claims and pins anew; says first which checkpoints will count."""
    from torchrec_checknrun.tools import takeover

    folder = open_root(root)
    require_root(folder)
    damage = find_damage(folder)
    for path, what in damage.claims.items():
        say(f"{path}: {what}", style="red")
    for problem in damage.pins.values():
        say(problem, style="red")
    if damage.undecided is not None and not damage.claims:
        say(damage.undecided, style="red")
    if not (damage.claims or damage.pins or damage.undecided or ignore):
        say(f"the claims and pins of {folder} are sound: nothing to repair")
        if damage.hidden:
            say("but no checkpoint counts: see `checknrun ls` and `checknrun adopt`")
        return
    if damage.undecided is not None or ignore:
        rows = [[id, _will(damage, id, ignore or [])] for id in damage.will_count]
        print_table(None, {"id": "left", "after it": "left"}, rows)
        say(
            "'presumably': only the lost claim could tell whether a replaced writer committed it "
            "too late; --ignore ID leaves one out. A process that still writes here commits "
            "nothing more"
        )
    _confirm("Write them anew?", yes)
    takeover.repair(folder, ignore or (), expected=damage.highest)
    say(f"repaired; {takeover.restores(folder)}")


def _will(damage: Damage, id: str, ignore: list[str]) -> str:
    if not damage.will_count[id] or id in ignore:
        return "does not count"
    return "counts, presumably" if id in damage.doubtful else "counts"


def adopt(root: Root, ids: SomeIds, yes: Yes = False) -> None:
    """Makes checkpoints count that `ls` calls ignored."""
    from torchrec_checknrun.tools import takeover

    folder = open_root(root)
    require_root(folder)
    new = takeover.adoptable(folder, ids)
    if not new:
        say(f"{', '.join(ids)}: counts already; {takeover.restores(folder)}")
        return
    say(
        f"{', '.join(new)}: committed when another writer had taken {folder} over already; a "
        "restore may choose what counts, and its steps replace what that other writer trained"
    )
    _confirm("Make them count?", yes)
    new = takeover.adopt(folder, new)
    say(f"{len(new)} more count now; {takeover.restores(folder)}")


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise CheckNRunError("nothing was changed: add --yes to do it without being asked")
    if not typer.confirm(question):
        raise CheckNRunError("nothing was changed")
