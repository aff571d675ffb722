"""Refuse keyword arguments that Checkpointer doesn't have, and name what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

_ONLY_HYDRA = {
    "images": "survive=Images()",
    "host_copies": "survive=HostCopies()",
    "peers": "partial=PartialRecovery(max_pls=0.01, total_steps=100_000, peers=PeerCopies())",
    "priority_every_steps": "partial=PartialRecovery(…, priority=PrioritySaves(100))",
    **dict.fromkeys(("bits", "method", "mean_bits", "offset"), "quantization=Quantization(bits=8)"),
    **dict.fromkeys(
        ("step", "loss", "current_loss", "trained_steps", "batch_size", "tail", "reference_bytes"),
        'quantization=Quantization(method="delta", step=…)',
    ),
    **dict.fromkeys(("compress", "exact_below_rows"), "quantization=Quantization(compress=True)"),
    "publish_root": 'publish=Publish(root="s3://bucket/serve")',
    **dict.fromkeys(
        ("publish_every_seconds", "publish_bits", "publish_method", "publish_tables"),
        'publish=Publish(root="s3://bucket/serve", every_seconds=30, bits=8)',
    ),
    "expected_restores": 'quantization=Quantization(bits="auto", expected_restores=3)',
    "codec": "quantization=Quantization(codec=MyCodec())",
    **dict.fromkeys(
        ("compact_after_links", "compact_after_share"), "compact_after=CompactAfter(links=8)"
    ),
    "optimizer_state": 'quantization=Quantization(bits=8, optimizer="log8")',
    "tables": 'quantization=Quantization(tables={"*user*": Quantization(bits=4)})',
    "every_seconds": "triggers=[EverySeconds(600)]",
    "at_end": "triggers=[AtEnd()]",
    **dict.fromkeys(("on_sigterm", "grace_seconds"), "triggers=[OnSigterm(grace_seconds=25)]"),
    **dict.fromkeys(("keep", "keep_every_hours"), "retention=Retention(keep=2, every_hours=6)"),
    "asynchronous": 'background="thread", which is the default',
    **dict.fromkeys(
        ("max_pls", "total_steps"), "partial=PartialRecovery(max_pls=0.01, total_steps=100_000)"
    ),
}
"""Keys of the Hydra group ``checkpoint`` that Checkpointer spells differently, and its spelling."""


def refuse_unknown(unknown: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse keyword arguments that Checkpointer doesn't have.

    Args:
        known: the arguments that it has.

    Raises:
        TypeError: names the argument; for a key of the Hydra group, shows Checkpointer's spelling,
            and for an object with a state the place where such objects are declared.
    """
    for name, value in unknown.items():
        if name in _ONLY_HYDRA:
            raise TypeError(
                f"{name} is a key of the Hydra group `checkpoint`; Checkpointer has no such "
                f"argument: give {_ONLY_HYDRA[name]}, not {name}={value!r}"
            )
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
            meant = f"did you mean {near[0]!r}?"
        elif callable(getattr(value, "state_dict", None)):
            meant = f"give what is to be saved beside the model by name, state={{{name!r}: {name}}}"
        else:
            meant = "see help(Checkpointer) for its arguments, such as every_steps=1000"
        raise TypeError(f"Checkpointer has no argument {name!r}: {meant}")
