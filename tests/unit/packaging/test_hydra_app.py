"""Offer the switch `checkpoint=` to an application that has only the wheel installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.packaging.builds import ROOT, clean_environment, run

APP = """
import hydra
from omegaconf import DictConfig, OmegaConf
import hydra_plugins.torchrec_checknrun_plugin as plugin
import torchrec_checknrun.version as version

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    print(OmegaConf.to_yaml(cfg.checkpoint))
    print("plugin:", plugin.__file__)
    print("package:", version.__file__)

main()
"""


class TestOtherHydraApp:
    """Run an application elsewhere, with only the wheel installed."""

    @pytest.fixture
    def app(self, tmp_path: Path) -> Path:
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "config.yaml").write_text('defaults: [{checkpoint: "off"}, _self_]\n')
        (tmp_path / "app.py").write_text(APP)
        return tmp_path

    def start(
        self, app: Path, site: Path | None, *overrides: str
    ) -> subprocess.CompletedProcess[str]:
        environment = clean_environment(**({"PYTHONPATH": str(site)} if site else {}))
        return run(sys.executable, "app.py", *overrides, cwd=app, env=environment)

    def test_the_switch_works_with_the_wheel(self, app: Path, site: Path) -> None:
        result = self.start(app, site, "checkpoint=check_n_run", "checkpoint.every_steps=7")
        assert result.returncode == 0, result.stderr
        assert "every_steps: 7" in result.stdout
        assert f"plugin: {site}/hydra_plugins/torchrec_checknrun_plugin.py" in result.stdout
        assert f"package: {site}/torchrec_checknrun/version.py" in result.stdout

    def test_switch_with_the_package_installed_in_place(self, app: Path) -> None:
        result = self.start(app, None, "checkpoint=check_n_run", "checkpoint.every_steps=7")
        assert result.returncode == 0, result.stderr
        assert "every_steps: 7" in result.stdout
        assert f"plugin: {ROOT}/torchrec_checknrun/hydra_plugin/" in result.stdout

    @pytest.mark.parametrize(
        ("overrides", "named"),
        [
            (["checkpoint=chek_n_run"], "chek_n_run"),
            (["checkpoint=check_n_run", "checkpoint.evry_steps=1"], "evry_steps"),
            (["checkpoint=check_n_run", "checkpoint.every_steps=often"], "often"),
        ],
    )
    def test_a_typo_fails_at_start(
        self, app: Path, site: Path, overrides: list[str], named: str
    ) -> None:
        result = self.start(app, site, *overrides)
        assert result.returncode != 0
        assert named in result.stderr
        assert "plugin:" not in result.stdout
