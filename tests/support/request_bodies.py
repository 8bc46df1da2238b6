"""A valid request for each operation of each protocol that reaches a worker."""

from collections.abc import Mapping
from typing import Any, Final

from tests.protocols import find_rows

TURNS: Final = {"messages": [{"role": "user", "content": "hi"}]}
PAIR: Final[dict[str, Any]] = {"query": "q", "documents": ["a", "b"]}
INPUT: Final = {"input": "hi"}
PROMPT: Final = {"prompt": "hi", "max_tokens": 4}
TENSORS: Final = {
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["hi"]}]
}
TOKENS: Final = {
    "inputs": [{"name": "input0", "datatype": "UINT32", "shape": [1, 2], "data": [1, 2]}],
    "outputs": [{"name": "output0"}],
}
BODIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "openai": {
        "chat": TURNS,
        "completion": PROMPT,
        "embedding": INPUT,
        "response": INPUT,
        "response tokens": INPUT,
        **dict.fromkeys(("rerank", "rerank_v1"), PAIR),
        "ranking": {"query": {"text": "q"}, "passages": [{"text": "a"}, {"text": "b"}]},
        "score": {"text_1": "a", "text_2": "b"},
        "classify": INPUT,
        "tokenize": {"prompt": "hi"},
        "detokenize": {"tokens": [1]},
        "speech": {**INPUT, "voice": "alloy"},
        "transcription": {},
        "translation": {},
        "image_generation": {"prompt": "hi"},
        "image_edit": {},
        "image_variation": {},
        "moderation": INPUT,
    },
    "databricks": {
        "invocations": TURNS,
        "chat": TURNS,
        "completion": PROMPT,
        "embedding": INPUT,
    },
    "triton": {
        "generate": {"text_input": "hi"},
        "generate_stream": {"text_input": "hi", "stream": True},
        "infer": TENSORS,
    },
    "mindie": {
        "text": {"text_input": "hi"},
        "text_stream": {"text_input": "hi"},
        "tokens": TOKENS,
        "stop": {"id": "none"},
        "tokenizer": {"inputs": "hi"},
        "chat": TURNS,
        "completion": PROMPT,
        "generate": {"prompt": "hi"},
        "generate_stream": {"inputs": "hi"},
        "native": {"inputs": "hi"},
        "root": {"inputs": "hi"},
    },
    "ovms": {
        "chat": TURNS,
        "completion": PROMPT,
        "embedding": INPUT,
        "rerank": PAIR,
        "nothing": TURNS,
    },
    "tgi": {
        "root": {"inputs": "hi"},
        "generate": {"inputs": "hi"},
        "generate_stream": {"inputs": "hi"},
        "tokenize": {"inputs": "hi"},
        "chat": TURNS,
        "completion": PROMPT,
    },
    "ollama": {
        "chat": TURNS,
        "generate": {"prompt": "hi"},
        "embed": INPUT,
        "embeddings": {"prompt": "hi"},
    },
    "anthropic": {"messages": {**TURNS, "max_tokens": 4}, "count_tokens": TURNS},
    **find_rows("BODIES"),
}
"""A valid request, without the model, for each operation that reaches a worker."""
