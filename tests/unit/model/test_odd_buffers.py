"""Save and restore models whose buffers are sparse, nested or expanded tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.unit.tracked_model import Model, batch
from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.errors import ModelPartlyRestored, UnsupportedState
from torchrec_checknrun.values.tensor_bytes import raw_bytes

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
ODD: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: torch.eye(4).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)]),
}


class Net(nn.Module):
    """Tables, a layer, and a buffer such as a graph's adjacency matrix."""

    def __init__(self, buffer: torch.Tensor, persistent: bool) -> None:
        super().__init__()
        self.sparse, self.out = Model(), nn.Linear(32, 1)
        self.register_buffer("odd", buffer, persistent=persistent)

    def forward(self, **bags: list[list[int]]) -> torch.Tensor:
        out: torch.Tensor = self.out(self.sparse(batch(**bags))).square().sum()
        return out


def make(root: Path, buffer: torch.Tensor, persistent: bool, **options: Any) -> Any:
    """Return a model, its optimizer and its Checkpointer."""
    torch.manual_seed(0)
    net = Net(buffer, persistent)
    model = DistributedModelParallel(net, device=torch.device("cpu"), init_data_parallel=False)
    optimizer = torch.optim.Adam(net.out.parameters(), lr=0.1)
    state = {"optimizer": optimizer}
    return net, model, optimizer, Checkpointer(root, model=model, state=state, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, saver: Checkpointer) -> None:
    optimizer.zero_grad()
    model(a=[[1, 2]], shared=[[3]], b=[[4]]).backward()
    optimizer.step()
    saver.step()


@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_stored_is_refused_at_the_start(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedState, match=rf"model\.odd is a .*{kind}.*persistent=False"):
        make(tmp_path, ODD[kind](), persistent=True)


@pytest.mark.parametrize("images", [False, True], ids=["heap", "images"])
@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_stored_is_no_matter(tmp_path: Path, kind: str, images: bool) -> None:
    survive = Images(folder=str(tmp_path)) if images else None
    root = tmp_path / "root"
    one, model, optimizer, saver = make(root, ODD[kind](), persistent=False, survive=survive)
    with saver:
        saver.restore()
        for _ in range(3):
            train(model, optimizer, saver)
        saver.save()
    other, _, _, saver = make(root, ODD[kind](), persistent=False)
    with saver:
        assert saver.restore() is not None
    assert torch.equal(one.out.weight, other.out.weight)


@pytest.mark.parametrize("kind", ODD)
def test_in_a_state_object_it_is_named(tmp_path: Path, kind: str) -> None:
    class Graph:
        def state_dict(self) -> dict[str, Any]:
            return {"edges": {"odd": ODD[kind]()}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    torch.manual_seed(0)
    model = DistributedModelParallel(Model(), device=torch.device("cpu"), init_data_parallel=False)
    with Checkpointer(tmp_path, model=model, state={"graph": Graph()}) as saver:
        saver.step()
        with pytest.raises(UnsupportedState, match=rf"graph\.edges\.odd is a .*{kind}"):
            saver.save()


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1), (3, 3)])
def test_an_expanded_buffer_comes_back(tmp_path: Path, shape: tuple[int, int]) -> None:
    wanted = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    *_, saver = make(tmp_path, wanted.expand(3, 3), persistent=True)
    with saver:
        saver.step()
        saver.save()
    net, *_, saver = make(tmp_path, torch.zeros(shape).expand(3, 3), persistent=True)
    with saver:
        saver.restore()
    assert torch.equal(net.odd, wanted.expand(3, 3))
    assert net.odd.untyped_storage().nbytes() == wanted.nbytes


def test_values_that_an_expanded_buffer_cannot_hold(tmp_path: Path) -> None:
    *_, saver = make(tmp_path, torch.rand(3, 3), persistent=True)
    with saver:
        saver.step()
        saver.save()
    *_, saver = make(tmp_path, torch.zeros(1, 3).expand(3, 3), persistent=True)
    with saver, pytest.raises(ModelPartlyRestored, match=r"clone\(\) it in the model"):
        saver.restore()


