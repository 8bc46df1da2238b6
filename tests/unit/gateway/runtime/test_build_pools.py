"""What stands beside a list's file holds for the workers in it."""

from pathlib import Path

from gateway.config.loader import load_text
from gateway.config.schema import PoolConfig
from gateway.runtime.build import build_adapter, build_pool_arguments

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends:
  pool:
    protocol: openai
    max_concurrency: 5
    workers:
      - {{file: {one}, weight: 3, max_concurrency: 7, auth: {{bearer: theirs}}}}
      - {{file: {two}}}
models: {{m: {{backend: pool}}}}
"""
LISTED = b"""
- http://a:1
- {url: "http://b:1", weight: 2, max_concurrency: 9, auth: {bearer: own}}
"""


def test_what_a_list_does_not_say(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.yaml" for name in ("one", "two")}
    for file in files.values():
        file.write_bytes(LISTED)
    told = load_text(CONFIG.format(**files), str(tmp_path / "gateway.yaml"), env={}).backends[
        "pool"
    ]
    assert isinstance(told, PoolConfig)
    readers = build_pool_arguments("pool", told, build_adapter("openai", None, {}), ())["readers"]
    found = {
        name: [(w.url, w.weight, w.max_concurrency, w.bearer) for w in readers[str(file)](LISTED)]
        for name, file in files.items()
    }
    assert found == {
        "one": [("http://a:1", 3, 7, "theirs"), ("http://b:1", 2, 9, "own")],
        "two": [("http://a:1", 1, 5, None), ("http://b:1", 2, 9, "own")],
    }
