"""Allow one writer per root: refuse others, take over, and decide which checkpoints count."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.chains import Part, write
from tests.unit.root.writers import ELSEWHERE, become, nothing
from torchrec_checknrun.errors import ClaimDamaged, RootInUse
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.counting import counting
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import FOLDER, Claim, Holder, Lease, latest_claim


def long_ago(monkeypatch: pytest.MonkeyPatch, root: Folder, claim: Claim) -> None:
    """Make a claim's last renewal long ago, by the store's times."""
    real = Folder.modified

    def modified(folder: Folder, name: str) -> float | None:
        found = real(folder, name)
        return found if found is None or name != claim.name else found - claim.seconds - 1

    monkeypatch.setattr(Folder, "modified", modified)


def test_a_second_writer_is_refused(
    root: Folder, leases: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Lease(root), Lease(root)
    leases += [first, second]
    first.acquire(nothing)
    assert first.claim.epoch == 1
    with monkeypatch.context() as patch:
        become(patch, **ELSEWHERE)
        with pytest.raises(RootInUse, match=r"is written to by process \d+ on .*give this run a"):
            second.acquire(nothing)
    first.check()
    first.release()
    with monkeypatch.context() as patch:
        become(patch, **ELSEWHERE)
        second.acquire(nothing)
    assert second.claim.epoch == 2


def test_an_expired_claim_is_taken_over(
    root: Folder, leases: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Lease(root, seconds=60), Lease(root)
    leases += [first, second]
    with monkeypatch.context() as patch:
        become(patch, **{**ELSEWHERE, "machine": "a third"})
        first.acquire(nothing)
    long_ago(monkeypatch, root, first.claim)
    with monkeypatch.context() as patch:
        become(patch, **ELSEWHERE)
        second.acquire(nothing)
    second.check()
    with pytest.raises(RootInUse, match="was taken over by process 7 on far"):
        first.check()
    first.release()  # and leaves the other's claim alone
    claim = latest_claim(root)
    assert claim is not None
    assert (claim.epoch, claim.released) == (2, False)


def test_a_claim_is_renewed(root: Folder, leases: list[Lease]) -> None:
    lease = Lease(root, seconds=0.4)
    leases.append(lease)
    lease.acquire(nothing)
    deadline = time.monotonic() + 20
    while (claim := latest_claim(root)) is None or claim.renewals < 5:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lease.use(["seq-1"])
    while (claim := latest_claim(root)) is None or claim.uses != ("seq-1",):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_restart_by_torchrun_takes_over_at_once(
    root: Folder, leases: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first, again, late, other = (Lease(root) for _ in range(4))
    leases += [first, again, late, other]
    with monkeypatch.context() as patch:
        become(patch, machine="another")
        first.acquire(nothing)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with monkeypatch.context() as patch:
        become(patch, machine="a third")
        again.acquire(nothing)
    assert again.claim.epoch == 2
    with pytest.raises(RootInUse, match="taken over"):
        first.check()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(RootInUse):  # the attempt comes after its successor's
        late.acquire(nothing)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "5")
    with pytest.raises(RootInUse):
        other.acquire(nothing)


@pytest.mark.parametrize("run", [None, "none"])
def test_runs_without_an_id_are_told_apart(
    run: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    code = "from torchrec_checknrun.writers.lease import Holder; print(Holder.this_process().run)"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Holder.this_process() == Holder.this_process()
    assert Holder.this_process().run != again.stdout.strip()


def test_a_dead_process_of_this_machine_is_not_waited_for(
    tmp_path: Path, leases: list[Lease]
) -> None:
    root = Folder(tmp_path / "run")
    code = (
        "import os, signal, sys; from torchrec_checknrun.store.folder import Folder\n"
        "from torchrec_checknrun.writers.lease import Lease\n"
        "Lease(Folder(sys.argv[1])).acquire(lambda _: ())\n"
        "print(flush=True) if sys.argv[2] == 'lives' else os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, root.url]
    lease = Lease(root)
    leases.append(lease)
    with subprocess.Popen([*command, "lives"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(RootInUse, match=f"process {process.pid} "):
            lease.acquire(nothing)
        process.kill()
    lease.acquire(nothing)
    assert lease.claim.epoch == 2


def test_checkpointers_of_one_process_share_the_claim(root: Folder, leases: list[Lease]) -> None:
    first, second = Lease(root), Lease(root)
    leases += [first, second]
    first.acquire(nothing)
    second.acquire(nothing)
    assert first.claim.epoch == second.claim.epoch == 1
    first.check()
    second.check()


def test_none_of_them_forgets_what_another_needs(root: Folder, leases: list[Lease]) -> None:
    """Keep all leases' checkpoints in every claim: upon use, renewal and release."""

    def written() -> Claim:
        claim = latest_claim(root)
        assert claim is not None
        return claim

    first, second = Lease(root, seconds=0.4), Lease(root)
    leases += [first, second]
    first.acquire(lambda _: ["a", "b", "c"], ["a"])
    second.acquire(nothing, ["x"])
    before = written()
    assert (set(before.uses), set(before.earlier or ())) == ({"a", "x"}, {"a", "b", "c", "x"})
    deadline = time.monotonic() + 20
    while written().renewals <= before.renewals:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.use(["z"])
    assert set(written().uses) == {"z", "x"}
    first.release()
    assert not written().released
    second.use(["x", "y"])
    assert written().uses == ("x", "y")
    second.release()
    assert written().released
    assert set(written().earlier or ()) == {"a", "b", "c", "x", "y", "z"}


