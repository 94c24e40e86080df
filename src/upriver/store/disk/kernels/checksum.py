# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A 64-bit checksum for everything on disk, as fast as a copy and the same on every machine.

Each of sixteen lanes takes one word of every 128 bytes: the lane is xored with the word, then its lower half is
multiplied and its upper half added, which loses nothing. So a change within one word always changes the checksum; any
other change goes unnoticed once in 2**64. It detects damage, not forgery.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from upriver.wire.kernels.intrinsics import load64, store64
from upriver.wire.kernels.kernel import kernel

LANES = 16
STRIPE = LANES * 8
FACTOR = 0xFFFFFFA5  # just below 2**32: then lower * FACTOR + upper is different for (almost) all pairs
_FACTOR = np.uint64(FACTOR)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_MIX2 = np.uint64(0xC4CEB9FE1A85EC53)


def _lanes_loop(context, builder, signature, source, count, lanes, target=None):
    """The loop over whole stripes, written with vectors that LLVM maps to the processor's instructions."""
    word, vector = ir.IntType(64), ir.VectorType(ir.IntType(64), LANES)
    factor, half, low = (ir.Constant(vector, [number] * LANES) for number in (FACTOR, 32, 0xFFFFFFFF))
    state_at = builder.bitcast(lanes, vector.as_pointer())
    before, body, after = builder.block, builder.append_basic_block("body"), builder.append_basic_block("after")
    begin = builder.load(state_at, align=8)
    builder.cbranch(builder.icmp_signed(">", count, ir.Constant(word, 0)), body, after)
    builder.position_at_end(body)
    index, state = builder.phi(word), builder.phi(vector)
    offset = builder.mul(index, ir.Constant(word, STRIPE))
    taken = builder.load(builder.bitcast(builder.gep(source, [offset]), vector.as_pointer()), align=1)
    if target is not None:
        builder.store(taken, builder.bitcast(builder.gep(target, [offset]), vector.as_pointer()), align=1)
    mixed = builder.xor(state, taken)
    product = builder.mul(builder.and_(mixed, low), factor)
    stepped = builder.add(product, builder.lshr(mixed, half))
    following = builder.add(index, ir.Constant(word, 1))
    index.add_incoming(ir.Constant(word, 0), before)
    index.add_incoming(following, body)
    state.add_incoming(begin, before)
    state.add_incoming(stepped, body)
    builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    builder.position_at_end(after)
    end = builder.phi(vector)
    end.add_incoming(begin, before)
    end.add_incoming(stepped, body)
    builder.store(end, state_at, align=8)
    return context.get_dummy_value()


def _pointer(context, builder, kind, value, at=None):
    data = context.make_array(kind)(context, builder, value).data
    return data if at is None else builder.gep(data, [at])


def _take(typingctx, lanes, source, at, count):
    """Let the lanes take ``count`` stripes of a byte array, from ``at`` on."""

    def codegen(context, builder, signature, args):
        state = _pointer(context, builder, signature.args[0], args[0])
        return _lanes_loop(
            context, builder, signature, _pointer(context, builder, signature.args[1], args[1], args[2]), args[3], state
        )

    return types.none(lanes, source, types.intp, types.intp), codegen


def _take_and_copy(typingctx, lanes, source, at, count, target, to):
    """The same, and copy the stripes to ``target``, from ``to`` on."""

    def codegen(context, builder, signature, args):
        state = _pointer(context, builder, signature.args[0], args[0])
        copy = _pointer(context, builder, signature.args[4], args[4], args[5])
        taken = _pointer(context, builder, signature.args[1], args[1], args[2])
        return _lanes_loop(context, builder, signature, taken, args[3], state, copy)

    return types.none(lanes, source, types.intp, types.intp, target, types.intp), codegen


_take_stripes: Any = intrinsic(_take)
_take_stripes_and_copy: Any = intrinsic(_take_and_copy)


@kernel(nogil=False)
def mix(word):
    """Mix a word so that every bit of the result depends on every bit of the input."""
    word ^= word >> np.uint64(33)
    word *= _MIX
    word ^= word >> np.uint64(33)
    word *= _MIX2
    word ^= word >> np.uint64(33)
    return word


@kernel(nogil=False)
def _begin(seed):
    lanes = np.empty(LANES, np.uint64)
    for lane in range(LANES):
        lanes[lane] = (np.uint64(seed) ^ np.uint64(lane)) * _SEED + np.uint64(lane)
    return lanes


@kernel(nogil=False)
def _step(state, word):
    state ^= word
    return (state & _LOW) * _FACTOR + (state >> _HALF)


