"""Models with a task that their workers' protocol has no requests for."""

import json
from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text
from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS

REGISTRY = ProtocolRegistry(PROTOCOLS)
TASKS = ("embedding", "rerank", "classify")
WORKERS = [
    (name, profile)
    for name in filter(REGISTRY.serves_workers, PROTOCOLS)
    for profile in REGISTRY.get_profiles(name)
]


def list_issues(protocol: str, models: str, backends: str = "") -> list[str]:
    text = f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends:
  w: {{{protocol}, workers: ["http://127.0.0.1:1"]}}
  e: {{kind: echo}}
{backends}
models: {models}
"""
    try:
        load_text(text, "g.yaml", env={})
    except ConfigError as error:
        return [
            f"{issue.format_place('g.yaml')} {issue.path}: {issue.message}"
            for issue in error.issues
        ]
    return []


@pytest.mark.parametrize(("protocol", "profile"), WORKERS)
@pytest.mark.parametrize("task", TASKS)
def test_task_is_refused_exactly_if_the_workers_have_no_such_requests(
    protocol: str, profile: str, task: str
) -> None:
    kinds = REGISTRY.get_request_kinds(protocol, profile)

    issues = list_issues(
        f"protocol: {protocol}, profile: '{profile}'", f"{{m: {{backend: w, task: {task}}}}}"
    )

    refused = [issue for issue in issues if " models.m.task: " in issue]
    assert bool(refused) is (task not in kinds)


def test_refusal_says_what_the_workers_do_and_where() -> None:
    [issue] = list_issues("protocol: anthropic", "{m: {backend: w, task: rerank}}")

    text = "workers of 'w' have no rerank requests in anthropic"
    assert issue == f"g.yaml:7:32 models.m.task: {text}; name another backend, or a task of: chat"


def test_each_version_of_a_model_is_checked() -> None:
    versions = "{1: {backend: e}, 2: {backend: w}, 3: {backend: w}, 4: {backend: absent}}"

    issues = list_issues("protocol: cohere", f"{{m: {{task: embedding, versions: {versions}}}}}")

    assert len([issue for issue in issues if "no embedding requests in cohere" in issue]) == 1


@pytest.mark.parametrize(
    ("protocol", "model"),
    [
        ("protocol: antropic", "{backend: w, task: rerank}"),
        ("protocol: anthropic, profile: none", "{backend: w, task: rerank}"),
        ("protocol: anthropic", "{backend: w, task: none}"),
        ("protocol: anthropic", "{backend: [], task: rerank}"),
        ("protocol: anthropic", "{versions: [], task: rerank}"),
        ("protocol: anthropic", "{versions: {1: [], 2: {backend: []}}, task: rerank}"),
        ("protocol: anthropic", "[]"),
    ],
)
def test_what_could_not_be_read_is_reported_once(protocol: str, model: str) -> None:
    issues = list_issues(protocol, f"{{m: {model}}}")

    assert issues
    assert not any("requests in" in issue for issue in issues)


def test_task_of_a_local_model_is_that_of_its_files(tmp_path: Path) -> None:
    """Given folders without settings of their task, models that name each other have the same."""
    folders = {"bert": "BertModel", "llama": "LlamaForCausalLM"}
    for name, architecture in folders.items():
        (tmp_path / name).mkdir()
        config = {"architectures": [architecture], "model_type": name}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors").touch()
    local = "\n".join(f"  {name}: {{kind: torch, path: '{tmp_path}/{name}'}}" for name in folders)

    def list_model_issues(models: str) -> list[str]:
        return list_issues("protocol: openai", models, local)

    worker = "w: {backend: w, task: embedding}"
    assert list_model_issues(f"{{m: {{backend: bert, fallback: [w]}}, {worker}}}") == []
    assert list_model_issues("{m: {backend: bert, task: rerank}}") == []
    [issue] = list_model_issues("{m: {backend: llama, fallback: [n]}, n: {backend: bert}}")
    assert "'n' has the task embedding, and this model has chat" in issue
    issues = list_model_issues("{m: {backend: bert, judge: {model: n}}, n: {backend: llama}}")
    assert any("answers of the task embedding have no text to judge" in one for one in issues)
