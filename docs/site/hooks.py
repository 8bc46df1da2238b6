# ruff: noqa: INP001 - MkDocs takes it by its path
"""What MkDocs can't do by itself: patterns in the nav, and links to what is no page."""

import logging
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

_OUTSIDE: Final = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+([^)#]+))\)")
_log = logging.getLogger("mkdocs.hooks.links")


def on_config(config: Any) -> Any:
    """Put pages in the place of the nav's patterns. Of two patterns the longer has a page."""
    docs = Path(config.docs_dir)
    pages = sorted(docs.rglob("*.md"), key=lambda file: file.with_suffix("").as_posix())
    named = list(_named(config.nav))
    whose = {page: _best(page, named) for page in (f.relative_to(docs).as_posix() for f in pages)}
    config.nav = _filled(config.nav, whose)
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Name what lies outside of the pages: they are read in a checkout, too, where it is there."""
    here = Path(page.file.abs_src_path).parent
    docs = Path(config.docs_dir).resolve()

    def told(link: re.Match[str]) -> str:
        text, path, name = link.groups()
        meant = (here / path).resolve()
        if meant.is_relative_to(docs):
            return link[0]
        if not meant.exists():
            _log.warning("%s: there is no %s", page.file.src_uri, path)
        return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}`)"

    return _OUTSIDE.sub(told, markdown)


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(one)


def _best(page: str, named: list[str]) -> str | None:
    """The longest of the names and patterns that fit."""
    return max((one for one in named if fnmatch(page, one)), key=len, default=None)


def _filled(nav: list[Any], whose: dict[str, str | None]) -> list[Any]:
    filled: list[Any] = []
    for one in nav:
        if isinstance(one, str):
            filled += [page for page, name in whose.items() if name == one]
        else:
            filled += [{title: _filled(inner, whose)} for title, inner in one.items()]
    return filled
