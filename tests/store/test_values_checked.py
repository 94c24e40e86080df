"""No operation stores a value that readers cannot open; one stored by an earlier version fails only its own request."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack as pack_numbers
from typing import Any

import pytest

from tests.store.store_support import Clock, changes, open_bucket
from upriver.errors import InvalidMessage, KeyNotFound, Status, StatusError
from upriver.model import Datatype, VbucketState
from upriver.wire.packed import RecordKind, pack
from upriver.wire.values import deflate, join_xattrs

MIB = 1 << 20
XATTR, SNAPPY = int(Datatype.XATTR), int(Datatype.SNAPPY)
MANY = b"".join(pack_numbers(">I", 7) + b"%04x\0" % n + b"1\0" for n in range(100_000))

BROKEN = [
    pytest.param(b"", XATTR, Status.XATTR_EINVAL, id="xattr flag without xattrs"),
    pytest.param(b"\0\0\0\x09{}", XATTR, Status.XATTR_EINVAL, id="xattrs cut short"),
    pytest.param(b"\0\0\0\x06\0\0\0\x02ab{}", XATTR, Status.XATTR_EINVAL, id="a pair without zero bytes"),
    pytest.param(pack_numbers(">I", len(MANY)) + MANY, XATTR, Status.E2BIG, id="more than 1 MiB of xattrs"),
    pytest.param(deflate(pack_numbers(">I", len(MANY)) + MANY), XATTR | SNAPPY, Status.E2BIG, id="compressed"),
    pytest.param(b"\xff\xff\xff", SNAPPY, Status.EINVAL, id="broken snappy"),
    pytest.param(b"", SNAPPY, Status.EINVAL, id="nothing, compressed"),
    pytest.param(deflate(bytes(30 * MIB)), SNAPPY, Status.E2BIG, id="30 MiB when inflated"),
    pytest.param(deflate(bytes(20 * MIB + 1)), SNAPPY, Status.E2BIG, id="a byte too much when inflated"),
    pytest.param(join_xattrs({"a": b"1"}, bytes(20 * MIB + 1)), XATTR, Status.E2BIG, id="a body too large"),
]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    opened = open_bucket(tmp_path_factory.mktemp("values"))
    opened.set_state(0, VbucketState.ACTIVE).documents.set(b"there", b"{}")
    yield opened
    opened.abandon()


def durably(vb: Any, value: bytes, datatype: int) -> None:
    with vb.durable.preparing(1):
        vb.documents.set(b"k", value, datatype=datatype)


META = {"rev_seqno": 9, "meta_cas": 77}
DOORS: dict[str, Callable[[Any, bytes, int], object]] = {
    "set": lambda vb, value, datatype: vb.documents.set(b"k", value, datatype=datatype),
    "add": lambda vb, value, datatype: vb.documents.add(b"k", value, datatype=datatype),
    "replace": lambda vb, value, datatype: vb.documents.replace(b"there", value, datatype=datatype),
    "prepare": lambda vb, value, datatype: vb.durable.prepare(b"k", value, level=1, datatype=datatype),
    "durable set": durably,
    "many": lambda vb, value, datatype: vb.bulk.set_many([b"k"], [value], datatype=datatype),
    "set with meta": lambda vb, value, datatype: vb.with_meta.set(b"k", value, datatype=datatype, **META),
    "delete with meta": lambda vb, value, datatype: vb.with_meta.delete(b"k", value=value, datatype=datatype, **META),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("value", "datatype", "status"), BROKEN)
def test_a_value_that_no_reader_could_open_is_refused(bucket, door: str, value: bytes, datatype: int, status: Status):
    vb = bucket.vbucket(0)
    with pytest.raises(StatusError) as refused:
        DOORS[door](vb, value, datatype)
    assert refused.value.status == status
    assert (vb.high_seqno, vb.pending) == (1, {})


def test_the_largest_document_has_20_mib_and_its_xattrs(tmp_path):
    xattrs = {"_s": b'"%s"' % (b"x" * (MIB - 20))}
    with open_bucket(tmp_path) as opened:
        vb = opened.set_state(0, VbucketState.ACTIVE)
        value = join_xattrs(xattrs, bytes(20 * MIB))
        vb.documents.set(b"plain", value, datatype=XATTR)
        vb.documents.set(b"small", deflate(value), datatype=XATTR | SNAPPY)
        assert vb.documents.get(b"plain").value == value


@pytest.fixture
def poisoned(tmp_path):
    """Documents that an earlier version accepted."""
    values = {b"snappy": (b"\xff\xff\xff", SNAPPY | XATTR), b"xattrs": (b"\0\0\0\x09{}", XATTR), b"empty": (b"", XATTR)}
    clock = Clock()
    with open_bucket(tmp_path, now_ns=clock) as opened:
        vb = opened.set_state(0, VbucketState.REPLICA)
        vb.replication.begin_snapshot(1, 4)
        for seqno, (key, (value, datatype)) in enumerate(values.items(), 1):
            time = clock.seconds + 10
            vb.replication.apply_records(
                pack(RecordKind.MUTATION, b"\0" + key, value, seqno=seqno, cas=5, datatype=datatype, time=time)
            )
        fine = pack(RecordKind.MUTATION, b"\0fine", b"{}", seqno=4, cas=5, time=clock.seconds + 10)
        vb.replication.apply_records(fine)
        opened.set_state(0, VbucketState.ACTIVE)
        yield opened, vb, clock


def test_an_unreadable_document_fails_only_its_own_request(poisoned):
    _, vb, _ = poisoned
    for key in (b"snappy", b"xattrs"):
        with pytest.raises((StatusError, InvalidMessage)):
            vb.documents.append(key, b"more")
        with pytest.raises((StatusError, InvalidMessage)):
            vb.documents.counter(key, 1)
    for key in (b"snappy", b"xattrs", b"empty"):
        vb.documents.get(key)
        vb.documents.delete(key)
        vb.documents.set(key, b"{}")


def test_an_unreadable_document_does_not_keep_others_from_expiring(poisoned):
    bucket, vb, clock = poisoned
    clock.seconds += 20
    assert bucket.run_expiry_pager() == 4
    with pytest.raises(KeyNotFound):
        vb.documents.get(b"fine")
    assert len(changes(vb.stream(0, vb.high_seqno))) == 4


def test_a_snapshot_of_seqnos_that_no_vbucket_can_have_is_refused(bucket):
    """The key index has 56 bits for a seqno: a record beyond that would never be found again."""
    replica = bucket.set_state(1, VbucketState.REPLICA)
    with pytest.raises(StatusError) as refused:
        replica.replication.begin_snapshot(1, 1 << 56)
    assert refused.value.status == Status.ERANGE
    replica.replication.begin_snapshot(1, (1 << 56) - 1)
