/* Issue the traces of an SM's warps, in order, on four sub-partitions that share L1, the L2 port and their part of DRAM
   bandwidth. Plain data in, plain data out; simulate.py prepares and names them. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FMA, FMAHEAVY, ALU, XU, CONVERT, UNIFORM, BRANCH, TENSOR, WGMMA, MIO, MISC, FP64, PIPES };
enum { SHFL = 1, LDSM = 2, LDGSTS = 4, LDGDEPBAR = 8, BAR = 16 };
enum { GLOBAL, SHARED, LOCAL };
/* reasons: see simulate.py; loads of tensor n from source s are R_TENSOR + 5 n + s */
enum { R_START, R_STALL, R_BRANCH, R_BARRIER, R_PIPE, R_PORTS = R_PIPE + PIPES, R_CPASYNC, R_WGMMA, R_LDS, R_LOCAL, R_STORE,
       R_OPERANDS, R_IDLE, R_FETCH, R_KIND, R_TENSOR = R_KIND + 16 };
enum { L1, L2, L2_FLIGHT, DRAM, DRAM_FLIGHT };

typedef struct {
    int32_t pipe, occupancy, latency, kind, stall, wait, write_barrier, read_barrier, depbar, depbar_left, flags, sources;
    int32_t slot[6], reg[6], keep[6];
} Static;

/* sectors are `first` and the numbers of a pattern, all moved by the warp's delta for the instruction */
typedef struct { int32_t space, store, passes, tensor, count, shift; int64_t pattern, first; } Access;

typedef struct {
    double dram_per_clock, l2_per_clock, bank_window;
    double l1_hit, l2_hit, dram, shared_load, ldsm, store_read, barrier, branch, mio_queue, mio_occupancy, block_launch;
    double l1_lines, l2_room, l0_lines, l0_miss;
} Machine;

typedef struct {
    const int32_t *steps;
    const int64_t *delta;
    int32_t length, position, block, age, blocked, why, sub, next, line;
    double ready, cp, release[6];
    int32_t reason[6], pending_count[7];
    double pending[7][64];
} Warp;

#define WAYS 16
typedef struct { uint64_t tag[WAYS]; double arrival[WAYS][4]; uint64_t used[WAYS]; } Set;

typedef struct {
    const Static *statics;
    const Access *accesses;
    const int64_t *patterns;
    /* where a tensor's sectors come from, and how much of what an SM moves of it takes part in DRAM's bandwidth */
    const int32_t *levels;
    const double *shares;
    const Machine *m;
    Set *sets;
    int nsets;
    uint64_t stamp;
    /* sectors that this SM has touched, and how many bytes it had brought into L2 by then */
    int64_t *touched;
    double *when, brought;
    double l1_free, l2_free, l2_write_free, dram_free;
    double *bytes;
} Sm;

static double max(double a, double b) { return a > b ? a : b; }

static double *find(Sm *s, int64_t sector, int allocate, int *found) {
    uint64_t line = (uint64_t)sector >> 2;
    Set *set = &s->sets[(line ^ line >> 8 ^ line >> 19 ^ line >> 31) % s->nsets];
    int old = 0;
    *found = 0;
    for (int w = 0; w < WAYS; w++) {
        if (set->tag[w] == line + 1) {
            set->used[w] = ++s->stamp;
            *found = set->arrival[w][sector & 3] >= 0;
            return &set->arrival[w][sector & 3];
        }
        if (set->used[w] < set->used[old]) old = w;
    }
    if (!allocate) return 0;
    set->tag[old] = line + 1;
    set->used[old] = ++s->stamp;
    for (int i = 0; i < 4; i++) set->arrival[old][i] = -1;
    return &set->arrival[old][sector & 3];
}

