"""The manifests and the chart, as kubectl and Helm make them; no cluster is here."""

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
from tests.deploy.processes import PLACE, Gateway, Stage, ask, ready, said_back
from tests.deploy.tools import DEPLOY, good, manifests, need, run

KUBERNETES = DEPLOY / "kubernetes"
BASE = KUBERNETES / "base"
TRY = KUBERNETES / "overlays" / "try"
CHART = DEPLOY / "helm" / "interlingua"
RENDERER = Path(__file__).with_name("render_chart.py")
CONFIG = (BASE / "gateway.yaml").read_text("utf-8")
SMALL = 'backends: {w: {protocol: openai, workers: ["http://w:1"]}}\nmodels: {m: {backend: w}}\n'
DIGESTS = {"INTERLINGUA_KEY_SHA256": "a" * 64, "INTERLINGUA_ADMIN_SHA256": "b" * 64}

Manifests = Sequence[dict[str, Any]]


def chart(tmp_path: Path, **values: Any) -> tuple[str, str]:
    """What Helm makes of the chart, and its complaint."""
    file = tmp_path / "values.json"
    file.write_bytes(msgspec.json.encode(values))
    said = run("python", RENDERER, CHART, file)
    need("No module named" not in said.stderr, "there is no Helm here; make deploy installs it")
    return said.stdout, said.stderr


@pytest.fixture(params=["base", "try", "chart"])
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "chart":
            made, complaint = chart(tmp_path, config=CONFIG)
            assert complaint == ""
            return made
        case name:
            return good("kubectl", "kustomize", {"base": BASE, "try": TRY}[name])


def of(kind: str, made: Manifests) -> Manifests:
    return [one for one in made if one["kind"] == kind]


def held(made: Manifests, kind: str, name: str) -> Mapping[str, str]:
    """What a ConfigMap or a Secret holds."""
    [found] = [one["data"] for one in of(kind, made) if one["metadata"]["name"] == name]
    values: Mapping[str, str] = found
    if kind == "Secret":
        return {key: base64.b64decode(value).decode() for key, value in values.items()}
    return values


def configuration(pod: Mapping[str, Any], made: Manifests) -> Mapping[str, str]:
    """The files that a pod has in its place."""
    [volume] = pod["volumes"]
    [mount] = pod["containers"][0]["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": PLACE, "readOnly": True}
    return held(made, "ConfigMap", volume["configMap"]["name"])


def pods(made: Manifests) -> list[dict[str, Any]]:
    return [one["spec"]["template"]["spec"] for one in of("Deployment", made)]


# ── what every rendering is held to ──────────────────────────────────────────────────────────────


