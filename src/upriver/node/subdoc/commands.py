"""Sub-document commands (``protocol.md`` 10.8): requests in, answers out.

The rules of a request are in ``subdoc_specs``, paths in ``subdoc_paths``, what is special about extended attributes
in ``subdoc_xattrs``, and a mutation's way from reading to writing in ``subdoc_write``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from upriver.errors import InvalidArguments, NotSupported, Status, StatusError
from upriver.model import SEQNO_MAX, Datatype
from upriver.node.cluster.durability import durably, finish
from upriver.node.commands.vbucket_gate import on_active
from upriver.node.dispatch import Handler
from upriver.node.subdoc import specs
from upriver.node.subdoc import write as subdoc_write
from upriver.node.subdoc.specs import Spec
from upriver.node.subdoc.view import DocumentView, look
from upriver.node.subdoc.write import Draft, MutationOutcome, PathFailure, Target
from upriver.wire import Message
from upriver.wire.constants import DocFlag, PathFlag
from upriver.wire.messages import subdoc
from upriver.wire.messages.subdoc import LookupResult, MutationResult

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.store import Stored, VBucket

LARGE = 64 * 1024  # a body that takes milliseconds to search
TRIES = 3
T = TypeVar("T")
_Lookup = subdoc.SubdocLookup | subdoc.SubdocMultiLookup
_Mutation = subdoc.SubdocMutation | subdoc.SubdocMultiMutation

# ---------------------------------------------------------------------------------------------- lookups


def lookup(conn: ClientConnection, request: _Lookup) -> Awaitable[None] | None:
    """A lookup reads the active vbucket, or with the replica flag the replica."""
    if conn.preserve_ttl(request):
        raise NotSupported("a lookup has no expiry to preserve")
    if conn.durability(request) is not None:
        raise InvalidArguments("a lookup cannot be durable")
    if (request.doc_flags or 0) & DocFlag.REPLICA_READ:
        return _lookup(conn, request, conn.vbucket(request.vbucket))
    return _lookup_active(conn, request)


def _lookup(conn: ClientConnection, request: _Lookup, vb: VBucket) -> Awaitable[None] | None:
    if isinstance(request, subdoc.SubdocLookup):
        return _single_lookup(conn, request, vb)
    return _multi_lookup(conn, request, vb)


_lookup_active = on_active(_lookup)


def _single_lookup(conn: ClientConnection, request: subdoc.SubdocLookup, vb: VBucket) -> Awaitable[None] | None:
    spec = specs.parse_spec(request.opcode, request.path_flags, request.path, b"", specs.LOOKUPS)
    view = _view(conn, request, vb)

    def answer(value: bytes) -> None:
        datatype = _json_bit(conn, value) if not spec.flags & PathFlag.BINARY else 0
        status = _status(failed=False, deleted=view.deleted)
        conn.reply(request, value=value, cas=_shown_cas(view, vb), status=status, datatype=datatype)

    return _work(conn, view, partial(look, view, spec), answer)


def _multi_lookup(conn: ClientConnection, request: subdoc.SubdocMultiLookup, vb: VBucket) -> Awaitable[None] | None:
    rules = specs.LOOKUPS | specs.WHOLE_LOOKUPS
    wanted = [specs.parse_spec(each.opcode, each.flags, each.path, b"", rules) for each in request.specs]
    specs.check_order(wanted)
    view = _view(conn, request, vb)

    def answer(results: tuple[LookupResult, ...]) -> None:
        status = _status(failed=any(result.status for result in results), deleted=view.deleted)
        value = subdoc.SubdocMultiLookupResponse(results).frame().value
        conn.reply(request, value=value, cas=_shown_cas(view, vb), status=status)

    return _work(conn, view, lambda: tuple(_result(view, spec) for spec in wanted), answer)


def _work(
    conn: ClientConnection, view: DocumentView, work: Callable[[], T], answer: Callable[[T], None]
) -> Awaitable[None] | None:
    """Look at once; into a large document from another thread, so that the other clients need not wait for it."""
    if len(view.body) <= LARGE:
        answer(work())
        return None

    async def later() -> None:
        answer(await conn.node.loop.run_in_executor(None, work))

    return later()


def _view(conn: ClientConnection, request: _Lookup, vb: VBucket) -> DocumentView:
    flags = specs.check_doc_flags(request.doc_flags or 0, specs.LOOKUP_DOC_FLAGS, request.cas)
    collection_id, key = conn.split(request.key)
    if flags & DocFlag.REPLICA_READ:
        return DocumentView.of(vb.get_replica(key, collection_id), vb.uuid)
    deleted_too = bool(flags & DocFlag.ACCESS_DELETED)
    return DocumentView.of(subdoc_write.read(vb, key, collection_id, deleted_too=deleted_too), vb.uuid)


def _result(view: DocumentView, spec: Spec) -> LookupResult:
    try:
        return LookupResult(Status.SUCCESS, look(view, spec))
    except StatusError as error:
        return LookupResult(error.status, b"")


def _shown_cas(view: DocumentView, vb: VBucket) -> int:
    """The CAS that others see: a locked document hides its own."""
    document = view.document
    locked = not document.deleted and vb.is_locked(document.key, document.collection_id)
    return SEQNO_MAX if locked else document.cas


def _status(*, failed: bool, deleted: bool) -> Status:
    if failed:
        return Status.SUBDOC_MULTI_PATH_FAILURE_DELETED if deleted else Status.SUBDOC_MULTI_PATH_FAILURE
    return Status.SUBDOC_SUCCESS_DELETED if deleted else Status.SUCCESS


def _json_bit(conn: ClientConnection, value: bytes) -> int:
    return Datatype.JSON & conn.context.datatypes if value else 0


# ---------------------------------------------------------------------------------------------- mutations


def mutate(conn: ClientConnection, request: subdoc.SubdocMutation, vb: VBucket) -> Awaitable[None] | None:
    spec = specs.parse_spec(request.opcode, request.path_flags, request.path, request.fragment, specs.MUTATIONS)

    def answer(outcome: MutationOutcome | PathFailure) -> Awaitable[None] | None:
        if isinstance(outcome, PathFailure):
            conn.fail(request, outcome.status, outcome.context)
            return None
        value = outcome.values[0]
        return _answer(conn, request, vb, outcome, value, _json_bit(conn, value))

    return _run(conn, request, vb, [spec], answer)


def multi_mutate(conn: ClientConnection, request: subdoc.SubdocMultiMutation, vb: VBucket) -> Awaitable[None] | None:
    rules = specs.MUTATIONS | specs.WHOLE_MUTATIONS
    wanted = [specs.parse_spec(each.opcode, each.flags, each.path, each.value, rules) for each in request.specs]
    specs.check_order(wanted)

    def answer(outcome: MutationOutcome | PathFailure) -> Awaitable[None] | None:
        if isinstance(outcome, PathFailure):
            result = MutationResult(outcome.index, outcome.status, b"")
            status = _status(failed=True, deleted=outcome.deleted)
            conn.reply(request, value=_packed((result,)), status=status)
            return None
        results = (MutationResult(index, Status.SUCCESS, value) for index, value in enumerate(outcome.values) if value)
        return _answer(conn, request, vb, outcome, _packed(tuple(results)), 0)

    return _run(conn, request, vb, wanted, answer)


def _packed(results: tuple[MutationResult, ...]) -> bytes:
    return subdoc.SubdocMultiMutationResponse(results=results).frame().value


def _run(
    conn: ClientConnection, request: _Mutation, vb: VBucket, wanted: Sequence[Spec],
    answer: Callable[[MutationOutcome | PathFailure], Awaitable[None] | None],
) -> Awaitable[None] | None:  # fmt: skip
    is_multi = isinstance(request, subdoc.SubdocMultiMutation)
    flags = specs.check_doc_flags(request.doc_flags or 0, specs.MUTATION_DOC_FLAGS, request.cas, is_multi=is_multi)
    collection_id, key = conn.split(request.key)
    target = Target(
        vb, collection_id, key, flags, request.cas, request.expiry or 0, conn.preserve_ttl(request),
        conn.require_bucket().store.options.lww, request.user_flags,
    )  # fmt: skip
    draft = Draft.begin(target, wanted)
    if len(draft.view.body) > LARGE:
        return _run_large(conn, request, draft, answer)
    draft.apply()
    return answer(draft.store())


async def _run_large(
    conn: ClientConnection,
    request: _Mutation,
    draft: Draft,
    answer: Callable[[MutationOutcome | PathFailure], Awaitable[None] | None],
) -> None:
    """As ``_run``, changing the document in another thread; if it was changed meanwhile by others, once more."""
    for _ in range(TRIES):
        await conn.node.loop.run_in_executor(None, draft.apply)
        if draft.is_current:
            break
        draft = Draft.begin(draft.target, draft.wanted)
    else:
        draft.apply()  # somebody else is always faster: now nobody is
    level = conn.durability(request)
    with nullcontext() if level is None else draft.target.vb.preparing(level):
        outcome = draft.store()
    pending = answer(outcome)
    if pending is not None:
        await pending


def _answer(
    conn: ClientConnection, request: _Mutation, vb: VBucket, outcome: MutationOutcome, value: bytes, datatype: int
) -> Awaitable[None] | None:
    """Answer now, or when the document is as durable as was asked for."""

    def reply(stored: Stored) -> None:
        status = _status(failed=False, deleted=outcome.deleted)
        extras = conn.mutation_extras(stored)
        conn.reply(request, extras=extras, value=value, cas=stored.cas, status=status, datatype=datatype)

    return finish(conn, request, vb, outcome.stored, reply)


HANDLERS: dict[type[Message], Handler] = {
    subdoc.SubdocLookup: lookup,
    subdoc.SubdocMultiLookup: lookup,
    subdoc.SubdocMutation: on_active(durably(mutate)),
    subdoc.SubdocMultiMutation: on_active(durably(multi_mutate)),
}
BUCKETLESS: frozenset[type[Message]] = frozenset()
