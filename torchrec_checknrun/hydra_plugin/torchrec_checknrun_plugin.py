"""Lets every Hydra application that has this package installed say `checkpoint=check_n_run`.

Hydra imports all modules of the namespace package `hydra_plugins` when an application starts.
setup.py installs this folder as a part of that namespace; it has no `__init__.py`, since it is no
package of ours, only the place of the source.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from torchrec_checknrun.hydra_config.config import register


class TorchRecCheckNRunPlugin(SearchPathPlugin):
    """Puts the config group `checkpoint` into Hydra's store before a config is composed."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Fill the store; the search path already leads to it."""
        register()
