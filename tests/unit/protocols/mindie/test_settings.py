"""The options of a listener and of a model."""

from typing import Any

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text
from protocols.mindie.endpoints import MindIE

PROMPTS = {
    "/v2/models/m/generate": {"text_input": "hi"},
    "/v2/models/m/generate_stream": {"text_input": [{"type": "text", "text": "hi"}]},
    "/infer": {"inputs": "hi"},
    "/": {"inputs": "hi"},
    "/generate_stream": {"inputs": "hi"},
    "/generate": {"prompt": "hi"},
}
AS_THEY_ARE = {
    "/infer_token": {"input_id": [1, 2]},
    "/v1/completions": {"model": "m", "prompt": "hi"},
}


@pytest.mark.parametrize(("path", "body"), PROMPTS.items(), ids=list(PROMPTS))
@pytest.mark.parametrize(("prompts", "mode"), [("raw", "raw"), ("chat", "server")])
def test_prompts_option_selects_the_template_mode(
    bench: Any, path: str, body: Any, prompts: str, mode: str
) -> None:
    request = bench(model="m", prompts=prompts).decode(path, body)
    assert request.prompts == ("hi",)
    assert request.templating.mode == mode


def test_prompts_are_raw_by_default(bench: Any) -> None:
    [(path, body), *_] = PROMPTS.items()
    assert bench().decode(path, body).templating.mode == "raw"


@pytest.mark.parametrize(("path", "body"), AS_THEY_ARE.items(), ids=list(AS_THEY_ARE))
def test_token_ids_and_completions_stay_raw_with_prompts_chat(
    bench: Any, path: str, body: Any
) -> None:
    assert bench(model="m", prompts="chat").decode(path, body).templating.mode == "raw"


CONFIGURATION = """
listeners: [{{address: "127.0.0.1:0", protocols: [{{name: mindie{listener}}}]}}]
backends: {{e: {{kind: echo}}}}
models: {{m: {{backend: e, model: m{model}}}}}
"""


@pytest.mark.parametrize(
    ("listener", "model", "message"),
    [
        (", prompts: both", "", "raw or chat"),
        ("", ", mindie: {pace: 5}", "pace"),
    ],
)
def test_invalid_option_raises_a_config_error_with_its_name(
    listener: str, model: str, message: str
) -> None:
    load_text(CONFIGURATION.format(listener="", model=""), "x.yaml", env={})
    with pytest.raises(ConfigError, match=message):
        load_text(CONFIGURATION.format(listener=listener, model=model), "x.yaml", env={})


def test_mindie_has_no_model_options() -> None:
    assert MindIE.model_options == {}
