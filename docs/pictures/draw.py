"""Draws the pictures of this folder: the way of a row to disk, its copy on write, and the way back.

python docs/pictures/draw.py

A test compares the files with what this prints, and each box's file with the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH, HEIGHT, GAP, LEFT, TOP = 206, 78, 26, 20, 50
FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class Box:
    """A step on the way: what happens, in two lines at most, and the file to read."""

    lines: tuple[str, ...]
    file: str


@dataclass(frozen=True)
class Lane:
    """Steps that one thread takes, one after the other."""

    name: str
    colour: str
    boxes: tuple[Box, ...]


SAVE = (
    Lane(
        "Training thread, every step",
        "#dbe9f6",
        (
            Box(("the backward pass updates", "rows and marks them"), "marks/marks.py"),
            Box(("step(): a trigger is due,", "no gradient waits"), "schedule/schedule.py"),
        ),
    ),
    Lane(
        "Training thread, the stall",
        "#f8dcc4",
        (
            Box(("all ranks agree: full or", "differential, how many bits"), "run/saver.py"),
            Box(("the cut: marks are frozen,", "a new interval begins"), "marks/cuts.py"),
            Box(("states are copied; rows", "are copied on write"), "snapshot/staging.py"),
        ),
    ),
    Lane(
        "Behind training: a thread or a process",
        "#dcefd9",
        (
            Box(("one plan of all ranks:", "no row twice, none missing"), "save/plan.py"),
            Box(("rows become bytes,", "chunk by chunk"), "codecs/rowwise.py"),
            Box(("chunks, index, footer:", "one file a rank"), "format/rank_file.py"),
            Box(("written, synced, retried", "in bounded time"), "store/folder.py"),
        ),
    ),
    Lane(
        "Behind training: rank 0, once all ranks are done",
        "#e6dcf2",
        (
            Box(("files and sizes are", "looked at once more"), "save/commit.py"),
            Box(("manifest.json, in one", "atomic put: the commit"), "format/manifest.py"),
            Box(("what no kept checkpoint", "needs is deleted"), "root/prune.py"),
        ),
    ),
)

COPY_ON_WRITE = (
    Lane(
        "Training thread, at the cut: the stall",
        "#f8dcc4",
        (
            Box(
                ("marks are frozen as a layer;", "zeroed bytes take their place"), "marks/marks.py"
            ),
            Box(("states that may change at", "any time are copied"), "snapshot/items.py"),
            Box(("the kernels' hooks are told", "which rows are needed"), "snapshot/cut_rows.py"),
        ),
    ),
    Lane(
        "Training thread, every backward pass until all rows are copied",
        "#dbe9f6",
        (
            Box(("the gradient arrives: these", "rows are to be updated"), "model/hooks.py"),
            Box(("those still needed are", "claimed, one by one"), "csrc/copy_on_write.h"),
            Box(("and copied to overflow", "memory"), "csrc/overflow_rows.h"),
            Box(("the kernel updates", "the rows, which are marked"), "marks/marks.py"),
        ),
    ),
    Lane(
        "Behind training, chunk by chunk",
        "#dcefd9",
        (
            Box(("the layer becomes a set", "of rows, cut into chunks"), "row_sets.py"),
            Box(("rows that nobody has copied", "are claimed and copied"), "csrc/copy_on_write.h"),
            Box(("the others come from", "overflow memory"), "csrc/overflow_rows.h"),
            Box(("each row once, and nobody", "wrote unseen: or it fails"), "snapshot/cut_rows.py"),
        ),
    ),
)

RESTORE = (
    Lane(
        "Rank 0, for all ranks",
        "#e6dcf2",
        (
            Box(("claims say which", "checkpoints count"), "root/counting.py"),
            Box(("the newest complete chain;", "why newer ones were skipped"), "root/chain.py"),
        ),
    ),
    Lane(
        "All ranks, before anything is changed",
        "#f8dcc4",
        (
            Box(("sizes, indexes, checksums", "of indexes"), "format/reader.py"),
            Box(("does the checkpoint fit", "model, state and ranks?"), "restore/fit.py"),
            Box(("which chunk holds the newest", "version of each row"), "restore/plan.py"),
        ),
    ),
    Lane(
        "Each rank, several threads, newest checkpoint first",
        "#dcefd9",
        (
            Box(("only the chunks that this", "rank needs are read"), "restore/chunks.py"),
            Box(("checksum, then ids and", "parts of the chunk"), "format/row_reader.py"),
            Box(("bytes become rows", ""), "codecs/rowwise.py"),
            Box(("each row is written once,", "to its new shard, and marked"), "restore/rows.py"),
        ),
    ),
    Lane(
        "Training thread",
        "#dbe9f6",
        (
            Box(("dense part, optimizers,", "reader and other state"), "dense/optimizer.py"),
            Box(("the run goes on with", "the same chain"), "root/lineage.py"),
        ),
    ),
)


def draw(title: str, lanes: tuple[Lane, ...]) -> str:
    """Return the picture: a lane a row, boxes from left to right, arrows between them."""
    longest = max(len(lane.boxes) for lane in lanes)
    across = 2 * LEFT + longest * WIDTH + (longest - 1) * GAP
    lane_height = HEIGHT + 52
    down = TOP + len(lanes) * lane_height
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {across} {down}' role='img'>",
        f"<title>{escape(title)}</title>",
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        "markerHeight='7' orient='auto'><path d='M0 0 8 4 0 8z' fill='#444'/></marker></defs>",
        f"<rect width='{across}' height='{down}' fill='#fff'/>",
        f"<text x='{LEFT}' y='30' {FONT} font-size='19' font-weight='bold'>{escape(title)}</text>",
    ]
    for row, lane in enumerate(lanes):
        top = TOP + row * lane_height
        name = f"<text x='{LEFT}' y='{top + 16}' {FONT} font-size='14' fill='#444'>"
        parts.append(f"{name}{escape(lane.name)}</text>")
        for column, box in enumerate(lane.boxes):
            parts += _box(box, LEFT + column * (WIDTH + GAP), top + 24, lane.colour)
            if column:
                start = LEFT + column * (WIDTH + GAP) - GAP
                middle = top + 24 + HEIGHT // 2
                parts.append(_arrow(f"M{start} {middle}h{GAP}"))
        if row + 1 < len(lanes):
            last = LEFT + (len(lane.boxes) - 1) * (WIDTH + GAP) + WIDTH // 2
            edge, below = LEFT // 2, top + 24 + HEIGHT
            down_to = below + 52 + HEIGHT // 2
            parts.append(_arrow(f"M{last} {below}v9H{edge}V{down_to}h{edge}"))
    return "\n".join([*parts, "</svg>", ""])


def _box(box: Box, left: int, top: int, colour: str) -> list[str]:
    centre = left + WIDTH // 2
    found = [
        f"<rect x='{left}' y='{top}' width='{WIDTH}' height='{HEIGHT}' rx='7' fill='{colour}' "
        "stroke='#444'/>"
    ]
    lines = [line for line in box.lines if line]
    for number, line in enumerate(lines):
        y = top + 24 + 17 * number + (9 if len(lines) == 1 else 0)
        found.append(
            f"<text x='{centre}' y='{y}' {FONT} font-size='13' text-anchor='middle'>"
            f"{escape(line)}</text>"
        )
    found.append(
        f"<text x='{centre}' y='{top + HEIGHT - 11}' font-family='monospace' font-size='12' "
        f"fill='#333' text-anchor='middle'>{escape(box.file)}</text>"
    )
    return found


def _arrow(path: str) -> str:
    return f"<path d='{path}' fill='none' stroke='#444' marker-end='url(#tip)'/>"


PICTURES = {
    "save.svg": ("The way of a row to disk", SAVE),
    "copy_on_write.svg": ("The copy of a row on write", COPY_ON_WRITE),
    "restore.svg": ("The way of a row back", RESTORE),
}


def main() -> None:
    """Write the pictures."""
    for name, (title, lanes) in PICTURES.items():
        (FOLDER / name).write_text(draw(title, lanes))


if __name__ == "__main__":
    main()
