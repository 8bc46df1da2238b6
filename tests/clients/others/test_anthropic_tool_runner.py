"""The tool runner of Anthropic's SDK, which keeps its history on the server if it can."""

import pytest
from anthropic import Anthropic, beta_tool


@beta_tool  # type: ignore[untyped-decorator, unused-ignore]
def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The city.
    """
    return f"sunny in {city}"


@pytest.mark.parametrize("streams", [False, True])
def test_tool_runner_finishes_its_loop(agents: str, key: str, streams: bool) -> None:
    """Given workers without message threads: the runner sends the whole history in each turn."""
    client = Anthropic(base_url=agents, api_key=key, max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="weather",
        max_tokens=100,
        tools=[get_weather],
        messages=[{"role": "user", "content": "weather?"}],
        stream=streams,
    )
    final = runner.until_done()

    assert [block.text for block in final.content] == ["It is sunny in 東京."]


def test_tool_runner_without_threads(agents: str, key: str) -> None:
    client = Anthropic(base_url=agents, api_key=key, max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="weather",
        max_tokens=100,
        tools=[get_weather],
        messages=[{"role": "user", "content": "weather?"}],
        thread=False,
    )

    assert [one.stop_reason for one in runner] == ["tool_use", "end_turn"]
