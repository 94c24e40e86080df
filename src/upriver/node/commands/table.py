"""Every command that a node answers: the tables of all command modules as one."""

from __future__ import annotations

from upriver.node.access import auth
from upriver.node.commands import collections, dcp, error_map, kv, meta, observe, session, vbuckets
from upriver.node.dcp import consumer
from upriver.node.dispatch import table
from upriver.node.stats import command as stats
from upriver.node.subdoc import commands as subdoc

COMMANDS = table(
    session.COMMANDS, auth.COMMANDS, error_map.COMMANDS, kv.COMMANDS, meta.COMMANDS, subdoc.COMMANDS,
    observe.COMMANDS, vbuckets.COMMANDS, collections.COMMANDS, stats.COMMANDS,
    dcp.COMMANDS, consumer.COMMANDS,
)  # fmt: skip
