"""The reference pages are up to date with the code and complete."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from docs.generate.__main__ import generate_pages, main
from docs.generate.configuration import configuration_page
from docs.generate.configuration_examples import EXAMPLES
from docs.generate.markdown import number
from docs.generate.protocols import ProtocolProfiles, errors_page, parameter_row, worker_tables
from gateway.config.loader import load_text
from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from protocols.core.loss import ParameterSupport, UnsupportedParameter, find_unsupported_parameters
from protocols.core.request import GenerationRequest, Request
from protocols.core.units import ConfigSection
from protocols.params import Param, ParamTableProvider

SPOKEN = list(filter(ProtocolRegistry(PROTOCOLS).serves_clients, PROTOCOLS))
PAGES = Path(__file__).parents[2] / "docs" / "reference"
CONFIGURATIONS = Path(__file__).parents[1] / "golden" / "config" / "good"
SMALLEST = """
backends: {gpu: {protocol: openai, workers: ["http://127.0.0.1:8001"]}}
models: {chat: {backend: gpu}}
"""


@pytest.fixture(scope="module")
def pages() -> Mapping[str, str]:
    return generate_pages()


@pytest.mark.parametrize(
    "name", ["protocols.md", "errors.md", "configuration.md", "metrics.md", "commands.md"]
)
def test_reference_page_is_up_to_date(pages: Mapping[str, str], name: str) -> None:
    held = (PAGES / name).read_text("utf-8")
    assert held == pages[name], f"docs/reference/{name} is stale; rewrite it with: make docs"


def test_every_pair_of_client_and_worker_is_in_the_table(pages: Mapping[str, str]) -> None:
    registry = ProtocolRegistry(PROTOCOLS)
    lines = pages["protocols.md"].splitlines()
    for client in SPOKEN:
        for worker in filter(registry.serves_workers, PROTOCOLS):
            [row] = [one for one in lines if one.startswith(f"| {client} | {worker} | ")]
            assert row.count("`temperature`") + row.count("temperature") >= 1


def test_every_header_with_a_meaning_is_in_the_table(pages: Mapping[str, str]) -> None:
    registry = ProtocolRegistry(PROTOCOLS)
    lines = pages["protocols.md"].splitlines()
    for client in SPOKEN:
        table = registry.create_adapter(client, None, {}).request_headers
        for name, decision in table.decisions.items():
            assert f"| {client} | `{name}` | {decision} |" in lines
        for prefix in table.prefixes:
            assert f"| {client} | `{prefix}*` | reported |" in lines


@pytest.mark.parametrize(
    ("pair", "column", "cell"),
    [
        ("anthropic | openai", 3, "`stop_sequences` → `stop`"),
        ("openai | anthropic", 2, "`parallel_tool_calls`"),
        ("openai | anthropic", 3, "`stop` → `stop_sequences`"),
        ("openai | anthropic", 4, "`seed` dropped"),
        ("openai | openai", 2, "`seed`"),
        ("ollama | openai", 3, "`options.stop` → `stop`"),
    ],
)
def test_pair_shows_how_a_field_is_translated(
    pages: Mapping[str, str], pair: str, column: int, cell: str
) -> None:
    [row] = [one for one in pages["protocols.md"].splitlines() if one.startswith(f"| {pair} | ")]
    cells = row.strip("| ").split(" | ")
    assert cell in cells[column].split(", ")


def test_reference_folder_has_only_generated_pages(pages: Mapping[str, str]) -> None:
    assert {file.name for file in PAGES.glob("*.md")} == set(pages)


@pytest.mark.parametrize(
    "expected_text",
    [
        "## interlingua keys new\n",
        "interlingua migrate litellm [OPTIONS] FILE",
        "| `--processes TEXT` |",
        "1 errors in FILE or found by --connect, 2 the file\ncan't be read.",
    ],
)
def test_commands_page_lists_commands_and_options(
    pages: Mapping[str, str], expected_text: str
) -> None:
    assert expected_text in pages["commands.md"]


def test_generate_command_writes_pages_and_checks_them(tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    run = CliRunner().invoke

    before = run(main, [str(folder), "--check"])
    written = run(main, [str(folder)])
    fresh = run(main, [str(folder), "--check"])
    (folder / "errors.md").write_text("old")

    stale = run(main, [str(folder), "--check"])

    assert (before.exit_code, written.exit_code, fresh.exit_code, stale.exit_code) == (1, 0, 0, 1)
    assert not fresh.output
    assert "errors.md is stale" in stale.output
    assert "protocols.md" not in stale.output


@pytest.mark.parametrize("name", SPOKEN)
def test_every_protocol_has_parameter_tables(name: str) -> None:
    registry = ProtocolRegistry(PROTOCOLS)
    for profile in registry.get_profiles(name):
        adapter = registry.create_adapter(name, profile, {})
        assert isinstance(adapter, ParamTableProvider)
        tasks = ("generate", "tokenize")
        variants = {one.operation for one in adapter.endpoints if one.task in tasks}
        assert {kind.partition(",")[0] for kind in adapter.param_tables} <= variants
        assert all(adapter.param_tables.values())


ROWS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("`w`", "`n`", "int", "", "", "absent", "")),
    ({"field": "request.w", "nullable": False}, ("`w`", "", "int", "", "", "refused", "")),
    ({"minimum": 0, "maximum": 2}, ("`w`", "`n`", "int", "from 0 to 2", "", "absent", "")),
    (
        {
            "minimum": 0,
            "maximum": 1,
            "exclusive_minimum": True,
            "exclusive_maximum": True,
            "default": True,
        },
        ("`w`", "`n`", "int", "above 0 to below 1", "`true`", "absent", ""),
    ),
    (
        {"minimum": 1, "disabled_values": (0, -1), "default": 1.0, "description": "so"},
        ("`w`", "`n`", "int", "from 1; 0 and -1 for off", "`1.0`", "absent", "so"),
    ),
    (
        {"maximum": 2**63 - 1, "default": "a"},
        ("`w`", "`n`", "int", "up to 2^63 - 1", '`"a"`', "absent", ""),
    ),
    (
        {"type": "strings", "min_items": 1, "max_items": 4},
        ("`w`", "`n`", "strings", "at least 1 items; at most 4 items", "", "absent", ""),
    ),
    (
        {"type": "str", "choices": ("a", "b")},
        ("`w`", "`n`", "str", "one of `a`, `b`", "", "absent", ""),
    ),
]


@pytest.mark.parametrize(("fields", "shown"), ROWS)
def test_parameter_table_row(fields: dict[str, Any], shown: tuple[str, ...]) -> None:
    param: dict[str, Any] = {"wire": "w", "field": "n", "type": "int", **fields}

    assert parameter_row(Param(**param)) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1e-6, "1e-06"), (-2.0, "-2"), (-(2**63), "-2^63"), (10**6, "1000000"), (3.4e38, "3.4e+38")],
)
def test_number_formatting(value: float, shown: str) -> None:
    assert number(value) == shown


class LimitedWorker:
    """Supports four parameters, some within limits and one in part, and none for prompts."""

    carries: Mapping[str, ParameterSupport] = {
        "n": ParameterSupport("n", 1, 8),
        "priority": ParameterSupport("p", reason="approximated"),
        "sampling.top_k": ParameterSupport("k", minimum=1),
        "stopping.min_tokens": ParameterSupport("m", maximum=5),
    }

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        prompts = isinstance(request, GenerationRequest) and request.kind == "completion"
        return find_unsupported_parameters(request, {} if prompts else self.carries, names)


FATES = {
    "`n`": "chat: carried; prompts: by the gateway",
    "`sampling.top_k`": "chat: clamped from 1; prompts: dropped",
    "`stopping.min_tokens`": "chat: clamped to 5; prompts: dropped",
    "`sampling.top_p`": "dropped",
    "`suffix`": "by the gateway",
}


def test_worker_table_shows_unsupported_parameters() -> None:
    registry = ProtocolRegistry(PROTOCOLS)
    spoken = [ProtocolProfiles("ovms", {"2026": registry.create_adapter("ovms", None, {})})]
    text, vectors = worker_tables(spoken, {"narrow": LimitedWorker()}).split("### Embeddings")

    reasons = {
        cells[1]: cells[-2] for cells in map(split_cells, text.splitlines()) if len(cells) > 2
    }
    assert {field: reasons[field] for field in FATES} == FATES
    assert ["`priority`", "", "approximated"] in [
        cells[1:-1] for cells in map(split_cells, vectors.splitlines())
    ]
    assert "| `sampling.beam_width` | `best_of` | dropped |" in text


def split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


def test_errors_page_lists_each_error_for_each_protocol(pages: Mapping[str, str]) -> None:
    page = pages["errors.md"]

    assert page.count("| `ContextTooLong` |") == 1 + len(SPOKEN)
    assert "| `Overloaded` | gateway | yes |" in page
    assert "| `RateLimitExceeded` | 429 |" in page


def test_text_with_backticks_stays_one_code_span() -> None:
    registry = ProtocolRegistry(PROTOCOLS)
    page = errors_page(
        [ProtocolProfiles("openai", {"openai": registry.create_adapter("openai", None, {})})]
    )

    assert '| `VersionNotFound` | 404 | `` {"error":{"message":"The model `MODEL`' in page


def test_configuration_page_shows_type_and_default_of_each_field() -> None:
    page = configuration_page()

    assert "| `drain_timeout` | [duration](#units) | `1m` | How long running requests may" in page
    assert "| `kind` | `pool` | implied by `workers` | The kind of backend" in page
    assert "| `top_p` | a number above 0 to 1 |  | Samples from the most likely tokens" in page
    assert "A single value in place of the mapping sets `url`." in page


def test_configuration_page_shows_the_example_of_each_section() -> None:
    _, *sections = configuration_page().split("\n## ")

    shown = {text.partition("\n")[0]: text for text in sections}
    assert len(EXAMPLES) > 20
    for section, example in EXAMPLES.items():
        assert f"```yaml\n{example}```" in shown[section.__name__]


@pytest.mark.parametrize("section", EXAMPLES, ids=lambda section: section.__name__)
def test_example_of_a_section_is_valid(section: type[ConfigSection], tmp_path: Path) -> None:
    for name in ("ca.pem", "cert.pem", "key.pem", "workers.txt"):
        shutil.copy(CONFIGURATIONS / name, tmp_path)
    document = yaml.safe_load(EXAMPLES[section])
    for key, entries in yaml.safe_load(SMALLEST).items():
        document[key] = entries | document.get(key, {})
    env = dict.fromkeys(re.findall(r"\w+_(?:PASSWORD|KEY|TOKEN)", EXAMPLES[section]), "0" * 64)

    config = load_text(json.dumps(document), str(tmp_path / "gateway.yaml"), env=env)

    assert find_sections(config, section)


def find_sections(value: Any, section: type[ConfigSection]) -> list[ConfigSection]:
    """Return the Structs that a configuration sets to other values than the defaults."""
    if isinstance(value, Mapping):
        return [one for inner in value.values() for one in find_sections(inner, section)]
    if isinstance(value, tuple):
        return [one for inner in value for one in find_sections(inner, section)]
    if not isinstance(value, ConfigSection):
        return []
    if type(value) is section:
        return [value]
    fields = {one.name: one for one in msgspec.structs.fields(value)}
    return [
        one
        for name, field in fields.items()
        if (inner := getattr(value, name)) != field.default
        for one in find_sections(inner, section)
    ]
