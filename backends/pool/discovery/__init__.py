"""Which workers a pool has, while it runs.

source      what tells of workers, and how it fails
names       DNS: a host's addresses, a service's places
nameserver  asks nameservers
file        a file that lists them
merging     all of it, and the admin's word, made one set
"""

from backends.pool.discovery.file import FileSource
from backends.pool.discovery.merging import WorkerDiscovery
from backends.pool.discovery.names import DnsSettings, DnsSource, WorkerTemplate
from backends.pool.discovery.source import DiscoveryError, WorkerSource

__all__ = [
    "DiscoveryError",
    "DnsSettings",
    "DnsSource",
    "FileSource",
    "WorkerDiscovery",
    "WorkerSource",
    "WorkerTemplate",
]
