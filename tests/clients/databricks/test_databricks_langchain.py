"""databricks-langchain's ChatDatabricks, on chat completions and on the Responses API."""

import os
from typing import Any

import pytest
from databricks.sdk import WorkspaceClient
from databricks_langchain import ChatDatabricks


def create_chat(**options: Any) -> ChatDatabricks:
    workspace = WorkspaceClient(host=os.environ["SCRIPTED_URL"], token="sk-clients")
    return ChatDatabricks(model="chat", workspace_client=workspace, **options)


def read_text(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of blocks."""
    return content if isinstance(content, str) else "".join(one["text"] for one in content)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_answer_is_read(use_responses_api: bool) -> None:
    chat = create_chat(use_responses_api=use_responses_api)

    assert read_text(chat.invoke("say hi").content) == "Hello world!"


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_stream_is_read(use_responses_api: bool) -> None:
    chat = create_chat(use_responses_api=use_responses_api)

    pieces = [read_text(one.content) for one in chat.stream("say hi")]

    assert "".join(pieces).startswith("Hello world!")
    assert len(pieces) > 2
