"""Global and shared memory with the checks of compute-sanitizer: memcheck, racecheck, initcheck.

A space is one byte array with a shadow: for every granule (the narrowest access of the kernel) whether it was written, and who
wrote and read it last. Threads are ordered by barriers only: within a block by `bar.sync` (its *epoch*), within a warp also
by `bar.warp.sync` (its *sync*), and blocks by nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np

# one virtual address range per buffer, so that no stray pointer hits another buffer
SEGMENT_BITS = 36
# start of a block's shared memory: address 0 stays invalid
SHARED_BASE = 1024

OK, OUT_OF_BOUNDS, MISALIGNED, BEYOND_VIEW, UNINITIALISED = 0, 1, 2, 3, 4
RACE_RAW, RACE_WAW, RACE_WAR = 5, 6, 7
BLOCKS_RAW, BLOCKS_WAW, BLOCKS_WAR = 8, 9, 10
WARP_RAW, WARP_WAW, WARP_WAR = 11, 12, 13
NO_FENCE = 14
KINDS = {
    OUT_OF_BOUNDS: 'out of bounds',
    MISALIGNED: 'misaligned',
    BEYOND_VIEW: 'inside the storage, outside of the tensor',
    UNINITIALISED: 'uninitialised read',
    RACE_RAW: 'race between warps: read after write',
    RACE_WAW: 'race between warps: write after write',
    RACE_WAR: 'race between warps: write after read',
    BLOCKS_RAW: 'race between blocks: read and write',
    BLOCKS_WAW: 'race between blocks: two writes',
    BLOCKS_WAR: 'race between blocks: write and read',
    WARP_RAW: 'intra-warp: read after write without a sync',
    WARP_WAW: 'intra-warp: write after write without a sync',
    WARP_WAR: 'intra-warp: write after read without a sync',
    NO_FENCE: 'wgmma reads a store without a proxy fence between',
}
# a granule's bits
WRITTEN, IN_VIEW = 1, 2
# readers since the last write: one thread, threads of a warp, warps of a block, blocks
ONE, LANES, WARPS, BLOCKS = 0, 1, 2, 3

NOBODY = -1


@numba.njit(cache=True)
def access(
    write, shared, address, lanes, width, data, memory, bits, shift, start, size, block_threads, first_thread, epochs, syncs,
    clock, fences, asynchronous, who_wrote, wrote_epoch, wrote_sync, wrote_time, who_read, read_epoch, read_sync, readers,
    found, check_races,
):
    """Load or store `width` bytes for each of `lanes`; `data` is `[lanes, width]`. Returns how many errors `found` holds.

    `asynchronous` loads are wgmma's: since the store its warp, or the reader's, must have run a proxy fence.
    """
    n_found = 0
    for i in range(lanes.shape[0]):
        lane = lanes[i]
        a = address[i]
        thread = first_thread + lane
        block, warp = thread // block_threads, thread // 32
        epoch, sync = epochs[lane // block_threads], syncs[lane // 32]
        error = OK
        other = NOBODY
        if shared:
            offset = a - SHARED_BASE
            begin, length = (lane // block_threads) * size[0], size[0]
        else:
            segment = a >> SEGMENT_BITS
            if segment < 1 or segment > start.shape[0]:
                offset, begin, length = -1, 0, 0
            else:
                offset = a - (segment << SEGMENT_BITS)
                begin, length = start[segment - 1], size[segment - 1]
        if offset < 0 or offset + width > length:
            error = OUT_OF_BOUNDS
        elif a % width != 0:
            error = MISALIGNED
        if error != OK:
            if n_found < found.shape[0]:
                found[n_found, 0], found[n_found, 1], found[n_found, 2], found[n_found, 3] = error, thread, a, other
            n_found += 1
            if not write:
                for b in range(width):
                    data[i, b] = 255
            continue
        p = begin + offset
        first = p >> shift
        last = (p + width - 1) >> shift
        same = True
        if write:
            for b in range(width):
                if memory[p + b] != data[i, b]:
                    same = False
        for g in range(first, last + 1):
            if not bits[g] & IN_VIEW:
                error = BEYOND_VIEW
            if write:
                bits[g] |= WRITTEN
            elif not bits[g] & WRITTEN:
                error = UNINITIALISED
            if not check_races:
                continue
            # against the last writer; writing the same value twice is no race
            w = who_wrote[g]
            if w != NOBODY and w != thread and not (write and same):
                if w // block_threads != block:
                    error, other = (BLOCKS_WAW if write else BLOCKS_RAW), w
                elif w // 32 != warp:
                    if wrote_epoch[g] == epoch:
                        error, other = (RACE_WAW if write else RACE_RAW), w
                elif wrote_sync[g] == sync and wrote_epoch[g] == epoch:
                    error, other = (WARP_WAW if write else WARP_RAW), w
            if asynchronous and w != NOBODY and error == OK:
                if max(fences[lane // 32], fences[(w - first_thread) // 32]) < wrote_time[g]:
                    error, other = NO_FENCE, w
            r = who_read[g]
            if write:
                if r != NOBODY and not same:
                    if readers[g] == BLOCKS or r // block_threads != block:
                        error, other = BLOCKS_WAR, r
                    elif read_epoch[g] == epoch:
                        if readers[g] == WARPS or r // 32 != warp:
                            error, other = RACE_WAR, r
                        elif read_sync[g] == sync and (readers[g] == LANES or r != thread):
                            error, other = WARP_WAR, r
                who_wrote[g], wrote_epoch[g], wrote_sync[g], wrote_time[g] = thread, epoch, sync, clock
            elif r == NOBODY:
                who_read[g], read_epoch[g], read_sync[g], readers[g] = thread, epoch, sync, ONE
            elif readers[g] == BLOCKS or r // block_threads != block:
                readers[g] = BLOCKS
            elif read_epoch[g] != epoch:
                who_read[g], read_epoch[g], read_sync[g], readers[g] = thread, epoch, sync, ONE
            elif readers[g] == WARPS or r // 32 != warp:
                readers[g] = WARPS
            elif read_sync[g] != sync:
                who_read[g], read_epoch[g], read_sync[g], readers[g] = thread, epoch, sync, ONE
            elif r != thread:
                readers[g] = LANES
        if error != OK:
            if n_found < found.shape[0]:
                found[n_found, 0], found[n_found, 1], found[n_found, 2], found[n_found, 3] = error, thread, a, other
            n_found += 1
        if write:
            for b in range(width):
                memory[p + b] = data[i, b]
        else:
            for b in range(width):
                data[i, b] = memory[p + b]
    return n_found


@dataclass
class Threads:
    """The progress of the threads of a batch of blocks."""

    block_threads: int
    # the number of the batch's first block in the whole grid
    first: int
    # barriers passed: by each block, and by each warp
    epochs: np.ndarray
    syncs: np.ndarray
    # memory operations and fences so far, and when each warp ran its last proxy fence
    fences: np.ndarray
    clock: int = 0


class Space:
    """Bytes with a shadow. `start` and `size` are the buffers of global memory, or `size` a block's shared memory."""

    def __init__(self, memory: np.ndarray, bits: np.ndarray, granule: int, start, size, shared: bool, races: bool) -> None:
        self.memory, self.bits, self.shift, self.shared, self.races = memory, bits, granule.bit_length() - 1, shared, races
        self.start, self.size = np.asarray(start, np.int64), np.asarray(size, np.int64)
        n = len(bits) if races else 1
        self.writers = [np.full(n, NOBODY, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32)]
        self.readers = [np.full(n, NOBODY, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int8)]
        self.found = np.zeros((8, 4), np.int64)

    def access(
        self, write: bool, address: np.ndarray, lanes: np.ndarray, data: np.ndarray, threads: Threads, asynchronous: bool,
    ) -> tuple[list[tuple[int, int, int, int]], int]:
        """(kind, thread, address, other thread) of at most eight errors, and their number."""
        n = access(
            write, self.shared, address, lanes, data.shape[1], data, self.memory, self.bits, self.shift, self.start, self.size,
            threads.block_threads, threads.first, threads.epochs, threads.syncs, threads.clock, threads.fences, asynchronous,
            *self.writers, *self.readers, self.found, self.races,
        )
        return [(int(kind), int(thread), int(a), int(other)) for kind, thread, a, other in self.found[:n]], n


@dataclass
class Finding:
    """An error at one instruction of one kernel."""

    kind: str
    kernel: str
    instruction: str
    line: str
    example: str
    count: int = 0

    def __str__(self) -> str:
        return f'{self.kind}: {self.kernel} {self.line}: `{self.instruction}` x{self.count}, first: {self.example}'


@dataclass
class Findings:
    """All errors, one entry per kind and instruction."""

    entries: dict = field(default_factory=dict)

    def add(self, kind: str, kernel: str, instruction: str, line: str, example: str, count: int = 1) -> None:
        entry = self.entries.setdefault((kind, kernel, instruction, line), Finding(kind, kernel, instruction, line, example))
        entry.count += count

    def __iter__(self):
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)
