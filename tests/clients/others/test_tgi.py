"""Clients of Text Generation Inference: text-generation and huggingface_hub."""

import pytest
import text_generation
from huggingface_hub import InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError
from text_generation import errors
from text_generation.types import FinishReason


def make_client(gateway: str, key: str, mount: str = "tgi") -> text_generation.Client:
    return text_generation.Client(f"{gateway}/{mount}", headers={"Authorization": f"Bearer {key}"})


def make_inference(gateway: str, key: str, mount: str = "tgi") -> InferenceClient:
    return InferenceClient(f"{gateway}/{mount}", token=key)


def test_generate_returns_text_and_details(gateway: str, key: str) -> None:
    response = make_client(gateway, key).generate("a b", max_new_tokens=2)

    assert response.generated_text == "Hello world"
    assert response.details.finish_reason is FinishReason.Length
    assert [token.text for token in response.details.tokens] == ["Hello", " world"]


def test_best_of_returns_the_other_sequence(gateway: str, key: str) -> None:
    response = make_client(gateway, key).generate("a b", best_of=2, do_sample=True)

    others = response.details.best_of_sequences
    assert others is not None
    assert others[0].generated_text == response.generated_text == "Hello world!"


def test_generate_stream_ends_with_the_whole_text(gateway: str, key: str) -> None:
    *_, last = make_client(gateway, key).generate_stream("a b", stop_sequences=["rld"])

    assert last.generated_text == "Hello world"
    assert last.details is not None
    assert last.details.finish_reason is FinishReason.StopSequence


def test_chat_of_text_generation(gateway: str, key: str) -> None:
    messages = [text_generation.types.Message(role="user", content="hi")]

    response = make_client(gateway, key).chat(messages)

    assert response.choices[0].message.content == "Hello world!"


def test_errors_have_their_classes(gateway: str, key: str) -> None:
    with pytest.raises(errors.ValidationError, match="strictly positive"):
        make_inference_error(gateway, key)
    with pytest.raises(errors.OverloadedError):
        make_client(gateway, key, "tgi-down").generate("a")
    with pytest.raises(errors.GenerationError):
        list(make_client(gateway, key, "tgi-broken").generate_stream("a"))


def make_inference_error(gateway: str, key: str) -> None:
    """The client validates parameters itself, so the request is built as it would build it."""
    client = make_client(gateway, key)
    import requests  # noqa: PLC0415 - the client's own library

    data = '{"inputs": "a", "parameters": {"temperature": 0}}'
    response = requests.post(client.base_url, data=data, headers=client.headers, timeout=9)
    raise errors.parse_error(response.status_code, response.json())


def test_inference_client_generates(gateway: str, key: str) -> None:
    client = make_inference(gateway, key)

    response = client.text_generation("a b", details=True, max_new_tokens=9)
    pieces = list(client.text_generation("a b", stream=True))

    *_, last = client.text_generation("a b", stream=True, details=True)

    assert response.details is not None
    assert (response.generated_text, response.details.finish_reason) == (
        "Hello world!",
        "eos_token",
    )
    assert pieces == ["Hello", " world", "!"]
    assert last.generated_text == "Hello world!"
    assert last.details is not None
    assert last.details.input_length == 2


def test_inference_client_chats(gateway: str, key: str) -> None:
    client = make_inference(gateway, key)
    messages = [{"role": "user", "content": "hi"}]

    response = client.chat_completion(messages)
    chunks = client.chat_completion(messages, stream=True)

    assert response.choices[0].message.content == "Hello world!"
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "Hello world!"


def test_inference_client_embeds(gateway: str, key: str) -> None:
    vectors = make_inference(gateway, key, "tgi-embed").feature_extraction("a b")

    assert vectors.tolist() == [[3.0, 2.0, 0.5, -0.25]]


def test_inference_client_raises_typed_errors(gateway: str, key: str) -> None:
    with pytest.raises(ValidationError, match="strictly positive"):
        make_inference(gateway, key).text_generation("a b", temperature=-1.0)
    with pytest.raises(OverloadedError):
        make_inference(gateway, key, "tgi-down").text_generation("a b")
