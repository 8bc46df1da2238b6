"""The models of a worker that is served without a file, as the worker lists them."""

import logging
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from backends.http.interfaces import join_path
from gateway.config.source import ConfigText
from protocols.core.json_text import decode_json, encode_ascii
from protocols.core.units import parse_alias

log = logging.getLogger("interlingua")

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

    def __init__(self, template: ConfigText, url: str) -> None:
        """``url`` is the worker's, whose backend in ``template`` is ``worker``."""
        self._template = template
        self._url = url
        self._names: Sequence[str] = ()
        self._is_reported = False
        """Whether the log tells already that the worker lists no models."""

    def __call__(self) -> ConfigText:
        """The current text."""
        try:
            names = list_worker_models(self._url)
        except WorkerListingError as error:
            if not self._is_reported:
                log.warning("%s: %s; every model name is passed on to it", self._url, error)
            self._is_reported = True
        else:
            self._is_reported = False
            if set(names) != set(self._names):
                self._names = names
        if not self._names:
            return self._template
        config: dict[str, Any] = decode_json(self._template.data)
        config["models"] = {name: {"backend": "worker"} for name in self._names}
        return replace(self._template, data=encode_ascii(config))


class WorkerListingError(Exception):
    """Why a worker's models are unknown."""


def list_worker_models(url: str) -> Sequence[str]:
    """The models that a worker lists, and ``*`` if one has no valid name.

    Raises WorkerListingError.
    """
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
                    raise WorkerListingError(f"{path} has over {_MAX_LISTING_SIZE >> 20} MiB")
        listing = decode_json(body, kind=_ModelListing)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise WorkerListingError(f"{path} gets status {status}, no list of models") from None
    except httpx.TimeoutException:
        raise WorkerListingError(f"{path} is not answered in {_LISTING_TIMEOUT:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise WorkerListingError(f"the worker does not answer ({error})") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise WorkerListingError(f"{path} is no list of models") from None
    names = dict.fromkeys(model.id for model in listing.data[:_MAX_MODELS])
    valid_names = [name for name in names if _is_model_name(name)]
    return valid_names if len(valid_names) == len(names) else [*valid_names, "*"]


def _is_model_name(name: str) -> bool:
    try:
        return parse_alias(name) == name
    except ValueError:
        return False
