"""The progress of loading shows the errors of other models than the one that failed."""

import logging

import pytest

from gateway.cli.loading_progress import show_loading


def test_errors_of_other_models_are_logged_when_one_cannot_be_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load_models() -> None:
        log = logging.getLogger("backends.torch.backend")
        with show_loading(enabled=True, use_status_line=False):
            log.error("a can't be loaded: %s", "the weights are missing")
            log.error("b can't be loaded: %s", "no memory")
            raise OSError("the weights are missing")

    with pytest.raises(OSError, match="the weights are missing"):
        load_models()

    assert caplog.messages == ["b can't be loaded: no memory"]
