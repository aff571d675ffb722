"""List every kind of damage to every file and directory of a root, in a fixed order."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchrec_checknrun.format.manifest import parse_manifest
from torchrec_checknrun.format.names import MANIFEST_NAME

FLIPS = 48
"""Flipped bits of a checkpoint's file: at both ends, and evenly spread between."""
CLAIM_FLIPS, PIN_FLIPS = 600, 150
"""Flipped bits of control records: one in every byte, two in some."""
_LENGTHS = ("0", "1", "half", "all but one")
_FILE_KINDS = (
    *("one byte more", "a page more", "zeros", "a page of zeros", "swapped", "older version"),
    *("deleted", "a directory in its place", "a link in its place", "a dangling link"),
    *("copied beside", "replaced by random bytes", "another encoding", "moved away"),
)
_PLACE_KINDS = (
    *("deleted", "moved away", "a directory in its place", "a link in its place"),
    *("a dangling link", "copied beside", "replaced by random bytes"),
)
"""Kinds that change a directory entry, not a file's content."""
_DIRECTORY_KINDS = (
    *("deleted", "duplicated", "renamed", "a file in its place", "a link in its place"),
    *("a directory in it", "a link in it", "emptied"),
)
_ROOT_KINDS = (
    "an empty directory",
    "a file like a checkpoint",
    "a temporary",
    "a checkpoint's name",
)


@dataclass(frozen=True)
class Damage:
    """A change to a copy of a root.

    Attributes:
        path: within the root; empty for the root itself.
        at: position of a flip, as a fraction of the file.
    """

    path: str
    how: str
    at: float = 0.0

    def __str__(self) -> str:
        return f"{self.how} {self.path or 'in the root'} ({self.at:.4f})"

    @property
    def of_checkpoint(self) -> bool:
        """Return whether the damaged file belongs to a checkpoint."""
        name = self.path.rpartition("/")[2]
        return name == MANIFEST_NAME or name.startswith("rank-")

    @property
    def uncommits(self) -> bool:
        """Return whether the damage removes every sign that a checkpoint was committed."""
        if self.how in ("deleted", "moved away", "renamed", "emptied"):
            return "/" not in self.path or self.path.endswith(MANIFEST_NAME)
        return self.how in ("a file in its place",) and "/" not in self.path


