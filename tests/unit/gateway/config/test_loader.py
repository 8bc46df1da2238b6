"""What a good file becomes; what a wrong one brings is in tests/golden/config."""

import shutil
from pathlib import Path

import msgspec
import pytest

from backends import BACKENDS
from backends.interfaces import Timeouts
from backends.pool.settings import PoolSettings
from gateway.config.errors import ConfigError
from gateway.config.loader import dump_config, load_bytes, load_config, load_text
from gateway.config.registry import ProtocolRegistry
from gateway.config.schema import (
    BackendConfig,
    Config,
    EchoConfig,
    TargetConfig,
)
from gateway.config.yaml_reader import MAX_ALIASED_NODES, MAX_DEPTH, MAX_FILE_SIZE, decode_utf8
from protocols import PROTOCOLS

LISTENERS = 'listeners: [{address: "127.0.0.1:0", protocols: [openai]}]\n'
ECHO = "backends: {a: {kind: echo}}\n"
CHAT = "models: {chat: {backend: a}}\n"


def good(*parts: str, insecure: bool = False, **env: str) -> Config:
    return load_text("".join((LISTENERS, *parts)), "g.yaml", env=env, insecure=insecure)


def complaints(text: str, *, insecure: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_text(text, "g.yaml", env={}, insecure=insecure)
    return str(caught.value).splitlines()


def test_the_kinds_are_those_registered() -> None:
    kinds = msgspec.inspect.type_info(BackendConfig)
    assert isinstance(kinds, msgspec.inspect.UnionType)
    tags = {one.tag for one in kinds.types if isinstance(one, msgspec.inspect.StructType)}
    assert tags == BACKENDS.keys()


def test_units_become_seconds_and_bytes() -> None:
    config = good(ECHO, CHAT, "limits: {body: 1MiB, drain_timeout: 1m}\n")
    assert (config.limits.body, config.limits.drain_timeout, config.limits.header) == (
        1 << 20,
        60.0,
        16384,
    )


def test_short_forms_are_written_out() -> None:
    config = good('backends: {a: {protocol: openai, workers: ["http://w:1"]}}\n', CHAT)
    pool = config.backends["a"]
    assert isinstance(pool, PoolSettings)
    assert (pool.kind, pool.workers[0].url, pool.workers[0].weight) == ("pool", "http://w:1", 1)
    assert config.listeners[0].protocols[0].name == "openai"


def test_a_pools_timeouts_left_out_are_the_defaults() -> None:
    config = good(
        "defaults: {timeouts: {connect: 1s, idle: 9s}}\n",
        "backends:\n",
        '  a: {protocol: openai, workers: ["http://w:1"], timeouts: {idle: 3s}}\n',
        '  b: {protocol: openai, workers: ["http://w:2"]}\n',
        CHAT,
    )
    first, second = config.backends["a"], config.backends["b"]
    assert isinstance(first, PoolSettings)
    assert isinstance(second, PoolSettings)
    assert first.timeouts == Timeouts(connect=1.0, idle=3.0)
    assert second.timeouts == Timeouts(connect=1.0, idle=9.0)


def test_a_model_has_targets_and_weights_however_it_is_written() -> None:
    config = good(
        ECHO,
        "models:\n",
        "  lone: {backend: a, model: m}\n",
        "  one: {versions: {next: {backend: a}}}\n",
        '  two: {versions: {"1": {backend: a}, "2": {backend: a}}, split: {weights: {"2": 7}}}\n',
    )
    lone, one, two = config.models.values()
    assert lone.resolve_targets() == {"1": TargetConfig(backend="a", model="m")}
    assert one.resolve_targets() == {"next": TargetConfig(backend="a")}
    assert [model.resolve_weights() for model in (lone, one, two)] == [
        {"1": 1},
        {"next": 1},
        {"2": 7},
    ]


@pytest.mark.parametrize(
    ("versions", "highest"),
    [(("9", "10"), "10"), (("10", "9"), "10"), (("next", "1"), "1"), (("next", "01", "2"), "2")],
)
def test_without_a_split_the_highest_number_takes_all(
    versions: tuple[str, ...], highest: str
) -> None:
    rows = "".join(f'    "{version}": {{backend: a}}\n' for version in versions)
    config = good(ECHO, "models:\n  m:\n   versions:\n", rows)

    assert config.models["m"].resolve_weights() == {highest: 1}


def test_rules_and_sticky_sources_are_read_as_they_are_meant() -> None:
    config = good(
        ECHO,
        'models: {m: {versions: {"1": {backend: a}}, split: {weights: {"1": 1}, ',
        'sticky: ["header:X-User-Id", "body:User Name", key]}}}\n',
        "routes: [{name: r, when: {body: {t: x, n: 5, f: 1.5, b: true}, share: 5%}, ",
        "to: {model: m}}]",
    )

    split, [rule] = config.models["m"].split, config.routes
    assert split is not None
    assert split.sticky == ("header:x-user-id", "body:User Name", "key")
    assert rule.when.body == {"t": "x", "n": 5, "f": 1.5, "b": True}
    assert rule.when.body["b"] is True
    assert (rule.when.share, rule.to.model, rule.to.version) == (0.05, "m", None)


def test_what_a_dialect_asks_for_stands_beside_its_name_or_under_it() -> None:
    config = load_text(
        'listeners: [{address: "127.0.0.1:0", protocols: [{name: databricks, '
        "stream_default: true}]}]\n"
        "backends: {a: {kind: echo}}\n"
        "models: {chat: {backend: a, databricks: {pay_per_token: true}}}\n",
        "g.yaml",
        env={},
    )
    assert config.listeners[0].protocols[0].options == {"stream_default": True}
    assert config.models["chat"].options == {"databricks": {"pay_per_token": True}}


def test_the_environment_is_typed_by_the_field() -> None:
    text = 'backends: {a: {kind: echo, script: ["${N}"], context: "${N}", delay: "${D:-1s}"}}\n'
    echo = good(text, CHAT, N="017").backends["a"]
    assert echo == EchoConfig(script=("017",), context=17, delay=1.0)


def test_the_environment_puts_in_no_structure() -> None:
    echo = good('backends: {a: {kind: echo, script: ["${X}"]}}\n', CHAT, X="a]}, b: {kind: x")
    assert echo.backends["a"] == EchoConfig(script=("a]}, b: {kind: x",))


def test_a_secret_comes_from_the_text_the_environment_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    path = tmp_path / "g.yaml"
    path.write_text(
        LISTENERS + "backends:\n  a:\n    protocol: openai\n    workers:\n"
        '      - {url: "http://w:1", auth: {bearer: from-text}}\n'
        '      - {url: "http://w:2", auth: {bearer: {env: TOKEN}}}\n'
        '      - {url: "http://w:3", auth: {bearer: {file: token}}}\n' + CHAT
    )
    config = load_config(str(path), env={"TOKEN": "from-env"})
    pool = config.backends["a"]
    assert isinstance(pool, PoolSettings)
    found = [worker.auth.bearer.reveal() for worker in pool.workers if worker.auth]
    assert found == ["from-text", "from-env", "from-file"]
    assert "from-" not in f"{config!r} {dump_config(config)}"
    assert dump_config(config)["backends"]["a"]["workers"][0]["auth"] == {"bearer": "***"}


def test_files_are_found_from_the_configurations_folder(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[3] / "fault/loopback.pem", tmp_path / "ca.pem")
    text = 'backends: {a: {protocol: openai, workers: ["https://w"], tls: {ca: ca.pem}}}\n'
    path = tmp_path / "g.yaml"
    path.write_text(LISTENERS + text + CHAT)
    pool = load_config(str(path), env={}).backends["a"]
    assert isinstance(pool, PoolSettings)
    assert pool.tls is not None
    assert pool.tls.ca == str(tmp_path / "ca.pem")


def test_a_listener_beyond_this_machine_needs_keys_or_the_flag() -> None:
    text = 'listeners: [{address: "0.0.0.0:8000", protocols: [openai]}]\n' + ECHO + CHAT
    assert "there are no keys" in complaints(text)[0]
    assert load_text(text, "g.yaml", env={}, insecure=True).listeners[0].address == "0.0.0.0:8000"
    keyed = text + f"keys: [{{name: k, sha256: {'ab' * 32}}}]\n"
    assert load_text(keyed, "g.yaml", env={}).keys[0].models is None


def test_without_listeners_every_dialect_is_served_on_this_machine_at_a_path_of_its_own() -> None:
    config = load_text(ECHO + CHAT, "g.yaml", env={})
    (listener,) = config.listeners
    assert listener.address == "127.0.0.1:8000"
    spoken = filter(ProtocolRegistry(PROTOCOLS).serves_clients, PROTOCOLS)
    assert {one.name for one in listener.protocols} == set(spoken)
    mounts = [{"name": one.name, "prefix": one.prefix or None} for one in listener.protocols]
    text = msgspec.json.encode(
        [{"address": listener.address, "protocols": [_given(mount) for mount in mounts]}]
    ).decode()
    assert load_text(f"listeners: {text}\n" + ECHO + CHAT, "g.yaml", env={}) == config


def _given(mount: dict[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in mount.items() if value is not None}


def test_merged_keys_give_way_to_the_mappings_own_and_to_earlier_ones() -> None:
    config = good(
        "x-a: &a {delay: 1s, context: 1}\nx-b: &b {delay: 2s, script: [b]}\n",
        "backends:\n  a: {kind: echo, <<: [*a, *b]}\n  b: {<<: *b, kind: echo, delay: 3s}\n",
        CHAT,
    )
    assert config.backends["a"] == EchoConfig(delay=1.0, context=1, script=("b",))
    assert config.backends["b"] == EchoConfig(delay=3.0, script=("b",))


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_limit_of_depth_is_exact(beyond: int) -> None:
    depth = MAX_DEPTH - 1 + beyond  # the document is the first level
    text = f"x-deep: {'[' * depth}{']' * depth}\n{LISTENERS}{ECHO}{CHAT}"
    if beyond:
        assert "nested deeper than 32" in complaints(text)[0]
    else:
        assert load_text(text, "g.yaml", env={}).models


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_limit_of_values_that_aliases_repeat_is_exact(beyond: int) -> None:
    repeated = 1 + 9_999  # a list and its values
    lists = f"x-list: &list [{', '.join(['1'] * 9_999)}]\nx-one: &one 1\n"
    aliases = ["*list"] * (MAX_ALIASED_NODES // repeated) + ["*one"] * beyond
    text = f"{lists}x-many: [{', '.join(aliases)}]\n{LISTENERS}{ECHO}{CHAT}"
    if beyond:
        [issue] = complaints(text)
        assert "aliases repeat more than 200000 values; use fewer aliases" in issue
    else:
        assert load_text(text, "g.yaml", env={}).models


def test_a_configuration_with_more_than_ten_thousand_values_loads() -> None:
    text = f"x-many: [{', '.join(['1'] * 50_000)}]\n{LISTENERS}{ECHO}{CHAT}"
    assert load_text(text, "g.yaml", env={}).models


def test_a_file_larger_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_bytes(b"#" * (MAX_FILE_SIZE + 1), "g.yaml", env={})
    assert str(caught.value) == "g.yaml:1:1: the file is larger than 64 MiB, the limit; split it"


def test_a_file_that_is_not_utf_8_is_told_where() -> None:
    with pytest.raises(ConfigError) as caught:
        decode_utf8("a: 1\nbü: ".encode() + b"\xff\n", "g.yaml")
    assert str(caught.value) == "g.yaml:2:5: the byte 0xff is not UTF-8; save the file as UTF-8"
    assert decode_utf8(b"\xef\xbb\xbfa: 1", "g.yaml") == "a: 1"


def test_complaints_are_in_the_order_of_the_file() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text("models: {a: {bakend: x}}\nbackends: {b: {kind: x}}\nfoo: 1\n", "g.yaml", env={})
    places = [(one.line, one.column) for one in caught.value.issues]
    assert places == sorted(places)
    assert [one.path for one in caught.value.issues] == [
        "models.a",
        "models.a.bakend",
        "backends.b.kind",
        "foo",
    ]


@pytest.mark.parametrize("folder", ["", "conf/", "./conf/", "../conf/"])
def test_a_path_is_never_taken_for_a_name_by_where_the_file_lies(folder: str) -> None:
    text = "backends: {a: {kind: torch, path: ./nothing}}\nmodels: {chat: {backend: a}}"
    with pytest.raises(ConfigError, match="is not a file or folder"):
        load_text(text, f"{folder}gateway.yaml", env={})


def test_a_backends_model_name_with_a_dot_segment_is_refused() -> None:
    models = "models: {a: {backend: a, model: ..}, b: {versions: {1: {backend: a, model: x/./y}}}}"
    assert [one.partition(": ")[2] for one in complaints(LISTENERS + ECHO + models)] == [
        "'..' holds '.' or '..', which mean folders in a worker's path (at models.a.model)",
        (
            "'x/./y' holds '.' or '..', which mean folders in a worker's path "
            "(at models.b.versions.1.model)"
        ),
    ]
