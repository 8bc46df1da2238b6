"""The model types that are refused by their name are those that the engine refuses at load."""

import pytest

from backends.torch.model_files import UNSUPPORTED_TYPES, find_unsupported_layers
from tests.integration.torch.family_table import _FAMILIES, load_family

_UNBUILT = frozenset({"mamba2", "qwen3_5", "qwen3_5_moe", "zamba", "zamba2"})
"""Types that the table's tiny sizes do not fit; their layers are those of others in the list."""

_SIZES = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
}


@pytest.mark.parametrize("kind", sorted(UNSUPPORTED_TYPES.keys() - _UNBUILT))
def test_listed_types_are_refused_at_load(kind: str) -> None:
    own = [sizes for name, sizes in _FAMILIES.values() if name == kind]
    options = own[0] if own else _SIZES.get(kind, {})
    assert load_family(kind, options).startswith("refused")


def test_other_families_of_the_table_are_not_listed() -> None:
    served = {kind for kind, _ in _FAMILIES.values()} - UNSUPPORTED_TYPES.keys()
    page_rows = {kind: load_family(kind, options) for kind, options in _FAMILIES.values()}
    assert {kind for kind, result in page_rows.items() if result == "served"} == served


@pytest.mark.parametrize(
    ("kind", "options"),
    [("lfm2", {"layer_types": ["conv", "full_attention"] * 2})],
)
def test_layers_that_are_refused_by_their_type_are_refused_at_load(
    kind: str, options: dict[str, list[str]]
) -> None:
    assert find_unsupported_layers({"model_type": kind, **options}) is not None
    assert load_family(kind, options).startswith("refused")
