"""The configuration: one YAML file, read strictly, all mistakes at once with file:line:column.

schema              every section of the file as a Struct; those of backends stand in the backends
yaml_reader         YAML text to a bounded tree of nodes
yaml_scalars        types of scalars, environment variables
decoder             the tree to the Structs
scalar_decoder      scalars to numbers, enumerations, secrets and paths
errors              ConfigError, positions, suggestions
loader              read, decode, validate, fill in defaults
source              where the text comes from, and how other processes get it
validate            models: versions, splits, aliases, options
validate_listeners  listeners: addresses, protocols, keys
validate_fallbacks  fallbacks: targets, tasks, circles
validate_observers  shadow traffic, judges, recordings
validate_keys       API keys and rate limits
validate_routes     routes: unknown names, routes that never match
validate_pools      pools: the workers' sources, credentials, headers
validate_backends   backends: what their protocols and models can do
validate_services   token issuers, Redis, PostgreSQL, telemetry collectors
validate_files      what must be on this machine: certificates, templates, models, packages
validation_context  what every check needs: positions and the registry
registry            what checks must know of protocols and backends: profiles, options, templates
jsonschema          the JSON Schema of the file, for editors
diff                what changed between two configurations
listeners           the identity of a listener across reloads
file_watch          watch the configuration file, also on Kubernetes volumes
"""
