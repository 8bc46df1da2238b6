"""The same clients with the small built-in models."""

from typing import Any

import numpy as np
import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.service.serving import ChatMessage, ChatMessageRole
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import SecretStr
from tritonclient.http import InferenceServerClient, InferInput

pytestmark = pytest.mark.slow
QUESTION = "What is the capital of France?"


def test_databricks_sdk_queries_the_built_in_model(small: str) -> None:
    client = WorkspaceClient(host=small, token="any")
    response: Any = client.serving_endpoints.query(
        "smollm2",
        messages=[ChatMessage(role=ChatMessageRole.USER, content=QUESTION)],
        max_tokens=24,
        temperature=0,
    )

    assert "Paris" in response.choices[0].message.content


def test_tritonclient_queries_the_built_in_model(small: str) -> None:
    prompt = InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([QUESTION.encode()], dtype=np.object_))

    with InferenceServerClient(small.removeprefix("http://")) as client:
        response = client.infer("smollm2", [prompt], parameters={"max_tokens": 24})

    assert response.as_numpy("text_output")[0]


def test_langchain_queries_the_built_in_models(small: str) -> None:
    model = ChatOpenAI(base_url=f"{small}/v1", api_key=SecretStr("any"), model="smollm2")
    vectors = OpenAIEmbeddings(
        base_url=f"{small}/v1",
        api_key=SecretStr("any"),
        model="minilm",
        check_embedding_ctx_length=False,
    ).embed_documents(["a cat sleeps", "a kitten naps", "interest rates rose"])

    text = "".join(str(chunk.content) for chunk in model.stream(QUESTION, max_tokens=24))
    assert "Paris" in text

    cat, kitten, rates = np.array(vectors)
    assert cat @ kitten > cat @ rates
