"""A model of 1.5 billion 4-bit weights calls strict tools, by OpenAI's SDK, in little memory.

The weights are random: grammars decide what is written, and every schema ends by itself.
"""

from typing import Any, Final, Literal

import click
from pydantic import BaseModel, Field

from tests.bench_engine.cost import measure_peak_memory
from tests.bench_engine.peers import PEERS, PLACE
from tests.bench_engine.running import serving, warm_up
from tests.bench_engine.weights import prepare

MEMORY_LIMIT: Final = 4 << 30
CALLS: Final = 3
"""Rounds of the loop, before its answer."""


class SetHeating(BaseModel):
    """Set the heating of a room."""

    room: Literal["kitchen", "bathroom", "office"]
    degrees: int = Field(ge=5, le=28)
    eco: bool


class Report(BaseModel):
    """The answer after the calls."""

    outcome: Literal["done", "failed"]
    rooms: int = Field(ge=0, le=9)


def run_loop(port: int, model: str) -> tuple[list[str], str]:
    """Call tools as the model demands, then take its answer; returns the calls and the outcome."""
    import openai  # noqa: PLC0415 - takes a second

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)
    tool = openai.pydantic_function_tool(SetHeating, name="set_heating")
    messages: list[Any] = [{"role": "user", "content": "Make every room warm, one by one."}]
    calls = []
    for _ in range(CALLS):
        choice = client.chat.completions.parse(
            model=model, messages=messages, tools=[tool], tool_choice="required"
        ).choices[0]
        if choice.finish_reason != "tool_calls" or not choice.message.tool_calls:
            raise RuntimeError(f"the model called nothing: {choice}")
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in choice.message.tool_calls:
            heating = call.function.parsed_arguments
            if not isinstance(heating, SetHeating):
                raise TypeError(f"the arguments do not have the schema: {call}")
            calls.append(heating.model_dump_json())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "set"})
    answer = client.chat.completions.parse(model=model, messages=messages, response_format=Report)
    report = answer.choices[0].message.parsed
    if report is None:
        raise RuntimeError(f"the answer does not have the schema: {answer}")
    return calls, report.outcome


@click.command("tools")
def command() -> None:
    """Run the loop with the large model, and print the calls and the peak memory."""
    PLACE.mkdir(parents=True, exist_ok=True)
    with serving("ours-large", prepare(PLACE / "weights")) as (pid, port):
        warm_up("ours-large", pid, port, 1)
        calls, outcome = run_loop(port, PEERS["ours-large"].model or "")
        peak = measure_peak_memory(pid)
    click.echo(f"{len(calls)} calls: {', '.join(calls)}; then: {outcome}")
    click.echo(f"peak memory: {peak / 1e6:,.0f} MB of {MEMORY_LIMIT / 1e6:,.0f} MB")
    if peak > MEMORY_LIMIT:
        raise click.ClickException("it takes too much memory")