#define TOUCHED (1 << 22)
/* whether a sector is in L2, or waits there to be written: not if the SM has filled its part of L2 since it last touched it */
static int touch(Sm *s, int64_t sector, int written) {
    int64_t key = sector << 1 | written;
    uint64_t i = (uint64_t)key * 0x9E3779B97F4A7C15ull >> 42;
    for (int n = 0; n < 64; n++, i = (i + 1) & (TOUCHED - 1)) {
        if (s->touched[i] && s->touched[i] != key + 1) continue;
        int kept = s->touched[i] && s->brought - s->when[i] <= s->m->l2_room;
        s->touched[i] = key + 1;
        if (!kept && !written) s->brought += 32;
        s->when[i] = s->brought;
        return kept;
    }
    return 0;
}

static double load(Sm *s, const Access *a, const int64_t *delta, double t, int *reason) {
    const Machine *m = s->m;
    double start = max(t, s->l1_free);
    s->l1_free = start + a->passes;
    if (a->space == SHARED) { *reason = R_LDS; return start + m->shared_load + a->passes - 1; }
    if (a->space == LOCAL) { *reason = R_LOCAL; return start + m->l1_hit + a->passes; }
    const int64_t *sectors = s->patterns + a->pattern, base = a->first + delta[a->shift];
    double done = start + m->l1_hit + a->passes - 1;
    int source = L1, level = s->levels[a->tensor];
    for (int i = 0; i < a->count; i++) {
        int found, from;
        double *slot = find(s, sectors[i] + base, 1, &found), arrival;
        if (!found) {
            s->l2_free = max(s->l2_free, start) + 32 / m->l2_per_clock;
            s->bytes[4 * a->tensor] += 32;
            arrival = max(start + m->l2_hit, s->l2_free + m->l2_hit - 32 / m->l2_per_clock);
            from = L2;
            if (level == DRAM && !touch(s, sectors[i] + base, 0)) {
                double size = 32 * s->shares[a->tensor];
                s->dram_free = max(s->dram_free, start) + size / m->dram_per_clock;
                s->bytes[4 * a->tensor + 1] += size;
                arrival = max(arrival, max(start + m->dram, s->dram_free + m->dram - size / m->dram_per_clock));
                from = DRAM;
            }
            *slot = arrival;
        } else {
            arrival = *slot;
            from = arrival <= start + m->l1_hit ? L1 : level == DRAM ? DRAM_FLIGHT : L2_FLIGHT;
        }
        if (arrival > done) { done = arrival; source = from; }
    }
    *reason = R_TENSOR + 5 * a->tensor + source;
    return done;
}

static double store(Sm *s, const Access *a, const int64_t *delta, double t) {
    double start = max(t, s->l1_free);
    s->l1_free = start + a->passes;
    if (a->space == GLOBAL) {
        const int64_t *sectors = s->patterns + a->pattern, base = a->first + delta[a->shift];
        double size = 32.0 * a->count;
        s->l2_write_free = max(s->l2_write_free, start) + size / 64;
        for (int i = 0; i < a->count; i++) {
            int found;
            double *slot = find(s, sectors[i] + base, 0, &found);
            if (slot) *slot = -1;
            touch(s, sectors[i] + base, 0);
            if (touch(s, sectors[i] + base, 1)) size -= 32;
        }
        if (s->levels[a->tensor] == DRAM) {
            /* L2 keeps what is written until DRAM has nothing to read: it counts with all bytes of a kernel, and delays no load */
            s->bytes[4 * a->tensor + 3] += size * s->shares[a->tensor];
        } else s->bytes[4 * a->tensor + 2] += size;
    }
    return start;
}

/* instructions that share a line of code, and the most lines of an L0 */
enum { LINE = 8, L0_MOST = 1024 };
typedef struct { int32_t line; double arrival; uint64_t used; } Line;
typedef struct { double pipe[PIPES], fma2, bank[2], clock; int64_t cache[8][2]; int32_t last, head, lines; Line l0[L0_MOST]; } Sub;

