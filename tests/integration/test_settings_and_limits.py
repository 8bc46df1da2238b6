"""Settings and limits also hold for forwarded, stored, binary and shadowed requests."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.config.schema import RedactionConfig
from gateway.observability.redaction import Redactor
from tests.conftest import Serve
from tests.integration.test_responses_api import respond
from tests.support.fakes import ScriptedWorker
from tests.support.waiting import PATIENCE

ECHO = {"kind": "echo", "script": ["so"]}
LIMITS = {"shutdown_delay": "0s", "drain_timeout": "1s"}


def build_config(**sections: Any) -> str:
    config = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
        "backends": {"w": ECHO, "v": ECHO},
        "models": {"m": {"backend": "w"}},
        "limits": LIMITS,
    }
    return json.dumps(config | sections)


@pytest.mark.parametrize("top_k", [{}, {"top_k": 4}])
async def test_unsupported_parameters_keep_the_protocols_own_headers(
    serve: Serve, top_k: dict[str, int]
) -> None:
    response = {
        "id": "c", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None,
        "content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip
    async with ScriptedWorker([respond(response)]) as worker:
        pool = {"protocol": "anthropic", "workers": [worker.url]}
        gateway = await serve(
            build_config(
                listeners=[{"address": "127.0.0.1:0", "protocols": ["anthropic"]}],
                backends={"w": pool | {"unsupported_parameters": ["sampling.top_k"]}},
            )
        )
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}

        reply = await gateway.http.post("/v1/messages", json=body | top_k)

        assert reply.status_code == 200
        assert worker.requests[-1].headers["anthropic-version"] == "2023-06-01"


async def test_unsupported_parameters_remove_only_what_they_name(serve: Serve) -> None:
    response = {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"},
                     "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }  # fmt: skip
    async with ScriptedWorker([respond(response)]) as worker:
        pool = {"protocol": "openai", "workers": [worker.url]}
        gateway = await serve(
            build_config(backends={"w": pool | {"unsupported_parameters": ["sampling.seed"]}})
        )
        message = {"role": "user", "content": "x", "vendor_key": 7}
        body = {"model": "m", "seed": 1, "messages": [message]}

        reply = await gateway.http.post("/v1/chat/completions", json=body)

        assert reply.headers["x-interlingua-loss"] == "seed=dropped"
        assert json.loads(worker.requests[-1].body)["messages"] == [message]


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 50}, {"on_loss": "reject"}])
async def test_headers_reach_a_worker_of_the_protocol_or_are_reported(
    serve: Serve, settings: dict[str, Any]
) -> None:
    response = {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"},
                     "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }  # fmt: skip
    limits = {"limits": {"max_tokens": 50}} if "max_tokens" in settings else settings
    async with ScriptedWorker([respond(response)]) as worker:
        pool = {"protocol": "openai", "workers": [worker.url]}
        gateway = await serve(
            build_config(backends={"w": pool}, models={"m": {"backend": "w", **limits}})
        )
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        headers = {
            "OpenAI-Beta": "a=1",
            "OpenAI-Project": "p",
            "Cookie": "c",
            "X-Stainless-OS": "o",
        }

        reply = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)

        sent = worker.requests[-1].headers
        assert reply.status_code == 200
        assert reply.headers["x-interlingua-loss"] == "header.openai-project=dropped"
        assert sent["openai-beta"] == "a=1"
        assert not {"openai-project", "cookie", "x-stainless-os"} & {one.lower() for one in sent}


async def test_binary_data_of_triton_is_not_counted_as_json(serve: Serve) -> None:
    gateway = await serve(
        build_config(listeners=[{"address": "127.0.0.1:0", "protocols": ["triton"]}])
    )
    text = b"for (i=0;i<n;i++) { x[i] = {a, b}; }\n" * 12_000
    data = len(text).to_bytes(4, "little") + text
    tensor: dict[str, Any] = {"name": "text_input", "shape": [1], "datatype": "BYTES"}
    tensor["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": str(len(head))}

    reply = await gateway.http.post("/v2/models/m/infer", content=head + data, headers=headers)
    objects = b'{"inputs":[' + b",".join([b"{}"] * 30_000) + b"]}"

    refused = await gateway.http.post("/v2/models/m/infer", content=objects)

    assert reply.status_code == 200
    assert "`limits.body_objects` allows 20000" in refused.text


async def test_shadow_of_a_stateful_request_has_its_history(serve: Serve) -> None:
    model = {
        "versions": {"1": {"backend": "w"}, "2": {"backend": "v"}},
        "split": {"weights": {"1": 1, "2": 0}},
        "shadow": {"to": "2", "share": "100%"},
    }
    gateway = await serve(build_config(models={"m": model}))
    compared = asyncio.Queue[Any]()
    gateway.app._services.shadow_manager.add_reporter(compared.put_nowait)
    body = {"model": "m", "input": "x", "temperature": 0}
    first = await gateway.http.post("/v1/responses", json=body)
    await asyncio.wait_for(compared.get(), PATIENCE)

    again = body | {"previous_response_id": first.json()["id"]}
    assert (await gateway.http.post("/v1/responses", json=again)).status_code == 200

    comparison = await asyncio.wait_for(compared.get(), PATIENCE)

    assert (comparison.shadow.outcome, comparison.equal) == ("ok", True)


async def test_largest_forwarded_body_fits_into_the_budget(serve: Serve) -> None:
    pool = {"protocol": "openai", "workers": ["http://127.0.0.1:9"]}
    limits = LIMITS | {"body": "1MiB", "memory": "1MiB"}
    gateway = await serve(build_config(limits=limits, backends={"w": pool}))
    body = {"model": "m", "input": "x" * 1_000_000, "voice": "a"}

    reply = await gateway.http.post("/v1/audio/speech", json=body)

    assert reply.json()["error"]["message"] == "the worker is unreachable"
    assert gateway.app.memory.get_use("bodies") == 0


async def test_forwarded_json_is_counted_before_it_is_decoded(serve: Serve) -> None:
    pool = {"protocol": "openai", "workers": ["http://127.0.0.1:9"]}
    gateway = await serve(build_config(backends={"w": pool}))
    body = {"model": "m"} | dict.fromkeys(map(str, range(1_000_001)), 0)

    reply = await gateway.http.post("/v1/moderations", json=body)

    assert reply.status_code == 413


async def test_references_are_loaded_within_the_deadline(serve: Serve) -> None:
    gateway = await serve(build_config())
    store: Any = gateway.app._services.reference_loader.store  # type: ignore[union-attr]

    async def wait(owner: str, names: Sequence[str]) -> Mapping[str, Any]:
        await asyncio.sleep(600)
        raise AssertionError(owner, names)

    store.locate_responses = wait
    body = {"model": "m", "input": "y", "previous_response_id": "resp_1"}
    headers = {"x-interlingua-timeout": "0.1"}

    async with asyncio.timeout(30):
        replies = await asyncio.gather(
            *(gateway.http.post("/v1/responses", json=body, headers=headers) for _ in range(10))
        )

    assert {one.status_code for one in replies} == {504}


async def test_objects_of_references_count_as_those_of_the_body(serve: Serve) -> None:
    gateway = await serve(build_config(limits=LIMITS | {"body_objects": 50}))
    content = [{"type": "input_text", "text": "x" * 2000}] * 45
    body = {"model": "m", "input": [{"role": "user", "content": content}]}
    stored = (await gateway.http.post("/v1/responses", json=body)).json()
    items = (await gateway.http.get(f"/v1/responses/{stored['id']}/input_items")).json()["data"]
    reference = {"type": "item_reference", "id": items[0]["id"]}

    reply = await gateway.http.post("/v1/responses", json={"model": "m", "input": [reference] * 40})

    assert reply.status_code == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "host.docker.internal:8000"}, 200),
        ({"origin": "https://app.example", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://app.example", "sec-fetch-site": "same-site"}, 403),
        ({"host": "app.example", "sec-fetch-site": "same-origin"}, 403),
    ],
)
async def test_listener_without_keys_knows_same_origin_pages_behind_proxies(
    serve: Serve, headers: dict[str, str], status: int
) -> None:
    gateway = await serve(build_config())

    assert (await gateway.http.get("/v1/models", headers=headers)).status_code == status


@pytest.mark.parametrize("text", ["Server=x;Uid=sa;Pwd=hunter22;", "Api_Key=abcdef123456"])
def test_passwords_are_found_in_upper_and_lower_case(text: str) -> None:
    redactor = Redactor(RedactionConfig())

    assert not redactor.is_clean(text.encode())
    assert "[redacted:password]" in redactor.redact("request", text, [])
