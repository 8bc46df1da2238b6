"""Each process gets its share of the configured limits."""

import os

from msgspec.structs import replace

from backends.pool.settings import PoolSettings
from gateway.config import listeners, loader, schema
from gateway.multiprocess.partition import find_unpartitionable, partition_config

FILE = """
listeners:
  - {address: "127.0.0.1:0", protocols: [openai]}
  - {address: "127.0.0.1:0", protocols: [ovms]}
limits: {connections: 1001, connections_per_address: 10}
backends:
  pool:
    protocol: openai
    workers: [{url: "http://127.0.0.1:9", max_concurrency: 1}, "http://127.0.0.1:10"]
    max_concurrency: 8
    total_concurrency: 11
    queue: {max: 0}
  free: {protocol: openai, workers: ["http://127.0.0.1:9"]}
  echo: {kind: echo}
models:
  m: {backend: pool, shadow: {to: n, share: 50%, max_concurrency: 5}}
  n: {backend: free}
  o: {backend: echo}
state: {redis: "redis://127.0.0.1:6379", replicas: 2}
"""
LISTENER_FDS = {("127.0.0.1:0", 0): 5001, ("127.0.0.1:0", 1): 5002}
CONFIG = loader.load_text(FILE, "x.yaml", env={})


def test_each_limit_is_divided_and_rounded_up() -> None:
    part = partition_config(CONFIG, 3, LISTENER_FDS)
    pool, shadow = part.backends["pool"], part.models["m"].shadow

    assert isinstance(pool, PoolSettings)
    assert shadow is not None
    assert (part.limits.connections, part.limits.connections_per_address) == (334, 4)
    assert part.limits.memory == -(-CONFIG.limits.memory // 3)
    assert [one.max_concurrency for one in pool.workers] == [1, None]
    assert (pool.max_concurrency, pool.total_concurrency, pool.queue.max) == (3, 4, 0)
    assert shadow.max_concurrency == 2


def test_replica_count_is_multiplied_by_the_process_count() -> None:
    part = partition_config(CONFIG, 3, LISTENER_FDS)
    assert part.state is not None
    assert part.state.replicas == 6


LIMITED = """
backends: {echo: {kind: echo}}
models: {m: {backend: echo}, n: {backend: echo}}
defaults: {limits: {requests: 10/s}}
keys:
  - name: one
    sha256: abababababababababababababababababababababababababababababababab
    limits:
      {requests: 600/min, tokens: 200k/min, concurrent: 4, budget: 5M/day,
       models: {m: {tokens: 1/s}}}
  - name: two
    sha256: abababababababababababababababababababababababababababababababac
"""


def test_key_limits_are_divided_without_shared_state() -> None:
    config = loader.load_text(LIMITED, "x.yaml", env={})
    part = partition_config(config, 3, dict.fromkeys(listeners.listeners_by_id(config), 1))
    one, two = part.keys

    assert part.defaults.limits == schema.KeyRateLimitConfig(requests=(4, 1))
    assert one.limits == schema.KeyRateLimitConfig(
        requests=(200, 60),
        tokens=(66_667, 60),
        concurrent=2,
        budget=1_666_667,
        models={"m": schema.RateLimitConfig(tokens=(1, 1))},
    )
    assert two.limits is None

    shared = loader.load_text(LIMITED + 'state: {redis: "redis://h"}', "x.yaml", env={})
    assert (
        partition_config(shared, 3, dict.fromkeys(listeners.listeners_by_id(shared), 1)).keys
        == shared.keys
    )


def test_missing_limits_stay_unset() -> None:
    part = partition_config(CONFIG, 3, LISTENER_FDS)
    free = part.backends["free"]

    assert isinstance(free, PoolSettings)
    assert (free.max_concurrency, free.total_concurrency) == (None, None)
    assert part.backends["echo"] == CONFIG.backends["echo"]
    assert part.models["n"] == CONFIG.models["n"]
    assert partition_config(replace(CONFIG, state=None), 3, LISTENER_FDS).state is None


def test_listeners_get_the_reserved_ports() -> None:
    addresses = [one.address for one in partition_config(CONFIG, 2, LISTENER_FDS).listeners]
    assert addresses == ["127.0.0.1:5001", "127.0.0.1:5002"]


def test_torch_backend_cannot_be_partitioned() -> None:
    text = (
        "backends: {l: {kind: torch, path: org/model}, e: {kind: echo}}\nmodels: {m: {backend: l}}"
    )
    loaded = loader.load_bytes(text.encode(), "x.yaml", env=os.environ)

    message = str(loaded.build_error(*find_unpartitionable(loaded.config)))

    assert message.startswith(
        "x.yaml:1:15: each process would load this model; serve it with `inter"
    )
    assert message.endswith("(at backends.l)")
