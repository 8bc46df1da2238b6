"""Fields that refer to what a server keeps are refused by targets that drop them."""

import pytest
from msgspec import Raw

from protocols.core.errors import UnsupportedFeature
from protocols.core.loss import UnsupportedParameter
from protocols.core.stateful import StatefulField, refuse_lost_state


@pytest.mark.parametrize("fields", [(), (StatefulField("cached_content", "stored", "kept"),)])
def test_refusal_has_a_sentence_whether_or_not_the_field_is_listed(
    fields: tuple[StatefulField, ...],
) -> None:
    lost = [UnsupportedParameter("cached_content", "dropped")]

    with pytest.raises(UnsupportedFeature, match="keep nothing between requests") as raised:
        refuse_lost_state(fields, {"cached_content": Raw(b'"caches/1"')}, lost)

    assert raised.value.param == "cached_content"
