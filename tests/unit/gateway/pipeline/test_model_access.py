"""Bodies of keys with a list of models: which part is JSON, and which can't be read."""

import pytest

from gateway.pipeline.model_access import check_named_models
from protocols.core.errors import ClientError, InvalidParameter

LENGTH = "inference-header-content-length"
TENSORS = b"\x05\x00\x00\x00hello"


async def test_only_the_json_before_the_bytes_of_tensors_is_read() -> None:
    await check_named_models(b'{"a": 1}' + TENSORS, {LENGTH: "8"})
    with pytest.raises(InvalidParameter, match="'models' names further models"):
        await check_named_models(b'{"models": 1}' + TENSORS, {LENGTH: "13"})


@pytest.mark.parametrize("length", ["", "0" * 19 + "8" + "1" * 5000, "9" * 5000, "-8", "eight"])
async def test_body_with_a_length_that_says_nothing_is_refused_if_it_is_no_json(
    length: str,
) -> None:
    with pytest.raises(ClientError, match="needs a body of JSON"):
        await check_named_models(b'{"a": 1}' + TENSORS, {LENGTH: length})
