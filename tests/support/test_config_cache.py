"""Tests that start the same gateway read its configuration once."""

import pytest

from tests.conftest import MOCK, load_config


def test_equal_configuration_is_read_once_for_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the same text, when another test reads it, then it gets the same configuration."""
    config = load_config(MOCK)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another test")

    assert load_config(MOCK) is config


def test_configuration_is_read_again_if_its_environment_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given a variable that the text may name, when it changes, then the text is read again."""
    config = load_config(MOCK)
    monkeypatch.setenv("SECRET", "changed")

    assert load_config(MOCK) is not config
