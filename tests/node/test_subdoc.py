"""Sub-document commands over a real socket: flags, statuses, attributes, macros and deleted documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from struct import pack
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.node.front_node import Served, serve
from tests.node.raw import BASIC, Raw, frame, ready
from tests.support.examples import examples
from upriver.errors import Status
from upriver.model import Datatype
from upriver.wire import Frame, Opcode
from upriver.wire.constants import DocFlag, Feature, PathFlag
from upriver.wire.messages import kv
from upriver.wire.messages.subdoc import (
    LookupSpec,
    MutationSpec,
    SubdocMultiLookup,
    SubdocMultiLookupResponse,
    SubdocMultiMutation,
    SubdocMultiMutationResponse,
)

S, Op = Status, Opcode
X = PathFlag.XATTR
MACRO = PathFlag.XATTR | PathFlag.EXPAND_MACROS
OK = S.SUCCESS
DELETED = DocFlag.ACCESS_DELETED
PRESERVE_TTL = b"\x50"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("subdoc") / "data") as served:
        yield served


@pytest.fixture
def raw(node: Served) -> Iterator[Raw]:
    with ready(node.kv_port, *BASIC, Feature.ALT_REQUEST) as connection:
        yield connection


class Answer(NamedTuple):
    status: Status
    value: bytes
    cas: int = 0


def answered(response: Frame) -> Answer:
    return Answer(Status(response.specific), response.value, response.cas)


def single(
    raw: Raw, opcode: int, path: bytes, value: bytes = b"", *, flags: int = 0, doc_flags: int | None = None,
    expiry: int | None = None, key: bytes = b"doc", cas: int = 0, framing: bytes = b"",
) -> Answer:  # fmt: skip
    """One single-path command, unchecked, so that it may break the rules."""
    extras = pack(">HB", len(path), flags)
    extras += pack(">I", expiry) if expiry is not None else b""
    extras += bytes((doc_flags,)) if doc_flags is not None else b""
    return answered(raw.ask(frame(opcode, extras=extras, key=key, value=path + value, cas=cas, framing=framing)))


def store(raw: Raw, value: object, key: bytes = b"doc", expiry: int = 0) -> int:
    """Write a new document; returns its CAS. (A plain SET would keep the attributes of an older one.)"""
    raw.ask(kv.Delete(key))
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    response = raw.ask(kv.Set(0xABCD, expiry, key, content))
    assert response.specific == OK
    return response.cas


def body(raw: Raw, key: bytes = b"doc") -> object:
    response = raw.ask(kv.Get(key))
    return json.loads(response.value) if response.specific == OK else Status(response.specific)


def lookups(raw: Raw, *specs: tuple[int, int, bytes], doc_flags: int | None = None, key: bytes = b"doc") -> Frame:
    return raw.ask(SubdocMultiLookup(doc_flags, key, tuple(LookupSpec(*spec) for spec in specs)))


def found(response: Frame) -> list[tuple[Status, bytes]]:
    results = SubdocMultiLookupResponse.from_frame(response).results
    return [(Status(each.status), each.value) for each in results]


def mutations(
    raw: Raw, *specs: tuple[int, int, bytes, bytes], doc_flags: int | None = None, key: bytes = b"doc", cas: int = 0,
    expiry: int | None = None, user_flags: int | None = None,
) -> Frame:  # fmt: skip
    message = SubdocMultiMutation(
        expiry, user_flags, doc_flags, key, tuple(MutationSpec(*spec) for spec in specs), cas=cas
    )
    return raw.ask(message)


def results(response: Frame) -> list[tuple[int, Status, bytes]]:
    made = SubdocMultiMutationResponse.from_frame(response).results
    return [(each.path_index, Status(each.status), each.value) for each in made]


# ---------------------------------------------------------------------------------------------- lookups


def test_single_lookups_answer_with_value_and_cas(raw: Raw) -> None:
    cas = store(raw, {"a": {"b": [1, 2]}})
    assert single(raw, Op.SUBDOC_GET, b"a.b[1]") == Answer(OK, b"2", cas)
    assert single(raw, Op.SUBDOC_EXISTS, b"a.b") == Answer(OK, b"", cas)
    assert single(raw, Op.SUBDOC_GET_COUNT, b"a.b") == Answer(OK, b"2", cas)
    assert single(raw, Op.SUBDOC_GET_COUNT, b"").value == b"1"


@pytest.mark.parametrize(("opcode", "path", "status"), [
    (Op.SUBDOC_GET, b"z", S.SUBDOC_PATH_ENOENT),
    (Op.SUBDOC_EXISTS, b"z", S.SUBDOC_PATH_ENOENT),
    (Op.SUBDOC_GET, b"a.b.c", S.SUBDOC_PATH_MISMATCH),
    (Op.SUBDOC_GET, b"a..b", S.SUBDOC_PATH_EINVAL),
    (Op.SUBDOC_GET, b"x" * 1025, S.SUBDOC_PATH_E2BIG),
    (Op.SUBDOC_GET, b"", S.EINVAL),
    (Op.SUBDOC_EXISTS, b"", S.EINVAL),
])  # fmt: skip
def test_single_lookups_fail_with_their_status(raw: Raw, opcode: int, path: bytes, status: Status) -> None:
    store(raw, {"a": {"b": [1, 2]}})
    assert single(raw, opcode, path).status == status


def test_a_missing_document_and_one_that_is_not_json(raw: Raw) -> None:
    assert single(raw, Op.SUBDOC_GET, b"a", key=b"missing").status == S.KEY_ENOENT
    store(raw, b"not json")
    assert single(raw, Op.SUBDOC_GET, b"a").status == S.SUBDOC_DOC_NOT_JSON
    store(raw, b"[" * 40 + b"]" * 40)
    assert single(raw, Op.SUBDOC_GET, b"[0]").status == S.SUBDOC_DOC_E2DEEP
    store(raw, b"not json")
    whole = lookups(raw, (Op.GET, 0, b""))
    assert found(whole) == [(OK, b"not json")]


def test_each_path_of_a_multi_lookup_has_its_own_result(raw: Raw) -> None:
    store(raw, {"a": 1, "b": [0]})
    assert found(lookups(raw, (Op.SUBDOC_GET, 0, b"a"), (Op.SUBDOC_EXISTS, 0, b"b"))) == [(OK, b"1"), (OK, b"")]
    response = lookups(raw, (Op.SUBDOC_GET, 0, b"a"), (Op.SUBDOC_GET, 0, b"z"), (Op.SUBDOC_GET_COUNT, 0, b"b"))
    assert response.specific == S.SUBDOC_MULTI_PATH_FAILURE
    assert found(response) == [(OK, b"1"), (S.SUBDOC_PATH_ENOENT, b""), (OK, b"1")]


@pytest.mark.parametrize(("specs", "status"), [
    ([(Op.SUBDOC_GET, 0, b"a"), (Op.SUBDOC_GET, X, b"x")], S.SUBDOC_INVALID_XATTR_ORDER),
    ([(Op.SUBDOC_DICT_ADD, 0, b"a")], S.SUBDOC_INVALID_COMBO),
    ([(Op.SUBDOC_GET, PathFlag.MKDIR_P, b"a")], S.EINVAL),
    ([(Op.SUBDOC_GET, 0x80, b"a")], S.EINVAL),
    ([(Op.GET, 0, b"a")], S.EINVAL),
    ([(Op.SUBDOC_GET, X, b"")], S.EINVAL),
    ([(Op.SUBDOC_GET, PathFlag.BINARY, b"a")], S.SUBDOC_XATTR_INVALID_FLAG_COMBO),
    ([(Op.SUBDOC_GET, X, b"$nothing.x")], S.SUBDOC_XATTR_UNKNOWN_VATTR),
    ([(Op.SUBDOC_GET, X, b"a-name-that-is-too-long")], S.XATTR_EINVAL),
    ([(Op.SUBDOC_GET, X, b"[0]")], S.XATTR_EINVAL),
    ([(Op.SUBDOC_GET, 0, b"a")] * 17, S.SUBDOC_INVALID_COMBO),
    ([], S.EINVAL),
])  # fmt: skip
def test_an_invalid_lookup_fails_as_a_whole(raw: Raw, specs: list[tuple[int, int, bytes]], status: Status) -> None:
    store(raw, {"a": 1})
    value = b"".join(pack(">BBH", opcode, flags, len(path)) + path for opcode, flags, path in specs)
    response = raw.ask(frame(Op.SUBDOC_MULTI_LOOKUP, key=b"doc", value=value))
    if specs:
        assert response.specific == status
    else:
        assert response.specific in (S.EINVAL, S.SUBDOC_INVALID_COMBO)


# ---------------------------------------------------------------------------------------------- mutations


def test_a_single_mutation_changes_the_document_and_keeps_its_flags(raw: Raw) -> None:
    cas = store(raw, {"a": 1})
    done = single(raw, Op.SUBDOC_DICT_UPSERT, b"b", b"[2]")
    assert done.status == OK
    assert done.cas > cas
    assert body(raw) == {"a": 1, "b": [2]}
    assert raw.ask(kv.Get(b"doc")).extras == pack(">I", 0xABCD)
    assert single(raw, Op.SUBDOC_COUNTER, b"n", b"5") == Answer(OK, b"5", single(raw, Op.SUBDOC_GET, b"n").cas)
    assert single(raw, Op.SUBDOC_DELETE, b"b").status == OK
    assert body(raw) == {"a": 1, "n": 5}


def test_a_mutation_is_answered_with_its_mutation_token(raw: Raw) -> None:
    store(raw, {})
    response = mutations(raw, (Op.SUBDOC_DICT_ADD, 0, b"a", b"1"))
    assert len(response.extras) == 16
    assert int.from_bytes(response.extras[8:], "big") > 0


@pytest.mark.parametrize(("opcode", "path", "value", "flags", "status"), [
    (Op.SUBDOC_DICT_ADD, b"a", b"2", 0, S.SUBDOC_PATH_EEXISTS),
    (Op.SUBDOC_DICT_UPSERT, b"x.y", b"2", 0, S.SUBDOC_PATH_ENOENT),
    (Op.SUBDOC_DICT_UPSERT, b"x", b"?", 0, S.SUBDOC_VALUE_CANTINSERT),
    (Op.SUBDOC_DICT_UPSERT, b"x", b"", 0, S.EINVAL),
    (Op.SUBDOC_DELETE, b"a", b"1", 0, S.EINVAL),
    (Op.SUBDOC_DELETE, b"", b"", 0, S.EINVAL),
    (Op.SUBDOC_REPLACE, b"a", b"1", PathFlag.MKDIR_P, S.EINVAL),
    (Op.SUBDOC_ARRAY_ADD_UNIQUE, b"list", b"1", 0, S.SUBDOC_PATH_EEXISTS),
    (Op.SUBDOC_COUNTER, b"a", b"0", 0, S.SUBDOC_DELTA_EINVAL),
    (Op.SUBDOC_DICT_UPSERT, b"x", b'"${Mutation.CAS}"', PathFlag.EXPAND_MACROS, S.SUBDOC_XATTR_INVALID_FLAG_COMBO),
    (Op.SUBDOC_DICT_UPSERT, b"x", b'"${Mutation.CSA}"', MACRO, S.SUBDOC_XATTR_UNKNOWN_MACRO),
    (Op.SUBDOC_DICT_UPSERT, b"x", b'"${$document.nope}"', MACRO, S.SUBDOC_XATTR_UNKNOWN_VATTR_MACRO),
    (Op.SUBDOC_DICT_UPSERT, b"$document.CAS", b"1", X, S.SUBDOC_XATTR_CANT_MODIFY_VATTR),
    (Op.SUBDOC_REPLACE_BODY_WITH_XATTR, b"a", b"", 0, S.SUBDOC_XATTR_INVALID_FLAG_COMBO),
])  # fmt: skip
def test_a_refused_mutation_has_its_status_and_changes_nothing(
    raw: Raw, opcode: int, path: bytes, value: bytes, flags: int, status: Status
) -> None:
    cas = store(raw, {"a": 1, "list": [1]})
    assert single(raw, opcode, path, value, flags=flags).status == status
    assert raw.ask(kv.Get(b"doc")).cas == cas


def test_several_mutations_are_all_or_nothing(raw: Raw) -> None:
    store(raw, {"a": 1})
    done = mutations(raw, (Op.SUBDOC_COUNTER, 0, b"a", b"9"), (Op.SUBDOC_DICT_ADD, 0, b"b", b"2"),
                     (Op.SUBDOC_COUNTER, 0, b"a", b"-3"))  # fmt: skip
    assert results(done) == [(0, OK, b"10"), (2, OK, b"7")]
    failed = mutations(raw, (Op.SUBDOC_COUNTER, 0, b"a", b"1"), (Op.SUBDOC_REPLACE, 0, b"z", b"2"))
    assert failed.specific == S.SUBDOC_MULTI_PATH_FAILURE
    assert results(failed) == [(1, S.SUBDOC_PATH_ENOENT, b"")]
    assert body(raw) == {"a": 7, "b": 2}


@pytest.mark.parametrize(("specs", "status"), [
    ([(Op.SUBDOC_DICT_ADD, 0, b"b", b"1"), (Op.SUBDOC_DICT_ADD, X, b"x", b"1")], S.SUBDOC_INVALID_XATTR_ORDER),
    ([(Op.SUBDOC_GET, 0, b"a", b"")], S.SUBDOC_INVALID_COMBO),
    ([(Op.SET, 0, b"", b"{}"), (Op.SUBDOC_DICT_ADD, 0, b"b", b"1")], S.SUBDOC_INVALID_COMBO),
    ([(Op.SET, 0, b"a", b"{}")], S.EINVAL),
])  # fmt: skip
def test_an_invalid_mutation_fails_as_a_whole(
    raw: Raw, specs: list[tuple[int, int, bytes, bytes]], status: Status
) -> None:
    store(raw, {"a": 1})
    assert mutations(raw, *specs).specific == status
    assert body(raw) == {"a": 1}


def test_a_document_is_created_only_on_request(raw: Raw) -> None:
    upsert = (Op.SUBDOC_DICT_UPSERT, 0, b"a.b", b"1")
    assert mutations(raw, upsert, key=b"new1").specific == S.KEY_ENOENT
    assert mutations(raw, upsert, key=b"new1", doc_flags=DocFlag.MKDOC).specific == OK
    assert body(raw, b"new1") == {"a": {"b": 1}}
    assert mutations(raw, upsert, key=b"new1", doc_flags=DocFlag.ADD).specific == S.KEY_EEXISTS
    assert mutations(raw, upsert, key=b"new2", doc_flags=DocFlag.ADD).specific == OK
    assert single(raw, Op.SUBDOC_ARRAY_PUSH_LAST, b"", b"1,2", key=b"new3", doc_flags=DocFlag.MKDOC).status == OK
    assert body(raw, b"new3") == [1, 2]
    assert mutations(raw, upsert, key=b"new4", doc_flags=DocFlag.MKDOC, cas=5).specific == S.KEY_ENOENT


@pytest.mark.parametrize("doc_flags", [
    DocFlag.ADD | DocFlag.MKDOC, DocFlag.CREATE_AS_DELETED, DocFlag.REPLICA_READ, 0x40,
    DocFlag.REVIVE | DocFlag.CREATE_AS_DELETED | DocFlag.MKDOC,
])  # fmt: skip
def test_document_flags_that_exclude_each_other_are_refused(raw: Raw, doc_flags: int) -> None:
    store(raw, {})
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"a", b"1", doc_flags=doc_flags).status == S.EINVAL


def test_cas_must_match(raw: Raw) -> None:
    cas = store(raw, {})
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"a", b"1", cas=cas + 1).status == S.KEY_EEXISTS
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"a", b"1", cas=cas).status == OK
    assert single(raw, Op.SUBDOC_DICT_ADD, b"z", b"1", cas=5, doc_flags=DocFlag.ADD, key=b"new").status == S.EINVAL


def test_a_locked_document_hides_its_cas_and_is_changed_only_by_its_holder(raw: Raw) -> None:
    store(raw, {"a": 1})
    held = raw.ask(kv.GetLocked(None, b"doc")).cas
    assert single(raw, Op.SUBDOC_GET, b"a") == Answer(OK, b"1", 0xFFFF_FFFF_FFFF_FFFF)
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"a", b"2").status == S.LOCKED
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"x", b'"${Mutation.CAS}"', flags=MACRO).status == S.LOCKED
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"a", b"3", cas=held).status == OK
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"a", b"4").status == OK


def expiry_of(raw: Raw) -> int:
    return int(single(raw, Op.SUBDOC_GET, b"$document.exptime", flags=X).value)


@pytest.mark.parametrize(("value", "flags"), [(b"1", X), (b'"${Mutation.CAS}"', MACRO)])
def test_a_mutation_removes_the_expiry_unless_it_is_preserved(raw: Raw, value: bytes, flags: int) -> None:
    store(raw, {}, expiry=1000)
    until = expiry_of(raw)
    assert until > 0
    single(raw, Op.SUBDOC_DICT_UPSERT, b"x", value, flags=flags, framing=PRESERVE_TTL)
    assert expiry_of(raw) == until
    single(raw, Op.SUBDOC_DICT_UPSERT, b"x", value, flags=flags)
    assert expiry_of(raw) == 0
    single(raw, Op.SUBDOC_DICT_UPSERT, b"x", value, flags=flags, expiry=2000)
    assert expiry_of(raw) >= until + 900


# ---------------------------------------------------------------------------------------------- attributes


def test_attributes_live_beside_the_body(raw: Raw) -> None:
    store(raw, b"not json at all")
    assert mutations(raw, (Op.SUBDOC_DICT_UPSERT, X | PathFlag.MKDIR_P, b"u.a", b"1"),
                     (Op.SUBDOC_ARRAY_PUSH_LAST, X | PathFlag.MKDIR_P, b"_s.list", b"1,2")).specific == OK  # fmt: skip
    assert raw.ask(kv.Get(b"doc")).value == b"not json at all"
    response = lookups(raw, (Op.SUBDOC_GET, X, b"u"), (Op.SUBDOC_GET, X, b"_s.list[1]"), (Op.SUBDOC_GET, X, b"$XTOC"))
    assert found(response) == [(OK, b'{"a":1}'), (OK, b"2"), (OK, b'["u", "_s"]')]
    assert single(raw, Op.SUBDOC_DELETE, b"u", flags=X).status == OK
    assert single(raw, Op.SUBDOC_GET, b"u", flags=X).status == S.SUBDOC_PATH_ENOENT
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"no.parents", b"1", flags=X).status == S.SUBDOC_PATH_ENOENT


def test_macros_are_replaced_by_the_facts_of_the_write(raw: Raw) -> None:
    store(raw, {"a": 1})
    mkdir = MACRO | PathFlag.MKDIR_P
    before = single(raw, Op.SUBDOC_GET, b"$document", flags=X)
    done = mutations(
        raw, (Op.SUBDOC_DICT_UPSERT, mkdir, b"m.cas", b'"${Mutation.CAS}"'),
        (Op.SUBDOC_DICT_UPSERT, mkdir, b"m.seqno", b'"${Mutation.seqno}"'),
        (Op.SUBDOC_DICT_UPSERT, mkdir, b"m.crc", b'"${Mutation.value_crc32c}"'),
        (Op.SUBDOC_DICT_UPSERT, mkdir, b"m.old", b'"${$document.seqno}"'),
        (Op.SUBDOC_DICT_UPSERT, mkdir, b"m.all", b'"${$document}"'),
        (Op.SUBDOC_DICT_UPSERT, 0, b"a", b"2"),
    )  # fmt: skip
    assert done.specific == OK
    made = json.loads(single(raw, Op.SUBDOC_GET, b"m", flags=X).value)
    document = json.loads(single(raw, Op.SUBDOC_GET, b"$document", flags=X).value)
    assert made["cas"] == "0x" + done.cas.to_bytes(8, "little").hex()
    assert int(made["seqno"], 16) == int.from_bytes(done.extras[8:], "big")
    assert made["crc"] == document["value_crc32c"]
    assert made["old"] == json.loads(before.value)["seqno"]
    assert made["all"] == json.loads(before.value)


def test_virtual_attributes_describe_the_document(raw: Raw) -> None:
    cas = store(raw, {"a": 1})
    document = json.loads(single(raw, Op.SUBDOC_GET, b"$document", flags=X).value)
    assert int(document["CAS"], 16) == cas
    assert document["datatype"] == ["json"]
    assert document["value_bytes"] == len(json.dumps({"a": 1}))
    assert document["flags"] == 0xABCD
    assert single(raw, Op.SUBDOC_GET, b"$document.deleted", flags=X).value == b"false"
    assert single(raw, Op.SUBDOC_EXISTS, b"$document.nope", flags=X).status == S.SUBDOC_PATH_ENOENT
    assert json.loads(single(raw, Op.SUBDOC_GET, b"$vbucket", flags=X).value)["HLC"]["mode"] == "real"


def test_binary_attributes_come_back_as_bytes(raw: Raw) -> None:
    store(raw, {})
    binary = X | PathFlag.BINARY
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"b", b"\x00\xff", flags=binary).status == OK
    assert single(raw, Op.SUBDOC_GET, b"b", flags=binary).value == b"\x00\xff"
    assert single(raw, Op.SUBDOC_GET, b"b", flags=X).value.startswith(b'"cb-content-base64-encoded:')
    single(raw, Op.SUBDOC_DICT_UPSERT, b"t", b'"text"', flags=X)
    assert single(raw, Op.SUBDOC_GET, b"t", flags=binary).status == S.SUBDOC_FIELD_NOT_BINARY_VALUE


def test_the_body_can_be_taken_from_an_attribute(raw: Raw) -> None:
    store(raw, {"old": 1})
    done = mutations(raw, (Op.SUBDOC_DICT_UPSERT, X, b"stage", b'{"new":1}'),
                     (Op.SUBDOC_REPLACE_BODY_WITH_XATTR, X, b"stage", b""),
                     (Op.SUBDOC_DELETE, X, b"stage", b""))  # fmt: skip
    assert done.specific == OK
    assert body(raw) == {"new": 1}


# ---------------------------------------------------------------------------------------------- deleted documents


def test_deleted_documents_are_seen_only_when_asked_for(raw: Raw) -> None:
    store(raw, {"a": 1})
    single(raw, Op.SUBDOC_DICT_UPSERT, b"_s", b"1", flags=X)
    single(raw, Op.SUBDOC_DICT_UPSERT, b"u", b"1", flags=X)
    raw.ask(kv.Delete(b"doc"))
    assert single(raw, Op.SUBDOC_GET, b"_s", flags=X).status == S.KEY_ENOENT
    assert single(raw, Op.SUBDOC_GET, b"_s", flags=X, doc_flags=DELETED)[:2] == (S.SUBDOC_SUCCESS_DELETED, b"1")
    wanted = [(Op.SUBDOC_GET, X, b"_s"), (Op.SUBDOC_GET, X, b"u"), (Op.SUBDOC_GET, 0, b"a")]
    response = lookups(raw, *wanted, doc_flags=DELETED)
    assert response.specific == S.SUBDOC_MULTI_PATH_FAILURE_DELETED
    assert [status for status, _ in found(response)] == [OK, S.SUBDOC_PATH_ENOENT, S.SUBDOC_PATH_ENOENT]
    assert single(raw, Op.SUBDOC_GET, b"$document.deleted", flags=X, doc_flags=DELETED).value == b"true"


def test_attributes_of_a_deleted_document_can_be_changed_but_it_has_no_body(raw: Raw) -> None:
    store(raw, {"a": 1})
    raw.ask(kv.Delete(b"doc"))
    change = {"flags": X, "doc_flags": DELETED}
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"_s", b"5", **change).status == S.SUBDOC_SUCCESS_DELETED
    assert single(raw, Op.SUBDOC_COUNTER, b"_s", b"2", **change)[:2] == (S.SUBDOC_SUCCESS_DELETED, b"7")
    refused = single(raw, Op.SUBDOC_DICT_UPSERT, b"a", b"1", doc_flags=DELETED)
    assert refused.status == S.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE
    assert body(raw) == S.KEY_ENOENT


def test_a_document_can_be_created_as_deleted_and_revived(raw: Raw) -> None:
    born_dead = DocFlag.ADD | DocFlag.CREATE_AS_DELETED | DELETED
    stage = (Op.SUBDOC_DICT_UPSERT, X, b"_txn", b'{"id":1}')
    assert mutations(raw, stage, doc_flags=born_dead, key=b"staged").specific == S.SUBDOC_SUCCESS_DELETED
    assert body(raw, b"staged") == S.KEY_ENOENT
    assert mutations(raw, stage, doc_flags=born_dead, key=b"staged").specific == S.KEY_EEXISTS
    revive = DocFlag.REVIVE | DELETED
    unstage = [(Op.SUBDOC_DELETE, X, b"_txn", b""), (Op.SET, 0, b"", b'{"live":1}')]
    done = mutations(raw, *unstage, doc_flags=revive, key=b"staged")
    assert done.specific == OK
    assert body(raw, b"staged") == {"live": 1}
    again = mutations(raw, stage, doc_flags=revive, key=b"staged")
    assert again.specific == S.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS


def test_the_whole_body_can_be_set_or_deleted_along_with_attributes(raw: Raw) -> None:
    store(raw, {"a": 1})
    assert mutations(raw, (Op.SUBDOC_DICT_UPSERT, X, b"_s", b"1"), (Op.SET, 0, b"", b"[1]")).specific == OK
    assert body(raw) == [1]
    assert mutations(raw, (Op.SUBDOC_DICT_UPSERT, X, b"u", b"1"), (Op.DELETE, 0, b"", b"")).specific == OK
    assert body(raw) == S.KEY_ENOENT
    kept = lookups(raw, (Op.SUBDOC_GET, X, b"$XTOC"), doc_flags=DELETED)
    assert found(kept) == [(OK, b'["_s"]')]


def test_replica_reads_need_a_replica(raw: Raw) -> None:
    store(raw, {"a": 1})
    assert single(raw, Op.SUBDOC_GET, b"a", doc_flags=DocFlag.REPLICA_READ).status == S.NOT_MY_VBUCKET


@pytest.mark.parametrize(("framing", "status"), [(PRESERVE_TTL, S.NOT_SUPPORTED), (b"\x11\x01", S.EINVAL)])
def test_a_lookup_has_no_expiry_and_cannot_be_durable(raw: Raw, framing: bytes, status: Status) -> None:
    store(raw, {"a": 1})
    assert single(raw, Op.SUBDOC_GET, b"a", framing=framing).status == status


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_durable_mutation_is_answered_when_it_is_durable(raw: Raw, level: int) -> None:
    store(raw, {"a": 1})
    done = single(raw, Op.SUBDOC_DICT_UPSERT, b"a", b"2", framing=bytes((0x11, level)))
    assert done.status == OK
    assert body(raw) == {"a": 2}


opcodes = st.sampled_from([*(op for op in Opcode if op.name.startswith("SUBDOC")), Op.GET, Op.SET, Op.DELETE])
parts = st.sampled_from([b"a", b"b", b".", b"[0]", b"[-1]", b"`c.d`", b"_s", b"$document", b"CAS", b"\xff", b"["])
paths = st.lists(parts, max_size=5).map(b"".join)
fragments = st.sampled_from([
    b"", b"1", b"-7", b"[1,2]", b"{}", b'"x"', b"1,2", b"nope", b'"${Mutation.CAS}"', b'"${$document}"', b"\xff",
    b"[" * 40,
])  # fmt: skip
path_flags = st.sampled_from([0, 1, 4, 5, 0x14, 0x15, 0x24, 0x25, 0x80])
stored = st.sampled_from([b"{}", b"[]", b'{"a":{"b":[1]},"c.d":5}', b"5", b"not json", b"[[[1]]]"])
specs = st.lists(st.tuples(opcodes, path_flags, paths, fragments), min_size=1, max_size=4)


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(content=stored, wanted=specs, doc_flags=st.none() | st.integers(0, 0x3F), deleted=st.booleans())
def test_any_request_leaves_a_valid_document_and_is_answered_with_a_status(
    raw: Raw, content: bytes, wanted: list[tuple[int, int, bytes, bytes]], doc_flags: int | None, deleted: bool
) -> None:
    store(raw, content)
    if deleted:
        raw.ask(kv.Delete(b"doc"))
    extras = bytes((doc_flags,)) if doc_flags is not None else b""
    lookup = b"".join(pack(">BBH", op, flags, len(path)) + path for op, flags, path, _ in wanted)
    assert raw.ask(frame(Op.SUBDOC_MULTI_LOOKUP, extras=extras, key=b"doc", value=lookup)).specific != S.EINTERNAL
    change = b"".join(pack(">BBHI", op, fl, len(path), len(value)) + path + value for op, fl, path, value in wanted)
    changed = raw.ask(frame(Op.SUBDOC_MULTI_MUTATION, extras=extras, key=b"doc", value=change))
    assert changed.specific != S.EINTERNAL
    after = raw.ask(kv.Get(b"doc"))
    if changed.specific == OK and after.datatype & Datatype.JSON:
        json.loads(after.value)
    elif changed.specific not in (OK, S.SUBDOC_SUCCESS_DELETED):
        assert (after.specific == OK) != deleted
        assert deleted or after.value == content


def test_newer_clients_set_the_user_flags_of_the_document(raw: Raw) -> None:
    """Nine bytes of extras: expiry, user flags, document flags."""
    raw.ask(kv.Delete(b"flagged"))
    made = mutations(
        raw, (Op.SUBDOC_DICT_ADD, 0, b"a", b"1"), expiry=0, user_flags=0x02000006, doc_flags=DocFlag.ADD, key=b"flagged"
    )
    assert made.specific == OK
    assert raw.ask(kv.Get(b"flagged")).extras == pack(">I", 0x02000006)
    assert mutations(raw, (Op.SUBDOC_DICT_ADD, 0, b"b", b"1"), key=b"flagged").specific == OK
    assert raw.ask(kv.Get(b"flagged")).extras == pack(">I", 0x02000006), "without user flags in the request, they stay"
    extras = pack(">HBIIB", 1, 0, 0, 7, 0)
    assert raw.ask(frame(Op.SUBDOC_DICT_UPSERT, extras=extras, key=b"flagged", value=b"c2")).specific == OK
    assert raw.ask(kv.Get(b"flagged")).extras == pack(">I", 7)


def test_a_document_created_as_deleted_can_be_changed_with_its_cas(raw: Raw) -> None:
    """A transaction does this when it takes over what another had staged."""
    raw.ask(kv.Delete(b"staged"))
    flags = DocFlag.ACCESS_DELETED | DocFlag.CREATE_AS_DELETED
    stage = (Op.SUBDOC_DICT_UPSERT, X, b"txn", b'{"id":1}')
    made = mutations(raw, stage, doc_flags=flags | DocFlag.MKDOC, key=b"staged")
    assert made.specific == S.SUBDOC_SUCCESS_DELETED
    again = mutations(raw, stage, doc_flags=flags, key=b"staged", cas=made.cas)
    assert again.specific == S.SUBDOC_SUCCESS_DELETED
    assert single(raw, Op.SUBDOC_DICT_UPSERT, b"txn", b"1", flags=X, doc_flags=flags, key=b"staged").status == S.EINVAL


@pytest.mark.parametrize("flag", [PathFlag.EXPAND_MACROS, PathFlag.BINARY])
def test_what_must_be_unique_cannot_be_a_macro_or_binary(raw: Raw, flag: int) -> None:
    store(raw, {"a": []})
    value = b'"${Mutation.CAS}"' if flag == PathFlag.EXPAND_MACROS else b"\xff"
    assert single(raw, Op.SUBDOC_ARRAY_ADD_UNIQUE, b"x.a", value, flags=X | flag).status == S.EINVAL
