"""The worked examples of the specification: docs/protocol/upr.md#examples and docs/protocol/messages.md#examples, with
what they mean.

An expected ``FramingError`` marks bytes that are broken as printed.
"""

from __future__ import annotations

from typing import NamedTuple

from upriver.errors import FramingError
from upriver.model import FailoverEntry
from upriver.wire import Context, Dialect, FrameInfo, Message, Opcode, OtherResponse
from upriver.wire.checks import DEFAULT_CONTEXT
from upriver.wire.messages import cluster, dcp, events, session, upr
from upriver.wire.messages.upr import VbucketStatus

UPR_CONTEXT = Context(Dialect.UPR)


class Vector(NamedTuple):
    name: str
    hex: str
    expected: Message | FramingError
    context: Context = DEFAULT_CONTEXT

    @property
    def raw(self) -> bytes:
        return bytes.fromhex(self.hex)


SEED = [
    Vector(
        "S0.stream_req.1",
        "80530000300000000000003000001000000000000000000000000000000000000000000000ffeeddffffffffffffffff"
        "00000000feeddeca0000000000ffeedd0000000000ffeeff",
        dcp.StreamRequest(
            start_seqno=0xFFEEDD, vbuuid=0xFEEDDECA, snap_start_seqno=0xFFEEDD, snap_end_seqno=0xFFEEFF, opaque=0x1000
        ),
    ),
    Vector(
        "S0.stream_req.1 (variant, snapshot start 0 as in the field list)",
        "80530000300000000000003000001000000000000000000000000000000000000000000000ffeeddffffffffffffffff"
        "00000000feeddeca00000000000000000000000000ffeeff",
        dcp.StreamRequest(start_seqno=0xFFEEDD, vbuuid=0xFEEDDECA, snap_end_seqno=0xFFEEFF, opaque=0x1000),
    ),
    Vector(
        "S0.stream_req.1.rollback_response",
        "8153000000000023000000080000100000000000000000000000000000000000",
        dcp.RollbackResponse(opaque=0x1000, status=0x23),
    ),
    Vector(
        "S0.stream_req.2 (as printed, 8 bytes short)",
        "80530000300000000000003000001000000000000000000000000000000000000000000000000000ffffffffffffffff"
        "00000000feeddeca0000000000000000",
        FramingError("connection ended inside a frame, 64 bytes in", "body", 64),
    ),
    Vector(
        "S0.stream_req.2 (fixed)",
        "80530000300000000000003000001000000000000000000000000000000000000000000000000000ffffffffffffffff"
        "00000000feeddeca00000000000000000000000000000000",
        dcp.StreamRequest(vbuuid=0xFEEDDECA, opaque=0x1000),
    ),
    Vector(
        "S0.stream_req.2.ok_response",
        "81530000000000000000004000001000000000000000000000000000feeddeca00000000000054320000000000decafe"
        "000000000134321400000000feedface000000000000000400000000deadbeef0000000000006524",
        dcp.FailoverLogResponse(
            entries=(
                FailoverEntry(0xFEEDDECA, 0x5432),
                FailoverEntry(0xDECAFE, 0x1343214),
                FailoverEntry(0xFEEDFACE, 4),
                FailoverEntry(0xDEADBEEF, 0x6524),
            ),
            opaque=0x1000,
        ),
    ),
    Vector(
        "S1.add_stream.request",
        "80510000040000050000000400000001000000000000000000000001",
        dcp.AddStream(flags=1, vbucket=5, opaque=1),
    ),
    Vector(
        "S1.add_stream.response",
        "81510000040000000000000400000001000000000000000000001000",
        dcp.AddStreamResponse(stream_opaque=0x1000, opaque=1),
    ),
    Vector(
        "S3.upr_open.request",
        "80500018080000000000002000000001000000000000000000000000000000006275636b657473747265616d2076625b"
        "3130302d3130355d",
        dcp.Open(reserved=0, flags=0, name=b"bucketstream vb[100-105]", opaque=1),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_open.response",
        "815000000000000000000000000000010000000000000000",
        OtherResponse(to=0x50, opaque=1),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_add_stream.request",
        "80510000040000050000000400000001000000000000000000000001",
        dcp.AddStream(flags=1, vbucket=5, opaque=1),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_add_stream.response",
        "81510000040000000000000400000001000000000000000000001000",
        dcp.AddStreamResponse(stream_opaque=0x1000, opaque=1),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_close_stream.request",
        "805200000000000500000000deadbeef0000000000000000",
        dcp.CloseStream(vbucket=5, opaque=0xDEADBEEF),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_get_failover_log.request",
        "805400000000000000000000deadbeef0000000000000000",
        dcp.GetDcpFailoverLog(opaque=0xDEADBEEF),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_get_failover_log.response",
        "815400000000000000000040deadbeef000000000000000000000000feeddeca00000000000054320000000000decafe"
        "000000000134321400000000feedface000000000000000400000000deadbeef0000000000006524",
        dcp.FailoverLogResponse.under(Opcode.DCP_GET_FAILOVER_LOG)(
            entries=(
                FailoverEntry(0xFEEDDECA, 0x5432),
                FailoverEntry(0xDECAFE, 0x1343214),
                FailoverEntry(0xFEEDFACE, 4),
                FailoverEntry(0xDEADBEEF, 0x6524),
            ),
            opaque=0xDEADBEEF,
        ),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_stream_req.1",
        "80530000280000000000002800001000000000000000000000000000000000000000000000ffeeddffffffffffffffff"
        "00000000feeddeca0000000000000000",
        upr.UprStreamRequest(start_seqno=0xFFEEDD, vbuuid=0xFEEDDECA, opaque=0x1000),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_stream_req.1.rollback_response",
        "8153000008000023000000080000100000000000000000000000000000000000",
        upr.UprRollbackResponse(opaque=0x1000, status=0x23),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_stream_req.2",
        "80530000280000000000002800001000000000000000000000000000000000000000000000000000ffffffffffffffff"
        "00000000feeddeca0000000000000000",
        upr.UprStreamRequest(vbuuid=0xFEEDDECA, opaque=0x1000),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_stream_req.2.ok_response (as printed, body length 0)",
        "81530000000000000000000000001000000000000000000000000000feeddeca00000000000054320000000000decafe"
        "000000000134321400000000feedface000000000000000400000000deadbeef0000000000006524",
        FramingError("0x00 is not a magic", "magic", 0),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_stream_req.2.ok_response (fixed)",
        "81530000000000000000004000001000000000000000000000000000feeddeca00000000000054320000000000decafe"
        "000000000134321400000000feedface000000000000000400000000deadbeef0000000000006524",
        dcp.FailoverLogResponse(
            entries=(
                FailoverEntry(0xFEEDDECA, 0x5432),
                FailoverEntry(0xDECAFE, 0x1343214),
                FailoverEntry(0xFEEDFACE, 4),
                FailoverEntry(0xDEADBEEF, 0x6524),
            ),
            opaque=0x1000,
        ),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_stream_end",
        "805500000400000000000004deadbeef000000000000000000000000",
        upr.UprStreamEnd(status=0, opaque=0xDEADBEEF),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_snapshot_marker",
        "805600000000000000000000deadbeef0000000000000000",
        upr.UprSnapshotMarker(opaque=0xDEADBEEF),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_mutation",
        "805700051e0002100000002800001210000064a5acec8a56000000000000000400000000000000010000000000000000"
        "00000000000068656c6c6f776f726c64",
        upr.UprMutation(
            by_seqno=4, rev_seqno=1, key=b"hello", value=b"world", vbucket=0x210, opaque=0x1210, cas=0x64A5ACEC8A56
        ),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_deletion",
        "80580005120002100000001700001210000000000000000000000000000000050000000000000001000068656c6c6f",
        upr.UprDeletion(by_seqno=5, rev_seqno=1, key=b"hello", vbucket=0x210, opaque=0x1210),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_expiration",
        "80590005120002100000001700001210000000000000000000000000000000050000000000000001000068656c6c6f",
        upr.UprExpiration(by_seqno=5, rev_seqno=1, key=b"hello", vbucket=0x210, opaque=0x1210),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_flush",
        "805a00000000000000000000deadbeef0000000000000000",
        upr.UprFlush(opaque=0xDEADBEEF),
        UPR_CONTEXT,
    ),
    Vector(
        "S3.upr_set_vbucket_state",
        "805b00000100000000000001deadbeef000000000000000004",
        upr.UprSetVbucketState(state=4, opaque=0xDEADBEEF),
        UPR_CONTEXT,
    ),
    Vector(
        "S4.b3_add_stream.request",
        "80b300000c0000000000001800000000000000000000000000000000deadbeef000a000b6d7973747265616d6e616d65",
        upr.UprAddStreams(connection_uuid=0xDEADBEEF, vbuckets=(10, 11), name=b"mystreamname"),
        UPR_CONTEXT,
    ),
    Vector(
        "S4.b3_add_stream.response",
        "81b300000800000000000008000000000000000000000000000a0000000b0007",
        upr.UprAddStreamsResponse(
            statuses=(
                VbucketStatus(0xA, 0),
                VbucketStatus(0xB, 7),
            )
        ),
        UPR_CONTEXT,
    ),
]

