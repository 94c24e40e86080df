"""``upriver serve``: run a node until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upriver.errors import ConfigError

if TYPE_CHECKING:
    from upriver.node.options import NodeOptions
    from upriver.node.server import Node

DEFAULT_KV_PORT, DEFAULT_HTTP_PORT = 11210, 8091
COLLECT_S = 60.0
MANY_STREAMS, MANY_ROUNDS = 5_000, 30  # with this many streams, collect only every thirtieth time
NEVER = 1 << 30
SILENT_START_S = 4.0


@click.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Directory of the buckets.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--kv-port", default=DEFAULT_KV_PORT, show_default=True, help="0 picks a free one.")
@click.option("--advertised-kv-port", type=int, help="Port of the proxy through which others reach --kv-port.")
@click.option(
    "--http-port", type=int, help="Management port; 0 picks a free one.  [default: 8091 beside --kv-port 11210, else 0]"
)
@click.option("--tls-port", type=int, help="KV port with TLS; needs --certificate and --private-key.")
@click.option("--certificate", type=click.Path(path_type=Path), help="PEM file for --tls-port.")
@click.option("--private-key", type=click.Path(path_type=Path), help="PEM file for --tls-port.")
@click.option("--client-ca", type=click.Path(path_type=Path), help="Accept client certificates signed by this CA.")
@click.option("--bucket", default="default", show_default=True, help="Created at the first start.")
@click.option("--vbuckets", default=1024, show_default=True)
@click.option("--username", default="", help="A user for this run only; `upriver user` adds permanent ones.")
@click.option("--password", default="", envvar="UPRIVER_PASSWORD", help="Safer in UPRIVER_PASSWORD.")
@click.option("--no-plain", is_flag=True, help="Refuse passwords in clear text without TLS.")
@click.option("--default-bucket", default="", help="Bucket of clients that never select one.")
@click.option("--member", is_flag=True, help="Be a member of a cluster: wait for its manager to push a map.")
@click.option("--enable-faults", is_flag=True, help="Allow `upriver fault`, for testing consumers.")
@click.option("--enable-flush", is_flag=True, help="Allow clients to empty a bucket.")
@click.option("--quota-mib", default=256, show_default=True, help="Memory for each bucket.")
@click.option("--lazy", is_flag=True, help="Sync less often: faster, survives kill -9 but perhaps not a power failure.")
@click.option("--log-level", default="warning", show_default=True, type=click.Choice(["info", "warning", "error"]))
def serve(**options: Any) -> None:
    """Serve DCP and the key-value protocol; prints "ready couchbase://HOST:PORT" once it does.

    Without any user the node is open to clients on the same machine and closed to all others.
    """
    from upriver.net.aio import run

    level = options.pop("log_level").upper()
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    run(_serve(_node_options(**options)))


def _node_options(*, no_plain: bool, quota_mib: int, lazy: bool, **options: Any) -> NodeOptions:
    from upriver.node.options import NodeOptions
    from upriver.store import Durability, StoreOptions

    durability = Durability.LAZY if lazy else Durability.FSYNC
    store = StoreOptions(quota_bytes=quota_mib << 20, durability=durability)
    if options["http_port"] is None:
        options["http_port"] = DEFAULT_HTTP_PORT if options["kv_port"] == DEFAULT_KV_PORT else 0
    if options["tls_port"] is not None and not (options["certificate"] and options["private_key"]):
        raise ConfigError("--tls-port needs --certificate and --private-key")
    return NodeOptions(plain_without_tls=not no_plain, store=store, **options)


async def _serve(options: NodeOptions) -> None:
    from upriver.node.server import serve as start

    node = await _started(asyncio.ensure_future(start(options)))
    collecting = asyncio.create_task(_collect_rarely(node))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    for name, reason in node.buckets.broken.items():
        click.secho(f"upriver: bucket {name} is NOT served: {reason}", fg="red", err=True)
    click.echo(f"ready couchbase://{options.host}:{node.kv_port}")
    click.echo(f"management http://{options.host}:{node.http_port}")
    if node.tls_port:
        click.echo(f"tls couchbases://{options.host}:{node.tls_port}")
    sys.stdout.flush()
    await stop.wait()
    collecting.cancel()
    await node.stop()


async def _started(starting: asyncio.Future[Node]) -> Node:
    """Wait for a node to start; say so if it takes long, because the first start on a machine compiles."""
    await asyncio.wait([starting], timeout=SILENT_START_S)
    if not starting.done():
        click.echo("still starting: the first start on a machine compiles, which may take a minute", err=True)
    return await starting


async def _collect_rarely(node: Node) -> None:
    """Run full garbage collections, during which all clients wait, once a minute, and less often with many streams.

    Objects that exist by now are excluded for good. Closed connections and streams are freed without a collection.
    """
    from upriver.node.dcp.producer import ProducerRole

    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], NEVER)
    for each in itertools.count(1):
        await asyncio.sleep(COLLECT_S)
        streams = sum(len(conn.dcp.machine.streams) for conn in node.connections if isinstance(conn.dcp, ProducerRole))
        if streams < MANY_STREAMS or each % MANY_ROUNDS == 0:
            gc.collect()