def test_it_is_what_kubernetes_takes(rendered: str, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(rendered)
    good("kubernetes-validate", "--strict", file)


@pytest.mark.parametrize("wrong", ["preStop: {sleep: {secs: 1}}", "preStop: {sleep: {seconds: a}}"])
def test_a_field_that_kubernetes_has_not_is_found(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    text = (BASE / "deployment.yaml").read_text("utf-8")
    file.write_text(re.sub(r"preStop: .*", wrong, text))
    assert run("kubernetes-validate", "--strict", file).returncode != 0


def test_a_pod_has_time_to_drain(rendered: str) -> None:
    made = list(manifests(rendered))
    for pod in pods(made):
        [text] = configuration(pod, made).values()
        limits = load_text(text, "gateway.yaml", env=DIGESTS, insecure=True).limits
        before = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert (
            pod["terminationGracePeriodSeconds"]
            >= before + limits.shutdown_delay + limits.drain_timeout + 5
        )


def test_a_pod_may_do_nothing_that_it_need_not(rendered: str) -> None:
    """What the Pod Security Standard ``restricted`` asks for, and a read-only file system."""
    found = pods(list(manifests(rendered)))
    assert found
    for pod in found:
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


def test_who_is_chosen_is_there(rendered: str) -> None:
    """Every selector finds the pods of one Deployment, and every port that is named is one."""
    made = list(manifests(rendered))
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in of("Deployment", made)]

    def found(chosen: Mapping[str, str]) -> int:
        return sum(chosen.items() <= one.items() for one in labels)

    chosen = [one["spec"]["selector"] for one in of("Service", made)]
    chosen += [one["spec"]["selector"]["matchLabels"] for one in of("PodDisruptionBudget", made)]
    chosen += [one["spec"]["selector"]["matchLabels"] for one in of("Deployment", made)]
    chosen += [one["spec"]["podSelector"]["matchLabels"] for one in of("NetworkPolicy", made)]
    chosen += [
        spread["labelSelector"]["matchLabels"]
        for pod in pods(made)
        for spread in pod.get("topologySpreadConstraints", ())
    ]
    assert [found(one) for one in chosen] == [1] * len(chosen)
    [scaled] = of("HorizontalPodAutoscaler", made)
    names = [one["metadata"]["name"] for one in of("Deployment", made)]
    assert scaled["spec"]["scaleTargetRef"]["name"] in names
    [first] = [one for one in of("Deployment", made) if one["metadata"]["name"] == "interlingua"]
    assert "replicas" not in first["spec"], "what the autoscaler says would be undone"


# ── the overlay, run as processes of this machine ────────────────────────────────────────────────


def start(
    stage: Stage, made: Manifests, name: str, place: Path, **env: str
) -> tuple[Gateway, dict[str, Any]]:
    """A Deployment's container with its configuration and its Secret, and the container."""
    [found] = [one for one in of("Deployment", made) if one["metadata"]["name"] == name]
    pod = found["spec"]["template"]["spec"]
    [container] = pod["containers"]
    folder = place / name
    folder.mkdir(exist_ok=True)
    for file, text in configuration(pod, made).items():
        (folder / file).write_text(text)
    for source in container.get("envFrom", ()):
        env |= held(made, "Secret", source["secretRef"]["name"])
    return stage.start(container["args"], folder, **env), container


def test_the_overlay_answers(stage: Stage, tmp_path: Path) -> None:
    made = list(manifests(good("kubectl", "kustomize", TRY)))
    worker, container = start(stage, made, "workers", tmp_path)
    assert httpx.get(worker.url + container["readinessProbe"]["httpGet"]["path"]).status_code == 200
    port = worker.url.rpartition(":")[2]
    gateway, container = start(stage, made, "interlingua", tmp_path, WORKERS=f"localhost:{port}")
    ready(gateway)

    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        told = container[probe]["httpGet"]
        assert told["port"] == "admin"
        assert httpx.get(gateway.admin + told["path"]).status_code == 200
    assert said_back(ask(gateway, "echo", "try")) == "say this back"
    assert ask(gateway, "echo", "other").status_code == 401
    page = httpx.get(f"{gateway.admin}/metrics", headers={"Authorization": "Bearer admin"})
    assert page.status_code == 200


def test_the_ports_are_those_that_it_listens_on() -> None:
    made = list(manifests(good("kubectl", "kustomize", TRY)))
    for pod in pods(made):
        [text] = configuration(pod, made).values()
        config = load_text(text, "gateway.yaml", env=DIGESTS, insecure=True)
        admin = (config.admin,) if config.admin else ()
        listens = [one.address.rpartition(":")[2] for one in (*config.listeners, *admin)]
        [container] = pod["containers"]
        assert [str(one["containerPort"]) for one in container["ports"]] == listens
    assert 'dns: "${WORKERS:-workers:8001}"' in CONFIG
    [headless] = [one for one in of("Service", made) if one["metadata"]["name"] == "workers"]
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["ports"][0]["port"] == 8001


# ── the chart ────────────────────────────────────────────────────────────────────────────────────


def plain(one: dict[str, Any]) -> dict[str, Any]:
    """A manifest without what tells only who made it."""
    labels = one["metadata"]["labels"]
    for name in ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version"):
        labels.pop(name, None)
    if one["kind"] == "Deployment":
        for container in one["spec"]["template"]["spec"]["containers"]:
            container["image"] = container["image"].partition(":")[0]
            container.pop("imagePullPolicy", None)
    return one


def test_the_chart_is_the_base(tmp_path: Path) -> None:
    made, _ = chart(tmp_path, config=CONFIG)
    base = good("kubectl", "kustomize", BASE)
    by_helm = {one["kind"]: plain(one) for one in manifests(made)}
    by_kustomize = {one["kind"]: plain(one) for one in manifests(base)}
    assert by_helm == by_kustomize


def test_what_the_values_say_is_there(tmp_path: Path) -> None:
    made, complaint = chart(
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
    file.write_text(made)
    good("kubernetes-validate", "--strict", file)
    every = list(manifests(made))
    [pod] = pods(every)
    [container] = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] == 10 + 7 + 90 + 5
    assert pod["nodeSelector"] == {"kind": "small"}
    assert [one["name"] for one in pod["volumes"]] == ["config", "tls"]
    assert [one["name"] for one in container["volumeMounts"]] == ["config", "tls"]
    assert container["image"] == "registry.test/interlingua:1"
    assert container["envFrom"] == [{"secretRef": {"name": "others"}}]
    assert of("NetworkPolicy", every) == []
    [service] = of("Service", every)
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["metadata"]["annotations"] == {"a": "b"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "'/config'"),
        ({"config": SMALL, "replicas": 3}, "'replicas' not allowed"),
        ({"config": SMALL, "pod": {"containers": []}}, "'containers'"),
        ({"config": "a: ["}, "config is not valid YAML"),
        ({"config": "limits: {drain_timeout: 60}"}, 'limits.drain_timeout of config is "60"'),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    made, complaint = chart(tmp_path, **values)
    assert made == ""
    assert said in complaint


def test_the_charts_default_configuration_is_none_and_it_lints() -> None:
    assert yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))["config"] == ""
    said = run("python", RENDERER, CHART, "--lint", BASE / "gateway.yaml")
    need("No module named" not in said.stderr, "there is no Helm here; make deploy installs it")
    assert said.stdout == ""
    assert said.returncode == 0, said.stderr
