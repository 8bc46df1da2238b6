# ruff: noqa: INP001 - MkDocs loads it by its path
"""MkDocs hooks: patterns in the nav, and links to files that are not pages."""

import logging
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

_OUTSIDE: Final = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+([^)#]+))\)")
_log = logging.getLogger("mkdocs.hooks.links")


def on_config(config: Any) -> Any:
    """Replace the patterns in the nav by pages. The longest pattern that matches gets a page."""
    docs = Path(config.docs_dir)
    pages = sorted(docs.rglob("*.md"), key=lambda file: file.with_suffix("").as_posix())
    patterns = list(_entries(config.nav))
    entry_of = {
        page: _best_match(page, patterns)
        for page in (f.relative_to(docs).as_posix() for f in pages)
    }
    config.nav = _expand(config.nav, entry_of)
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace links to files outside docs/ by their names; in a checkout the links work."""
    here = Path(page.file.abs_src_path).parent
    docs = Path(config.docs_dir).resolve()

    def replace(link: re.Match[str]) -> str:
        text, path, name = link.groups()
        target = (here / path).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            _log.warning("%s: there is no %s", page.file.src_uri, path)
        return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}`)"

    return _OUTSIDE.sub(replace, markdown)


def _entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from _entries(one)


def _best_match(page: str, patterns: list[str]) -> str | None:
    """The longest name or pattern that matches."""
    return max((one for one in patterns if fnmatch(page, one)), key=len, default=None)


def _expand(nav: list[Any], entry_of: dict[str, str | None]) -> list[Any]:
    expanded: list[Any] = []
    for one in nav:
        if isinstance(one, str):
            expanded += [page for page, name in entry_of.items() if name == one]
        else:
            expanded += [{title: _expand(inner, entry_of)} for title, inner in one.items()]
    return expanded
