"""The client of a running gateway's admin listener, for commands."""

from typing import Final

import click
import msgspec

from protocols.core.json_text import decode_json

_TIMEOUT: Final = 10.0
"""In seconds."""


class _ErrorDetail(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


class AdminClient:
    """Requests one page of an admin listener. ``content`` names the expected content.

    Every failure is a click.UsageError that names the page.
    """

    def __init__(self, page: str, key: str | None, content: str) -> None:
        self._page = page
        self._content = content
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, suffix: str = "") -> bytes:
        """Read the page, or a path below it."""
        return self._send("GET", self._page + suffix)

    def post(self, body: bytes) -> bytes:
        """Send JSON to the page."""
        return self._send("POST", self._page, body)

    def unexpected(self, status: int) -> click.UsageError:
        """The error for a response without the expected content."""
        return click.UsageError(
            f"{self._page}: the response has the status {status}, and no {self._content}"
        )

    def _send(self, method: str, url: str, body: bytes | None = None) -> bytes:
        import httpx  # noqa: PLC0415 - not loaded by commands that read a file

        try:
            response = httpx.request(
                method, url, content=body, headers=self._headers, timeout=_TIMEOUT
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise click.UsageError(f"{self._page} can't be read: {error}") from None
        if response.status_code == httpx.codes.OK:
            return response.content
        try:
            detail = decode_json(response.content, kind=_ErrorBody).error
        except msgspec.DecodeError:
            raise self.unexpected(response.status_code) from None
        raise click.UsageError(f"{self._page}: {detail.message}")
