"""Write a codec of your own: fixed-point values, 8 bits, one step for all rows of a block.

Python:  python examples/custom_codec.py /tmp/checkpoints
Hydra:   python examples/hydra_app.py checkpoint.root=/tmp/checkpoints \\
             'checkpoint.codec={_target_: custom_codec.FixedPoint}'
"""

import sys
from typing import Any

import torch
from small_model import batches, make_model, train_step

from torchrec_checknrun import Checkpointer, Quantization
from torchrec_checknrun.codecs import Codec, CodecSpec, Encoded, register
from torchrec_checknrun.elastic import init_process_group


@register  # restores find the codec by name, once this module has been imported
class FixedPoint(Codec):
    """A codec to multiples of 1/127 of a block's largest magnitude."""

    name = "example_fixed_point"
    lossy = True
    value_bits = 8

    def spec(self) -> CodecSpec:
        return {"name": self.name, "version": self.version}

    def encode(self, rows: torch.Tensor, ids: Any = None, *_: Any, **__: Any) -> Encoded:
        values = (rows if ids is None else rows[ids]).detach().float().cpu().clone()
        bad = ~values.isfinite().all(1)  # these rows are stored exactly
        values[bad] = 0
        step = float(values.abs().max()) / 127 or 1.0
        data = (values / step).round().to(torch.int8).reshape(-1).view(torch.uint8)
        return Encoded(data, {"step": step}, bad.nonzero().reshape(-1))

    def decode(self, data: Any, parameters: Any, rows: int, start: int, out: torch.Tensor) -> None:
        codes = data.view(torch.int8).view(rows, -1)[start : start + len(out)]
        out.copy_(codes.float() * parameters["step"])


def main(root: str) -> None:
    """Train and save with the codec; run it twice to restore from it."""
    init_process_group()
    model, optimizer = make_model()
    state, choice = {"optimizer": optimizer}, Quantization(codec=FixedPoint())
    with Checkpointer(root, model=model, state=state, quantization=choice) as checkpointer:
        checkpointer.restore()
        for data in batches(checkpointer.steps, checkpointer.steps + 5):
            train_step(model, optimizer, data)
            checkpointer.step()
        print(checkpointer.save())


if __name__ == "__main__":
    main(sys.argv[1])
