"""Reasoning of a local model reaches the clients of three APIs, over a socket."""

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from backends.torch.output_formats import REASONING_MARKS, ReasoningMark
from tests.conftest import Serve

MARKS = [one for one in REASONING_MARKS if one.opening in ("<think>", "[THINK]", "<seed:think>")]


def write_model(folder: Path, mark: ReasoningMark, target: Path) -> Path:
    """Write the tiny model with a template whose prompt ends with the start of reasoning."""
    shutil.copytree(folder, target)
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        f"{{% if enable_thinking is not false %}}{mark.opening}\n{{% endif %}}"
        f"{{# {mark.template_sign} #}}"
    )
    tokenizer.save_pretrained(target)
    return target


@pytest.mark.parametrize("mark", MARKS, ids=lambda mark: f"{mark.family[:11]} {mark.closing}")
async def test_reasoning_reaches_clients(
    serve: Serve, tiny_folder: Path, tmp_path: Path, mark: ReasoningMark
) -> None:
    path = write_model(tiny_folder, mark, tmp_path / "model")
    config = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai", "anthropic"]}],
        "backends": {"local": {"kind": "torch", "path": str(path), "threads": 1}},
        "models": {"m": {"backend": "local"}},
    }
    gateway = await serve(json.dumps(config))
    letters: dict[str, Any] = {"logit_bias": {str(ord("a")): 100}, "max_tokens": 6}
    messages: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as client:
        for effort, reasoning, text in ((None, "aaaaaa", ""), ("none", "", "aaaaaa")):
            template_options = (
                letters if effort is None else {**letters, "reasoning_effort": effort}
            )
            whole = await client.chat.completions.create(
                model="m", messages=messages, **template_options
            )
            message: Any = whole.choices[0].message
            assert (getattr(message, "reasoning_content", None) or "") == reasoning
            assert (message.content or "") == text
        stream = await client.chat.completions.create(
            model="m", messages=messages, stream=True, **letters
        )
        deltas: list[Any] = [one.choices[0].delta async for one in stream if one.choices]
        parts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]

        assert "".join(parts) == "aaaaaa"

        response = await client.responses.create(model="m", input="hi", max_output_tokens=16)
        assert "reasoning" in [item.type for item in response.output]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": "m", "messages": messages, "max_tokens": 1100, "thinking": thinking}
    headers = {"anthropic-version": "2023-06-01"}

    answer = await gateway.http.post("/v1/messages", json=body, headers=headers)

    assert answer.json()["content"][0]["type"] == "thinking"
