"""Which workers a pool has, while it runs.

source      what tells of workers, and how it fails
names       DNS: a host's addresses, a service's places
nameserver  asks nameservers
file        a file that lists them
merging     all of it, and the admin's word, made one set
"""

from backends.pool.discovery.file import File
from backends.pool.discovery.merging import Discovery
from backends.pool.discovery.names import Dns, DnsSettings, Template
from backends.pool.discovery.source import DiscoveryFailed, Source

__all__ = [
    "Discovery",
    "DiscoveryFailed",
    "Dns",
    "DnsSettings",
    "File",
    "Source",
    "Template",
]
