"""``interlingua migrate litellm`` writes a valid file and reports what it can't migrate."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.cli import main
from gateway.config.errors import ConfigError
from gateway.config.loader import load_text
from gateway.tools.migrate.litellm import migrate
from tests.golden.migrate.test_golden_migrate import FILES

GOLDEN = Path(__file__).parents[3] / "golden" / "migrate"
WHOLE = GOLDEN / "01-first-line.yaml"
PARTLY = GOLDEN / "12-wildcard.yaml"
NOTHING = GOLDEN / "13-nothing-to-serve.yaml"


def run_migrate(file: Path, *arguments: str) -> Result:
    """Run it where all variables of these files are set."""
    env = {"OPENAI_API_KEY": "set"}
    return CliRunner(env=env).invoke(main, ["migrate", "litellm", str(file), *arguments])


def test_supported_configuration_is_migrated_completely() -> None:
    result = run_migrate(WHOLE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == WHOLE.with_suffix(".made").read_text("utf-8")
    assert run_migrate(WHOLE, "--strict").stdout == result.stdout


def test_omitted_settings_are_reported_with_position_and_exit_code_3(tmp_path: Path) -> None:
    out = tmp_path / "gateway.yaml"
    result = run_migrate(PARTLY, "--write", str(out))

    assert (result.exit_code, result.stdout) == (3, "")
    assert f"{PARTLY}:4:17: left out: model_list[1].model_name: " in result.stderr
    assert out.read_text("utf-8") == PARTLY.with_suffix(".made").read_text("utf-8")


@pytest.mark.parametrize(
    ("file", "options", "why"),
    [
        (PARTLY, ["--strict"], "something is left out"),
        (NOTHING, [], f"no model of {NOTHING} is supported"),
    ],
)
def test_no_file_is_written_if_the_migration_fails(
    file: Path, options: list[str], why: str, tmp_path: Path
) -> None:
    out = tmp_path / "gateway.yaml"
    result = run_migrate(file, "--write", str(out), *options)

    assert result.exit_code == 1
    assert result.stderr.endswith(f"nothing is written: {why}\n")
    assert not out.exists()


def test_output_in_a_missing_folder_is_reported_after_the_notes(tmp_path: Path) -> None:
    out = tmp_path / "none" / "gateway.yaml"

    result = run_migrate(PARTLY, "--write", str(out))

    assert result.exit_code == 2
    assert "left out: model_list[1].model_name: " in result.stderr
    assert f"{out} can't be written: No such file or directory" in result.stderr


def test_json_output_contains_text_and_notes() -> None:
    body = json.loads(run_migrate(PARTLY, "--json").stdout)
    assert body["text"] == PARTLY.with_suffix(".made").read_text("utf-8")
    assert body["notes"][0] == {
        "line": 4,
        "column": 17,
        "path": "model_list[1].model_name",
        "kind": "left out",
        "why": "is not a name; names are made of letters, digits and ._:/-, at most 200 characters",
    }


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("model_list: [", "2:1"),
        ("router_settings: 5\nmodel_list: []", "1:18"),
        ("model_list:\n  - chat", "2:5"),
        ("a: 1\na: 2", "2:1"),
    ],
)
def test_file_that_is_not_a_litellm_configuration_is_rejected(
    text: str, place: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)

    result = run_migrate(file)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"{file}:{place}")


ODD: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 10**20),
        st.floats(),
        st.sampled_from(["", "x", "*", "os.environ/X", "http://h/v1", "openai/*", "é $ \"'"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["model", "chat", "x", "a b"]), inner, max_size=3),
    ),
    max_leaves=4,
)
SEEDS = [msgspec.yaml.decode(path.read_bytes()) for path in FILES]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_migration_of_any_values_writes_a_valid_configuration(data: st.DataObject) -> None:
    """Any value in any place of a real file gives a configuration that passes the check."""
    document = msgspec.json.decode(msgspec.json.encode(data.draw(st.sampled_from(SEEDS))))
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = document
        while True:
            keys = [*at] if isinstance(at, dict) else [*range(len(at))]
            key = data.draw(st.sampled_from(keys))
            if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
                at[key] = data.draw(ODD)
                break
            at = at[key]
    try:
        migration = migrate(msgspec.yaml.encode(document), "config.yaml", {})
    except ConfigError:
        return
    if migration.text is not None:
        load_text(migration.text, "gateway.yaml", env={})


def test_tasks_and_alias_settings_are_migrated_or_reported() -> None:
    """Cohere's workers rank; no worker of its protocol embeds."""
    text = """
model_list:
  - {model_name: rank, litellm_params: {model: cohere/rerank-v3.5}, model_info: {mode: rerank}}
  - {model_name: embed, litellm_params: {model: cohere/embed-v4}, model_info: {mode: embedding}}
router_settings: {model_group_alias: {rank-alias: {model: rank, hidden: true}}}
"""
    migration = migrate(text.encode(), "f.yaml", {})

    assert migration.text is not None
    config = load_text(migration.text, "g.yaml", env={})
    assert {name: one.task for name, one in config.models.items()} == {"rank": "rerank"}
    assert config.models["rank"].aliases == ("rank-alias",)
    notes = [one.text("f") for one in migration.notes]
    assert any("workers of the protocol cohere do not have the task embedding" in n for n in notes)
    assert any("hidden: the alias has no such setting" in n for n in notes)
    assert any(n.startswith("f:2:1: changed: variables are not set here") for n in notes)


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_empty_file_is_reported_as_one_of_litellm(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)

    result = run_migrate(file)

    assert result.exit_code == 1
    message = "the file is empty; a config.yaml of LiteLLM has a model_list"
    assert result.stderr == f"{file}:1:1: {message}\n"


