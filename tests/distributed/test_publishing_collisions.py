"""Publications of tables whose ids are mapped to rows: a row and its map are served together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.quant import embedding_modules
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.collisions import (
    RAW_IDS,
    Options,
    Spec,
    build,
    fill,
    net_of,
    on_device,
    rows_of,
)
from tests.distributed.serving import gathered, quantized
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import ZooBatch
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Follower, Publish
from torchrec_checknrun.serve.inference.names import plain
from torchrec_checknrun.serve.publish import publish

Workers = Callable[[int], WorkerPool]
KINDS = {
    kind: getattr(embedding_modules, f"Quant{kind.__name__}", None)
    for kind in (ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection)
}
if None in KINDS.values():
    pytest.skip("this TorchRec can't quantize modules of mapped ids", allow_module_level=True)
FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "tables quantized": quantized,
    "modules quantized": lambda model: quantize_embeddings(
        model, torch.qint8, False, [*KINDS], dict(KINDS)
    ),
}


def served(spec: Spec, state: dict[str, torch.Tensor] | None = None) -> nn.Module:
    """Build the model that serves, of other weights or of a state as TorchRec loads it."""
    model = net_of(spec, torch.device("cpu"))[0]
    if state is not None:
        model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model.eval()


def every_id() -> ZooBatch:
    """Return a batch that looks up every raw id, seen or not, once by each feature."""
    ids = torch.arange(RAW_IDS)
    features = KeyedJaggedTensor(
        ["f0", "f1", "f2"], torch.cat([ids] * 3), lengths=torch.ones(3 * RAW_IDS).long()
    )
    return ZooBatch(torch.zeros(RAW_IDS, 2), features)


def differences(
    follower: Follower, wanted: nn.Module, mapping: dict[str, dict[int, int]]
) -> list[str]:
    """Compare what is served with a model made from scratch, and with training's map."""
    found = []
    with follower.read() as (model, _), torch.no_grad():
        own = {plain(name): value for name, value in model.state_dict().items()}
        other = {plain(name): value for name, value in wanted.state_dict().items()}
        common = own.keys() & other.keys()  # all, but for kernels that are modules
        assert len(common) > 5
        found += [".".join(n) for n in common if not torch.equal(own[n], other[n])]
        if not torch.equal(model(every_id())[1], wanted(every_id())[1]):
            found.append("answers")
        maps: Any = model.get_submodule("embeddings._managed_collision_collection")
        for table, module in maps._managed_collision_modules.items():
            if rows_of(module) != mapping[table]:
                found.append(f"map of {table}")
    return found


def lives(root: str, spec: Options) -> int:
    """Publish after each step, and save now and then; return how many rows changed their id."""
    own = Spec(**spec)
    zoo = build(own)
    rule = Publish(f"{root}/serve", every_seconds=1e6, bits=32)
    followers = {
        (where, form): Follower(f"{root}/{where}", FORMS[form](served(own)), copies=copies)
        for where, copies, form in (
            *(("serve", 2, form) for form in FORMS),
            ("run", 1, "as it is"),
            ("copy", 2, "as it is"),
        )
    }
    given, kinds = 0, set()
    before: dict[str, dict[int, int]] = {}
    with on_device(own), Checkpointer(f"{root}/run", model=zoo.model, publish=rule) as saver:
        for step in range(8):
            if own.hashed:  # which a CPU doesn't train
                fill(zoo, step)
            else:
                zoo.train()
            saver.step()
            report = saver.publish()
            assert report is not None
            kinds.add(report.kind)
            if step % 3 == 0:
                saver.save()
                if dist.get_rank() == 0:
                    publish(f"{root}/run", f"{root}/copy")
                dist.barrier()
            mapping = zoo.mapping()
            for table, rows in mapping.items():
                old = before.get(table, {})
                given += sum(1 for raw, row in rows.items() if old and old.get(raw) != row)
            before, state = mapping, gathered(zoo.model)
            for (where, form), follower in followers.items():
                if step % 3 and where != "serve":
                    continue
                version = follower.poll()
                assert version is not None
                assert version.error is None
                # TorchRec makes the quantized modules without the weights of their tables.
                again = "tables quantized" if form == "modules quantized" else form
                wanted = FORMS[again](served(own, state))
                wrong = differences(follower, wanted, mapping)
                assert wrong == [], f"{where}, {form}, step {step}: {wrong}"
            dist.barrier()
    assert kinds == {"full", "differential"}
    return given


CHOICES: list[tuple[int, Options]] = [
    (1, {}),
    (2, {}),
    (2, {"bag": False, "policy": "lru"}),
    (2, {"hashed": True}),
]


@pytest.mark.parametrize(("ranks", "options"), some_of(CHOICES, 3), ids=str)
def test_rows_and_maps_of_one_version(
    workers: Workers, tmp_path: Path, ranks: int, options: Options
) -> None:
    given = workers(ranks).run(lives, root=str(tmp_path), spec=options)
    assert min(given) > 20
