"""The parameter tables of the chat protocols are used to decode and encode."""

from collections.abc import Callable

import pytest

from protocols.chat.params import CHAT_PARAMS, find_param, remove_params, replace_params


def test_replace_params_changes_only_the_named_params() -> None:
    table = replace_params(
        CHAT_PARAMS, temperature={"maximum": 1.0}, top_p={"exclusive_minimum": True}
    )
    assert [param.wire for param in table] == [param.wire for param in CHAT_PARAMS]
    assert (
        find_param(table, "temperature").maximum,
        find_param(CHAT_PARAMS, "temperature").maximum,
    ) == (
        1.0,
        2,
    )
    assert find_param(table, "top_p").exclusive_minimum
    assert find_param(table, "seed") is not None
    assert find_param(table, "n") == find_param(CHAT_PARAMS, "n")


def test_remove_params_removes_the_named_params() -> None:
    wires = {param.wire for param in remove_params(CHAT_PARAMS, "seed", "n")}
    assert wires == {param.wire for param in CHAT_PARAMS} - {"seed", "n"}


@pytest.mark.parametrize(
    "use", [find_param, remove_params, lambda table, name: replace_params(table, **{name: {}})]
)
def test_unknown_param_name_raises_key_error(use: Callable[..., object]) -> None:
    with pytest.raises(KeyError):
        use(CHAT_PARAMS, "tempreature")
