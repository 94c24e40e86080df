"""Unreadable documents: none can be stored, and one from an older version fails only the requests for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.node.raw import ALL, BASIC, frame, ready
from tests.node.streaming import OK, producer, take, to_disk, whole
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.model import Datatype
from upriver.wire import Message, Opcode
from upriver.wire.constants import DocFlag, Feature, OpenFlag, PathFlag
from upriver.wire.messages import dcp, kv
from upriver.wire.messages.subdoc import SubdocLookup, SubdocMutation
from upriver.wire.packed import RecordKind
from upriver.wire.values import deflate, join_xattrs

JSON, SNAPPY, XATTR = int(Datatype.JSON), int(Datatype.SNAPPY), int(Datatype.XATTR)
POISON = {
    b"no-section": (XATTR, b""),
    b"broken-total": (XATTR, b"\xff\xff\xff\xff{}"),
    b"broken-pair": (XATTR | JSON, b"\0\0\0\x09\0\0\0\xffab\0\0\0{}"),
    b"broken-snappy": (SNAPPY, b"\x08\xff\xff\xff"),
    b"both": (XATTR | SNAPPY | JSON, b"\x08\xff\xff\xff"),
}
MAX_XATTR_BYTES = 1024 * 1024
GOOD = b'{"good":1}'

MakeNode = Callable[..., NodeThread]


@pytest.fixture(scope="module")
def poisoned(make_node: MakeNode) -> NodeThread:
    """Vbucket 0 has them all between two good documents; they are written past the checks that refuse them."""
    node = make_node()
    vb = node.vbucket(0)
    node.node.buckets.get("default").expect_xattrs()

    def plant() -> None:
        vb.documents.set(b"first", GOOD, 0)
        for key, (datatype, value) in POISON.items():
            with vb.shared.lock:
                vb.documents.write(RecordKind.MUTATION, b"\0" + key, value, datatype, 0)
        vb.documents.set(b"last", GOOD, 0)

    node.call(plant)
    return node


@pytest.mark.parametrize("key", POISON)
@pytest.mark.parametrize("features", [BASIC, ALL], ids=["plain client", "client with all features"])
def test_a_read_of_an_unreadable_document_fails_and_the_reader_stays_connected(
    poisoned: NodeThread, features: tuple[int, ...], key: bytes
) -> None:
    prefix = b"\0" if Feature.COLLECTIONS in features else b""
    with ready(poisoned.port, *features) as raw:
        answer = raw.ask(kv.Get(prefix + key))
        if Feature.SNAPPY in features and key == b"broken-snappy":
            assert (answer.specific, answer.value) == (OK, POISON[key][1])  # the client inflates it, not the node
        elif key == b"broken-pair":
            assert (answer.specific, answer.value) == (OK, b"{}")  # its body can be found
        else:
            assert answer.specific == Status.EINTERNAL
            assert b"cannot be read" in answer.value
        looked = raw.ask(SubdocLookup.under(Opcode.SUBDOC_GET)(1, PathFlag.XATTR, key=prefix + key, path=b"a"))
        assert looked.specific == Status.EINTERNAL
        assert raw.ask(kv.Get(prefix + b"last")).value == GOOD


@pytest.mark.parametrize("from_disk", [False, True])
@pytest.mark.parametrize(
    "flags", [0, OpenFlag.INCLUDE_XATTRS, OpenFlag.NO_VALUE, OpenFlag.NO_VALUE | OpenFlag.INCLUDE_XATTRS]
)
def test_a_stream_continues_after_an_unreadable_document(poisoned: NodeThread, flags: int, from_disk: bool) -> None:
    """The stream sends its bytes unchanged, and everything after it."""
    if from_disk:
        to_disk(poisoned)
    with producer(poisoned, *BASIC, flags=flags) as raw:
        found = {m.key: m for m in whole(poisoned, raw, 0) if isinstance(m, dcp.DcpMutation)}
        assert list(found) == [b"first", *POISON, b"last"]
        if not flags & OpenFlag.NO_VALUE:
            assert found[b"last"].value == GOOD
            for key, (_, value) in POISON.items():
                assert not found[key].datatype & SNAPPY
                assert found[key].value == value
        assert raw.ask(frame(Opcode.NOOP)).specific == OK


def test_a_live_stream_and_its_neighbours_continue_after_an_unreadable_document(make_node: MakeNode) -> None:
    node = make_node()
    vb = node.vbucket(1)
    with producer(node, *BASIC) as raw:
        for vbucket in (1, 2):
            raw.send(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket))
        node.call(lambda: vb.documents.write(RecordKind.MUTATION, b"\0bad", *reversed(POISON[b"broken-total"]), 0))
        node.call(lambda: (vb.documents.set(b"good", GOOD, 0), node.vbucket(2).documents.set(b"other", GOOD, 0)))
        seen: set[bytes] = set()

        def note(message: Message) -> bool:
            seen.update({message.key} if isinstance(message, dcp.DcpMutation) else ())
            return seen == {b"bad", b"good", b"other"}

        take(raw, note)


def test_an_unreadable_document_can_be_written_over_or_deleted(make_node: MakeNode) -> None:
    node = make_node()
    vb = node.vbucket(0)
    node.node.buckets.get("default").expect_xattrs()
    for key, (datatype, value) in POISON.items():
        for copy in (b"set-", b"del-"):
            named = b"\0" + copy + key
            node.call(lambda k=named, v=value, d=datatype: vb.documents.write(RecordKind.MUTATION, k, v, d, 0))
    with ready(node.port, *BASIC) as raw:
        for key in POISON:
            assert raw.ask(kv.Set(0, 0, key=b"set-" + key, value=GOOD)).specific == OK
            assert raw.ask(kv.Get(b"set-" + key)).value == GOOD
            assert raw.ask(kv.Delete(b"del-" + key)).specific == OK


def test_a_read_from_a_damaged_file_fails_and_the_reader_stays_connected(make_node: MakeNode) -> None:
    node = make_node()
    node.call(
        lambda: (node.vbucket(0).documents.set(b"lost", GOOD, 0), node.vbucket(1).documents.set(b"kept", GOOD, 0))
    )
    to_disk(node)
    disk = node.vbucket(0).shared.disk

    def damage() -> None:
        with disk.write() as transaction:
            disk.erase(transaction, 0)

    node.call(damage)
    with ready(node.port, *BASIC) as raw:
        assert raw.ask(kv.Get(b"lost")).specific == Status.EINTERNAL
        assert raw.ask(kv.Get(b"kept", vbucket=1)).value == GOOD


# ---------------------------------------------------------------------------------------------- checks of values


@pytest.mark.parametrize(
    ("datatype", "value", "status"),
    [
        pytest.param(XATTR, b"", Status.XATTR_EINVAL, id="empty value marked as xattrs"),
        pytest.param(SNAPPY, b"", Status.EINVAL, id="empty value marked as compressed"),
        pytest.param(XATTR, join_xattrs({"a": b"nonsense"}), Status.XATTR_EINVAL, id="an attribute that is not JSON"),
        pytest.param(
            XATTR, join_xattrs({"a": b'"%s"' % (b"x" * MAX_XATTR_BYTES)}), Status.E2BIG, id="xattrs beyond 1 MiB"
        ),
        pytest.param(
            XATTR | SNAPPY, deflate(join_xattrs({"a": b"1" * MAX_XATTR_BYTES})), Status.E2BIG, id="behind compression"
        ),
        pytest.param(
            XATTR, join_xattrs({f"{n:x}": b"1" for n in range(20_000)}), Status.E2BIG, id="20,000 xattrs"
        ),
    ],
)  # fmt: skip
def test_no_client_can_store_an_unreadable_value(node: NodeThread, datatype: int, value: bytes, status: int) -> None:
    with ready(node.port, *ALL) as raw:
        for request in (
            kv.Set(0, 0, key=b"\0k", value=value, datatype=datatype),
            kv.Add(0, 0, key=b"\0k", value=value, datatype=datatype),
            kv.WithMeta(0, 0, 1, 1, key=b"\0k", value=value, datatype=datatype),
        ):
            assert raw.ask(request).specific == status


def test_a_path_cannot_make_xattrs_larger_than_a_document_may_have(node: NodeThread) -> None:
    with ready(node.port, *BASIC) as raw:
        large = b'"%s"' % (b"x" * MAX_XATTR_BYTES)
        upsert = SubdocMutation.under(Opcode.SUBDOC_DICT_UPSERT)(
            1, PathFlag.XATTR, doc_flags=DocFlag.MKDOC, key=b"large", value=b"a" + large
        )
        assert raw.ask(upsert).specific == Status.E2BIG
        assert raw.ask(kv.Get(b"large")).specific == Status.KEY_ENOENT


# ---------------------------------------------------------------------------------------------- deep JSON

DEEP = b"[" * 900 + b"]" * 900
DEEPER = b"[" * 20_000 + b"]" * 20_000


@pytest.mark.parametrize("text", [DEEP, DEEPER], ids=["900 levels", "20,000 levels"])
def test_deep_json_is_an_error_of_its_request(node: NodeThread, text: bytes) -> None:
    with ready(node.port, *ALL) as raw:
        nonsense = (
            frame(Opcode.DCP_OPEN, extras=bytes(8), key=b"deep", value=text, datatype=JSON),
            frame(Opcode.STAT, key=b"dcp", value=text, datatype=JSON),
        )
        for request in nonsense:
            assert raw.ask(request).specific == Status.EINVAL
        raw.ask(kv.Set(0, 0, key=b"\0deep", value=text))
        assert raw.ask(kv.Get(b"\0deep")).value == text
        looked = raw.ask(SubdocLookup.under(Opcode.SUBDOC_GET)(4, key=b"\0deep", path=b"a[0]"))
        assert looked.specific in (Status.SUBDOC_DOC_E2DEEP, Status.SUBDOC_DOC_NOT_JSON)


def test_an_attribute_that_is_deep_json_is_no_binary_value(node: NodeThread) -> None:
    with ready(node.port, *ALL) as raw:
        value = join_xattrs({"deep": DEEP}, b"{}")
        assert raw.ask(kv.Set(0, 0, key=b"\0x", value=value, datatype=XATTR)).specific == OK
        binary = PathFlag.XATTR | PathFlag.BINARY
        looked = raw.ask(SubdocLookup.under(Opcode.SUBDOC_GET)(4, binary, key=b"\0x", path=b"deep"))
        assert looked.specific in (Status.SUBDOC_FIELD_NOT_BINARY_VALUE, Status.SUBDOC_DOC_E2DEEP)
