"""The configuration: one YAML file, read strictly, all mistakes at once with file:line:column.

schema              every section of the file as a Struct
types               scalar types: durations, sizes, rates, shares, secrets, addresses, URLs
yaml_reader         YAML text to a bounded tree of nodes; environment variables
decoder             the tree to the Structs
errors              ConfigError, positions, suggestions
loader              read, decode, validate, fill in defaults
validate            cross references: listeners, models, splits, routes, fallbacks, keys, limits
validate_backends   checks that need the machine: files, TLS, installed packages, protocols
validation_context  what every check needs: positions and the registry
registry            the registered protocols: profiles and options
jsonschema          the JSON Schema of the file, for editors
diff                what changed between two configurations
listeners           the identity of a listener across reloads
file_watch          watch the configuration file, also on Kubernetes volumes
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
