"""Gateways that play a reader's workers on each page, with scripted echo backends.

Each has the protocol and the port of a server on the page. They are not vLLM, Triton, MindIE or
OpenVINO Model Server: transcripts and the real Triton (tests/oracle) test those.
"""

from collections.abc import Mapping
from typing import Final


def _build_worker_config(
    *listeners: str, script: str = '"Paris", ",", " of", " course", "."'
) -> str:
    return f"""
listeners: [{", ".join(listeners)}]
limits: {{drain_timeout: 1s}}
backends: {{says: {{kind: echo, script: [{script}]}}}}
models:
  llama3: {{backend: says}}
  llama3.1: {{backend: says}}
  smollm2: {{backend: says}}
  bge-m3: {{backend: says, task: embedding}}
"""


_VLLM: Final = _build_worker_config(*[
    f'{{address: "127.0.0.1:{port}", protocols: [{{name: openai, profile: vllm}}]}}'
    for port in (8001, 8002)
])  # fmt: skip
_MIGRATION: Final = """
listeners:
  - {address: "127.0.0.1:8001", protocols: [openai]}
  - {address: "127.0.0.1:8002", protocols: [{name: openai, profile: vllm}]}
limits: {drain_timeout: 1s}
backends:
  present: {kind: echo, script: ["Paris", ",", " of", " course", "."]}
  own: {kind: echo, script: ["The", " capital", " of", " France", " is", " Paris", "."]}
models: {gpt-4o-mini: {backend: present}, llama3.1: {backend: own}}
"""
_TRITON: Final = _build_worker_config(
    '{address: "127.0.0.1:8000", protocols: [{name: triton, profile: vllm}]}'
)
_MINDIE: Final = _build_worker_config('{address: "127.0.0.1:1025", protocols: [mindie]}')
_OVMS: Final = _build_worker_config('{address: "127.0.0.1:9000", protocols: [ovms]}')
_OLLAMA: Final = _build_worker_config(
    '{address: "127.0.0.1:11434", protocols: [openai, ollama]}',
    script='"Paris", ", of", " course."',
).replace("llama3:", "llama3.2:", 1)
_BUILT_IN: Final = _build_worker_config(
    '{address: "127.0.0.1:8000", protocols: [openai, databricks, '
    "{name: triton, profile: plain}, ovms, {name: mindie, prefix: /mindie}]}",
    '{address: "127.0.0.1:1025", protocols: [mindie]}',
    '{address: "127.0.0.1:8001", protocols: [{name: openai, profile: vllm}]}',
)
"""What `make run` serves, and a worker."""

STANDS_IN: Final[Mapping[str, str]] = {
    "README.md": _BUILT_IN,
    "docs/tutorial.md": _BUILT_IN,
    "docs/howto/mindie.md": _MINDIE,
    "docs/howto/openvino-model-server.md": _OVMS,
    "docs/howto/triton.md": _TRITON,
    "docs/howto/vllm.md": _VLLM,
    "docs/howto/ollama.md": _OLLAMA,
    "docs/howto/codex.md": _VLLM,
    "docs/howto/openai-agents.md": _VLLM,
    "docs/howto/claude-code.md": _VLLM,
    "docs/howto/probe.md": _VLLM,
    "docs/howto/prometheus-grafana.md": _VLLM,
    "docs/howto/migrate-databricks.md": _VLLM,
    "docs/howto/migrate-openai.md": _VLLM,
    "docs/howto/load-balancing.md": _VLLM,
    "docs/howto/rehearse-migration.md": _MIGRATION,
}
