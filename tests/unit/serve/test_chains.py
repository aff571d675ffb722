"""Follow hand-made chains: several ranks, any ranges of columns, every codec, NaN and infinity."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.inference.modules import quantize_inference_model
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.examples import examples
from tests.unit.chains import (
    CODECS,
    DIM,
    Part,
    apply_in_order,
    make_shards,
    new_root,
    random_parts,
    same_bits,
    write,
)
from torchrec_checknrun import Follower
from torchrec_checknrun.shards import Rectangle

pytestmark = pytest.mark.usefixtures("small_operations")
TYPES = (torch.qint8, torch.quint4x2, torch.quint2x4, torch.float16)


def model_of(rows: int) -> nn.Module:
    table = EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"]
    )
    net = nn.Module()
    net.ebc = EmbeddingBagCollection([table], device=torch.device("cpu"))
    return net


def memory(model: Any) -> torch.Tensor:
    """Return a quantized table's rows without padding."""
    (kernel,) = model.ebc._emb_modules
    ((codes, scales),) = kernel.split_embedding_weights()
    found: torch.Tensor = codes if scales is None else torch.cat([scales, codes], dim=1)
    return found.contiguous()


@settings(max_examples=examples(200, quick=5), deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 40),
    ranks=st.integers(1, 3),
    copies=st.integers(1, 2),
    at_once=st.integers(1, 3),
)
def test_any_chain(data: st.DataObject, rows: int, ranks: int, copies: int, at_once: int) -> None:
    chain: list[list[Part]] = data.draw(random_parts(rows, CODECS))
    for part in (part for parts in chain for part in parts):
        part.states = ()  # as in publications
    root = new_root()
    plain = model_of(rows)
    budget = data.draw(st.sampled_from([1, 500, 1 << 20]))
    floats = Follower(root.url, copy.deepcopy(plain), copies=copies, memory_bytes=budget)
    kinds = {
        kind: Follower(
            root.url,
            quantize_inference_model(copy.deepcopy(plain), quantization_dtype=kind),
            copies=copies,
            memory_bytes=budget,
        )
        for kind in TYPES
    }
    manifest = None
    for number, parts in enumerate(chain):
        manifest = write(root, rows, parts, manifest, ranks)
        if number % at_once and number < len(chain) - 1:
            continue
        (shard,) = make_shards(rows, [Rectangle(0, rows, 0, DIM)])
        apply_in_order(root, manifest.id, [shard])
        wanted = copy.deepcopy(plain)
        wanted.load_state_dict({"ebc.embedding_bags.t.weight": shard.weight})
        for kind, follower in [(None, floats), *kinds.items()]:
            version = follower.poll()
            assert version is not None
            assert version.error is None
            assert version.checkpoint_id == manifest.id
            with follower.read() as (model, _):
                if kind is None:
                    weight = model.get_parameter("ebc.embedding_bags.t.weight")
                    assert same_bits(weight.detach(), shard.weight)
                    continue
                own = quantize_inference_model(copy.deepcopy(wanted), quantization_dtype=kind)
                assert same_bits(memory(model), memory(own)), kind
