"""A session with the randomness that a login needs, for whoever connects to a node."""

from __future__ import annotations

import secrets

from upriver.protocol.scram import ScramClient
from upriver.protocol.session import Credentials, FeedSettings, Session


def make_session(agent: str, credentials: Credentials, bucket: str, feed: FeedSettings | None = None) -> Session:
    """The handshake of one connection: a new nonce for each."""
    return Session(agent, credentials, bucket, _scram, feed)


def _scram(mechanism: str, username: str, password: str) -> ScramClient:
    return ScramClient(mechanism, username, password, secrets.token_urlsafe(18))
