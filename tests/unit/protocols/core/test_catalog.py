"""What the engine understands of a model, in words."""

import pytest

from protocols.core.catalog import ModelFeatures, ModelState, ModelWeights

FULL = ModelFeatures(
    chat=True,
    tool_calls="Hermes",
    found_by="chat template",
    enforced="always",
    functions_in="chat template",
    reasoning="<think> … </think>",
    keeps_reasoning=True,
    schema=True,
    context_length=512,
    prompt_lookup="off by configuration",
)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (
            FULL,
            {
                "chat": "by the chat template",
                "tool calls": "Hermes (found by: chat template)",
                "calls are enforced": "always",
                "functions are in": "the chat template",
                "reasoning": "<think> … </think>",
                "earlier reasoning": "goes back to the model",
                "schema": "enforced by a grammar",
                "context": "512 tokens",
                "prompt lookup": "off by configuration",
            },
        ),
        (
            ModelFeatures(chat=True, tool_calls="Granite", enforced="with options"),
            {
                "calls are enforced": "with options; otherwise they are parsed",
                "reasoning": "none",
                "earlier reasoning": "is not in the prompt",
            },
        ),
        (
            ModelFeatures(problem="it has no chat template"),
            {
                "chat": "no: it has no chat template",
                "tool calls": "not understood: it has no chat template",
                "schema": "not enforced",
                "context": "unknown",
                "prompt lookup": "unknown",
            },
        ),
    ],
)
def test_description_names_each_subject(features: ModelFeatures, expected: dict[str, str]) -> None:
    shown = dict(features.describe())
    assert {subject: shown[subject] for subject in expected} == expected


@pytest.mark.parametrize(("length", "shown"), [(512, "512 tokens"), (None, "unknown")])
def test_model_that_generates_no_text_is_described_by_its_task(
    length: int | None, shown: str
) -> None:
    features = ModelFeatures(task="embedding", context_length=length)
    assert dict(features.describe()) == {
        "task": "embedding",
        "context": shown,
        "weights": "unknown",
    }


WEIGHTS = ModelWeights("gguf", "llama", 134_515_008, "Q4_1", 98_362_432)


def test_state_of_a_model_before_its_first_load_tells_its_weights() -> None:
    unloaded = ModelState(loaded=False, on_demand=True, weights=WEIGHTS)
    loaded = ModelState(loaded=True, features=ModelFeatures(chat=True))
    assert WEIGHTS.describe() == "llama, 134.5 million parameters, Q4_1, 98 MB of gguf"
    assert unloaded.known_weights == WEIGHTS
    assert loaded.known_weights is None
    assert dict(unloaded.describe()) == {
        "task": "unknown: it has not been loaded yet",
        "weights": WEIGHTS.describe(),
    }
    assert dict(loaded.describe())["weights"] == "unknown"
