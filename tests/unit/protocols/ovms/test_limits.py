"""The limit of the graph: as the server says it, and strictly less."""

import pytest

from protocols.ovms import params
from protocols.params import build_limit_error


@pytest.mark.parametrize("param", [params.MAX_TOKENS, params.MAX_COMPLETION_TOKENS])
def test_max_tokens_must_be_less_than_the_limit(param: params.OvmsParam) -> None:
    row = param.param
    assert [row.exceeds_limit(value, 100) for value in (99, 100, 101)] == [False, True, True]
    error = build_limit_error(row, 100, 100)
    assert error.message == f"{row.wire} exceeds limit provided in graph config: 100"
