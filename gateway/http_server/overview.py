"""The root of a listener: what it serves, as JSON for programs and as a page for browsers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Final

import msgspec

from gateway import __version__
from gateway.pipeline.http import HttpRequest
from gateway.routing.paths import AdapterMount
from protocols.core.interfaces import HttpResponse

_HTML: Final = "text/html"
_VARY: Final = ("Vary", "Accept")
_JSON_HEADERS: Final = (("Content-Type", "application/json"), _VARY)
_PAGE_HEADERS: Final = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"),
    _VARY,
)
_STYLE: Final = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 1.5rem 0 .3rem; }
ul { padding: 0; list-style: none; columns: 20rem; } code { overflow-wrap: anywhere; }
"""


def build_overview(
    mounts: Sequence[AdapterMount], *, keyed: bool, admin_url: str | None
) -> Callable[[HttpRequest], HttpResponse]:
    """The page at ``/``. ``admin_url`` is that of the web UI, if the page may show it.

    A browser is who accepts HTML; all others get JSON.
    """
    endpoints: dict[str, list[str]] = {}
    for mount in mounts:
        endpoints.setdefault(mount.adapter.name, []).extend(
            f"{endpoint.method} {mount.prefix}{endpoint.path}"
            for endpoint in mount.adapter.endpoints
        )

    @functools.cache
    def render_json() -> HttpResponse:
        overview = {
            "name": "Interlingua",
            "version": __version__,
            "api_key_required": keyed,
            "openapi": "/openapi.json",
            "health": "/health",
            "endpoints": endpoints,
        }
        document = msgspec.json.format(msgspec.json.encode(overview), indent=2)
        return HttpResponse(200, document, _JSON_HEADERS)

    @functools.cache
    def render_html() -> HttpResponse:
        page = _render_page(endpoints, keyed=keyed, admin_url=admin_url)
        return HttpResponse(200, page.encode(), _PAGE_HEADERS)

    def get_overview(http: HttpRequest) -> HttpResponse:
        return render_html() if _HTML in http.headers.get("accept", "") else render_json()

    return get_overview


def _render_page(
    endpoints: Mapping[str, Sequence[str]], *, keyed: bool, admin_url: str | None
) -> str:
    links = [
        '<a href="/openapi.json">OpenAPI document</a>',
        '<a href="/health">health</a>',
    ]
    if admin_url is not None:
        url = escape(admin_url)
        links += [
            f'<a href="{url}">web UI</a>',
            f'<a href="{url}#playground">playground</a>',
            f'<a href="{url}#api">API reference</a>',
        ]
    key = (
        "Requests need an API key, as the protocol's clients send it."
        if keyed
        else "Requests need no API key."
    )
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>Interlingua</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>Interlingua</h1><p>Version {escape(__version__)}. {key}</p>",
        f"<p>{' · '.join(links)}</p>",
    ]
    for protocol, paths in endpoints.items():
        items = "".join(f"<li><code>{escape(path)}</code></li>" for path in paths)
        parts.append(f"<h2>{escape(protocol)}</h2><ul>{items}</ul>")
    return "\n".join([*parts, "</main></body></html>\n"])
