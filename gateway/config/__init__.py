"""One YAML file, read strictly: what is wrong with it is told all at once, each with its place.

complaints   what is wrong, and where           document  text to a bounded tree of nodes
scalars      the environment, YAML 1.2's types  units     durations, sizes, names, secrets
addresses    where to listen, workers' URLs     shape     every Struct the file may hold
pairs        the keys of a mapping              leaves    scalar nodes to values
reader       the tree to the Structs            dialects  what the registry says of them
ground       what the checks stand on           mounts    do the listeners make sense
checks       does the rest                      resolve   what the file leaves unsaid
loading      all of this, in its order          shown     a configuration as it may be shown
json_schema  what may be written, for editors
"""

from gateway.config.addresses import split_address
from gateway.config.complaints import Complaint, ConfigError
from gateway.config.json_schema import schema
from gateway.config.loading import decode, load, read
from gateway.config.shape import (
    Auth,
    Backend,
    Config,
    Defaults,
    Echo,
    Fail,
    Key,
    Limits,
    Listener,
    ListenerDialect,
    Model,
    ModelLimits,
    Pool,
    Split,
    Target,
    Timeouts,
    Tls,
    Torch,
    Trust,
    Worker,
)
from gateway.config.shown import dump
from gateway.config.units import Secret

__all__ = [
    "Auth",
    "Backend",
    "Complaint",
    "Config",
    "ConfigError",
    "Defaults",
    "Echo",
    "Fail",
    "Key",
    "Limits",
    "Listener",
    "ListenerDialect",
    "Model",
    "ModelLimits",
    "Pool",
    "Secret",
    "Split",
    "Target",
    "Timeouts",
    "Tls",
    "Torch",
    "Trust",
    "Worker",
    "decode",
    "dump",
    "load",
    "read",
    "schema",
    "split_address",
]
