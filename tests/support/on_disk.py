"""Wait for the disk: a fault that rolls a vbucket back can only go to a seqno that was persisted by itself."""

from __future__ import annotations

from contextlib import closing

from upriver.client._requests.connections import converse
from upriver.client.blocking import Database
from upriver.errors import Status
from upriver.wire.messages.cluster import SeqnoPersistence


def until_on_disk(db: Database) -> None:
    """Return when everything written so far is persisted."""
    for vb, seqno in db.high_seqnos().items():
        owner = db.topology.active(vb)
        assert owner is not None
        with closing(converse(owner, db.options)) as conversation:
            [answer] = conversation.ask([SeqnoPersistence(seqno, vbucket=vb)])
            assert answer.status == Status.SUCCESS
