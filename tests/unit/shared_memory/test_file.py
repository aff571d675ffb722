"""Files that are found in shared memory: only this user's own, whole and unused ones are opened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchrec_checknrun.errors import ImagesRefused
from torchrec_checknrun.memory.sweep import sweep
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files
from torchrec_checknrun.shared_memory import space
from torchrec_checknrun.shared_memory.areas import Areas, Layout
from torchrec_checknrun.shared_memory.file import PAGE, ImageFile, NoImage, owner_text, this_process
from torchrec_checknrun.shared_memory.header import FIRST_BYTES, Word, Words
from torchrec_checknrun.shared_memory.space import require_space

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

NAME = "checknrun-{uid}-0123456789abcdef-{rank}of2.image"


def filled(path: Path, ready: int = 1, owner: int = 0, run: str = "run") -> None:
    """Leave an image behind, as a process that has died does."""
    areas = Areas.create(path, Layout(run, "shards", "", {}))
    areas.add("one", 3 * PAGE)[:5] = torch.arange(5, dtype=torch.uint8)
    areas.publish("together")
    areas.words.publish(Word.READY, ready)
    areas.words.publish(Word.OWNER, owner)
    areas.close()


def opened(path: Path) -> Areas:
    files._mapped.clear()  # as in another process
    return Areas.open(path, "run", "shards")


def test_what_was_left_is_found(tmp_path: Path) -> None:
    filled(tmp_path / "image")
    areas = opened(tmp_path / "image")
    assert areas.get("one")[:5].tolist() == [0, 1, 2, 3, 4]
    assert areas.layout.incarnation == "together"
    areas.grow("one", 9 * PAGE, 5)[5] = 9
    areas.close()
    assert opened(tmp_path / "image").get("one")[:6].tolist() == [0, 1, 2, 3, 4, 9]
    assert (tmp_path / "image").stat().st_mode & 0o777 == 0o600


def link(path: Path) -> None:
    filled(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def readable(path: Path) -> None:
    filled(path)
    path.chmod(0o640)


def named_twice(path: Path) -> None:
    filled(path)
    path.with_name("other").hardlink_to(path)


def pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def cut_off(path: Path) -> None:
    filled(path)
    os.truncate(path, path.stat().st_size - 100)


def shorter(path: Path) -> None:
    filled(path)
    os.truncate(path, FIRST_BYTES)


def tiny(path: Path) -> None:
    filled(path)
    os.truncate(path, PAGE)


def foreign(path: Path) -> None:
    filled(path)
    os.chown(path, 12345, -1)


def noise(path: Path) -> None:
    path.touch(0o600)
    path.write_bytes(os.urandom(2 * FIRST_BYTES))


def half_filled(path: Path) -> None:
    filled(path, ready=0)


def of_another_run(path: Path) -> None:
    filled(path, run="other")


def overlapping(path: Path) -> None:
    areas = Areas.create(path, Layout("run", "shards", "", {"a": (FIRST_BYTES, PAGE)}))
    areas.add("b", PAGE)
    areas.publish("x")
    areas.words.publish(Word.READY, 1)
    areas.words.publish(Word.OWNER, 0)
    areas.close()


def changed_layout(path: Path) -> None:
    filled(path)
    data = bytearray(path.read_bytes())
    for at in range(PAGE, FIRST_BYTES):
        data[at] ^= 0x55
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (lambda path: None, "there is none"),
        (link, "can't be opened"),
        (readable, "other users may open it"),
        (named_twice, "2 names"),
        (pipe, "no regular file"),
        (cut_off, "cut off"),
        (shorter, "outside of it"),
        (tiny, "not in its"),
        (noise, "does not begin as an image"),
        (half_filled, "not filled"),
        (of_another_run, "another run"),
        (overlapping, "overlap"),
        (changed_layout, "damaged"),
        pytest.param(
            *(foreign, "another user"),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_what_can_t_be_trusted_is_not_used(
    tmp_path: Path, leave: Callable[[Path], None], reason: str
) -> None:
    leave(tmp_path / "image")
    with pytest.raises(NoImage, match=reason):
        opened(tmp_path / "image")
    Areas.create(tmp_path / "image", Layout("run", "shards", "", {})).remove()  # in its place
    assert not (tmp_path / "image").exists()


def test_other_shards_are_told(tmp_path: Path) -> None:
    filled(tmp_path / "image")
    files._mapped.clear()
    with pytest.raises(NoImage, match="other shards"):
        Areas.open(tmp_path / "image", "run", "others")


def test_a_living_owner_keeps_it_and_a_dead_one_does_not(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, this_process().to_bytes(8, "little"))
        time.sleep(60)
        os._exit(0)
    owner = int.from_bytes(os.read(reading, 8), "little")
    filled(tmp_path / "image", owner=owner)
    with pytest.raises(NoImage, match=f"process {child}, which is alive"):
        opened(tmp_path / "image")
    os.kill(child, signal.SIGKILL)
    while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert owner_text(owner) is None  # dead, though nobody has heard of it yet
    opened(tmp_path / "image").close()
    os.waitpid(child, 0)
    assert owner_text(owner) is None


def test_a_process_of_the_same_number_is_another_one() -> None:
    assert owner_text(os.getppid() | 1 << 40) is None  # another start time


def test_memory_that_a_model_of_this_process_uses_is_left_to_it(tmp_path: Path) -> None:
    areas = Areas.create(tmp_path / "image", Layout("run", "shards", "", {}))
    used = areas.add("one", PAGE)
    used.fill_(7)
    areas.publish("x")
    areas.words.publish(Word.READY, 1)
    areas.close()
    with pytest.raises(NoImage, match="still uses its memory"):
        Areas.open(tmp_path / "image", "run", "shards")
    again = Areas.create(tmp_path / "image", Layout("run", "shards", "", {}))
    again.add("one", PAGE).fill_(1)
    assert used.tolist() == [7] * PAGE
    again.remove()


def test_a_hole_is_given_memory_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "image")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoImage, match="no memory"):
        opened(tmp_path / "image")
    with pytest.raises(ImagesRefused, match="shm-size"):
        ImageFile.create(tmp_path / "image", PAGE)
    assert not (tmp_path / "image").exists()


def test_too_little_shared_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImagesRefused, match=r"has [\d,.]+ MB free: give it more"):
        require_space(tmp_path, 1 << 60)
    with pytest.raises(ImagesRefused, match="can't be used for images"):
        require_space(tmp_path / "missing", 1)


@pytest.mark.parametrize(
    ("groups", "most", "used"),
    [
        ("0::/a/b\n", "a/memory.max", "a/memory.current"),
        ("3:memory:/x\n0::/\n", "memory/x/memory.limit_in_bytes", "memory/x/memory.usage_in_bytes"),
    ],
)
def test_a_control_group_s_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, most: str, used: str
) -> None:
    for name, text in ((most, "3000000"), (used, "1000000")):
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    (tmp_path / "cgroup").write_text(groups)
    monkeypatch.setattr(space, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(space, "_OWN_GROUPS", tmp_path / "cgroup")
    require_space(tmp_path, 1_900_000)
    require_space(tmp_path, 3_900_000, freed=2_000_000)
    with pytest.raises(ImagesRefused, match=r"2\.0 MB left below its memory\.max"):
        require_space(tmp_path, 2_100_000)
    stat = (tmp_path / "groups" / used).parent / "memory.stat"
    of_files = "inactive_file 300000\nactive_file 200000\n"  # pages that the kernel gives back
    stat.write_text(f"shmem 700000\n{of_files}")
    require_space(tmp_path, 2_400_000)
    with pytest.raises(ImagesRefused, match=r"2\.5 MB left below its memory\.max"):
        require_space(tmp_path, 2_600_000)
    (tmp_path / "groups" / most).write_text("max")
    require_space(tmp_path, 2_600_000)


def test_images_that_are_over_are_swept(tmp_path: Path) -> None:
    uid = os.geteuid()
    own = tmp_path / NAME.format(uid=uid, rank=0)
    kept = {
        own: 0,
        tmp_path / NAME.format(uid=uid, rank=1): 0,
        tmp_path / f"checknrun-{uid}-fedcba9876543210-0of1.image": 0,  # of another run, recent
        tmp_path / f"checknrun-{uid}-aaaaaaaaaaaaaaaa-0of1.image": os.getppid(),  # and alive
    }
    over = [
        tmp_path / f"checknrun-{uid}-0123456789abcdef-0of4.image",
        tmp_path / f"checknrun-{uid}-1111111111111111-0of1.image",
    ]
    for path in (*kept, *over):
        filled(path)
    for path in kept:
        _set(path, Word.TIME, int(time.time()))
    _set(list(kept)[3], Word.OWNER, files._process_word(os.getppid()))
    _set(list(kept)[3], Word.TIME, 0)
    (tmp_path / "something.else").touch()
    link_ = tmp_path / f"checknrun-{uid}-2222222222222222-0of1.image"
    link_.symlink_to(own)
    files._mapped.clear()
    assert len(list(sweep(own, 2, 24.0))) == 2
    assert all(path.exists() for path in kept)
    assert link_.is_symlink()
    assert not any(path.exists() for path in over)


def _set(path: Path, word: Word, value: int) -> None:
    page = torch.frombuffer(bytearray(path.read_bytes()[:PAGE]), dtype=torch.uint8)
    Words(page).publish(word, value)
    with path.open("r+b") as file:
        file.write(page.numpy().tobytes())
