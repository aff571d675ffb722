"""Every kind of damage to every file and directory of a root, in a list that can be counted."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchrec_checknrun.format.manifest import MANIFEST_NAME, parse_manifest

FLIPS = 48
"""In a file of a checkpoint: at its ends, and evenly between."""
CLAIM_FLIPS, PIN_FLIPS = 600, 150
"""In control records: at every byte, at some twice."""
_LENGTHS = ("0", "1", "half", "all but one")
_FILE_KINDS = (
    *("one byte more", "a page more", "zeros", "a page of zeros", "swapped", "older version"),
    *("deleted", "a directory in its place", "a link in its place", "a dangling link"),
    *("copied beside", "emptied and made anew", "another encoding", "moved away"),
)
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
    """What is done to a copy of a root.

    Attributes:
        path: within the root; empty for the root itself.
        at: for flips: where, as a part of the file.
    """

    path: str
    how: str
    at: float = 0.0

    def __str__(self) -> str:
        return f"{self.how} {self.path or 'in the root'} ({self.at:.4f})"

    @property
    def of_checkpoint(self) -> bool:
        """Whether it is done to a file that a checkpoint consists of."""
        name = self.path.rpartition("/")[2]
        return name == MANIFEST_NAME or name.startswith("rank-")

    @property
    def uncommits(self) -> bool:
        """Whether it takes away what tells that there was a checkpoint."""
        if self.how in ("deleted", "moved away", "renamed", "emptied"):
            return "/" not in self.path or self.path.endswith(MANIFEST_NAME)
        return self.how in ("a file in its place",) and "/" not in self.path


def all_damages(root: Path) -> Iterator[Damage]:
    """List what can be done to a root."""
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
    """Do it.

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
    how, data = damage.how, bytearray(path.read_bytes())
    outside = other / "outside"
    if how == "flip":
        data[round(damage.at * (len(data) - 1))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif how.startswith("cut to "):
        lengths = dict(zip(_LENGTHS, (0, 1, len(data) // 2, len(data) - 1), strict=True))
        path.write_bytes(data[: max(0, lengths[how.removeprefix("cut to ")])])
    elif how == "one byte more":
        path.write_bytes(data + b"\0")
    elif how == "a page more":
        path.write_bytes(data + rng.randbytes(4096))
    elif how == "zeros":
        path.write_bytes(bytes(len(data)))
    elif how == "a page of zeros":
        start = rng.randrange(max(1, len(data) // 2))
        data[start : start + 512] = bytes(len(data[start : start + 512]))
        path.write_bytes(data)
    elif how == "swapped":
        siblings = [p for p in path.parent.parent.glob(f"*/{path.name}") if p != path]
        siblings += [p for p in path.parent.iterdir() if p != path]
        source = rng.choice(sorted(siblings) or [path])
        path.write_bytes(source.read_bytes())
    elif how == "older version":
        path.write_bytes(_older(path, other))
    elif how in ("deleted", "moved away"):
        if how == "moved away":
            (path.parent / f"{path.name}.bak").write_bytes(data)
        path.unlink()
    elif how == "a directory in its place":
        path.unlink()
        path.mkdir()
    elif how in ("a link in its place", "a dangling link"):
        outside.write_bytes(data)
        path.unlink()
        path.symlink_to(outside if how.startswith("a link") else other / "nowhere")
    elif how == "copied beside":
        (path.parent / f"copy-of-{path.name}").write_bytes(data)
    elif how == "emptied and made anew":
        path.unlink()
        path.write_bytes(rng.randbytes(len(data)))
    else:
        assert how == "another encoding", how
        path.write_bytes(bytes(data).decode("latin-1").encode("utf-16"))


def _older(path: Path, other: Path) -> bytes:
    """Return what is sound in itself, and of the same file by its name, but not this one."""
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
