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

from gateway.config.addresses import split_address
from gateway.config.allowances import Allowance, KeyLimits
from gateway.config.complaints import Complaint, ConfigError
from gateway.config.diff import ConfigDiff, diff_configs
from gateway.config.document import decode
from gateway.config.entrance import Limits
from gateway.config.json_schema import schema
from gateway.config.listeners import (
    ListenerId,
    listener_name,
    listeners_by_id,
    restart_required,
)
from gateway.config.loading import Loaded, Source, load, loaded, opened, read, workers
from gateway.config.mounts import is_loopback
from gateway.config.pools import Pool, Retries, Timeouts, Worker
from gateway.config.shape import (
    Admin,
    Backend,
    Config,
    Defaults,
    Echo,
    Fail,
    Key,
    Listener,
    ListenerDialect,
    Model,
    ModelLimits,
    Observe,
    Rule,
    Shadow,
    Split,
    Target,
    Tls,
    Torch,
    UsageRows,
)
from gateway.config.shown import dump
from gateway.config.state import State
from gateway.config.traces import Figures, Push, Traces
from gateway.config.units import Secret

__all__ = [
    "Admin",
    "Allowance",
    "Backend",
    "Complaint",
    "Config",
    "ConfigDiff",
    "ConfigError",
    "Defaults",
    "Echo",
    "Fail",
    "Figures",
    "Key",
    "KeyLimits",
    "Limits",
    "Listener",
    "ListenerDialect",
    "ListenerId",
    "Loaded",
    "Model",
    "ModelLimits",
    "Observe",
    "Pool",
    "Push",
    "Retries",
    "Rule",
    "Secret",
    "Shadow",
    "Source",
    "Split",
    "State",
    "Target",
    "Timeouts",
    "Tls",
    "Torch",
    "Traces",
    "UsageRows",
    "Worker",
    "decode",
    "diff_configs",
    "dump",
    "is_loopback",
    "listener_name",
    "listeners_by_id",
    "load",
    "loaded",
    "opened",
    "read",
    "restart_required",
    "schema",
    "split_address",
    "workers",
]
