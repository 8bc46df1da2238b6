"""Health checks and errors while one of several models can't be loaded."""

import os
from pathlib import Path
from typing import Any

import pytest

from backends.echo import EchoBackend
from backends.interfaces import ReportsFailure
from tests.conftest import RunningGateway, Serve
from tests.support.waiting import wait_until

CONFIG = """
listeners:
  - {address: "127.0.0.1:0", protocols: [openai]}
admin: {address: "127.0.0.1:0"}
backends:
  good: {kind: echo, script: [fine]}
  broken: {kind: echo, script: [fine]}
models: {small: {backend: good}, large: {backend: broken}}
"""
REASON = "/srv/models/large: model.safetensors is truncated"


async def serve_with_failure(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, config: str
) -> tuple[RunningGateway, list[Any]]:
    """A gateway whose backend ``broken`` has failed, and the responses to its health checks."""
    gateway = await serve(config)
    broken = gateway.app.backends["broken"]
    monkeypatch.setattr(
        EchoBackend,
        "failure",
        property(lambda backend: REASON if backend is broken else None),
        raising=False,
    )
    responses = [await gateway.http.get(path) for path in ("/health", "/health/readiness")]
    return gateway, [*responses, await gateway.http.get(f"{gateway.admin}/-/ready")]


async def test_health_checks_name_the_model_that_cannot_be_loaded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, responses = await serve_with_failure(serve, monkeypatch, CONFIG)
    status = (await gateway.http.get(f"{gateway.admin}/-/status")).json()

    assert [response.status_code for response in responses] == [200] * 3
    assert [response.json()["failed_models"] for response in responses] == [["large"]] * 3
    assert "/srv" not in "".join(response.text for response in responses)
    assert status["failures"] == {"broken": REASON}


async def test_strict_health_checks_fail_with_the_model(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, responses = await serve_with_failure(serve, monkeypatch, CONFIG + "health: strict\n")

    assert [response.status_code for response in responses] == [503] * 3
    assert all("large" in response.text for response in responses)


@pytest.mark.parametrize(("health", "succeeds"), [("serving", True), ("strict", False)])
async def test_health_checks_of_protocols_follow_the_setting(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, health: str, *, succeeds: bool
) -> None:
    others = "{name: triton, prefix: /t}, {name: tgi, prefix: /g}, {name: mindie, prefix: /m}"
    config = CONFIG.replace("[openai]", f"[openai, {others}, {{name: ovms, prefix: /o}}]")
    gateway, _ = await serve_with_failure(serve, monkeypatch, f"{config}health: {health}\n")
    paths = ("/t/v2/health/ready", "/g/health", "/m/v2/health/ready", "/o/v2/health/ready")

    responses = [await gateway.http.get(path) for path in paths]

    shown = {one.url.path: one.status_code for one in responses if one.status_code != 404}
    assert {one == 200 for one in shown.values()} == {succeeds}, shown
    assert len(shown) >= 3


async def test_health_of_a_listener_with_keys_names_no_model(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = 'keys: [{name: k, sha256: "' + "0" * 64 + '"}]\n'
    _, responses = await serve_with_failure(serve, monkeypatch, CONFIG + keys)

    assert responses[0].json() == {"status": "ok"}
    assert responses[2].json()["failed_models"] == ["large"]


async def test_only_admin_readiness_fails_without_a_ready_backend(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EchoBackend, "ready", False)
    _, responses = await serve_with_failure(serve, monkeypatch, CONFIG)

    assert [response.status_code for response in responses] == [200, 200, 503]
    assert [one.json()["failed_models"] for one in responses[:2]] == [["large"]] * 2


BROKEN_MODEL = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, ollama]}}]
admin: {{address: "127.0.0.1:0"}}
backends: {{local: {{kind: torch, path: "{path}"}}}}
models: {{m: {{backend: local}}}}
"""


async def test_client_of_a_model_that_cannot_be_loaded_sees_no_absolute_path(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator does, in the status and the log."""
    code, folder = tmp_path / "code", tmp_path / "model"
    code.mkdir()
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    reason = f"{folder}/model.safetensors is truncated"
    (code / "torch.py").write_text(f"raise ValueError({reason!r})\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(code), os.environ.get("PYTHONPATH", ""))))
    gateway = await serve(BROKEN_MODEL.format(path=folder))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": False}

    local = gateway.app.backends["local"]
    assert isinstance(local, ReportsFailure)
    await wait_until(lambda: local.failure is not None)
    failures = (await gateway.http.get(f"{gateway.admin}/-/status")).json()["failures"]
    paths = ("/v1/chat/completions", "/api/chat")
    responses = [await gateway.http.post(path, json=body) for path in paths]

    assert "model.safetensors is truncated" in responses[0].text
    for response in responses:
        assert response.status_code >= 500
        assert str(tmp_path) not in response.text
    assert reason in failures["local"]
