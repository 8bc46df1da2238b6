"""The OpenAPI documents of protocols, by option; tests/schema checks that they are true."""

from typing import Any

import pytest

from protocols.databricks.endpoints import Databricks
from protocols.mindie.endpoints import MindIE
from protocols.openai.endpoints import OpenAI
from protocols.ovms.endpoints import OVMS
from protocols.triton.endpoints import Triton


def list_operations(adapter: Any) -> dict[str, Any]:
    return dict(adapter.openapi_fragment().operations)


def get_request_schema(adapter: Any, variant: str) -> dict[str, Any]:
    """Return the schema of an operation's request body."""
    body = list_operations(adapter)[variant]["requestBody"]
    schema: dict[str, Any] = body["content"]["application/json"]["schema"]
    return schema


def get_media_types(adapter: Any, variant: str, status: str) -> set[str]:
    """Return the media types of an operation's response."""
    return set(list_operations(adapter)[variant]["responses"][status].get("content", {}))


def test_openai_schema_limits_the_safety_identifier_but_no_lists_of_stop_strings_and_tools() -> (
    None
):
    fields = get_request_schema(OpenAI(), "chat")["properties"]

    assert fields["safety_identifier"] == {
        "anyOf": [{"type": "string", "maxLength": 64}, {"type": "null"}]
    }
    assert "maxItems" not in fields["stop"]["anyOf"][0]["anyOf"][1]
    assert "maxItems" not in str(fields["tools"])


@pytest.mark.parametrize(
    ("adapter", "kinds_of_404", "kinds_of_ready"),
    [
        (Triton(), {"application/json", "text/plain"}, {"application/json", "text/plain"}),
        (Triton(status="sane"), {"application/json"}, {"application/json"}),
    ],
)
def test_triton_schema_has_text_plain_only_with_strict_status(
    adapter: Triton, kinds_of_404: set[str], kinds_of_ready: set[str]
) -> None:
    assert get_media_types(adapter, "infer", "404") == kinds_of_404
    assert get_media_types(adapter, "ready", "200") == kinds_of_ready


def test_triton_schema_lists_the_tensors_of_the_profile() -> None:
    schema = get_request_schema(Triton("trtllm"), "infer")["properties"]["inputs"]

    needed = [one["properties"]["name"]["const"] for one in schema["prefixItems"]]
    assert needed == ["text_input", "max_tokens"]
    assert schema["prefixItems"][0]["properties"]["shape"] == {"const": [1, 1]}
    assert get_request_schema(Triton("plain"), "infer")["properties"]["inputs"]["items"] is False


@pytest.mark.parametrize(
    ("operation", "response", "required"),
    [
        ("rerank_v1", "RerankResponse", ["model", "query", "documents"]),
        ("ranking", "RankingResponse", ["model", "query", "passages"]),
        ("score", "ScoreResponse", ["model"]),
        ("tokenize", "TokenizeResponse", ["model"]),
        ("detokenize", "DetokenizeResponse", ["model", "tokens"]),
    ],
)
def test_openai_schema_has_the_endpoints_of_reranking_and_tokenization(
    operation: str, response: str, required: list[str]
) -> None:
    fragment = OpenAI().openapi_fragment()
    content = fragment.operations[operation]["responses"]["200"]["content"]

    assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{response}"}
    assert response in fragment.schemas
    assert get_request_schema(OpenAI(), operation)["required"] == required


def test_ovms_schema_lists_the_enabled_endpoints() -> None:
    assert "ready" not in list_operations(OVMS())
    assert {"server", "live", "ready", "model ready"} <= list_operations(OVMS(kserve=True)).keys()


def test_ovms_schema_lists_the_fields_of_the_profile() -> None:
    today, early = (
        get_request_schema(OVMS(), "chat")["properties"],
        get_request_schema(OVMS("2024"), "chat")["properties"],
    )

    assert {"tools", "stop", "stream_options"} <= today.keys()
    assert not {"tools", "stop", "stream_options"} & early.keys()
    assert "diversity_penalty" in early

    answers = OVMS("2024").openapi_fragment().schemas
    assert "usage" not in answers["ChatAnswer"]["properties"]


def test_mindie_schema_requires_model_without_a_default_model() -> None:
    assert get_request_schema(MindIE(), "tokenizer")["required"] == ["inputs", "model"]
    assert get_request_schema(MindIE(model="m"), "tokenizer")["required"] == ["inputs"]


def test_mindie_schema_lists_the_fields_of_the_profile() -> None:
    today, early = (
        get_request_schema(MindIE(), "chat")["properties"],
        get_request_schema(MindIE("rc1"), "chat")["properties"],
    )

    assert {"tools", "stop", "top_k"} <= today.keys()
    assert not {"tools", "stop", "top_k"} & early.keys()

    plain = get_request_schema(MindIE(vllm_validator=False), "chat")["properties"]
    assert plain["temperature"] != today["temperature"]

    chunk = MindIE("rc1").openapi_fragment().schemas["ChatChunk"]["properties"]
    assert "usage" not in chunk


def test_databricks_config_schema_is_an_empty_object() -> None:
    config = list_operations(Databricks())["config"]
    assert config["responses"]["200"]["content"]["application/json"]["schema"]["properties"] == {}
