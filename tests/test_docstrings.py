"""A name in double backticks in a function's docstring exists where a reader looks for it."""

import ast
import builtins
import keyword
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("gateway", "backends", "protocols")
NAME: Final = re.compile(r"``([A-Za-z_]\w*)``")
LANGUAGE: Final = frozenset({*dir(builtins), *keyword.kwlist})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parse_modules() -> dict[Path, ast.Module]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(paths)}


@cache
def list_nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a module, parsed once for several tables."""
    return tuple(ast.walk(parse_modules()[path]))


@cache
def list_project_names() -> frozenset[str]:
    """Return modules, packages, classes, functions, methods and constants of the project."""
    names = set[str]()
    for path, module in parse_modules().items():
        names.update(path.relative_to(ROOT).with_suffix("").parts)
        for node in list_nodes(path):
            if isinstance(node, Function | ast.ClassDef):
                names.add(node.name)
        names.update(
            name.id
            for statement in module.body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            for name in ast.walk(statement)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        )
    return frozenset(names)


def get_called_name(call: ast.Call) -> str:
    """Return the name of the called function, method or class, or "" for an expression."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


@cache
def list_table_names() -> frozenset[str]:
    """Return wire names and internal fields of the parameter tables."""
    return frozenset(
        argument.value
        for path in parse_modules()
        for call in list_nodes(path)
        if isinstance(call, ast.Call) and "Param" in get_called_name(call)
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )


@cache
def list_folder_keys(folder: Path) -> frozenset[str]:
    """Return strings that a package's modules use as a whole: wire fields and settings."""
    return frozenset(
        node.value
        for path in parse_modules()
        if path.parent == folder
        for node in list_nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@cache
def list_fields(path: Path) -> frozenset[str]:
    """Return attributes that a module's classes declare, or that it reads or assigns."""
    names = set[str]()
    for node in list_nodes(path):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            names.update(
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            )
    return frozenset(names)


def list_imported_fields(path: Path) -> Iterator[str]:
    """Return the attributes of the project's modules that a module imports."""
    for node in list_nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported = (ROOT / node.module.replace(".", "/")).with_suffix(".py")
            if imported in parse_modules():
                yield from list_fields(imported)


def list_local_names(function: Function) -> set[str]:
    """Return parameters and variables of a function and inner ones, and call keywords."""
    names = set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            names.add(node.arg)
    return names


def find_stale_names(node: ast.AST, known_names: frozenset[str]) -> Iterator[tuple[Function, str]]:
    """Yield functions below a node, each with an unknown name in its docstring."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function):
            yield from find_stale_names(child, known_names)
            continue
        names = known_names | list_local_names(child)
        text = ast.get_docstring(child) or ""
        yield from ((child, name) for name in NAME.findall(text) if name not in names)
        yield from find_stale_names(child, names)


def test_names_in_docstrings_of_functions_exist() -> None:
    everywhere = LANGUAGE | list_project_names() | list_table_names()
    stale = [
        f"{path.relative_to(ROOT)}:{function.lineno}: {function.name}: ``{name}``"
        for path, module in parse_modules().items()
        for function, name in find_stale_names(
            module,
            everywhere.union(
                list_folder_keys(path.parent), list_fields(path), list_imported_fields(path)
            ),
        )
    ]

    assert stale == [], "Name what the function has now, or write the word without backticks"


def test_a_renamed_parameter_is_reported() -> None:
    module = ast.parse('def wait(pending):\n    """Await ``opening``, at most ``pending``."""\n')
    stale = [name for _, name in find_stale_names(module, frozenset())]
    assert stale == ["opening"]
