"""``python -m tests.changed [REV]``: the test files that the changes since a revision can break.

A file depends on what it imports, directly or not: by an import statement, by a module's name in a
string (registries, ``-m gateway``), or by a fixture of a ``conftest.py``. A changed file that is no
module counts for its folder. Tests that run in another environment are left out.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("gateway", "backends", "protocols", "tests", "docs")
SPECIAL: Final = (
    "tests/property", "tests/schema", "tests/deploy", "tests/page", "tests/oracle", "tests/ray",
    "tests/clients/others", "tests/clients/agents", "tests/clients/databricks",
    "tests/clients/node", "tests/docs/test_site.py",
)  # fmt: skip
"""Folders that ``make test`` leaves out, too."""
_REFERENCE: Final = re.compile(r"(?:gateway|backends|protocols|tests)(?:\.\w+)+(?::\w+)?")


def main() -> None:
    """Print the test files."""
    revision = sys.argv[1] if len(sys.argv) > 1 else "main"
    tests = select_tests(list_changed_files(revision), build_graph(list_modules()))
    for path in tests:
        sys.stdout.write(f"{path}\n")
    sys.stderr.write(f"changed: {len(tests)} test files depend on what changed since {revision}\n")


def list_changed_files(revision: str) -> set[str]:
    """Return the files that differ from this branch's base on ``revision``, and new ones."""
    base = _run_git("merge-base", "HEAD", revision)[0]
    return {
        *_run_git("diff", "--name-only", base),
        *_run_git("ls-files", "--others", "--exclude-standard"),
    }


def _run_git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def list_modules() -> dict[str, str]:
    """Return the source of each module and test by path."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def build_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the direct dependencies of each file by path."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    fixtures = {path: _list_fixtures(tree) for path, tree in trees.items() if _is_conftest(path)}
    graph: dict[str, set[str]] = {}
    for path, tree in trees.items():
        graph[path] = {
            file for name in _list_names(tree) for file in _find_files(name) if file in sources
        }
        used = {one.arg for one in ast.walk(tree) if isinstance(one, ast.arg)}
        for folder in Path(path).parents:
            conftest = str(folder / "conftest.py")
            if conftest != path and conftest in fixtures and used & fixtures[conftest]:
                graph[path].add(conftest)
    return graph


def _is_conftest(path: str) -> bool:
    return Path(path).name == "conftest.py"


def _list_fixtures(tree: ast.Module) -> set[str]:
    """Return the decorated functions: fixtures, and hooks, which are no arguments."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {one.name for one in tree.body if isinstance(one, functions) and one.decorator_list}


def _list_names(tree: ast.Module) -> Iterator[str]:
    """Return the modules, and objects in modules, that a file names."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Constant(value=str(text)) if _REFERENCE.fullmatch(text):
                yield text.partition(":")[0]
            case ast.List(elts=words) | ast.Tuple(elts=words) | ast.Call(args=words):
                yield from _list_run_modules(words)
            case _:
                pass


def _list_run_modules(words: Sequence[ast.expr]) -> Iterator[str]:
    """Return the modules that a command runs: the words after ``-m``."""
    texts = [one.value if isinstance(one, ast.Constant) else None for one in words]
    yield from (str(name) for option, name in pairwise(texts) if option == "-m")


@cache
def _find_files(name: str) -> tuple[str, ...]:
    """Return the files that importing or running a name executes, none for other names."""
    path = name.replace(".", "/")
    parents = [f"{parent}/__init__.py" for parent in Path(path).parents if str(parent) != "."]
    return (f"{path}.py", f"{path}/__init__.py", f"{path}/__main__.py", *parents)


def select_tests(changed: Iterable[str], graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the tests that depend on changed files, directly or not."""
    importers: dict[str, set[str]] = {}
    for path, dependencies in graph.items():
        for one in dependencies:
            importers.setdefault(one, set()).add(path)
    affected_files: set[str] = set()
    pending = [file for path in changed for file in _list_affected(path, graph)]
    while pending:
        path = pending.pop()
        if path not in affected_files:
            affected_files.add(path)
            pending += importers.get(path, ())
    return sorted(path for path in affected_files if _is_selected(path))


def _list_affected(path: str, graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a changed module, or the files below a changed ``conftest.py`` or folder."""
    folder = str(Path(path).parent)
    if path in graph and not _is_conftest(path):
        return [path]
    if path.endswith(".md") and not path.startswith("tests/"):
        return [one for one in graph if one.startswith("tests/docs/")]
    if folder == ".":  # files of the build
        return [one for one in graph if one == "tests/test_architecture.py"]
    while folder not in (".", *PACKAGES):
        neighbours = [one for one in graph if one.startswith(f"{folder}/")]
        if neighbours:
            return neighbours
        folder = str(Path(folder).parent)
    return [one for one in graph if _is_conftest(path) and one.startswith(f"{folder}/")]


def _is_selected(path: str) -> bool:
    name = Path(path).name
    return (
        path.startswith("tests/")
        and name.startswith("test_")
        and not any(path == one or path.startswith(f"{one}/") for one in SPECIAL)
        and (ROOT / path).exists()
    )


if __name__ == "__main__":
    main()
