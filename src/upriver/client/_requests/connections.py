"""Opens conversations with a node, according to the connect options."""

from __future__ import annotations

from upriver.client._feed.link_policy import refusal
from upriver.client.options import ConnectOptions
from upriver.errors import StatusError
from upriver.net import conversation
from upriver.net.aio_conversation import AsyncConversation
from upriver.net.conversation import Conversation
from upriver.protocol.session import Credentials, FeedSettings, Session
from upriver.protocol.topology import Address
from upriver.version import __version__


def make_session(options: ConnectOptions, feed: FeedSettings | None = None) -> Session:
    """The handshake for a connection with these options."""
    credentials = Credentials(options.username, options.password, options.allow_plain or options.tls)
    return conversation.make_session(f"upriver/{__version__}", credentials, options.bucket, feed)


def converse(address: Address, options: ConnectOptions, *, again: bool = False) -> Conversation:
    """A blocking conversation with a node, with the bucket selected.

    ``again``: the cluster has accepted us before, so a missing bucket means that the node is restarting.
    """
    try:
        return Conversation(
            address,
            make_session(options),
            connect_timeout_s=options.connect_timeout_s,
            request_timeout_s=options.request_timeout_s,
            tls=options.ssl_context(),
        )
    except StatusError as error:
        raise refusal(error, address, again) from error


async def converse_async(address: Address, options: ConnectOptions, *, again: bool = False) -> AsyncConversation:
    """The same for asyncio."""
    made = AsyncConversation(
        address,
        make_session(options),
        connect_timeout_s=options.connect_timeout_s,
        request_timeout_s=options.request_timeout_s,
        tls=options.ssl_context(),
    )
    try:
        await made.open()
    except StatusError as error:
        raise refusal(error, address, again) from error
    return made
