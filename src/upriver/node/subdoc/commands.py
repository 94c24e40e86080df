"""Sub-document commands (docs/protocol/subdoc.md): requests in, answers out.

``specs`` has the rules of a request, ``paths`` finds and changes a path in a JSON text, ``xattrs`` has what is special
about extended attributes, and ``write`` reads a document, changes it and writes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from upriver.errors import Status, StatusError
from upriver.model import SEQNO_MAX, Datatype
from upriver.node.cluster.durability import when_durable
from upriver.node.commands import answers
from upriver.node.dispatch import Pending, command, document_command, on_active
from upriver.node.subdoc import specs
from upriver.node.subdoc.specs import Spec
from upriver.node.subdoc.view import DocumentView, look
from upriver.node.subdoc.write import Draft, MutationOutcome, PathFailure, Target, read
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
_Answer = Callable[[MutationOutcome | PathFailure], Pending]

# ---------------------------------------------------------------------------------------------- lookups


def lookup(conn: ClientConnection, request: subdoc.SubdocLookup) -> Pending:
    return _on_vbucket(conn, request, _lookup)


def multi_lookup(conn: ClientConnection, request: subdoc.SubdocMultiLookup) -> Pending:
    return _on_vbucket(conn, request, _multi_lookup)


L = TypeVar("L", subdoc.SubdocLookup, subdoc.SubdocMultiLookup)


def _on_vbucket(conn: ClientConnection, request: L, do: Callable[[ClientConnection, L, VBucket], Pending]) -> Pending:
    """A lookup reads the active vbucket, or with the replica flag the replica."""
    if (request.doc_flags or 0) & DocFlag.REPLICA_READ:
        return do(conn, request, conn.vbucket(request.vbucket))
    return on_active(conn, request, do)


def _lookup(conn: ClientConnection, request: subdoc.SubdocLookup, vb: VBucket) -> Pending:
    spec = specs.parse_spec(request.opcode, request.path_flags, request.path, b"", specs.LOOKUPS)
    view = _view(conn, request, vb)

    def answer(value: bytes) -> None:
        datatype = _json_bit(conn, value) if not spec.flags & PathFlag.BINARY else 0
        status = _status(failed=False, deleted=view.deleted)
        conn.reply(request, value=value, cas=_shown_cas(view, vb), status=status, datatype=datatype)

    return _work(conn, view, partial(look, view, spec), answer)


def _multi_lookup(conn: ClientConnection, request: subdoc.SubdocMultiLookup, vb: VBucket) -> Pending:
    rules = specs.LOOKUPS | specs.WHOLE_LOOKUPS
    wanted = [specs.parse_spec(each.opcode, each.flags, each.path, b"", rules) for each in request.specs]
    specs.check_order(wanted)
    view = _view(conn, request, vb)

    def answer(results: tuple[LookupResult, ...]) -> None:
        status = _status(failed=any(result.status for result in results), deleted=view.deleted)
        value = subdoc.SubdocMultiLookupResponse(results).frame().value
        conn.reply(request, value=value, cas=_shown_cas(view, vb), status=status)

    return _work(conn, view, lambda: tuple(_result(view, spec) for spec in wanted), answer)


def _work(conn: ClientConnection, view: DocumentView, work: Callable[[], T], answer: Callable[[T], None]) -> Pending:
    """Do the work now; on a large document in another thread, so that other clients need not wait for it."""
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
        return DocumentView.of(vb.documents.get_replica(key, collection_id), vb.uuid)
    deleted_too = bool(flags & DocFlag.ACCESS_DELETED)
    return DocumentView.of(read(vb, key, collection_id, deleted_too=deleted_too), vb.uuid)


def _result(view: DocumentView, spec: Spec) -> LookupResult:
    try:
        return LookupResult(Status.SUCCESS, look(view, spec))
    except StatusError as error:
        return LookupResult(error.status, b"")


def _shown_cas(view: DocumentView, vb: VBucket) -> int:
    """The CAS that others see: a locked document hides its own."""
    document = view.document
    locked = not document.deleted and vb.documents.is_locked(document.key, document.collection_id)
    return SEQNO_MAX if locked else document.cas


def _status(*, failed: bool, deleted: bool) -> Status:
    if failed:
        return Status.SUBDOC_MULTI_PATH_FAILURE_DELETED if deleted else Status.SUBDOC_MULTI_PATH_FAILURE
    return Status.SUBDOC_SUCCESS_DELETED if deleted else Status.SUCCESS


def _json_bit(conn: ClientConnection, value: bytes) -> int:
    return Datatype.JSON & conn.context.datatypes if value else 0


# ---------------------------------------------------------------------------------------------- mutations


def mutate(conn: ClientConnection, request: subdoc.SubdocMutation, vb: VBucket) -> Pending:
    spec = specs.parse_spec(request.opcode, request.path_flags, request.path, request.fragment, specs.MUTATIONS)

    def answer(outcome: MutationOutcome | PathFailure) -> Pending:
        if isinstance(outcome, PathFailure):
            answers.fail(conn, request, outcome.status, outcome.context)
            return None
        value = outcome.values[0]
        return _acknowledge(conn, request, vb, outcome, value, _json_bit(conn, value))

    return _run(conn, request, vb, [spec], answer)


def multi_mutate(conn: ClientConnection, request: subdoc.SubdocMultiMutation, vb: VBucket) -> Pending:
    rules = specs.MUTATIONS | specs.WHOLE_MUTATIONS
    wanted = [specs.parse_spec(each.opcode, each.flags, each.path, each.value, rules) for each in request.specs]
    specs.check_order(wanted)

    def answer(outcome: MutationOutcome | PathFailure) -> Pending:
        if isinstance(outcome, PathFailure):
            result = MutationResult(outcome.index, outcome.status, b"")
            status = _status(failed=True, deleted=outcome.deleted)
            conn.reply(request, value=_packed((result,)), status=status)
            return None
        results = (MutationResult(index, Status.SUCCESS, value) for index, value in enumerate(outcome.values) if value)
        return _acknowledge(conn, request, vb, outcome, _packed(tuple(results)), 0)

    return _run(conn, request, vb, wanted, answer)


def _packed(results: tuple[MutationResult, ...]) -> bytes:
    return subdoc.SubdocMultiMutationResponse(results=results).frame().value


def _run(conn: ClientConnection, request: _Mutation, vb: VBucket, wanted: Sequence[Spec], answer: _Answer) -> Pending:
    is_multi = isinstance(request, subdoc.SubdocMultiMutation)
    flags = specs.check_doc_flags(request.doc_flags or 0, specs.MUTATION_DOC_FLAGS, request.cas, is_multi=is_multi)
    bucket = conn.require_bucket()
    bucket.expect_xattrs()  # a mutation may write some, which a plain SET then has to keep
    collection_id, key = conn.split(request.key)
    target = Target(
        vb, collection_id, key, flags, request.cas, request.expiry or 0, request.preserve_ttl,
        bucket.store.options.lww, request.user_flags,
    )  # fmt: skip
    draft = Draft.begin(target, wanted)
    if len(draft.view.body) > LARGE:
        return _run_large(conn, request, draft, answer)
    draft.apply()
    return answer(draft.store())


async def _run_large(conn: ClientConnection, request: _Mutation, draft: Draft, answer: _Answer) -> None:
    """As ``_run``, but in another thread; starts again if others have changed the document meanwhile."""
    for _ in range(TRIES):
        await conn.node.loop.run_in_executor(None, draft.apply)
        if draft.is_current:
            break
        draft = Draft.begin(draft.target, draft.wanted)
    else:
        draft.apply()  # changed by others every time; nobody can interrupt the loop's thread
    durability = request.durability
    with nullcontext() if durability is None else draft.target.vb.durable.preparing(durability.level):
        outcome = draft.store()
    pending = answer(outcome)
    if pending is not None:
        await pending


def _acknowledge(
    conn: ClientConnection, request: _Mutation, vb: VBucket, outcome: MutationOutcome, value: bytes, datatype: int
) -> Pending:
    """Answer now, or when the document is as durable as was asked for."""

    def reply(stored: Stored) -> None:
        status = _status(failed=False, deleted=outcome.deleted)
        extras = conn.mutation_token(stored)
        conn.reply(request, extras=extras, value=value, cas=stored.cas, status=status, datatype=datatype)

    return when_durable(conn, request, vb, outcome.stored, reply)


COMMANDS = (
    command(subdoc.SubdocLookup, lookup),
    command(subdoc.SubdocMultiLookup, multi_lookup),
    document_command(subdoc.SubdocMutation, mutate),
    document_command(subdoc.SubdocMultiMutation, multi_mutate),
)
