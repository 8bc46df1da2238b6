"""Every key of a LiteLLM file is converted, or named in a note: none is lost in silence.

A key is converted if the new file depends on its value.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.errors import format_path
from gateway.tools.migrate.litellm import Migration, migrate
from tests.golden.migrate.test_golden_migrate import Environment

Path = tuple[str | int, ...]

_PARAMS: Final[Mapping[str, tuple[Any, Any]]] = {
    "model": ("openai/m1", "anthropic/m2"),
    "api_base": ("http://h1:1", "http://h2:1"),
    "base_url": ("http://h3:1", "http://h4:1"),
    "api_key": ("os.environ/KEY_A", "os.environ/KEY_B"),
    "custom_llm_provider": ("openai", "anthropic"),
    "api_version": ("2024-01-01", "2025-01-01"),
    "organization": ("org-1", "org-2"),
    "headers": ({"X-A": "1"}, {"X-A": "2"}),
    "extra_headers": ({"Authorization": "Basic a"}, {"X-B": "2"}),
    "weight": (2, 0),
    "rpm": (60, 90),
    "tpm": (600, 0),
    "order": (1, 2),
    "timeout": (5, 7),
    "stream_timeout": (3, 4),
    "max_retries": (1, 2),
    "num_retries": (3, 4),
    "max_parallel_requests": (3, 4),
    "temperature": (0.1, 0.2),
    "top_p": (0.5, 0.6),
    "top_k": (5, 6),
    "max_tokens": (50, 60),
    "seed": (1, 2),
    "tags": (["a"], ["b"]),
    "drop_params": (True, False),
    "mock_response": ("one", "two"),
    "litellm_credential_name": ("first", "second"),
    "use_in_pass_through": (True, False),
    "no_such_key": (1, 2),
}
_INFO: Final[Mapping[str, tuple[Any, Any]]] = {
    "mode": ("chat", "embedding"),
    "id": ("a", "b"),
    "access_groups": (["a"], ["b"]),
}
_SETTINGS: Final[Mapping[str, Mapping[str, tuple[Any, Any]]]] = {
    "router_settings": {
        "routing_strategy": ("least-busy", "latency-based-routing"),
        "model_group_alias": ({"other": "base"}, {"another": "base"}),
        "fallbacks": ([{"base": ["spare"]}], [{"spare": ["base"]}]),
        "default_fallbacks": (["spare"], ["base"]),
        "num_retries": (5, 6),
        "timeout": (50, 60),
        "stream_timeout": (20, 30),
        "allowed_fails": (2, 3),
        "cooldown_time": (10, 20),
        "default_max_parallel_requests": (7, 8),
        "optional_pre_call_checks": (["enforce_model_rate_limits"], ["other"]),
        "enable_pre_call_checks": (True, False),
        "redis_host": ("a", "b"),
        "no_such_key": (1, 2),
    },
    "litellm_settings": {
        "num_retries": (7, 8),
        "request_timeout": (70, 80),
        "drop_params": (True, False),
        "callbacks": (["prometheus"], ["langfuse"]),
        "default_fallbacks": (["spare"], ["base"]),
        "model_alias_map": ({"third": "base"}, {"fourth": "base"}),
        "cache": (True, False),
        "json_logs": (True, False),
    },
    "general_settings": {
        "master_key": ("sk-1", "sk-2"),
        "max_parallel_requests": (9, 10),
        "global_max_parallel_requests": (11, 12),
        "max_request_size_mb": (13, 14),
        "database_url": ("a", "b"),
    },
}
_CREDENTIALS: Final[Mapping[str, tuple[Any, Any]]] = {
    "api_key": ("os.environ/KEY_C", "os.environ/KEY_D"),
    "api_base": ("http://h5:1", "http://h6:1"),
    "temperature": (0.3, 0.4),
}
_SHARED: Final = ("timeout", "stream_timeout", "max_retries", "num_retries")
"""Workers of one pool have them in common; a note on an entry says so of all of them."""
_NAMES: Final = ("model_name", "credential_name", "litellm_credential_name")
"""Names lead to entries, whose keys are looked at."""


def draw_keys(draw: st.DrawFn, table: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(table)), unique=True, max_size=5))
    return {name: draw(st.sampled_from(table[name])) for name in names}


@st.composite
def litellm_files(draw: st.DrawFn) -> dict[str, Any]:
    """A file with at least the models ``base`` and ``spare``, of which ``base`` has two workers."""
    entries = [
        {"model_name": name, "litellm_params": {"model": "openai/m", "api_base": f"http://{host}"}}
        for name, host in (("base", "b1:1"), ("base", "b2:1"), ("spare", "s:1"))
    ]
    for name in draw(
        st.lists(st.sampled_from(["base", "spare", "a", "a", "b", "c-*"]), max_size=4)
    ):
        params = {"model": "openai/m", **draw_keys(draw, _PARAMS)}
        entry = {"model_name": name, "litellm_params": params}
        if info := draw_keys(draw, _INFO):
            entry["model_info"] = info
        entries.append(entry)
    file: dict[str, Any] = {"model_list": entries}
    for section, table in _SETTINGS.items():
        if chosen := draw_keys(draw, table):
            file[section] = chosen
    if draw(st.booleans()):
        file["credential_list"] = [
            {"credential_name": name, "credential_values": draw_keys(draw, _CREDENTIALS)}
            for name in ("first", "second")
        ]
    return file


def convert(file: Mapping[str, Any]) -> Migration:
    return migrate(json.dumps(file).encode(), "f", Environment())


def iterate_keys(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path of each key whose value is none of the file's own sections."""
    if isinstance(value, dict) and len(path) != 4:
        for key, one in value.items():
            if isinstance(one, dict) and len(path) in (0, 2):
                yield from iterate_keys(one, (*path, key))
            elif key in ("model_list", "credential_list"):
                for number, entry in enumerate(one):
                    yield from iterate_keys(entry, (*path, key, number))
            else:
                yield (*path, key)