def test_a_state_without_memory_of_its_own_is_named(tmp_path: Path) -> None:
    """Name state of a class that keeps its values in tensors inside, as torchao's optimizers do."""
    _, model, optimizer, saver = make(tmp_path, torch.eye(4), persistent=True)
    with saver:
        train(model, optimizer, saver)
        state = next(iter(optimizer.state.values()))
        state["exp_avg"] = TwoTensor(state["exp_avg"], state["exp_avg"])
        with pytest.raises(UnsupportedState, match=r"exp_avg is a .*TwoTensor"):
            saver.save()


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.parametrize("images", [False, True])
def test_observers_come_back_before_and_after_a_forward_pass(tmp_path: Path, images: bool) -> None:
    """Observers of quantization-aware training take their shapes in the first forward pass."""

    def observed(passes: int) -> tuple[Any, Checkpointer]:
        torch.manual_seed(0)
        net: Any = Net(torch.zeros(1), True)
        net.out.qconfig = get_default_qat_qconfig("fbgemm")
        prepare_qat(net, inplace=True)
        model = DistributedModelParallel(net, device=torch.device("cpu"), init_data_parallel=False)
        with torch.no_grad():
            for _ in range(passes):
                model(a=[[1]])
        survive = Images(folder=str(tmp_path)) if images else None
        return model, Checkpointer(tmp_path / "root", model=model, survive=survive)

    model, saver = observed(1)
    with saver:
        saver.restore()
        model(a=[[2]]).backward()
        saver.step()
        saver.save()
    wanted = dict(model.named_buffers())
    for passes in (0, 1):
        found, reader = observed(passes)
        with reader:
            reader.restore()
        assert all(torch.equal(buffer, wanted[name]) for name, buffer in found.named_buffers())


def test_a_buffer_without_values_may_still_be_resized() -> None:
    buffer = torch.zeros(0)
    assert not len(raw_bytes(buffer))
    assert buffer.resize_(3).shape == (3,)


def test_extra_state_that_no_checkpoint_takes_has_no_images(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        kept: object = torch.zeros(1)

        def get_extra_state(self) -> object:
            return self.kept

        def set_extra_state(self, state: object) -> None: ...

    net = Net(torch.zeros(1), persistent=True)
    net.out = part = Counting(32, 1)
    model = DistributedModelParallel(net, device=torch.device("cpu"), init_data_parallel=False)
    images = Images(folder=str(tmp_path))
    with Checkpointer(tmp_path / "root", model=model, survive=images) as saver:
        part.kept = {"count": object()}
        with pytest.raises(UnsupportedState, match=r"_extra_state\.count is a builtins\.object"):
            saver.restore()


def test_a_lazy_module_is_named_before_its_first_forward_pass(tmp_path: Path) -> None:
    dmp = DistributedModelParallel(Net(torch.zeros(1), True), device=torch.device("cpu"))
    model = nn.ModuleDict({"net": dmp, "lazy": nn.LazyLinear(2)})
    with pytest.raises(UnsupportedState, match=r"lazy\.weight .*make one forward pass"):
        Checkpointer(tmp_path, model=model)
    model["lazy"](torch.zeros(1, 3))
    with Checkpointer(tmp_path, model=model) as saver:
        saver.save()


def test_the_first_fsdp_is_refused_by_name(tmp_path: Path) -> None:
    sharded = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # it needs a GPU else
    nn.Module.__init__(sharded)
    sharded._fsdp_wrapped_module = nn.Linear(2, 2)
    dmp = DistributedModelParallel(Net(torch.zeros(1), True), device=torch.device("cpu"))
    model = nn.ModuleDict({"net": dmp, "over": sharded})
    with pytest.raises(UnsupportedState, match=r"FullyShardedDataParallel around Linear.*FSDP2"):
        Checkpointer(tmp_path, model=model)
