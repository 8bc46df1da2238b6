"""The documentation of deploy/ matches its files."""

import re
import shutil
from pathlib import Path

from tests.deploy.tools import DEPLOY, ROOT, find_tool, run_tool, run_tool_successfully
from tests.docs.pages import check_page
from tests.docs.stands_in import STANDS_IN

HOWTO = ROOT / "docs" / "howto"


def test_documented_kubernetes_overlay_is_valid(tmp_path: Path) -> None:
    find_tool("kubectl")
    folder = tmp_path / "checkout"
    shutil.copytree(DEPLOY / "kubernetes", folder / "deploy" / "kubernetes")

    check_page((HOWTO / "kubernetes.md").read_text("utf-8"), folder)

    manifests = run_tool_successfully("kubectl", "kustomize", folder / "overlays" / "ours")
    (tmp_path / "all.yaml").write_text(manifests)
    run_tool_successfully("kubernetes-validate", "--strict", tmp_path / "all.yaml")

    assert "registry.example.com/interlingua:0.1.0" in manifests
    assert "app: vllm" in manifests
    assert "component: worker" not in manifests

    key = (folder / "web-app.key").read_text("utf-8").splitlines()[0]
    assert key not in manifests


def test_documented_prometheus_scrape_config_is_valid(tmp_path: Path) -> None:
    text = (HOWTO / "kubernetes.md").read_text("utf-8")
    [block] = re.findall(r"```yaml\n(scrape_configs:\n.*?)```", text, re.DOTALL)
    (tmp_path / "key").write_text("il-1")
    file = tmp_path / "prometheus.yml"
    block = block.replace("/etc/prometheus/interlingua-admin.key", str(tmp_path / "key"))
    scrape_config = "kubernetes_sd_configs: [{role: pod, namespaces: {names: [models]}}]"

    assert scrape_config in block

    # Debian's Prometheus has no Kubernetes discovery; it checks the rest of the job.
    file.write_text(block.replace(scrape_config, 'static_configs: [{targets: ["pod:8081"]}]'))
    run_tool_successfully("promtool", "check", "config", file)


def test_documented_prometheus_has_the_data_of_the_dashboard(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    for name in ("grafana", "prometheus"):
        shutil.copytree(DEPLOY / name, folder / "deploy" / name)
    page = "docs/howto/prometheus-grafana.md"

    check_page((ROOT / page).read_text("utf-8"), folder, STANDS_IN[page])


def test_documented_systemd_drop_ins_are_valid(tmp_path: Path) -> None:
    drop_ins = re.findall(r"```ini\n(.*?)```", (HOWTO / "systemd.md").read_text("utf-8"), re.DOTALL)
    assert len(drop_ins) == 2

    unit = (DEPLOY / "systemd" / "interlingua.service").read_text("utf-8")
    for drop_in in drop_ins:
        file = tmp_path / "interlingua.service"
        file.write_text(unit.replace("/opt/interlingua/bin/interlingua", "/bin/true") + drop_in)
        result = run_tool("systemd-analyze", "verify", "--man=no", file)
        assert (result.returncode, result.stderr) == (0, "")
