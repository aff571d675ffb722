"""Offer `checkpoint=check_n_run` to every Hydra application that has this package installed.

Hydra imports all modules of the namespace package `hydra_plugins` when an application starts.
setup.py installs this folder as a part of that namespace. The folder has no `__init__.py`, since it
is no package of ours, only the place of the source.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from torchrec_checknrun.hydra_config.config import register


class TorchRecCheckNRunPlugin(SearchPathPlugin):
    """A plugin that registers the config group `checkpoint` before a config is composed."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Fill the store; the search path already leads to it."""
        register()
