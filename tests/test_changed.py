"""``make changed`` selects each test that a change can break, and no other."""

import pytest

from tests.changed import build_graph, list_modules, select_tests

SOURCES = {
    "gateway/__init__.py": "",
    "gateway/__main__.py": "from gateway import cli\n",
    "gateway/cli.py": "",
    "gateway/routing.py": "",
    "protocols/__init__.py": 'PROTOCOLS = {"tgi": "protocols.tgi:Tgi"}\n',
    "protocols/tgi.py": "from gateway.routing import x\n",
    "tests/conftest.py": (
        "import pytest\nimport protocols\n\n@pytest.fixture\ndef serve() -> None:\n    ...\n"
    ),
    "tests/test_architecture.py": "def test_serve(serve): ...\n",
    "tests/test_time_limits.py": 'COMMAND = ["-m", "gateway"]\n',
    "tests/golden/test_changed.py": "from gateway import routing\n",
}
BY_FIXTURE, BY_COMMAND = "tests/test_architecture.py", "tests/test_time_limits.py"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("gateway/cli.py", [BY_COMMAND]),
        ("gateway/__init__.py", [BY_FIXTURE, BY_COMMAND]),
        ("protocols/tgi.py", [BY_FIXTURE]),
        ("gateway/routing.py", [BY_FIXTURE]),
        ("tests/conftest.py", [BY_FIXTURE, BY_COMMAND]),
        (BY_COMMAND, [BY_COMMAND]),
        ("pyproject.toml", [BY_FIXTURE]),
        ("tests/property/test_every_client_adapter.py", []),
    ],
)
def test_selects_the_tests_that_import_use_or_run_what_changed(
    changed: str, expected: list[str]
) -> None:
    assert select_tests([changed], build_graph(SOURCES)) == expected


def test_a_change_of_a_golden_file_selects_the_test_beside_it() -> None:
    changed = ["tests/golden/config/wrong/torch_path.yaml"]
    sources = {path: text for path, text in list_modules().items() if path.startswith("tests/gol")}
    assert "tests/golden/config/test_golden_config.py" in select_tests(
        changed, build_graph(sources)
    )