@kernel(nogil=False)
def _rest(lanes, data, at, end):
    """Take what follows the last whole stripe: words, then some bytes."""
    lane = 0
    while at + 8 <= end:
        lanes[lane] = _step(lanes[lane], load64(data, at))
        at += 8
        lane += 1
    tail, shift = np.uint64(0), np.uint64(0)
    while at < end:
        tail |= np.uint64(data[at]) << shift
        shift += np.uint64(8)
        at += 1
    lanes[lane] = _step(lanes[lane], tail)


@kernel(nogil=False)
def _end(lanes, length):
    """Combine all lanes and the length into one number; never 0, which means "no checksum"."""
    total = np.uint64(length) * _SEED
    for lane in range(LANES):
        total = mix(total ^ lanes[lane]) + _SEED
    return total if total != np.uint64(0) else np.uint64(1)


@kernel()
def checksum(data, at, end, seed):
    """The checksum of ``data[at:end]``; ``seed`` stands for its identity, such as the vbucket."""
    lanes = _begin(seed)
    count = (end - at) // STRIPE
    _take_stripes(lanes, data, at, count)
    _rest(lanes, data, at + count * STRIPE, end)
    return _end(lanes, end - at)


@kernel()
def copy_checked(data, at, end, seed, target, to):
    """``checksum``, and copy exactly the bytes that it covers to ``target``, from ``to`` on."""
    lanes = _begin(seed)
    count = (end - at) // STRIPE
    _take_stripes_and_copy(lanes, data, at, count, target, to)
    at, to = at + count * STRIPE, to + count * STRIPE
    _rest(lanes, data, at, end)
    length = count * STRIPE + end - at
    while at + 8 <= end:
        store64(target, to, load64(data, at))
        at, to = at + 8, to + 8
    while at < end:
        target[to] = data[at]
        at, to = at + 1, to + 1
    return _end(lanes, length)


# ---- blocks: the layout is declared in ``sealed`` ----

AT_CHECKSUM, AT_LINK, AT_LENGTH = 24, 32, 40
OLD_HEAD, HEAD = 32, 48
SEALED = 2  # block flag: it has a checksum, a link to the block before it, and knows how long it is
WHOLE, TORN, CHANGED, UNSEALED, GAP = range(5)


@kernel(nogil=False)
def _block_seed(data, vbucket, last):
    """What its place and its head say."""
    seed = mix(np.uint64(vbucket) + _SEED) ^ np.uint64(last)
    for at in (0, 8, 16, AT_LINK, AT_LENGTH):
        seed = mix(seed + _SEED) ^ load64(data, at)
    return seed


@kernel()
def seal_block(data, end, vbucket, last):
    """Put the checksum of ``data[:end]`` into its head, where everything else is already."""
    store64(data, AT_LENGTH, np.uint64(end))
    store64(data, AT_CHECKSUM, checksum(data, HEAD, end, _block_seed(data, vbucket, last)))


@kernel(nogil=False)
def _head_state(data, strict):
    """WHOLE if the head is good enough to read the rest, or what is wrong."""
    if data.size < OLD_HEAD:
        return TORN
    sealed = data[0] & SEALED
    if not sealed:
        return UNSEALED if strict or load64(data, AT_CHECKSUM) != np.uint64(0) else WHOLE
    if data.size < HEAD or load64(data, AT_LENGTH) != np.uint64(data.size):
        return TORN
    return WHOLE


@kernel()
def block_state(data, vbucket, last, strict):
    """WHOLE, or what is wrong with a block; ``strict``: every block must have a checksum."""
    state = _head_state(data, strict)
    if state == WHOLE and data[0] & SEALED:
        found = checksum(data, HEAD, data.size, _block_seed(data, vbucket, last))
        return WHOLE if found == load64(data, AT_CHECKSUM) else CHANGED
    return state


@kernel()
def copy_block(data, vbucket, last, after, first, strict, target, to):
    """Copy the records of a block behind ``target[:to]``; returns (WHOLE or what is wrong, where the target ends).

    The block before it must end at ``after``; before the ``first`` block of a scan it may also end earlier.
    """
    state = _head_state(data, strict)
    if state != WHOLE:
        return state, to
    if not data[0] & SEALED:
        target[to : to + data.size - OLD_HEAD] = data[OLD_HEAD:]
        return WHOLE, to + data.size - OLD_HEAD
    found = copy_checked(data, HEAD, data.size, _block_seed(data, vbucket, last), target, to)
    if found != load64(data, AT_CHECKSUM):
        return CHANGED, to
    link = load64(data, AT_LINK)
    if link > np.uint64(after) or (not first and link != np.uint64(after)):
        return GAP, to
    return WHOLE, to + data.size - HEAD