def test_entries_of_another_task_than_the_first_of_their_name_are_left_out() -> None:
    migrated = migrate(
        b"model_list:\n"
        b"  - {model_name: m, litellm_params: {model: openai/a, api_base: 'http://a:1'}}\n"
        b"  - {model_name: m, litellm_params: {model: openai/b, api_base: 'http://b:1'},"
        b" model_info: {mode: embedding}}\n",
        "f",
        {},
    )

    assert [note.why for note in migrated.notes if note.path == "model_list[1]"] == [
        "its task is embedding, and that of its name chat; the whole entry"
    ]
    assert "b:1" not in str(migrated.text)


def test_entries_of_one_address_have_the_sum_of_their_limits() -> None:
    entry = b"  - {model_name: m, litellm_params: {model: openai/a, api_base: 'http://a:1'"
    migrated = migrate(
        b"model_list:\n"
        + entry
        + b", max_parallel_requests: 3}}\n"
        + entry
        + b", max_parallel_requests: 4}}\n",
        "f",
        {},
    )

    assert "max_concurrency: 7" in str(migrated.text)


def test_file_that_is_migrated_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(WHOLE.read_bytes())

    result = run_migrate(file, "--write", str(file))

    assert result.exit_code == 2
    assert "would overwrite the file that is migrated" in result.stderr
    assert file.read_bytes() == WHOLE.read_bytes()


@pytest.mark.parametrize(
    ("name", "variable"), [("", "_"), ("MY-KEY", "MY_KEY"), ("1ST.KEY", "_1ST_KEY")]
)
def test_name_that_no_variable_may_have_is_replaced(name: str, variable: str) -> None:
    text = f"""\
model_list: [{{model_name: a, litellm_params: {{model: openai/x, api_key: os.environ/{name}}}}}]
"""
    migration = migrate(text.encode(), "config.yaml", {})

    assert migration.text is not None
    assert f"${{{variable}:-" in migration.text
    load_text(migration.text, "gateway.yaml", env={})


def test_fallback_that_is_named_twice_is_written_once() -> None:
    entry = "{model_name: %s, litellm_params: {model: openai/x, api_base: 'http://10.0.0.1'}}"
    text = f"""\
model_list: [{entry % "a"}, {entry % "b"}]
router_settings: {{fallbacks: [{{"*": [b]}}, {{"*": [b]}}], default_fallbacks: [b]}}
"""
    migration = migrate(text.encode(), "config.yaml", {})

    assert migration.text is not None
    assert "fallback: [b]" in migration.text
    assert [note.kind for note in migration.notes if note.why.endswith("already")] == [
        "needless"
    ] * 2
