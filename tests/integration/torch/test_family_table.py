"""The documentation's table of model families matches the engine."""

import pytest

from tests.integration.torch.family_table import PAGE, build_table, replace_table

pytestmark = pytest.mark.slow


def test_table_of_model_families_is_up_to_date() -> None:
    page = PAGE.read_text("utf-8")

    assert replace_table(page, build_table()) == page
