"""Keys of earlier versions are named with what they are called now."""

import pytest

from gateway.config.decoder import RENAMED_KEYS, find_new_key, list_keys
from gateway.config.descriptions import list_sections
from gateway.config.errors import ConfigError, ConfigIssue
from gateway.config.loader import load_text

SECTIONS = list_sections()


@pytest.mark.parametrize(("old", "names"), RENAMED_KEYS.items())
def test_every_new_key_exists_in_a_section_without_the_old_key(
    old: str, names: tuple[str, ...]
) -> None:
    for name in names:
        sections = [one for one in SECTIONS if find_new_key(old, one) == name]
        assert sections
        assert not any(old in list_keys(one) for one in sections)


def test_renamed_key_is_reported_once_with_position_and_new_name() -> None:
    text = 'backends:\n  a: {workers: ["http://w:1"], dialect: openai}\nmodels: {m: {backend: a}}\n'
    with pytest.raises(ConfigError) as caught:
        load_text(text, "g.yaml", env={})
    message = "'dialect' is now 'protocol'; rename it"
    hint = "protocol: The protocol that the workers speak."
    assert caught.value.issues == [ConfigIssue(2, 32, message, "backends.a.dialect", hint=hint)]


def test_rename_hint_appears_only_if_the_section_has_the_new_key() -> None:
    text = "backends: {a: {kind: echo, keep: 1}}\nmodels: {m: {backend: a}}\n"
    with pytest.raises(ConfigError) as caught:
        load_text(text, "g.yaml", env={})
    assert caught.value.issues[0].message.startswith("there is no 'keep' here; ")