def list_others(path: Path) -> tuple[Any, ...]:
    """Other values of a key."""
    *_, section, key = path
    tables = {"litellm_params": _PARAMS, "model_info": _INFO, "credential_values": _CREDENTIALS}
    table = tables.get(str(section)) or _SETTINGS[str(section)]
    return table[str(key)]


def change(file: Mapping[str, Any], path: Path, value: object) -> Mapping[str, Any]:
    """The file with another value of a key; None removes the key."""
    changed = copy.deepcopy(file)
    section: Any = changed
    for step in path[:-1]:
        section = section[step]
    if value is None:
        del section[path[-1]]
    else:
        section[path[-1]] = value
    return changed


def has_no_effect(path: Path, file: Mapping[str, Any]) -> bool:
    """Whether the key may change nothing, although it is read.

    That is the model of an entry that asks none, the task that an entry has without it, and an
    order in which the entries are already.
    """
    if path[0] != "model_list":
        return False
    entry = file["model_list"][path[1]]
    is_mocked = "mock_response" in entry["litellm_params"]
    if path[-1] == "order":
        return [one["model_name"] for one in file["model_list"]].count(entry["model_name"]) > 1
    return (path[-1] == "model" and is_mocked) or (
        path[-1] == "mode" and entry["model_info"]["mode"] == "chat"
    )


def is_named(path: Path, migration: Migration) -> bool:
    """Whether a note names the key, a part of its value, or says that its whole entry is out."""
    text, entry = format_path(path), format_path(path[:2])
    for note in migration.notes:
        if note.path.startswith(text):
            return True
        is_own = f"{note.path}.".startswith(f"{entry}.") or path[0] == "credential_list"
        if is_own and "whole entry" in note.why:
            return True
        if is_own and note.path.count(".") == 0 and str(path[-1]) in (*note.why.split(), *_SHARED):
            return True
    return False


@settings(max_examples=60, derandomize=True)
@given(litellm_files())
def test_every_key_of_a_litellm_file_is_converted_or_named_in_a_note(file: dict[str, Any]) -> None:
    migrated = convert(file)
    for path in iterate_keys(file):
        if path[-1] in _NAMES or is_named(path, migrated) or has_no_effect(path, file):
            continue
        values = (*list_others(path), None)
        assert any(convert(change(file, path, one)).text != migrated.text for one in values), (
            f"{format_path(path)} is neither converted nor named"
        )
