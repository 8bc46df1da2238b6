"""What dialects tell of themselves, setting by setting. That it is true: tests/schema."""

from typing import Any

import pytest

from protocols.databricks.endpoints import Databricks
from protocols.mindie.endpoints import MindIE
from protocols.openai.endpoints import OpenAI
from protocols.ovms.endpoints import OVMS
from protocols.triton.endpoints import Triton


def operations(dialect: Any) -> dict[str, Any]:
    return dict(dialect.openapi_fragment().operations)


def asked(dialect: Any, variant: str) -> dict[str, Any]:
    """The schema of the body that an operation takes."""
    body = operations(dialect)[variant]["requestBody"]
    found: dict[str, Any] = body["content"]["application/json"]["schema"]
    return found


def kinds(dialect: Any, variant: str, status: str) -> set[str]:
    """The media types of an operation's answer."""
    return set(operations(dialect)[variant]["responses"][status].get("content", {}))


def test_openai_tells_how_long_who_asks_may_be_and_how_many_stops_there_may_be() -> None:
    fields = asked(OpenAI(), "chat")["properties"]

    assert fields["safety_identifier"] == {
        "anyOf": [{"type": "string", "maxLength": 64}, {"type": "null"}]
    }
    assert fields["stop"]["anyOf"][0]["anyOf"][1]["maxItems"] == 4


@pytest.mark.parametrize(
    ("dialect", "kinds_of_404", "kinds_of_ready"),
    [
        (Triton(), {"application/json", "text/plain"}, {"application/json", "text/plain"}),
        (Triton(status="sane"), {"application/json"}, {"application/json"}),
    ],
)
def test_triton_labels_what_is_early_as_the_original_does(
    dialect: Triton, kinds_of_404: set[str], kinds_of_ready: set[str]
) -> None:
    assert kinds(dialect, "infer", "404") == kinds_of_404
    assert kinds(dialect, "ready", "200") == kinds_of_ready


def test_triton_tells_the_tensors_of_the_profile() -> None:
    schema = asked(Triton("trtllm"), "infer")["properties"]["inputs"]

    needed = [one["properties"]["name"]["const"] for one in schema["prefixItems"]]
    assert needed == ["text_input", "max_tokens"]
    assert schema["prefixItems"][0]["properties"]["shape"] == {"const": [1, 1]}
    assert asked(Triton("plain"), "infer")["properties"]["inputs"]["items"] is False


def test_ovms_tells_what_is_mounted() -> None:
    assert "ready" not in operations(OVMS())
    assert {"server", "live", "ready", "model ready"} <= operations(OVMS(kserve=True)).keys()


def test_ovms_tells_what_the_release_knows() -> None:
    today, early = asked(OVMS(), "chat")["properties"], asked(OVMS("2024"), "chat")["properties"]

    assert {"tools", "stop", "stream_options"} <= today.keys()
    assert not {"tools", "stop", "stream_options"} & early.keys()
    assert "diversity_penalty" in early
    answers = OVMS("2024").openapi_fragment().schemas
    assert "usage" not in answers["ChatAnswer"]["properties"]


def test_mindie_tells_which_endpoint_needs_a_model() -> None:
    assert asked(MindIE(), "tokenizer")["required"] == ["inputs", "model"]
    assert asked(MindIE(model="m"), "tokenizer")["required"] == ["inputs"]


def test_mindie_tells_what_the_release_knows() -> None:
    today, early = asked(MindIE(), "chat")["properties"], asked(MindIE("rc1"), "chat")["properties"]

    assert {"tools", "stop", "top_k"} <= today.keys()
    assert not {"tools", "stop", "top_k"} & early.keys()
    plain = asked(MindIE(vllm_validator=False), "chat")["properties"]
    assert plain["temperature"] != today["temperature"]
    chunk = MindIE("rc1").openapi_fragment().schemas["ChatChunk"]["properties"]
    assert "usage" not in chunk


def test_databricks_tells_of_its_host() -> None:
    told = operations(Databricks())["config"]
    assert told["responses"]["200"]["content"]["application/json"]["schema"]["properties"] == {}