def all_damages(root: Path) -> Iterator[Damage]:
    """List all damages to a root."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        for file in sorted(folder.iterdir()):
            path = f"{folder.name}/{file.name}"
            flips = FLIPS if Damage(path, "").of_checkpoint else PIN_FLIPS
            flips = CLAIM_FLIPS if file.name.startswith("epoch-") else flips
            if file.stat().st_size:
                for number in range(flips):
                    yield Damage(path, "flip", number / (flips - 1))
            for length in _LENGTHS:
                yield Damage(path, f"cut to {length}")
            for how in _FILE_KINDS:
                yield Damage(path, how)
        for how in _DIRECTORY_KINDS:
            yield Damage(folder.name, how)
    for how in _ROOT_KINDS:
        yield Damage("", how)


def apply(damage: Damage, root: Path, other: Path, rng: random.Random) -> None:
    """Damage a copy of a root.

    Args:
        root: the copy.
        other: another run's root, and older versions of control records.
    """
    path = root / damage.path
    if not damage.path:
        _apply_to_root(damage, root)
    elif "/" not in damage.path:
        _apply_to_directory(damage, path, other)
    else:
        _apply_to_file(damage, path, other, rng)


def _apply_to_file(damage: Damage, path: Path, other: Path, rng: random.Random) -> None:
    if damage.how in _PLACE_KINDS:
        _replace_file(damage.how, path, other, rng)
    else:
        path.write_bytes(_changed(damage, path, other, rng))


def _replace_file(how: str, path: Path, other: Path, rng: random.Random) -> None:
    """Remove a file, put something else in its place, or put a copy beside it."""
    data, outside = path.read_bytes(), other / "outside"
    if how == "copied beside":
        (path.parent / f"copy-of-{path.name}").write_bytes(data)
        return
    path.unlink()
    if how == "moved away":
        (path.parent / f"{path.name}.bak").write_bytes(data)
    elif how == "a directory in its place":
        path.mkdir()
    elif how in ("a link in its place", "a dangling link"):
        outside.write_bytes(data)
        path.symlink_to(outside if how.startswith("a link") else other / "nowhere")
    elif how == "replaced by random bytes":
        path.write_bytes(rng.randbytes(len(data)))
    else:
        assert how == "deleted", how


def _changed(damage: Damage, path: Path, other: Path, rng: random.Random) -> bytes:
    """Return the damaged content of a file."""
    how, data = damage.how, bytearray(path.read_bytes())
    if how == "flip":
        data[round(damage.at * (len(data) - 1))] ^= 1 << rng.randrange(8)
        return bytes(data)
    if how.startswith("cut to "):
        lengths = dict(zip(_LENGTHS, (0, 1, len(data) // 2, len(data) - 1), strict=True))
        return bytes(data[: max(0, lengths[how.removeprefix("cut to ")])])
    if how == "one byte more":
        return bytes(data + b"\0")
    if how == "a page more":
        return bytes(data + rng.randbytes(4096))
    if how == "zeros":
        return bytes(len(data))
    if how == "a page of zeros":
        start = rng.randrange(max(1, len(data) // 2))
        data[start : start + 512] = bytes(len(data[start : start + 512]))
        return bytes(data)
    if how == "swapped":
        return _sibling(path, rng).read_bytes()
    if how == "older version":
        return _older(path, other)
    assert how == "another encoding", how
    return bytes(data).decode("latin-1").encode("utf-16")


def _sibling(path: Path, rng: random.Random) -> Path:
    """Choose a file of the same name, or of the same checkpoint."""
    siblings = [p for p in path.parent.parent.glob(f"*/{path.name}") if p != path]
    siblings += [p for p in path.parent.iterdir() if p != path]
    return rng.choice(sorted(siblings) or [path])


def _older(path: Path, other: Path) -> bytes:
    """Return a valid file of the same name from another checkpoint or an earlier time."""
    control = other / "older" / path.name
    if control.exists():
        return control.read_bytes()
    same = sorted(other.glob(f"seq-*/{path.name}")) or [path]
    source = next((p for p in same if p.parent.name[:10] == path.parent.name[:10]), same[0])
    if path.name != MANIFEST_NAME:
        return source.read_bytes()
    manifest = parse_manifest(source.read_bytes(), str(source))
    return msgspec.structs.replace(manifest, id=path.parent.name).sealed().to_bytes()


def _apply_to_directory(damage: Damage, path: Path, other: Path) -> None:
    how = damage.how
    if how == "deleted":
        shutil.rmtree(path)
    elif how == "duplicated":
        shutil.copytree(path, path.with_name(f"seq-000009{path.name[10:]}"))
    elif how == "renamed":
        path.rename(path.with_name(f"old-{path.name}"))
    elif how == "a file in its place":
        shutil.rmtree(path)
        path.write_bytes(b"lost+found")
    elif how == "a link in its place":
        shutil.move(path, other / "moved")
        path.symlink_to(other / "moved", target_is_directory=True)
    elif how == "a directory in it":
        (path / "nested").mkdir()
        (path / "nested" / "file").write_bytes(b"x")
    elif how == "a link in it":
        os.symlink(other, path / "link")
    else:
        assert how == "emptied", how
        for file in path.iterdir():
            file.unlink()


def _apply_to_root(damage: Damage, root: Path) -> None:
    how = damage.how
    if how == "an empty directory":
        (root / "lost+found").mkdir()
    elif how == "a file like a checkpoint":
        (root / "seq-000099_step-00000099_0badf00d").write_bytes(b"x")
    elif how == "a temporary":
        (root / ".epoch-00000001.json.12345678").write_bytes(b"{")
    else:
        assert how == "a checkpoint's name", how
        folder = root / "seq-000099_step-00000099_0badf00d"
        folder.mkdir()
        (folder / MANIFEST_NAME).write_text(json.dumps({"hello": "world"}))