MODERN = [
    Vector(
        "OPEN producer xattr+deltimes name=dcp:test",
        "80500008080000000000001000000001000000000000000000000000000000256463703a74657374",
        dcp.Open(reserved=0, flags=0x25, name=b"dcp:test", opaque=1),
    ),
    Vector(
        "CONTROL enable_noop=true",
        "805e000b000000000000000f000000020000000000000000656e61626c655f6e6f6f7074727565",
        dcp.DcpControl(key=b"enable_noop", value=b"true", opaque=2),
    ),
    Vector(
        "CONTROL connection_buffer_size=1048576",
        "805e0016000000000000001d000000030000000000000000636f6e6e656374696f6e5f6275666665725f73697a6531303438353736",
        dcp.DcpControl(key=b"connection_buffer_size", value=b"1048576", opaque=3),
    ),
    Vector(
        "STREAM_REQ vb7 0..inf",
        "80530000300000070000003000001007000000000000000000000000000000000000000000000000ffffffffffffffff"
        "000000000000000000000000000000000000000000000000",
        dcp.StreamRequest(vbucket=7, opaque=0x1007),
    ),
    Vector(
        'STREAM_REQ vb7 {"collections":["8"]}',
        "80530000300000070000004500001007000000000000000000000000000000000000000000000000ffffffffffffffff"
        "0000000000000000000000000000000000000000000000007b22636f6c6c656374696f6e73223a5b2238225d7d",
        dcp.StreamRequest(value=b'{"collections":["8"]}', vbucket=7, opaque=0x1007),
    ),
    Vector(
        "STREAM_REQ rsp ok 1 entry",
        "8153000000000000000000100000100700000000000000000000aabbccddeeff0000000000000000",
        dcp.FailoverLogResponse(entries=(FailoverEntry(0xAABBCCDDEEFF, 0),), opaque=0x1007),
    ),
    Vector(
        "STREAM_REQ rsp rollback 900",
        "8153000000000023000000080000100700000000000000000000000000000384",
        dcp.RollbackResponse(seqno=900, opaque=0x1007, status=0x23),
    ),
    Vector(
        "SNAPSHOT v1 0..8 disk|ckpt",
        "8056000014000007000000140000100700000000000000000000000000000000000000000000000800000006",
        dcp.SnapshotMarker(start_seqno=0, end_seqno=8, flags=6, vbucket=7, opaque=0x1007),
    ),
    Vector(
        "SNAPSHOT v2.0 1..8 disk mvs8 hcs7",
        "805600000100000700000025000010070000000000000000000000000000000001000000000000000800000002000000"
        "00000000080000000000000007",
        dcp.SnapshotMarkerV20(
            version=0,
            start_seqno=1,
            end_seqno=8,
            flags=2,
            max_visible_seqno=8,
            high_completed_seqno=7,
            vbucket=7,
            opaque=0x1007,
        ),
    ),
    Vector(
        "SNAPSHOT v2.2 1..8 disk|ckpt mvs8 hcs7 purge3 hps6",
        "805600000100000700000035000010070000000000000000020000000000000001000000000000000800000006000000"
        "0000000008000000000000000700000000000000030000000000000006",
        dcp.SnapshotMarkerV22(
            version=2,
            start_seqno=1,
            end_seqno=8,
            flags=6,
            max_visible_seqno=8,
            high_completed_seqno=7,
            purge_seqno=3,
            high_prepared_seqno=6,
            vbucket=7,
            opaque=0x1007,
        ),
    ),
    Vector(
        "MUTATION hello/world seq4 rev1 flags0 exp0",
        "805700051f0002100000002900001210000064a5acec8a56000000000000000400000000000000010000000000000000"
        "0000000000000068656c6c6f776f726c64",
        dcp.DcpMutation(
            by_seqno=4, rev_seqno=1, key=b"hello", value=b"world", vbucket=0x210, opaque=0x1210, cas=0x64A5ACEC8A56
        ),
    ),
    Vector(
        "MUTATION collection 8, sid 71",
        "085703061f0002100000002d00001210000064a5acec8a56220047000000000000000400000000000000010000000000"
        "000000000000000000000868656c6c6f776f726c64",
        dcp.DcpMutation(
            by_seqno=4,
            rev_seqno=1,
            key=b"\x08hello",
            value=b"world",
            vbucket=0x210,
            opaque=0x1210,
            cas=0x64A5ACEC8A56,
            frame_infos=(FrameInfo(id=2, data=b"\x00G"),),
        ),
    ),
    Vector(
        "DELETION v1",
        "80580005120002100000001700001210000000000000000100000000000000050000000000000002000068656c6c6f",
        dcp.DcpDeletion(by_seqno=5, rev_seqno=2, key=b"hello", vbucket=0x210, opaque=0x1210, cas=1),
    ),
    Vector(
        "DELETION v2 t=1700000000",
        "80580005150002100000001a000012100000000000000001000000000000000500000000000000026553f1000068656c6c6f",
        dcp.DeletionV2(
            by_seqno=5, rev_seqno=2, delete_time=1700000000, key=b"hello", vbucket=0x210, opaque=0x1210, cas=1
        ),
    ),
    Vector(
        "EXPIRATION",
        "805900051400021000000019000012100000000000000001000000000000000500000000000000026553f10068656c6c6f",
        dcp.Expiration(
            by_seqno=5, rev_seqno=2, delete_time=1700000000, key=b"hello", vbucket=0x210, opaque=0x1210, cas=1
        ),
    ),
    Vector(
        "STREAM_END ok sid 71",
        "08550300040000070000000700001007000000000000000022004700000000",
        dcp.StreamEnd(status=0, vbucket=7, opaque=0x1007, frame_infos=(FrameInfo(id=2, data=b"\x00G"),)),
    ),
    Vector(
        "NOOP req",
        "805c00000000000000000000009896810000000000000000",
        dcp.DcpNoop(opaque=0x989681),
    ),
    Vector(
        "NOOP rsp",
        "815c00000000000000000000009896810000000000000000",
        OtherResponse(to=0x5C, opaque=0x989681),
    ),
    Vector(
        "BUFFER_ACK 4096",
        "805d0000040000000000000400000005000000000000000000001000",
        dcp.BufferAck(bytes=4096, opaque=5),
    ),
    Vector(
        "SEQNO_ADVANCED 42",
        "806400000800000700000008000010070000000000000000000000000000002a",
        dcp.SeqnoAdvanced(by_seqno=42, vbucket=7, opaque=0x1007),
    ),
    Vector(
        "OSO start",
        "80650000040000070000000400001007000000000000000000000001",
        dcp.OsoSnapshot(flags=1, vbucket=7, opaque=0x1007),
    ),
    Vector(
        "OSO end",
        "80650000040000070000000400001007000000000000000000000002",
        dcp.OsoSnapshot(flags=2, vbucket=7, opaque=0x1007),
    ),
    Vector(
        "SYSTEM_EVENT begin v1 mycollection uid2 sid0 cid8 ttl72000",
        "805f000c0d0002100000002d000012100000000000000000000000000000000400000000016d79636f6c6c656374696f"
        "6e0000000000000002000000000000000800011940",
        events.SystemEvent(
            by_seqno=4,
            event=0,
            version=1,
            key=b"mycollection",
            value=b"\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x08\x00\x01\x19@",
            vbucket=0x210,
            opaque=0x1210,
        ),
    ),
    Vector(
        "SYSTEM_EVENT end v0",
        "805f00000d0002100000001d0000121000000000000000000000000000000009000000010000000000000000030000000000000008",
        events.SystemEvent(
            by_seqno=9,
            event=1,
            value=b"\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00\x08",
            vbucket=0x210,
            opaque=0x1210,
        ),
    ),
    Vector(
        "PREPARE majority",
        "806000051f00021000000029000012100000000000000001000000000000000400000000000000010000000000000000"
        "0000000000000168656c6c6f776f726c64",
        dcp.Prepare(by_seqno=4, rev_seqno=1, key=b"hello", value=b"world", vbucket=0x210, opaque=0x1210, cas=1),
    ),
    Vector(
        "COMMIT 4->5",
        "8062000510000210000000150000121000000000000000000000000000000004000000000000000568656c6c6f",
        dcp.Commit(prepared_seqno=4, commit_seqno=5, key=b"hello", vbucket=0x210, opaque=0x1210),
    ),
    Vector(
        "ABORT 4->5",
        "8063000510000210000000150000121000000000000000000000000000000004000000000000000568656c6c6f",
        dcp.Abort(prepared_seqno=4, abort_seqno=5, key=b"hello", vbucket=0x210, opaque=0x1210),
    ),
    Vector(
        "SEQNO_ACKED 4",
        "8061000008000210000000080000121000000000000000000000000000000004",
        dcp.SeqnoAcknowledged(prepared_seqno=4, vbucket=0x210, opaque=0x1210),
    ),
    Vector(
        "SET_VBUCKET active",
        "803d0000010000070000000100000000000000000000000001",
        cluster.SetVbucket(state=1, vbucket=7),
    ),
    Vector(
        "SET_VBUCKET active, before 8.0",
        "803d0000040000070000000400000000000000000000000000000001",
        cluster.SetVbucketWide(state=1, vbucket=7),
    ),
    Vector(
        "GET_ALL_VB_SEQNOS active",
        "804800000400000000000004deadbeef000000000000000000000001",
        cluster.GetAllVbSeqnos(state=1, opaque=0xDEADBEEF),
    ),
    Vector(
        "SASL_AUTH PLAIN user/pencil",
        "802100050000000000000011000000000000000000000000504c41494e00757365720070656e63696c",
        session.SaslAuth(mechanism=b"PLAIN", value=b"\x00user\x00pencil"),
    ),
]
