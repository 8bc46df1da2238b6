"""The models that can't be loaded, and why; and those that are not loaded yet."""

from collections.abc import Mapping

from backends.interfaces import ReportsFailure, ReportsLoading
from gateway.config.schema import Config


def list_failed_models(config: Config, backends: Mapping[str, object]) -> list[str]:
    """The names of the models of which a version's backend failed for good."""
    failed = list_failures(backends)
    return [
        name
        for name, model in config.models.items()
        if failed and any(one.backend in failed for one in model.resolve_targets().values())
    ]


def list_loading_models(config: Config, backends: Mapping[str, object]) -> dict[str, str]:
    """How far each model is of which a version's backend still loads, by the models' names."""
    loading = list_loading(backends)
    return {
        name: loading[target.backend]
        for name, model in config.models.items()
        if loading
        for target in model.resolve_targets().values()
        if target.backend in loading
    }


def list_loading(backends: Mapping[str, object]) -> dict[str, str]:
    """The backends that load their model, by name, with how far they are."""
    return {
        name: progress
        for name, backend in backends.items()
        if isinstance(backend, ReportsLoading) and (progress := backend.loading) is not None
    }


def list_failures(backends: Mapping[str, object]) -> dict[str, str]:
    """The backends that failed for good, by name, with their reasons."""
    return {
        name: backend.failure
        for name, backend in backends.items()
        if isinstance(backend, ReportsFailure) and backend.failure is not None
    }
