"""The page's files: they are the same for everybody, and hold nothing of this gateway."""

from http import HTTPStatus
from importlib import resources
from typing import Final

from aiohttp import hdrs, web

from gateway.admin.answers import AdminError

_UI_PATH: Final = "/-/ui/"
_UI_FILES: Final = resources.files("gateway") / "page"
_CONTENT_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing comes from elsewhere, nothing stands in the page itself, and no text becomes markup."""


async def redirect_to_ui(request: web.Request) -> web.Response:
    """Lead to the page."""
    del request
    return web.Response(status=HTTPStatus.FOUND, headers={hdrs.LOCATION: _UI_PATH})


async def serve_ui_file(request: web.Request) -> web.Response:
    """Give one of its files."""
    name = request.match_info["file"] or "index.html"
    found = {one.name: one for one in _UI_FILES.iterdir()}.get(name)
    kind = _CONTENT_TYPES.get(name.rpartition(".")[2])
    if found is None or kind is None:
        raise AdminError(HTTPStatus.NOT_FOUND, "there is no such path")
    headers = {
        hdrs.CONTENT_TYPE: kind,
        hdrs.CONTENT_SECURITY_POLICY: _CONTENT_SECURITY_POLICY,
        "Referrer-Policy": "no-referrer",
    }
    return web.Response(body=found.read_bytes(), headers=headers)
