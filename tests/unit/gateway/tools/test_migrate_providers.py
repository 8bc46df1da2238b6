"""LiteLLM entries of a provider are migrated to its protocol or profile, and its key header."""

from collections.abc import Mapping

import msgspec
import pytest

from gateway.config.registry import ProtocolRegistry
from gateway.tools.migrate import providers
from gateway.tools.migrate.litellm import Migration, migrate
from protocols import PROTOCOLS
from protocols.core.interfaces import ClientAdapter


class RegistryWithAzure(ProtocolRegistry):
    """A registry in which OpenAI has the profile ``azure``."""

    def get_profiles(self, name: str) -> tuple[str, ...]:
        return (*super().get_profiles(name), "azure")

    def create_adapter(
        self, name: str, profile: str | None, options: Mapping[str, object]
    ) -> ClientAdapter:
        return super().create_adapter(name, None if profile == "azure" else profile, options)


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "ProtocolRegistry", RegistryWithAzure)


def migrate_entry(model: str, **params: str) -> Migration:
    entry = {"model_name": "m", "litellm_params": {"model": model, **params}}
    variables = {"A", "AZURE_API_BASE", "AZURE_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"}
    source = msgspec.json.encode({"model_list": [entry]})
    return migrate(source, "config.yaml", dict.fromkeys(variables, "set"))


@pytest.mark.usefixtures("azure")
@pytest.mark.parametrize(
    ("model", "params", "backend", "worker"),
    [
        (
            "azure/gpt-4o-eu",
            {"api_base": "https://eu.openai.azure.com/openai/", "api_key": "os.environ/A"},
            {"protocol": "openai", "profile": "azure"},
            {"url": "https://eu.openai.azure.com", "header": "api-key", "key": "${A}"},
        ),
        (
            "azure/gpt-4o-eu",
            {},
            {"protocol": "openai", "profile": "azure"},
            {"url": "${AZURE_API_BASE}", "header": "api-key", "key": "${AZURE_API_KEY}"},
        ),
        (
            "anthropic/claude-sonnet-4-5",
            {},
            {"protocol": "anthropic"},
            {
                "url": "https://api.anthropic.com",
                "header": "x-api-key",
                "key": "${ANTHROPIC_API_KEY}",
            },
        ),
        (
            "anthropic/claude-sonnet-4-5",
            {"api_base": "http://10.0.0.1:4000/v1", "api_key": "os.environ/A"},
            {"protocol": "anthropic"},
            {"url": "http://10.0.0.1:4000/v1", "header": "x-api-key", "key": "${A}"},
        ),
    ],
)
def test_azure_and_anthropic_are_written_with_their_protocol_and_header_of_the_key(
    model: str, params: dict[str, str], backend: dict[str, str], worker: dict[str, str]
) -> None:
    migration = migrate_entry(model, **params)
    assert migration.text is not None

    section = msgspec.yaml.decode(migration.text)["backends"]["m"]
    auth = {"header": {"name": worker["header"], "value": worker["key"]}}
    assert section == {**backend, "workers": [{"url": worker["url"], "auth": auth}]}
    assert msgspec.yaml.decode(migration.text)["models"]["m"]["model"] == model.partition("/")[2]


@pytest.mark.parametrize("provider", ["cohere", "cohere_chat"])
def test_cohere_is_written_with_its_protocol(provider: str) -> None:
    migration = migrate_entry(f"{provider}/command-a-03-2025", api_key="os.environ/A")

    assert msgspec.yaml.decode(migration.text or "")["backends"]["m"] == {
        "protocol": "cohere",
        "workers": [{"url": "https://api.cohere.com", "auth": {"bearer": "${A}"}}],
    }


@pytest.mark.parametrize(
    ("model", "protocol", "url"),
    [
        ("claude-sonnet-4-5", "anthropic", "https://api.anthropic.com"),
        ("command-r", "cohere", "https://api.cohere.com"),
        ("gpt-4o", "openai", "https://api.openai.com"),
    ],
)
def test_model_without_a_provider_is_sent_to_that_of_its_name(
    model: str, protocol: str, url: str
) -> None:
    migration = migrate_entry(model, api_key="os.environ/A")
    document = msgspec.yaml.decode(migration.text or "")

    assert document["backends"]["m"]["protocol"] == protocol
    assert document["backends"]["m"]["workers"][0]["url"] == url
    assert document["models"]["m"]["model"] == model


@pytest.mark.usefixtures("azure")
def test_version_of_azures_api_is_kept() -> None:
    migration = migrate_entry("azure/gpt-4o", api_version="2024-10-21")

    section = msgspec.yaml.decode(migration.text or "")["backends"]["m"]
    assert section["options"] == {"api_version": "2024-10-21"}
    assert migration.is_complete


def test_provider_without_its_protocol_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "PROTOCOLS", {"openai": PROTOCOLS["openai"]})
    migration = migrate_entry("triton/llama", api_base="http://t/v2/models/m/generate")

    assert migration.text is None
    assert "provider 'triton' is not supported" in migration.notes[0].why
