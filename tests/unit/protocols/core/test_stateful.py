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


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        (b'{"google":{"cached_content":"caches/1"}}', "extra_body.google.cached_content"),
        (b'{"conversation":"c"}', "extra_body.conversation"),
        (b'{"cachedContent":"caches/1"}', "extra_body.cachedContent"),
        (b'{"previousResponseId":"r"}', "extra_body.previousResponseId"),
        (b'{"Thread_ID":"t"}', "extra_body.Thread_ID"),
        (b'{"google":{"cached_content":null,"safety_settings":[1]},"session_id":"s"}', None),
        (b'{"trace":{"container":"c"}}', None),
        (b"[1]", None),
    ],
)
def test_fields_inside_a_field_that_holds_further_ones_are_looked_at(
    value: bytes, refused: str | None
) -> None:
    table = [StatefulField("session_id", "reported", "chooses a worker")]
    lost = [UnsupportedParameter("extra_body", "dropped")]

    if refused is None:
        refuse_lost_state(table, {"extra_body": Raw(value)}, lost)
        return
    with pytest.raises(UnsupportedFeature) as raised:
        refuse_lost_state(table, {"extra_body": Raw(value)}, lost)
    assert raised.value.param == refused
