"""The core types behave as documented."""

import pytest
from msgspec.structs import replace

from protocols.core import errors
from protocols.core.catalog import ModelInfo, VersionInfo
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    LogprobsOptions,
    Message,
    PromptOptions,
    ResponseOptions,
    SamplingParams,
    TextPart,
)


def test_message_text_joins_its_text_parts() -> None:
    message = Message("user", (TextPart("a"), ImagePart("data:x"), TextPart("b")))

    assert message.text == "ab"


@pytest.mark.parametrize(
    ("prompts", "n", "choices"), [((), None, 1), ((), 3, 3), (("a", "b"), 2, 4)]
)
def test_choice_count_is_n_times_prompts(
    prompts: tuple[str, ...], n: int | None, choices: int
) -> None:
    request = GenerationRequest(model="m", kind="completion", prompts=prompts, n=n)

    assert request.choice_count == choices


def test_set_fields_are_keyed_by_path() -> None:
    request = GenerationRequest(
        model="m",
        kind="chat",
        echo=False,
        sampling=SamplingParams(top_k=5, do_sample=False),
        templating=PromptOptions(mode="raw"),
        logprobs=LogprobsOptions(),
        response_options=ResponseOptions("each"),
    )

    set_fields = {path: value for path, value in request.set_fields.items() if value}
    unsaid = {path for path, value in request.set_fields.items() if value is False}

    assert set_fields == {
        "model": "m",
        "kind": "chat",
        "templating.mode": "raw",
        "sampling.top_k": 5,
        "response_options.usage": "each",
    }
    assert unsaid == {"echo", "sampling.do_sample"}
    assert request.set_fields["logprobs.top"] == 0


def test_unset_fields_have_no_path() -> None:
    set_fields = EmbeddingRequest(model="m", inputs=("a",), dimensions=3).set_fields

    assert set_fields["inputs"] == ("a",)
    assert set_fields["dimensions"] == 3
    assert "normalize" not in set_fields
    assert not [
        path for path in GenerationRequest(model="m", kind="chat").set_fields if "." in path
    ]


def test_replaced_field_is_in_set_fields() -> None:
    request = GenerationRequest(model="m", kind="chat", n=2)

    assert request.set_fields["n"] == 2
    assert replace(request, n=3).set_fields["n"] == 3


def test_model_is_ready_if_one_version_is_ready() -> None:
    def model(*ready: bool) -> ModelInfo:
        return ModelInfo("m", tuple(VersionInfo("1", "w", 50, one) for one in ready))

    assert model(False, True).ready
    assert not model(False).ready


def test_errors_have_an_origin_and_a_retryable_flag() -> None:
    blame = {
        errors.RequestTooLarge("x", limit=1): "client",
        errors.Overloaded("x"): "gateway",
        errors.WorkerUnreachable("x"): "worker",
        errors.InternalError("x"): "gateway",
    }

    assert {error: error.origin for error in blame} == blame
    assert errors.WorkerUnreachable("x").retryable
    assert not errors.StreamBroken("x").retryable
