"""LiteLLM files, their migrated configurations, and the printed notes."""

import re
from pathlib import Path
from typing import Final

import pytest

from gateway.config.loader import load_text
from gateway.tools.migrate.litellm import Migration, migrate

HERE: Final = Path(__file__).parent
FILES: Final = sorted(HERE.glob("*[a-z].yaml"))
NOTHING: Final = "13-nothing-to-serve"
SECRETS: Final = ("canary", "1234")
ENV: Final = {
    "BASE": "http://10.0.0.9:8000",
    "DATABRICKS_API_BASE": "https://adb-1.azuredatabricks.net",
    "TRITON": "http://10.0.0.9:8000",
    "LITELLM_MASTER_KEY_SHA256": "0" * 64,
}


class Environment(dict[str, str]):
    """An environment in which every variable is set, as the notes require."""

    def __missing__(self, name: str) -> str:
        return "secret"

    def get(self, name: str, _default: str | None = None) -> str:  # type: ignore[override]
        return self[name]

    def __contains__(self, name: object) -> bool:
        return True


def migrate_file(path: Path) -> Migration:
    return migrate(path.read_bytes(), path.name, Environment(ENV))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_migrated_configuration_and_notes_of_each_file(path: Path) -> None:
    migrated = migrate_file(path)
    notes = "".join(f"{note.text(path.name)}\n" for note in migrated.notes)

    assert notes == path.with_suffix(".txt").read_text("utf-8")
    assert (migrated.text or "") == path.with_suffix(".made").read_text("utf-8")
    assert not any(secret in f"{migrated.text}{notes}" for secret in SECRETS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_migrated_configuration_is_valid(path: Path) -> None:
    migrated = migrate_file(path)
    assert (migrated.text is None) == (path.stem == NOTHING)
    if migrated.text is not None:
        assert load_text(migrated.text, "gateway.yaml", env=Environment(ENV)).models


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_migrated_configuration_is_valid_where_no_variable_is_set(path: Path) -> None:
    """Placeholders stand for the variables, whose names one note lists."""
    variables = set(re.findall(r"\$\{(\w+)\}", migrate_file(path).text or ""))

    migrated = migrate(path.read_bytes(), path.name, {})

    if migrated.text is not None:
        assert load_text(migrated.text, "gateway.yaml", env={}).models
    notes = [note.why for note in migrated.notes if "placeholders stand in the file" in note.why]
    assert len(notes) == bool(variables)
    assert all(name in notes[0] for name in variables)


def test_only_fully_supported_files_migrate_completely() -> None:
    whole = {path.stem for path in FILES if migrate_file(path).is_complete}
    assert whole == {"01-first-line", "04-splits", "15-least-busy", "16-anthropic"}
    assert len(FILES) == 18
