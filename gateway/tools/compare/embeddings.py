"""The similarity of texts by a local embedding model."""

import asyncio
import math
from collections.abc import Sequence
from typing import Final

import httpx
import msgspec
from msgspec.structs import replace

from gateway.config.loader import load_bytes
from gateway.observability.record import ignore_record
from gateway.runtime.gateway import Gateway, build_services

_BATCH: Final = 64
_MAX_TEXT: Final = 4000
"""Characters of a text that are embedded."""


class EmbeddingSimilarity:
    """Computes the cosine of the embeddings of two texts, at least 0."""

    def __init__(self, model: str) -> None:
        """``model`` is a local model: a folder, or a name that ``interlingua serve`` knows."""
        self._model = model

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        """The similarity of each pair. Raises WorkerError if the model can't be loaded."""
        vectors = asyncio.run(self._embed([text for pair in pairs for text in pair]))
        return [
            max(0.0, _cosine(first, second))
            for first, second in zip(vectors[::2], vectors[1::2], strict=True)
        ]

    async def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        text = {
            "version": 1,
            "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
            "backends": {"local": {"kind": "torch", "path": self._model, "task": "embedding"}},
            "models": {"embedding": {"backend": "local", "task": "embedding"}},
        }
        config = load_bytes(msgspec.json.encode(text), "<embeddings>", env={}).config
        services = replace(build_services(), observe_request=ignore_record)
        gateway = Gateway(config, services)
        try:
            [url] = await gateway.start(warmed=True)
            async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
                vectors = list[list[float]]()
                for start in range(0, len(texts), _BATCH):
                    batch = [one[:_MAX_TEXT] or " " for one in texts[start : start + _BATCH]]
                    reply = await client.post(
                        "/v1/embeddings", json={"model": "embedding", "input": batch}
                    )
                    reply.raise_for_status()
                    vectors += [each["embedding"] for each in reply.json()["data"]]
                return vectors
        finally:
            await gateway.stop()


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / (math.hypot(*a) * math.hypot(*b) or 1.0)
