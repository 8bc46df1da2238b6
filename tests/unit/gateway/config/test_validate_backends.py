"""Loading a configuration does not depend on the machine and runs no product code."""

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[4] / "gateway" / "config"
MODULES = sorted(FOLDER.glob("*.py"))
OWNERS = {
    "ssl": "validate_files",
    "importlib.util": "validate_files",
    "backends.chat_template": "registry",
    "gateway.routing.traffic_split": "",
}
"""The only module that may import each of these; "" means none."""
CHECKS = [FOLDER / f"{name}.py" for name in ("validate", "diff", "listeners")]


def list_imports(path: Path) -> set[str]:
    """Return the modules that a module imports, and the names that it imports from them."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{one.name}" for one in node.names)}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_only_one_module_imports_ssl_packages_and_templates(path: Path) -> None:
    forbidden = {module for module, owner in OWNERS.items() if owner != path.stem}
    assert not list_imports(path) & forbidden


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.stem)
def test_static_checks_neither_read_files_nor_create_adapters(path: Path) -> None:
    assert not list_imports(path) & {"os", "os.path", "pathlib", "pathlib.Path", "importlib"}
    assert not any(
        isinstance(node, ast.Attribute)
        and node.attr in ("create_adapter", "load_adapter_class", "endpoints")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
    )
