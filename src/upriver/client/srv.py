"""The nodes of a cluster as DNS lists them: SRV records of ``_couchbase._tcp`` or ``_couchbases._tcp`` (TLS).

Needs dnspython (the extra ``srv``), since the standard library cannot look SRV records up. Without records, or without
an answer, the name is used as a host name.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from upriver.client.options import ConnectOptions
from upriver.errors import ConfigError
from upriver.protocol.topology import Address

MOST_S = 5.0  # wait no longer for a name server that does not answer
_log = logging.getLogger(__name__)


def srv_seeds(options: ConnectOptions) -> tuple[Address, ...]:
    """The seeds that DNS lists, in the order to try them, or else the given seeds. Blocks."""
    if not options.dns_srv:
        return options.seeds
    try:
        dns = import_module("dns.resolver"), import_module("dns.exception")
    except ImportError:
        if options.dns_nameserver:
            raise ConfigError("dns_nameserver needs dnspython: pip install 'upriver[srv]'") from None
        return options.seeds
    return _listed(options, *dns) or options.seeds


def _listed(options: ConnectOptions, dns: Any, exception: Any) -> tuple[Address, ...]:
    name = f"{'_couchbases' if options.tls else '_couchbase'}._tcp.{options.seeds[0].host}"
    try:
        resolver = _resolver(dns, options.dns_nameserver)
        answer = resolver.resolve(name, "SRV", lifetime=min(MOST_S, options.connect_timeout_s))
    except exception.DNSException as error:
        _log.debug("no SRV record %s, so the host name is used: %s", name, error)
        return ()
    records = answer.rrset.processing_order()  # priorities in order, weights by chance (RFC 2782)
    hosts = ((str(record.target).rstrip("."), int(record.port)) for record in records)
    return tuple(Address(host, port) for host, port in hosts if host)  # a target of "." means that there is no service


def _resolver(dns: Any, nameserver: str) -> Any:
    if not nameserver:
        return dns.Resolver()
    try:
        server = urlsplit("//" + nameserver)
        resolver = dns.Resolver(configure=False)
        resolver.nameservers, resolver.port = [server.hostname], server.port or 53
    except ValueError as error:
        raise ConfigError(f"dns_nameserver: {nameserver!r} is not an address, or address:port") from error
    return resolver
