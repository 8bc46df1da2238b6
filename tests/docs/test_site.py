"""The documentation site builds without warnings; every page is linked, no resource remote."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urldefrag

import pytest

from tests.deploy.tools import require

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
LOADED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="([^"]+)"')
NAV = re.compile(r'<a href="([^"]+)" class="md-nav__link')


def build_site(docs: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    """Build it as ``make site`` does; every warning is an error."""
    require(MKDOCS.exists(), "there is no MkDocs here; make site installs it")
    return subprocess.run(
        [
            *(MKDOCS, "build", "--strict"),
            *("--config-file", docs / "site" / "mkdocs.yml", "--site-dir", site),
        ],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("docs") / "site"
    result = build_site(DOCS, built)
    assert result.returncode == 0, result.stderr
    return built


def get_site_path(page: Path) -> str:
    """Return a page's path in the site."""
    name = page.relative_to(DOCS).with_suffix("")
    return str(name.parent / "index.html" if name.name == "index" else name / "index.html")


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    pages = {get_site_path(page) for page in DOCS.rglob("*.md")}
    assert pages == {str(file.relative_to(site)) for file in site.rglob("index.html")}

    start = (site / "index.html").read_text("utf-8")
    linked = {str(Path(urldefrag(link)[0]) / "index.html") for link in NAV.findall(start)}
    assert pages <= linked | {"index.html"}


def test_site_loads_no_external_resources(site: Path) -> None:
    loaded = [
        link for file in site.rglob("*.html") for link in LOADED.findall(file.read_text("utf-8"))
    ]
    assert loaded
    assert not [link for link in loaded if re.match(r"\w+:|//", link)]
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text("utf-8"))


def test_each_navigation_section_has_a_page(site: Path) -> None:
    start = (site / "index.html").read_text("utf-8")
    _, *sections = re.split(r'<nav class="md-nav" data-md-level="1"', start)

    assert len(sections) > 5
    for section in sections:
        assert NAV.search(section.partition("</nav>")[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("[a page](howto/none.md)", "howto/none.md"),
        ("[a place](glossary.md#none)", "#none"),
        ("[a place here](#none)", "#none"),
        ("[a file](../deploy/none)", "there is no ../deploy/none"),
    ],
)
def test_broken_link_fails_the_build(tmp_path: Path, words: str, message: str) -> None:
    docs = tmp_path / "docs"
    (docs / "site").mkdir(parents=True)
    for name in ("site/mkdocs.yml", "site/hooks.py", "glossary.md"):
        shutil.copy(DOCS / name, docs / name)
    (docs / "index.md").write_text(f"# Here\n\n{words}\n")
    built = build_site(docs, tmp_path / "site")

    assert built.returncode == 1
    assert message in built.stdout + built.stderr


def test_readme_links_exist() -> None:
    links = re.findall(r"\]\(([^)h#][^)#]*)", (ROOT / "README.md").read_text("utf-8"))
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_source_paths_named_in_the_docs_exist() -> None:
    named = re.compile(r"(?<![\w./])((?:gateway|backends|protocols|tests|deploy)/[\w./-]*\w)")
    folders = (DOCS, DOCS / "howto", DOCS / "maintainers")
    pages = [page for folder in folders for page in folder.glob("*.md")]
    pages += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

    named_paths = {
        (page.name, path) for page in pages for path in named.findall(page.read_text("utf-8"))
    }

    assert len(named_paths) > 20
    assert {one for one in named_paths if not (ROOT / one[1]).exists()} == set()
