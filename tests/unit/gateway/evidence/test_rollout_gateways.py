"""Which settings of a rollout the gateways follow, if they have different ones."""

import msgspec
import pytest

from gateway.config.schema import GuardrailsConfig as Guardrails
from gateway.config.schema import IncreaseConfig, RolloutConfig, RolloutStepConfig
from gateway.evidence.rollout_gateways import (
    GatewaySettings,
    build_settings,
    find_common_settings,
    list_forgotten,
)
from protocols.core.units import Secret

OLD = RolloutConfig(
    to="2",
    step_at_least=RolloutStepConfig(requests=10),
    guardrails=Guardrails(errors=IncreaseConfig(max_increase=0.01)),
)
NEW = msgspec.structs.replace(OLD, steps=(5, 100), check_every=60.0)
NOW = 10_000.0


def make_settings(rollout: RolloutConfig, began: float, seen_at: float = NOW) -> GatewaySettings:
    settings = build_settings(rollout, [], began, rollout.check_every)
    return msgspec.structs.replace(settings, seen_at=seen_at)


def test_nobody_is_alive() -> None:
    assert find_common_settings([], NOW) is None
    assert find_common_settings([make_settings(OLD, 1, NOW - 30)], NOW) is None


def test_equal_settings_are_no_difference() -> None:
    common = find_common_settings([make_settings(OLD, 1), make_settings(OLD, 2)], NOW)
    assert common is not None
    assert (common.rollout, common.difference) == (OLD, "")


def test_settings_that_were_loaded_last_decide_and_the_difference_is_named() -> None:
    common = find_common_settings(
        [make_settings(NEW, 2), make_settings(OLD, 1), make_settings(OLD, 1)], NOW
    )
    assert common is not None
    assert common.rollout == NEW
    assert common.difference == (
        "gateway processes with other settings (check_every, steps): 2 of 3; all follow those that "
        "were loaded last: to 2, steps 5, 100, check_every 60s"
    )


def test_gateway_that_starts_again_with_old_settings_does_not_decide() -> None:
    """It was killed a minute ago; the rows of the dead say when its settings were first loaded."""
    gateways = [make_settings(OLD, 1, NOW - 60), make_settings(NEW, 2)]
    again = build_settings(OLD, gateways, NOW, OLD.check_every)
    assert (again.began, again.seen_at, again.seconds) == (1, NOW, 30)
    common = find_common_settings([*gateways, again], NOW)
    assert common is not None
    assert common.rollout == NEW
    assert "1 of 2" in common.difference


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_clock_that_jumps_revives_nobody(jump: float) -> None:
    common = find_common_settings([make_settings(NEW, 2, NOW - jump), make_settings(OLD, 1)], NOW)
    assert common is not None
    assert (common.rollout, common.difference) == (OLD, "")


def test_settings_of_a_release_that_has_more_are_named_and_do_not_decide() -> None:
    later = msgspec.structs.replace(
        make_settings(OLD, 5), rollout='{"to": "2", "phase_of_moon": 1}'
    )
    common = find_common_settings([later, make_settings(OLD, 1)], NOW)
    assert common is not None
    assert common.rollout == OLD
    assert "phase_of_moon" not in common.difference
    assert "1 of 2" in common.difference
    assert find_common_settings([later], NOW) is None


def test_webhook_is_not_shared() -> None:
    secret = msgspec.structs.replace(OLD, webhook=Secret("https://hooks.example/secret-path"))
    assert "secret-path" not in make_settings(secret, 1).rollout
    assert make_settings(secret, 1) == make_settings(OLD, 1)


def test_process_that_is_gone_for_a_week_is_forgotten() -> None:
    gateways = {
        "a": make_settings(OLD, 1, NOW - 8 * 86400),
        "b": make_settings(OLD, 1, NOW - 6 * 86400),
    }
    assert list_forgotten(gateways, NOW) == ["a"]
