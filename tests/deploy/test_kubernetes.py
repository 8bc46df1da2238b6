"""The manifests and the Helm chart, rendered by kubectl and Helm, without a cluster."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from gateway.config.loader import load_text
from tests.deploy.processes import (
    PLACE,
    Gateway,
    ProcessLauncher,
    get_response_text,
    send_chat,
    wait_until_ready,
)
from tests.deploy.tools import DEPLOY, parse_manifests, require, run_tool, run_tool_successfully

KUBERNETES = DEPLOY / "kubernetes"
BASE = KUBERNETES / "base"
TRY = KUBERNETES / "overlays" / "try"
CHART = DEPLOY / "helm" / "interlingua"
RENDERER = Path(__file__).with_name("render_chart.py")
CONFIG = (BASE / "gateway.yaml").read_text("utf-8")
SMALL = 'backends: {w: {protocol: openai, workers: ["http://w:1"]}}\nmodels: {m: {backend: w}}\n'
DIGESTS = {"INTERLINGUA_KEY_SHA256": "a" * 64, "INTERLINGUA_ADMIN_SHA256": "b" * 64}

Manifests = Sequence[dict[str, Any]]


def render_chart(tmp_path: Path, **values: Any) -> tuple[str, str]:
    """Render the chart; return the manifests and Helm's error."""
    file = tmp_path / "values.json"
    file.write_bytes(msgspec.json.encode(values))
    result = run_tool("python", RENDERER, CHART, file)
    require(
        "No module named" not in result.stderr, "there is no Helm here; make deploy installs it"
    )
    return result.stdout, result.stderr


