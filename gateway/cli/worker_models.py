"""The models of a worker that ``interlingua serve http://…`` serves without a file."""

import logging
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from backends.http.interfaces import join_path
from gateway.config.loader import ConfigText
from protocols.core.units import parse_alias

_LISTING_TIMEOUT: Final = 2.0
"""Seconds until the worker counts as unreachable."""
_MAX_LISTING_SIZE: Final = 8 << 20
_MAX_MODELS: Final = 10_000


class _ListedModel(Struct):
    id: str


class _ModelListing(Struct):
    data: list[_ListedModel]


class WorkerProxyFetcher:
    """A ``ConfigFetcher``: the built-in configuration for one worker, with the worker's models.

    As long as the worker was never reached, or if it lists a name that a model can't have, any name
    is passed on to it. If it is unreachable later, the last known models stay.
    """

    def __init__(self, template: ConfigText, worker_url: str) -> None:
        """``template`` is JSON, with the model ``*``."""
        self._template = template
        self._worker_url = worker_url
        self._names: Sequence[str] = ()

    def __call__(self) -> ConfigText:
        """The current text."""
        names = list_worker_models(self._worker_url)
        if names is not None and set(names) != set(self._names):
            self._names = names
        if not self._names:
            return self._template
        config: dict[str, Any] = msgspec.json.decode(self._template.data)
        model = config["models"]["*"]
        config["models"] = dict.fromkeys(self._names, model)
        return replace(self._template, data=msgspec.json.encode(config))


def list_worker_models(url: str) -> Sequence[str] | None:
    """The models that a worker lists, and ``*`` if one has no valid name; None if it lists none."""
    import httpx  # noqa: PLC0415 - only this command needs it at the start

    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
    parts = urlsplit(url)
    path = join_path(parts.path.rstrip("/"), "/v1/models")
    body = b""
    try:
        with httpx.stream(
            "GET",
            f"{parts.scheme}://{parts.netloc}{path}",
            timeout=_LISTING_TIMEOUT,
            trust_env=False,
        ) as response:
            response.raise_for_status()
            for piece in response.iter_bytes():
                body += piece
                if len(body) > _MAX_LISTING_SIZE:
                    return None
        listing = msgspec.json.decode(body, type=_ModelListing)
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, UnicodeDecodeError):
        return None
    names = dict.fromkeys(model.id for model in listing.data[:_MAX_MODELS])
    valid_names = [name for name in names if _is_model_name(name)]
    return valid_names if len(valid_names) == len(names) else [*valid_names, "*"]


def _is_model_name(name: str) -> bool:
    try:
        return parse_alias(name) == name
    except ValueError:
        return False
