"""instructor with openai 2: every mode of structured output."""

from typing import Any

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel

WHO: Any = [{"role": "user", "content": "who?"}]


class Person(BaseModel):
    name: str
    age: int


class Number(BaseModel):
    x: int


@pytest.fixture
def client(gateway: str, key: str) -> OpenAI:
    return OpenAI(base_url=f"{gateway}/v1", api_key=key, max_retries=0)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT])
def test_tool_modes_return_the_response_model(client: OpenAI, mode: instructor.Mode) -> None:
    response = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="chat", response_model=Number, messages=WHO
    )

    assert response.model_dump() == {"x": 1}


@pytest.mark.parametrize(
    "mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON, instructor.Mode.MD_JSON]
)
def test_json_modes_return_the_response_model(client: OpenAI, mode: instructor.Mode) -> None:
    response = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="structured", response_model=Person, messages=WHO
    )

    assert response.model_dump() == {"name": "Ada", "age": 36}


@pytest.mark.parametrize(
    ("mode", "model", "expected"),
    [
        (instructor.Mode.TOOLS, "chat", Number(x=1)),
        (instructor.Mode.JSON_SCHEMA, "structured", Person(name="Ada", age=36)),
    ],
)
def test_partial_response_model_is_streamed(
    client: OpenAI, mode: instructor.Mode, model: str, expected: BaseModel
) -> None:
    partial = instructor.from_openai(client, mode=mode).chat.completions.create_partial(
        model=model, response_model=type(expected), messages=WHO
    )
    dumps = [one.model_dump() for one in partial]

    assert len(dumps) > 1
    assert None in dumps[0].values()
    assert dumps[-1] == expected.model_dump()
