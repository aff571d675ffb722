"""Restarts under torchrun on gloo: every attempt finds its own ranks and no dead one."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.fork_server import REPOSITORY
from tests.distributed.forked import Forked
from torchrec_checknrun.elastic import attempt_store, init_process_group

SCRIPT = """
import json, os, random, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torchrec_checknrun.elastic import init_process_group

folder, kills, victim = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
attempt = len(list(folder.glob("killed-*")))
print(f"attempt {attempt} begins", flush=True)
mine = int(os.environ["RANK"]) == (victim if victim >= 0 else attempt % 2)
if attempt < kills and mine:
    def kill():
        (folder / f"killed-{attempt}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt % 3 == 0 and victim < 0:  # while the ranks look for each other
        threading.Timer(random.Random(attempt).uniform(0, 0.05), kill).start()
init_process_group(timeout=timedelta(seconds=60))
groups = [None, dist.new_group()]
for group in groups:
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [2, 2, 2], ones
if attempt < kills:
    dist.barrier()
    if mine:
        kill()
    if victim < 0:
        dist.barrier()  # fails: its agent counts that restart, too
    time.sleep(600)  # until torchrun ends this rank
counted = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps([attempt, counted]))
dist.barrier()
dist.destroy_process_group()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def torchrun(*options: str, script: Path, folder: Path, arguments: tuple[int, int]) -> list[str]:
    return [*options, str(script), str(folder), *map(str, arguments)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    "kills", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_every_restart_joins(
    script: Path, tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    command = torchrun(
        *("--standalone", "--nproc-per-node=2", f"--max-restarts={kills}"),
        script=script,
        folder=tmp_path,
        arguments=(kills, -1),
    )
    log = tmp_path / "log"
    status = Forked("tests.distributed.forked_torchrun", *command, log=log).wait(800)
    assert status == 0, log.read_text()[-6000:]
    # As many restarts as kills: no attempt failed in any other way.
    ends = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ends == [[kills, kills]] * 2
    of_attempts = re.split(r"attempt (\d+) begins", log.read_text())[1:]
    for attempt, told in zip(map(int, of_attempts[::2]), of_attempts[1::2], strict=True):
        dies_early = attempt < kills and attempt % 3 == 0  # the other rank may still call it
        assert dies_early or not re.search("connectFullMesh|refused", told)
    assert of_attempts[-2] == str(kills)


@pytest.mark.slow
def test_nodes_that_count_restarts_differently(script: Path, tmp_path: Path) -> None:
    """Restart the worker of the agent whose worker did not fail: that restart is not counted."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *torchrun(
                    *("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"),
                    *("--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint=127.0.0.1:{port}"),
                    *(f"--rdzv-conf=is_host={1 - node}", "--local-addr=127.0.0.1"),
                    script=script,
                    folder=tmp_path,
                    arguments=(1, 1),
                ),
            ],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        printed = [agent.communicate(timeout=200)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "".join(printed)[-6000:]
    ends = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ends[0] != ends[1], "the agents counted alike: nothing was shown"


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def joined(store: dist.TCPStore, world_size: int) -> list[dist.Store]:
    views: dict[int, dist.Store] = {}

    def join(rank: int) -> None:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        views[rank] = attempt_store(own, rank, world_size, timedelta(seconds=30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [views[rank] for rank in range(world_size)]


def test_attempts_share_no_keys(store: dist.TCPStore) -> None:
    for number in range(3):
        # Another number of ranks each time, as an elastic job may have.
        views = joined(store, 4 - number)
        assert not any(view.check(["address"]) for view in views)
        views[0].set("address", str(number))
        assert all(view.get("address") == str(number).encode() for view in views)


def test_a_dead_process_question_is_no_obstacle(store: dist.TCPStore) -> None:
    """Let rank 1 of an attempt ask and die before rank 0 comes."""
    dist.PrefixStore("torchrec_checknrun.elastic", store).set("question/1", "of the dead")
    first, second = joined(store, 2)
    first.set("address", "here")
    assert second.get("address") == b"here"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_an_error(store: dist.TCPStore, rank: int) -> None:
    with pytest.raises(dist.DistStoreError):
        attempt_store(store, rank, 2, timedelta(seconds=0.5))
    dist.PrefixStore("torchrec_checknrun.elastic", store).set("question/1", "of the dead")
    with pytest.raises(dist.DistStoreError):
        attempt_store(store, rank, 2, timedelta(seconds=0.5))


def test_without_a_launcher_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    init_process_group()
    try:
        assert dist.get_world_size() == 1
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("of_agent", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        {"init_method": "env://"},
        {"rank": 0, "world_size": 1, "timeout": None},
        {"init_method": "file://{folder}/meet", "rank": 0, "world_size": 1},
        {"store": dist.HashStore(), "rank": 0, "world_size": 1},
    ],
    ids=["env", "ranks", "file", "store"],
)
def test_scripts_call_it_as_they_called_torchs(
    store: dist.TCPStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    of_agent: bool,
) -> None:
    """Join with the arguments that scripts commonly give, under torchrun and without a launcher."""
    monkeypatch.delenv("RANK", raising=False)
    if of_agent:
        launched = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = store.port if of_agent else found.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    options = {k: v.format(folder=tmp_path) if k == "init_method" else v for k, v in given.items()}
    empty = store.num_keys()
    init_process_group("gloo", **options)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    finally:
        dist.destroy_process_group()
    assert (store.num_keys() > empty) == (
        of_agent and "file" not in str(given) and "store" not in given
    )
