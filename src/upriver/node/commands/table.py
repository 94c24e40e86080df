"""Every command that a node answers: the commands of all modules in one table."""

from __future__ import annotations

from upriver.node.access import auth
from upriver.node.commands import collections, dcp, error_map, kv, meta, observe, session, vbuckets
from upriver.node.dcp import consumer
from upriver.node.stats import command as stats
from upriver.node.subdoc import commands as subdoc

_MODULES = (session, auth, error_map, kv, meta, subdoc, observe, vbuckets, collections, stats, dcp, consumer)

# By message class, quiet and other variants included; a later row replaces an earlier one.
COMMANDS = {
    variant: command
    for module in _MODULES
    for command in module.COMMANDS
    for variant in command.message.variants.values()
    if issubclass(variant, command.message)
}
