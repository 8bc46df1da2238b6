"""The vocabulary says what it means."""

import pytest

from gateway.core import errors
from gateway.core.catalog import ModelInfo, VersionInfo
from gateway.core.types import GenerateRequest, ImagePart, Message, TextPart


def test_the_text_of_a_message_is_its_text_parts() -> None:
    message = Message("user", (TextPart("a"), ImagePart("data:x"), TextPart("b")))

    assert message.text == "ab"


@pytest.mark.parametrize(
    ("prompts", "n", "choices"), [((), None, 1), ((), 3, 3), (("a", "b"), 2, 4)]
)
def test_choices_are_n_for_each_prompt(
    prompts: tuple[str, ...], n: int | None, choices: int
) -> None:
    request = GenerateRequest(model="m", kind="completion", prompts=prompts, n=n)

    assert request.choices == choices


def test_a_model_is_ready_when_one_version_is() -> None:
    def model(*ready: bool) -> ModelInfo:
        return ModelInfo("m", tuple(VersionInfo("1", "w", 50, one) for one in ready))

    assert model(False, True).ready
    assert not model(False).ready


def test_every_error_says_who_is_to_blame() -> None:
    blame = {
        errors.TooLarge("x", limit=1): "client",
        errors.Overloaded("x"): "gateway",
        errors.WorkerUnreachable("x"): "worker",
        errors.InternalError("x"): "gateway",
    }

    assert {error: error.blame for error in blame} == blame
    assert errors.WorkerUnreachable("x").retryable
    assert not errors.StreamBroken("x").retryable
