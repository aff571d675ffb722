"""Store OmegaConf's configs as the lists and dicts that they stand for.

Hydra hands an optimizer the lists of its configuration as a ``ListConfig``, which many keep as an
option (RAdam's ``betas``). Read back as configs, text such as ``${…}`` would be evaluated.
"""

from __future__ import annotations

import sys
from typing import Any

from torchrec_checknrun.errors import UnsupportedState


def is_config(value: object) -> bool:
    """Return whether a value is a list or dict of OmegaConf's."""
    omegaconf: Any = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, (omegaconf.ListConfig, omegaconf.DictConfig))


def container_of(config: object, path: str) -> Any:
    """Return a config's content, with its interpolations resolved, in lists and dicts.

    Raises:
        UnsupportedState: an interpolation can't be resolved.
    """
    from omegaconf import OmegaConf  # only a program that has imported it has configs
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        why = str(error).partition("\n")[0]
        raise UnsupportedState(
            f"{path} is a {type(config).__name__} that can't be resolved ({why}): let "
            "state_dict() return its values, as OmegaConf.to_container does"
        ) from error