/* when a line of code is in the sub-partition's L0; a missing one takes the place of the one that was used longest ago */
static double fetch(Sm *s, Sub *b, int32_t line, double t) {
    int i = 0, old = 0;
    for (; i < b->lines && b->l0[i].line != line; i++) if (b->l0[i].used < b->l0[old].used) old = i;
    if (i == b->lines) {
        if (b->lines < s->m->l0_lines) b->lines++;
        else i = old;
        b->l0[i].line = line;
        b->l0[i].arrival = t + s->m->l0_miss;
    }
    b->l0[i].used = ++s->stamp;
    return b->l0[i].arrival;
}

/* when the warp's next instruction can issue, and what decides */
static double earliest(const Sm *s, const Sub *sub, const Warp *w, int id, int *why) {
    const Machine *m = s->m;
    const Static *x = &s->statics[w->steps[2 * w->position]];
    double t = w->ready, r;
    *why = w->why;
    for (int b = 0; b < 6; b++)
        if (x->wait >> b & 1 && w->release[b] > t) { t = w->release[b]; *why = w->reason[b]; }
    if (x->depbar >= 0) {
        /* at most depbar_left outstanding: wait for all but the last ones issued */
        int n = w->pending_count[x->depbar] - x->depbar_left;
        for (int i = 0; i < n; i++)
            if (w->pending[x->depbar][i] > t) { t = w->pending[x->depbar][i]; *why = x->depbar == 6 ? R_WGMMA : R_CPASYNC; }
    }
    switch (x->pipe) {
    case FMA: r = sub->pipe[FMA] < sub->fma2 ? sub->pipe[FMA] : sub->fma2; break;
    case FMAHEAVY: r = sub->pipe[FMA]; break;
    case MIO: r = sub->pipe[MIO] - m->mio_queue * m->mio_occupancy; break;
    case WGMMA: r = sub->pipe[TENSOR] - 64; break;
    case MISC: r = 0; break;
    default: r = sub->pipe[x->pipe];
    }
    if (r > t) { t = r; *why = R_PIPE + x->pipe; }
    if (x->sources && m->bank_window > 0) {
        int need[2] = {0, 0};
        for (int i = 0; i < x->sources; i++) {
            int64_t me = (int64_t)(id + 1) << 9 | x->reg[i];
            int again = sub->cache[x->slot[i]][x->reg[i] & 1] == me;
            for (int j = 0; j < i; j++) again |= x->reg[j] == x->reg[i];
            need[x->reg[i] & 1] += !again;
        }
        for (int b = 0; b < 2; b++)
            if (need[b] && (r = sub->bank[b] + need[b] - m->bank_window) > t) { t = r; *why = R_PORTS; }
    }
    return t;
}