def test_of_many_at_once_one_wins(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one of many simultaneous writers win; each thread stands for a process."""
    holder = Holder.this_process()
    me = threading.local()
    monkeypatch.setattr(Holder, "this_process", classmethod(lambda cls: me.holder))
    monkeypatch.setattr(Holder, "gone", False)
    outcomes: list[object] = []
    ready = threading.Barrier(6)

    def claim(number: int) -> None:
        me.holder = replace(holder, pid=number, machine=f"machine {number}", run=f"run {number}")
        lease = Lease(root)
        ready.wait()
        try:
            lease.acquire(nothing)
            outcomes.append(lease)
        except RootInUse as error:
            outcomes.append(error)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
    assert (len(outcomes), len(winners)) == (6, 1)
    winners[0].check()
    winners[0].release()


def test_what_a_replaced_writer_commits_does_not_count(
    root: Folder, leases: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(before: Claim | None) -> list[str]:
        return [manifest.id for manifest in counting(root, before)]

    def part() -> list[Part]:
        return [Part((0, 8), list(range(20)), 20)]

    root.create()
    old, new, newer = Lease(root), Lease(root), Lease(root)
    leases += [old, new, newer]
    old.acquire(listed)
    first = write(root, 20, part(), epoch=1)
    with monkeypatch.context() as patch:
        become(patch, **ELSEWHERE)
        monkeypatch.setattr(Holder, "gone", True)
        new.acquire(listed)
    # The old writer has checked just before, and commits now.
    late = write(root, 20, part(), parent=first, epoch=1)
    chain, problems = newest(root)
    assert chain is not None
    assert chain.head.id == first.id
    assert problems == [
        f"{late.id}: it was committed by a writer that had been replaced by then, and doesn't "
        f"count: `checknrun adopt {root} {late.id}` makes it count"
    ]
    after = write(root, 20, part(), parent=late, epoch=2)  # a sequence number higher
    chain, _ = newest(root)
    assert chain is not None
    assert chain.head.id == after.id
    with monkeypatch.context() as patch:
        become(patch, **{**ELSEWHERE, "pid": 8})
        newer.acquire(listed)
    assert newer.claim.earlier == (after.id, first.id)
    assert [manifest.id for manifest in counting(root, latest_claim(root))] == [after.id, first.id]


def test_old_claims_are_cleaned_up(root: Folder, leases: list[Lease]) -> None:
    for _ in range(5):
        lease = Lease(root)
        lease.acquire(nothing)
        lease.release()
    assert (root / FOLDER).names() == ["epoch-00000004.json", "epoch-00000005.json"]


def test_a_claim_whose_folder_is_gone_is_written_anew(root: Folder, leases: list[Lease]) -> None:
    lease = Lease(root)
    leases.append(lease)
    lease.acquire(nothing)
    folder = root / FOLDER
    for name in folder.names():
        folder.delete(name)
    folder.remove()
    lease.check()
    assert latest_claim(root) == lease.claim


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"epoch": 1}', b'{"epoch": 1, "holder": 5}'],
)
def test_a_claim_that_is_none(
    root: Folder, leases: list[Lease], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Hide nothing without any commit, and last as long as an unknown writer's claim."""
    root.create()
    (root / FOLDER).create()
    (root / FOLDER).put("epoch-00000003.json", content)
    (root / FOLDER).put("notes.txt", b"")
    with pytest.raises(ClaimDamaged, match="epoch-00000003"):
        latest_claim(root)
    lease = Lease(root)
    leases.append(lease)
    with pytest.raises(
        RootInUse, match=r"epoch-00000003\.json is damaged and was written less than"
    ):
        lease.acquire(nothing)
    long_ago(monkeypatch, root, Claim(3, Holder.this_process()))
    with pytest.raises(ClaimDamaged, match="checknrun repair"):
        lease.acquire(lambda _: ["seq-1"])
    lease.acquire(nothing)
    assert lease.claim.epoch == 4
    fields = json.loads((root / FOLDER).read("epoch-00000004.json"))["claim"]
    assert fields["holder"]["pid"] == Holder.this_process().pid
    assert latest_claim(root) == lease.claim
