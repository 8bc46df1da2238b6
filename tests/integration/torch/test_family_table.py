"""The table of model families in the documentation is what the engine says today."""

import pytest

from tests.integration.torch.family_table import PAGE, build_table, replace_table

pytestmark = pytest.mark.slow


def test_table_of_model_families_is_up_to_date() -> None:
    page = PAGE.read_text("utf-8")

    assert replace_table(page, build_table()) == page
