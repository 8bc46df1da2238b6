"""One YAML file, read strictly: what is wrong with it is told all at once, each with its place.

complaints   what is wrong, and where           document  text to a bounded tree of nodes
scalars      the environment, YAML 1.2's types  units     durations, sizes, names, secrets
addresses    where to listen, workers' URLs     shape     every Struct the file may hold
pools        those of a pool of workers         section   what a Struct of the file is
pairs        the keys of a mapping              leaves    scalar nodes to values
reader       the tree to the Structs            dialects  what the registry says of them
ground       what the checks stand on           mounts    do the listeners' addresses make sense
checks       does the rest                      resolve   what the file leaves unsaid
rules        do the exceptions                  fallbacks do those in a model's stead
shadows      do those of requests               loading   all of this, in its order
shown        a configuration as it may be shown  json_schema  what may be written, for editors
diff         between two configurations         listeners  what identifies them
state        what several gateways share        entrance  how much is taken in
traces       where traces and figures go        allowances  how much clients may take
rates        read and written                   quotas    do those make sense
validate_backends  files, certificates, packages, protocols: what a check can't tell from the file
"""

from gateway.config.diff import ConfigDiff, diff_configs
from gateway.config.errors import ConfigError, ConfigIssue
from gateway.config.jsonschema import build_schema
from gateway.config.listeners import ListenerId, listener_name, listeners_by_id, restart_required
from gateway.config.loader import (
    LoadConfig,
    LoadedConfig,
    dump_config,
    load_bytes,
    load_config,
    load_file,
    load_text,
    load_worker_list,
)
from gateway.config.schema import (
    AdminConfig,
    ApiKeyConfig,
    BackendConfig,
    Config,
    DefaultsConfig,
    EchoConfig,
    EchoFailureConfig,
    KeyRateLimitConfig,
    ListenerConfig,
    ListenerProtocolConfig,
    MetricsConfig,
    ModelConfig,
    ModelLimitsConfig,
    ObservabilityConfig,
    OtlpMetricsConfig,
    PoolConfig,
    RateLimitConfig,
    RetryConfig,
    RouteConfig,
    ServerLimitsConfig,
    ShadowConfig,
    SharedStateConfig,
    TargetConfig,
    TimeoutsConfig,
    TlsConfig,
    TorchConfig,
    TracingConfig,
    TrafficSplitConfig,
    UsageConfig,
    WorkerSourceConfig,
)
from gateway.config.types import Secret, split_address
from gateway.config.validate import is_loopback
from gateway.config.yaml_reader import decode_utf8

__all__ = [
    "AdminConfig",
    "ApiKeyConfig",
    "BackendConfig",
    "Config",
    "ConfigDiff",
    "ConfigError",
    "ConfigIssue",
    "DefaultsConfig",
    "EchoConfig",
    "EchoFailureConfig",
    "KeyRateLimitConfig",
    "ListenerConfig",
    "ListenerId",
    "ListenerProtocolConfig",
    "LoadConfig",
    "LoadedConfig",
    "MetricsConfig",
    "ModelConfig",
    "ModelLimitsConfig",
    "ObservabilityConfig",
    "OtlpMetricsConfig",
    "PoolConfig",
    "RateLimitConfig",
    "RetryConfig",
    "RouteConfig",
    "Secret",
    "ServerLimitsConfig",
    "ShadowConfig",
    "SharedStateConfig",
    "TargetConfig",
    "TimeoutsConfig",
    "TlsConfig",
    "TorchConfig",
    "TracingConfig",
    "TrafficSplitConfig",
    "UsageConfig",
    "WorkerSourceConfig",
    "build_schema",
    "decode_utf8",
    "diff_configs",
    "dump_config",
    "is_loopback",
    "listener_name",
    "listeners_by_id",
    "load_bytes",
    "load_config",
    "load_file",
    "load_text",
    "load_worker_list",
    "restart_required",
    "split_address",
]