@pytest.fixture(params=["base", "try", "chart"])
def rendered_manifests(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "chart":
            manifests, complaint = render_chart(tmp_path, config=CONFIG)
            assert complaint == ""
            return manifests
        case name:
            return run_tool_successfully("kubectl", "kustomize", {"base": BASE, "try": TRY}[name])


def filter_kind(kind: str, manifests: Manifests) -> Manifests:
    return [one for one in manifests if one["kind"] == kind]


def get_data(manifests: Manifests, kind: str, name: str) -> Mapping[str, str]:
    """Return the data of a ConfigMap or a Secret."""
    [data] = [
        one["data"] for one in filter_kind(kind, manifests) if one["metadata"]["name"] == name
    ]
    values: Mapping[str, str] = data
    if kind == "Secret":
        return {key: base64.b64decode(value).decode() for key, value in values.items()}
    return values


def get_config_files(pod: Mapping[str, Any], manifests: Manifests) -> Mapping[str, str]:
    """Return the configuration files of a pod."""
    [volume] = pod["volumes"]
    [mount] = pod["containers"][0]["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": PLACE, "readOnly": True}
    return get_data(manifests, "ConfigMap", volume["configMap"]["name"])


def list_pod_specs(manifests: Manifests) -> list[dict[str, Any]]:
    return [one["spec"]["template"]["spec"] for one in filter_kind("Deployment", manifests)]


# ── every rendering ───────────────────────────────────────────────────────────────────────────────


def test_manifests_are_valid_for_kubernetes(rendered_manifests: str, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(rendered_manifests)
    run_tool_successfully("kubernetes-validate", "--strict", file)


@pytest.mark.parametrize("wrong", ["preStop: {sleep: {secs: 1}}", "preStop: {sleep: {seconds: a}}"])
def test_validation_detects_an_unknown_field(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    text = (BASE / "deployment.yaml").read_text("utf-8")

    file.write_text(re.sub(r"preStop: .*", wrong, text))

    assert run_tool("kubernetes-validate", "--strict", file).returncode != 0


def test_termination_grace_period_covers_the_drain(rendered_manifests: str) -> None:
    manifests = list(parse_manifests(rendered_manifests))
    for pod in list_pod_specs(manifests):
        [text] = get_config_files(pod, manifests).values()
        limits = load_text(text, "gateway.yaml", env=DIGESTS, insecure=True).limits
        before = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert (
            pod["terminationGracePeriodSeconds"]
            >= before + limits.shutdown_delay + limits.drain_timeout + 5
        )


def test_pods_satisfy_the_restricted_security_standard(rendered_manifests: str) -> None:
    """The Pod Security Standard ``restricted``, and a read-only file system."""
    pod_specs = list_pod_specs(list(parse_manifests(rendered_manifests)))
    assert pod_specs

    for pod in pod_specs:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        [container] = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert [one for one in pod["volumes"] if "configMap" not in one] == []


def test_selectors_match_exactly_one_deployment(rendered_manifests: str) -> None:
    """Every selector matches the pods of one Deployment, and every named port exists."""
    manifests = list(parse_manifests(rendered_manifests))
    labels = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in filter_kind("Deployment", manifests)
    ]

    def count_matches(chosen: Mapping[str, str]) -> int:
        return sum(chosen.items() <= one.items() for one in labels)

    chosen = [one["spec"]["selector"] for one in filter_kind("Service", manifests)]
    chosen += [
        one["spec"]["selector"]["matchLabels"]
        for one in filter_kind("PodDisruptionBudget", manifests)
    ]
    chosen += [
        one["spec"]["selector"]["matchLabels"] for one in filter_kind("Deployment", manifests)
    ]
    chosen += [
        one["spec"]["podSelector"]["matchLabels"] for one in filter_kind("NetworkPolicy", manifests)
    ]
    chosen += [
        spread["labelSelector"]["matchLabels"]
        for pod in list_pod_specs(manifests)
        for spread in pod.get("topologySpreadConstraints", ())
    ]

    assert [count_matches(one) for one in chosen] == [1] * len(chosen)

    [scaled] = filter_kind("HorizontalPodAutoscaler", manifests)
    names = [one["metadata"]["name"] for one in filter_kind("Deployment", manifests)]
    assert scaled["spec"]["scaleTargetRef"]["name"] in names

    [first] = [
        one
        for one in filter_kind("Deployment", manifests)
        if one["metadata"]["name"] == "interlingua"
    ]
    assert "replicas" not in first["spec"], "it would override the autoscaler"


# ── the overlay, run as processes ─────────────────────────────────────────────────────────────────


def start_deployment(
    stage: ProcessLauncher, manifests: Manifests, name: str, place: Path, **env: str
) -> tuple[Gateway, dict[str, Any]]:
    """Start a Deployment's container with its configuration and its Secret."""
    [deployment] = [
        one for one in filter_kind("Deployment", manifests) if one["metadata"]["name"] == name
    ]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    folder = place / name
    folder.mkdir(exist_ok=True)
    for file, text in get_config_files(pod, manifests).items():
        (folder / file).write_text(text)
    for source in container.get("envFrom", ()):
        env |= get_data(manifests, "Secret", source["secretRef"]["name"])
    return stage.start(container["args"], folder, **env), container


def test_overlay_serves_requests_and_probes(stage: ProcessLauncher, tmp_path: Path) -> None:
    manifests = list(parse_manifests(run_tool_successfully("kubectl", "kustomize", TRY)))
    worker, container = start_deployment(stage, manifests, "workers", tmp_path)
    assert (
        httpx.get(
            worker.url + container["readinessProbe"]["httpGet"]["path"], timeout=30
        ).status_code
        == 200
    )

    port = worker.url.rpartition(":")[2]
    gateway, container = start_deployment(
        stage, manifests, "interlingua", tmp_path, WORKERS=f"localhost:{port}"
    )
    wait_until_ready(gateway)

    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        http_get = container[probe]["httpGet"]
        assert http_get["port"] == "admin"
        assert httpx.get(gateway.admin + http_get["path"], timeout=30).status_code == 200
    assert get_response_text(send_chat(gateway, "echo", "try")) == "say this back"
    assert send_chat(gateway, "echo", "other").status_code == 401

    page = httpx.get(
        f"{gateway.admin}/metrics", headers={"Authorization": "Bearer admin"}, timeout=30
    )
    assert page.status_code == 200


def test_container_ports_match_the_listeners() -> None:
    manifests = list(parse_manifests(run_tool_successfully("kubectl", "kustomize", TRY)))
    for pod in list_pod_specs(manifests):
        [text] = get_config_files(pod, manifests).values()
        config = load_text(text, "gateway.yaml", env=DIGESTS, insecure=True)
        admin = (config.admin,) if config.admin else ()
        listens = [one.address.rpartition(":")[2] for one in (*config.listeners, *admin)]
        [container] = pod["containers"]
        assert [str(one["containerPort"]) for one in container["ports"]] == listens
    assert 'dns: "${WORKERS:-workers:8001}"' in CONFIG

    [headless] = [
        one for one in filter_kind("Service", manifests) if one["metadata"]["name"] == "workers"
    ]
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["ports"][0]["port"] == 8001


# ── the chart ────────────────────────────────────────────────────────────────────────────────────


def strip_tool_labels(one: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest without the labels that name the tool."""
    labels = one["metadata"]["labels"]
    for name in ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version"):
        labels.pop(name, None)
    if one["kind"] == "Deployment":
        for container in one["spec"]["template"]["spec"]["containers"]:
            container["image"] = container["image"].partition(":")[0]
            container.pop("imagePullPolicy", None)
    return one


def test_chart_renders_the_same_manifests_as_the_base(tmp_path: Path) -> None:
    manifests, _ = render_chart(tmp_path, config=CONFIG)
    base = run_tool_successfully("kubectl", "kustomize", BASE)
    by_helm = {one["kind"]: strip_tool_labels(one) for one in parse_manifests(manifests)}

    by_kustomize = {one["kind"]: strip_tool_labels(one) for one in parse_manifests(base)}

    assert by_helm == by_kustomize


def test_chart_values_appear_in_the_manifests(tmp_path: Path) -> None:
    manifests, complaint = render_chart(
        tmp_path,
        config=SMALL + "limits: {drain_timeout: 1.5m, shutdown_delay: 7s}\n",
        secretName="others",
        image={"repository": "registry.test/interlingua", "tag": "1"},
        service={"type": "LoadBalancer", "port": 8000, "annotations": {"a": "b"}},
        networkPolicy={"enabled": False},
        volumes=[{"name": "tls", "secret": {"secretName": "tls"}}],
        volumeMounts=[{"name": "tls", "mountPath": "/tls", "readOnly": True}],
        pod={"nodeSelector": {"kind": "small"}},
    )
    assert complaint == ""

    file = tmp_path / "all.yaml"
    file.write_text(manifests)
    run_tool_successfully("kubernetes-validate", "--strict", file)
    every = list(parse_manifests(manifests))
    [pod] = list_pod_specs(every)
    [container] = pod["containers"]

    assert pod["terminationGracePeriodSeconds"] == 10 + 7 + 90 + 5
    assert pod["nodeSelector"] == {"kind": "small"}
    assert [one["name"] for one in pod["volumes"]] == ["config", "tls"]
    assert [one["name"] for one in container["volumeMounts"]] == ["config", "tls"]
    assert container["image"] == "registry.test/interlingua:1"
    assert container["envFrom"] == [{"secretRef": {"name": "others"}}]
    assert filter_kind("NetworkPolicy", every) == []

    [service] = filter_kind("Service", every)
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["metadata"]["annotations"] == {"a": "b"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'/config'"),
        ({"config": SMALL, "replicas": 3}, "'replicas' not allowed"),
        ({"config": SMALL, "pod": {"containers": []}}, "'containers'"),
        ({"config": "a: ["}, "config is not valid YAML"),
        ({"config": "limits: {drain_timeout: 60}"}, 'limits.drain_timeout of config is "60"'),
    ],
)
def test_invalid_chart_values_are_rejected(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    manifests, complaint = render_chart(tmp_path, **values)
    assert manifests == ""
    assert message in complaint


def test_chart_has_no_default_configuration_and_passes_lint() -> None:
    assert yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))["config"] == ""

    result = run_tool("python", RENDERER, CHART, "--lint", BASE / "gateway.yaml")
    require(
        "No module named" not in result.stderr, "there is no Helm here; make deploy installs it"
    )
    assert result.stdout == ""
    assert result.returncode == 0, result.stderr
