"""Settings beside a worker list file hold for its workers."""

from pathlib import Path

from backends.http.interfaces import make_bearer_credentials
from backends.pool.settings import PoolSettings
from gateway.config.loader import load_text
from gateway.runtime.build import parse_worker_list

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


def test_settings_of_a_worker_file_are_defaults_of_its_workers(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.yaml" for name in ("one", "two")}
    for file in files.values():
        file.write_bytes(LISTED)
    pool = load_text(CONFIG.format(**files), str(tmp_path / "gateway.yaml"), env={}).backends[
        "pool"
    ]

    assert isinstance(pool, PoolSettings)

    sources = {source.file: source for source in pool.workers}
    workers = {
        name: [
            (w.url, w.weight, w.max_concurrency, w.credentials)
            for w in pool.make_listed_workers(sources[str(file)], parse_worker_list(LISTED))
        ]
        for name, file in files.items()
    }
    theirs, own = make_bearer_credentials("theirs"), make_bearer_credentials("own")

    assert workers == {
        "one": [("http://a:1", 3, 7, theirs), ("http://b:1", 2, 9, own)],
        "two": [("http://a:1", 1, 5, None), ("http://b:1", 2, 9, own)],
    }
