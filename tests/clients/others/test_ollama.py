"""Ollama's own Python client, and LangChain's."""

import ollama
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel

HI = [{"role": "user", "content": "say hi"}]


def f(x: int) -> str:
    """A tool.

    Args:
        x: a number
    """
    return str(x)


class Person(BaseModel):
    """Who."""

    name: str
    age: int


@pytest.fixture
def client(gateway: str, key: str) -> ollama.Client:
    return ollama.Client(gateway, headers={"Authorization": f"Bearer {key}"})


def test_chat_returns_the_response_with_durations(client: ollama.Client) -> None:
    response = client.chat("chat", HI)

    assert response.message.content == "Hello world!"
    assert (response.done, response.done_reason) == (True, "stop")
    assert (response.prompt_eval_count, response.eval_count) == (2, 3)
    assert response.total_duration
    assert response.eval_duration
    assert response.total_duration >= response.eval_duration


def test_chat_streams_the_pieces(client: ollama.Client) -> None:
    lines = list(client.chat("chat:latest", HI, stream=True))

    assert [line.message.content for line in lines] == ["Hello", " world", "!", ""]
    assert [line.done for line in lines] == [False, False, False, True]


def test_line_separators_of_unicode_do_not_break_a_stream(client: ollama.Client) -> None:
    lines = client.chat("separators", HI, stream=True)

    assert "".join(line.message.content or "" for line in lines) == "a\u2028b\u0085cé"


def test_tool_call_and_its_result(client: ollama.Client) -> None:
    question = {"role": "user", "content": "use the tool"}

    first = client.chat("chat", [question], tools=[f])
    assert first.message.tool_calls is not None

    [call] = first.message.tool_calls
    result = {"role": "tool", "tool_name": "f", "content": "1"}
    second = client.chat("chat", [question, first.message, result, *HI], tools=[f])

    assert (call.function.name, call.function.arguments) == ("f", {"x": 1})
    assert second.message.content == "Hello world!"


def test_schema_is_a_format(client: ollama.Client) -> None:
    response = client.chat("structured", HI, format=Person.model_json_schema())

    assert Person.model_validate_json(response.message.content or "") == Person(name="Ada", age=36)


def test_thinking_is_separate_from_the_text(client: ollama.Client) -> None:
    response = client.chat("thinking", HI, think=True)

    assert (response.message.thinking, response.message.content) == ("hm", "Hello")
    with pytest.raises(ollama.ResponseError, match='"chat" does not support thinking'):
        client.chat("chat", HI, think=True)


def test_generate_whole_and_streamed(client: ollama.Client) -> None:
    options = {"num_predict": 2, "temperature": 0}

    assert client.generate("chat", "a b", options=options).response == "Hello world"

    lines = client.generate("chat", "a b", stream=True, keep_alive="5m")
    assert "".join(line.response for line in lines) == "Hello world!"


def test_model_is_loaded_and_unloaded(client: ollama.Client) -> None:
    assert client.generate("chat", "").done_reason == "load"
    assert client.generate("chat", "", keep_alive=0).done_reason == "unload"


def test_embeddings(client: ollama.Client) -> None:
    assert client.embed("embed", ["a b"], dimensions=2).embeddings[0] == pytest.approx(
        [0.83205, 0.5547], abs=1e-4
    )
    assert list(client.embeddings("embed", "a b").embedding) == [3.0, 2.0, 0.5, -0.25]


def test_models_are_listed_and_described(client: ollama.Client) -> None:
    assert "chat:latest" in [one.model for one in client.list().models]
    assert "chat:latest" in [one.model for one in client.ps().models]
    assert "tools" in (client.show("chat").capabilities or ())


@pytest.mark.parametrize(
    ("model", "status", "text"),
    [
        ("nope", 404, "model 'nope' not found"),
        ("limited", 429, "rate limit exceeded"),
        ("down", 503, "server busy"),
        ("failing", 502, "the worker answered with an error"),
    ],
)
def test_errors_are_response_errors(
    client: ollama.Client, model: str, status: int, text: str
) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match=text) as excinfo:
            list(client.chat(model, HI, stream=stream))
        assert excinfo.value.status_code == status


def test_error_in_a_stream_raises(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="the worker"):
        list(client.chat("broken", HI, stream=True))


def test_wrong_key_is_an_error(gateway: str) -> None:
    with pytest.raises(ollama.ResponseError, match="unauthorized"):
        ollama.Client(gateway).list()


# --- LangChain ------------------------------------------------------------------------------------


def make_chat(gateway: str, key: str, model: str = "chat") -> ChatOllama:
    headers = {"headers": {"Authorization": f"Bearer {key}"}}
    return ChatOllama(
        base_url=gateway, model=model, client_kwargs=headers, validate_model_on_init=True
    )


def test_langchain_invokes_with_usage(gateway: str, key: str) -> None:
    response = make_chat(gateway, key).invoke("say hi")

    assert response.content == "Hello world!"
    assert response.usage_metadata is not None
    assert response.usage_metadata["total_tokens"] == 5


def test_langchain_calls_a_tool(gateway: str, key: str) -> None:
    model = make_chat(gateway, key).bind_tools([f])
    question = HumanMessage("use the tool")

    call = model.invoke([question])
    assert isinstance(call, AIMessage)

    [tool_call] = call.tool_calls
    result = ToolMessage("1", tool_call_id=tool_call["id"])
    response = model.invoke([question, call, result, HumanMessage("say hi")])

    assert (tool_call["name"], tool_call["args"]) == ("f", {"x": 1})
    assert response.content == "Hello world!"


def test_langchain_reads_a_schema(gateway: str, key: str) -> None:
    model = make_chat(gateway, key, "structured").with_structured_output(Person)

    assert model.invoke("who?") == Person(name="Ada", age=36)


def test_langchain_completes_and_embeds(gateway: str, key: str) -> None:
    headers = {"headers": {"Authorization": f"Bearer {key}"}}

    text = OllamaLLM(base_url=gateway, model="chat", client_kwargs=headers).invoke("a b")
    vectors = OllamaEmbeddings(base_url=gateway, model="embed", client_kwargs=headers)

    assert text == "Hello world!"
    assert vectors.embed_query("a b")[0] == pytest.approx(0.82223, abs=1e-4)
