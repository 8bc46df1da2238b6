"""openai-agents with its default API, Responses, and a chat completions worker."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

set_tracing_disabled(disabled=True)


class Person(BaseModel):
    """The output type of ``structured``."""

    name: str
    age: int


@function_tool  # type: ignore[untyped-decorator, unused-ignore]
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@pytest.fixture
def client() -> AsyncOpenAI:
    url = os.environ["AGENTS_URL"]
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-clients", max_retries=0)


def create_agent(client: AsyncOpenAI, model: str, **options: Any) -> Agent[Any]:
    return Agent(
        name=options.pop("name", model), model=OpenAIResponsesModel(model, client), **options
    )


def run(agent: Agent[Any], text: str = "go", **options: Any) -> Any:
    return asyncio.run(Runner.run(agent, text, run_config=RunConfig(), **options))


def test_documented_program(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "openai-agents.md").read_text("utf-8")
    [program] = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "program.py").write_text(
        program.replace("http://127.0.0.1:8000", os.environ["AGENTS_URL"])
    )

    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert ended.stdout == "It is sunny in 東京.\n", ended.stderr


def test_answer_with_instructions(client: AsyncOpenAI) -> None:
    result = run(create_agent(client, "plain", instructions="Be brief."))

    assert result.final_output == "Hello world!"
    assert result.raw_responses[0].usage.total_tokens == 12


def test_tool_is_called(client: AsyncOpenAI) -> None:
    result = run(create_agent(client, "weather", tools=[get_weather]))

    kinds = [type(item).__name__ for item in result.new_items]
    assert result.final_output == "It is sunny in 東京."
    assert "ToolCallItem" in kinds
    assert "sunny in 東京" in [getattr(item, "output", None) for item in result.new_items]


def test_tool_call_is_streamed(client: AsyncOpenAI) -> None:
    async def run_agent() -> tuple[list[str], Any]:
        result = Runner.run_streamed(create_agent(client, "weather", tools=[get_weather]), "go")
        kinds = [
            event.data.type
            async for event in result.stream_events()
            if event.type == "raw_response_event"
        ]
        return kinds, result.final_output

    kinds, output = asyncio.run(run_agent())

    assert output == "It is sunny in 東京."
    assert "response.function_call_arguments.delta" in kinds
    assert "response.reasoning_text.delta" in kinds
    assert kinds.count("response.completed") == 2


def test_reasoning_summary(client: AsyncOpenAI) -> None:
    settings = ModelSettings(reasoning=Reasoning(effort="low", summary="auto"))

    result = run(create_agent(client, "weather", tools=[get_weather], model_settings=settings))

    first = result.raw_responses[0].output[0]
    assert (first.type, first.summary[0].text) == ("reasoning", "I call a tool.")


def test_handoff(client: AsyncOpenAI) -> None:
    expert = create_agent(client, "plain", name="expert")

    result = run(create_agent(client, "triage", handoffs=[expert]))

    assert result.last_agent.name == "expert"
    assert result.final_output == "Hello world!"


def test_output_type(client: AsyncOpenAI) -> None:
    result = run(create_agent(client, "structured", output_type=Person))

    assert result.final_output == Person(name="Ada", age=36)


def test_previous_response_replaces_history(client: AsyncOpenAI) -> None:
    async def run_agent() -> tuple[Any, Any]:
        agent = create_agent(client, "weather", tools=[get_weather])
        first = await Runner.run(agent, "go", auto_previous_response_id=True)
        plain = create_agent(client, "plain")
        last = first.last_response_id
        return first, await Runner.run(plain, "again", previous_response_id=last)

    first, second = asyncio.run(run_agent())

    assert first.final_output == "It is sunny in 東京."
    assert second.final_output == "Hello world!"
