"""Against tabulated values, to more digits than any table of a book has."""

import pytest

from gateway.tools.ab.distributions import (
    chi_square_above,
    normal_quantile,
    t_below,
    t_quantile,
)


@pytest.mark.parametrize(
    ("p", "wanted"),
    [
        (0.5, 0.0),
        (0.9, 1.2815515655446004),
        (0.95, 1.6448536269514722),
        (0.975, 1.959963984540054),
        (0.995, 2.5758293035489004),
        (0.9995, 3.2905267314919255),
        (0.025, -1.959963984540054),
    ],
)
def test_the_normal_distribution(p: float, wanted: float) -> None:
    assert normal_quantile(p) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("p", "freedom", "wanted"),
    [
        (0.975, 1, 12.706204736432095),
        (0.975, 2, 4.302652729911275),
        (0.975, 5, 2.570581836614739),
        (0.975, 10, 2.2281388519649385),
        (0.975, 30, 2.0422724563012373),
        (0.975, 120, 1.9799304050824413),
        (0.95, 7, 1.894578605061305),
        (0.995, 15, 2.946712883338615),
        (0.9995, 4, 8.610301581379272),
        (0.025, 5, -2.570581836614739),
        (0.5, 3, 0.0),
    ],
)
def test_students(p: float, freedom: float, wanted: float) -> None:
    assert t_quantile(p, freedom) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("freedom", [1.0, 2.5, 40.0, 1e4])
@pytest.mark.parametrize("p", [0.5001, 0.6, 0.9, 0.999])
def test_a_quantile_is_where_so_much_lies_below(p: float, freedom: float) -> None:
    assert t_below(t_quantile(p, freedom), freedom) == pytest.approx(p, abs=1e-9)


def test_with_much_freedom_students_is_the_normal_distribution() -> None:
    assert t_quantile(0.975, 1e6) == pytest.approx(1.959966, abs=1e-6)


@pytest.mark.parametrize(
    ("x", "freedom", "wanted"),
    [
        (0.0, 3, 1.0),
        (0.016, 1, 0.8993431885613662),
        (3.841458820694124, 1, 0.05),
        (10.827566170662733, 1, 0.001),
        (5.991464547107979, 2, 0.05),
        (18.307038053275146, 10, 0.05),
        (4.865182051925326, 10, 0.9),
        (30.0, 3, 1.380057031249e-06),
    ],
)
def test_chi_square(x: float, freedom: int, wanted: float) -> None:
    assert chi_square_above(x, freedom) == pytest.approx(wanted, rel=1e-9)