/* blocks: warps of block i are warp_first[i] to warp_first[i + 1]; returns cycles */
double simulate(const Static *statics, const Access *accesses, const int64_t *patterns, const int32_t *levels, const double *shares, int shifts,
                const Machine *machine, int blocks, const int32_t *warp_first, const int32_t *const *steps, const int32_t *lengths,
                const int64_t *deltas, int resident, double *idle, double *bytes, int64_t *issued) {
    int warps = warp_first[blocks];
    Sm s = {statics, accesses, patterns, levels, shares, machine};
    s.nsets = (int)machine->l1_lines / WAYS + 1;
    s.sets = calloc(s.nsets, sizeof(Set));
    s.bytes = bytes;
    s.touched = calloc(TOUCHED, sizeof(int64_t));
    s.when = calloc(TOUCHED, sizeof(double));
    Warp *w = calloc(warps, sizeof(Warp));
    int *alive = calloc(blocks, sizeof(int)), *arrived = calloc(blocks, sizeof(int));
    Sub subs[4];
    memset(subs, 0, sizeof subs);
    for (int i = 0; i < 4; i++) { subs[i].head = -1; subs[i].last = -1; }
    int counts[4] = {0}, launched = 0, slot = 0, dirty[4] = {1, 1, 1, 1}, pick[4], reason[4];
    double when[4], finish = 0, now = 0;
    *issued = 0;

    for (int launch = resident; ; launch = 1) {
        for (int n = 0; n < launch && launched < blocks; n++, launched++) {
            int first = warp_first[launched], members = warp_first[launched + 1] - first;
            alive[launched] = members;
            for (int k = 0; k < members; k++) {
                int home = (slot + k) % 4;
                if (members == 1) for (int i = home = 0; i < 4; i++) if (counts[i] < counts[home]) home = i;
                Warp *x = &w[first + k];
                x->steps = steps[first + k];
                x->length = lengths[first + k];
                x->delta = deltas + (int64_t)(first + k) * shifts;
                x->block = launched; x->age = launched; x->sub = home; x->ready = now + 4 * n; x->why = R_START; x->line = -1;
                if (!counts[home]) subs[home].clock = max(subs[home].clock, x->ready);
                counts[home]++;
                x->next = subs[home].head;
                subs[home].head = first + k;
                dirty[home] = 1;
            }
            if (members > 1) slot += members;
        }
        /* run until a block ends */
        int ended_block = 0;
        while (!ended_block) {
            int i = -1;
            for (int j = 0; j < 4; j++) {
                if (dirty[j]) {
                    dirty[j] = 0;
                    pick[j] = -1;
                    double best = 0; int best_last = 0, best_age = 0;
                    /* the policy is greedy, then youngest */
                    for (int k = subs[j].head; k >= 0; k = w[k].next) {
                        if (w[k].blocked) continue;
                        int why;
                        double t = max(earliest(&s, &subs[j], &w[k], k, &why), subs[j].clock);
                        int is_last = k == subs[j].last;
                        if (pick[j] < 0 || t < best || (t == best && (is_last > best_last || (is_last == best_last && w[k].age > best_age)))) {
                            best = t; best_last = is_last; best_age = w[k].age; pick[j] = k; reason[j] = why;
                        }
                    }
                    when[j] = best;
                }
                if (pick[j] >= 0 && (i < 0 || when[j] < when[i])) i = j;
            }
            if (i < 0) { launched = blocks + 1; break; }
            Sub *sub = &subs[i];
            int id = pick[i];
            Warp *x = &w[id];
            double t = when[i], done, read = t + 10;
            int index = x->steps[2 * x->position], ai = x->steps[2 * x->position + 1];
            const Static *in = &statics[index];
            const Access *a = ai < 0 ? 0 : &accesses[ai];
            if (t > sub->clock) idle[reason[i]] += t - sub->clock;
            ++*issued;
            dirty[i] = 1;
            sub->last = id;
            sub->clock = t + 1;
            switch (in->pipe) {
            case FMA: if (sub->fma2 <= sub->pipe[FMA]) sub->fma2 = t + in->occupancy; else sub->pipe[FMA] = t + in->occupancy; break;
            case FMAHEAVY: sub->pipe[FMA] = t + in->occupancy; break;
            case MIO: sub->pipe[MIO] = max(sub->pipe[MIO], t) + in->occupancy; break;
            case WGMMA: sub->pipe[TENSOR] = max(sub->pipe[TENSOR], t) + in->occupancy; break;
            case MISC: break;
            default: sub->pipe[in->pipe] = t + in->occupancy;
            }
            if (in->sources && machine->bank_window > 0)
                for (int k = 0; k < in->sources; k++) {
                    int64_t me = (int64_t)(id + 1) << 9 | in->reg[k], *c = &sub->cache[in->slot[k]][in->reg[k] & 1];
                    int again = *c == me;
                    for (int j = 0; j < k; j++) again |= in->reg[j] == in->reg[k];
                    if (!again) sub->bank[in->reg[k] & 1] = max(sub->bank[in->reg[k] & 1], t) + 1;
                    *c = in->keep[k] ? me : 0;
                }
            done = t + in->latency;
            int why = R_KIND + in->kind;
            if (in->pipe == MIO) {
                double begin = sub->pipe[MIO] - in->occupancy;
                read = begin + machine->store_read;
                if (!a) {
                    done = begin + (in->latency ? in->latency : machine->store_read);
                    if (in->flags & SHFL) s.l1_free = max(s.l1_free, begin) + 1;
                } else if (a->store) {
                    begin = store(&s, a, x->delta, begin);
                    done = begin + 20;
                    read = begin + machine->store_read + a->passes;
                    why = R_STORE;
                } else {
                    done = load(&s, a, x->delta, begin, &why);
                    if (in->flags & LDSM) done += machine->ldsm - machine->shared_load;
                    if (in->flags & LDGSTS) { x->cp = max(x->cp, done); done = begin + machine->store_read; }
                }
            } else if (in->pipe == WGMMA) {
                done = sub->pipe[TENSOR] + in->latency - in->occupancy;
                why = R_WGMMA;
                int n = x->pending_count[6];
                if (n == 64) { memmove(x->pending[6], x->pending[6] + 1, 63 * sizeof(double)); n--; }
                x->pending[6][n] = done;
                x->pending_count[6] = n + 1;
            } else if (in->flags & LDGDEPBAR) { done = x->cp; why = R_CPASYNC; }
            if (in->write_barrier >= 0) {
                int b = in->write_barrier, n = 0;
                if (done > x->release[b]) { x->release[b] = done; x->reason[b] = why; }
                for (int k = 0; k < x->pending_count[b]; k++) if (x->pending[b][k] > t) x->pending[b][n++] = x->pending[b][k];
                if (n == 64) n--;
                x->pending[b][n] = done;
                x->pending_count[b] = n + 1;
            }
            if (in->read_barrier >= 0 && read > x->release[in->read_barrier]) {
                x->release[in->read_barrier] = read;
                x->reason[in->read_barrier] = R_OPERANDS;
            }
            x->ready = t + in->stall;
            x->why = R_STALL;
            x->position++;
            finish = max(finish, t);
            int ended = x->position >= x->length;
            if (!ended && in->pipe == BRANCH && x->steps[2 * x->position] != index + 1) {
                double gap = t + machine->branch;
                if (gap > x->ready) { x->ready = gap; x->why = R_BRANCH; }
            }
            if (!ended && machine->l0_lines > 0 && x->steps[2 * x->position] / LINE != x->line) {
                x->line = x->steps[2 * x->position] / LINE;
                double arrival = fetch(&s, sub, x->line, t);
                if (arrival > x->ready) { x->ready = arrival; x->why = R_FETCH; }
            }
            int block = x->block;
            if (in->flags & BAR && warp_first[block + 1] - warp_first[block] > 1) {
                x->blocked = 1;
                if (++arrived[block] >= alive[block]) {
                    arrived[block] = 0;
                    for (int k = warp_first[block]; k < warp_first[block + 1]; k++)
                        if (w[k].blocked) {
                            w[k].blocked = 0;
                            dirty[w[k].sub] = 1;
                            if (t + machine->barrier > w[k].ready) { w[k].ready = t + machine->barrier; w[k].why = R_BARRIER; }
                        }
                }
            }
            if (ended) {
                int32_t *link = &sub->head;
                while (*link != id) link = &w[*link].next;
                *link = x->next;
                counts[i]--;
                if (--alive[block] == 0) { ended_block = 1; now = t + machine->block_launch; }
            }
        }
        if (launched > blocks) break;
    }
    for (int i = 0; i < 4; i++) if (finish + 1 > subs[i].clock) idle[R_IDLE] += finish + 1 - subs[i].clock;
    free(s.sets); free(s.touched); free(s.when); free(w); free(alive); free(arrived);
    return finish + 1;
}
