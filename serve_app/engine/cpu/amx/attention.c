/* Attention of a packed ragged step over the paged KV pool, for CPUs with AMX: bfloat16 products, float32 sums.
 *
 * Owns the way of a step: new KV is written, jobs are shared among threads, and where a row has several, they are
 * merged by the logarithms of their sums. A job is some rows over a run of keys; its arithmetic is many_queries.h's, or
 * with few queries few_queries.h's. Knows nothing of sequences: attention.py plans the jobs, library.py builds this
 * and loads it.
 */
#include "few_queries.h"

#include <string.h>

/* `table`, `rows_at`: offsets into the plan's tables and rows. Key 0 is at position `first_key`, a block's start. */
typedef struct { int32_t table, keys, first_key, rows_at, rows; } Job;
typedef struct { int32_t row, first_place, places; } Merge;
/* Counts and offsets, in 32-bit words from the plan's start. Rows from `real_rows` on are padding. Jobs from `many` on
 * have few queries. */
typedef struct {
    int32_t jobs, many, merges, rows, real_rows, jobs_at, tables_at, rows_at, places_at, merges_at;
} Plan;

/* Rows of heads, with strides in elements. */
typedef struct { const bf16 *at; int64_t row, head; } Given;

/* Everything of one call that all jobs share. */
typedef struct {
    const Plan *plan;
    const int32_t *words;
    const int64_t *positions;
    Given query;
    const bf16 *keys, *values;
    bf16 *out;
    float *partials;
    int kv_heads, group, block;
    float factor;
} Call;

static void load_queries(Work *w, const Call *call, const int32_t *rows, int lanes, int kv_head)
{
    for (int lane = 0; lane < lanes; lane += 16) {
        const bf16 *from[16];
        for (int i = 0; i < 16; i++) {
            const int number = lane + i < lanes ? lane + i : lanes - 1, row = rows[number / call->group];
            /* Lanes beyond the last repeat it, and are not written. */
            const int64_t head = kv_head * call->group + number % call->group;
            from[i] = call->query.at + row * call->query.row + head * call->query.head;
            w->position[lane + i] = (int32_t)call->positions[row];
        }
        for (int d = 0; d < D / 32; d++) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from[i] + 32 * d);
            turn(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(w->query[lane / 16][d][i], r[i]);
        }
        _mm512_store_ps(w->largest + lane, _mm512_set1_ps(-INFINITY));
        _mm512_store_ps(w->total + lane, _mm512_setzero_ps());
    }
    memset(w->out, 0, sizeof w->out[0] * ((lanes + 15) / 16));
}

/* Write what was found: to the output, or where a row has several jobs to its place among the partial results. */
static void store_results(Work *w, const Call *call, const int32_t *rows, const int32_t *places, int lanes, int kv_head)
{
    const int64_t heads = call->kv_heads * call->group;
    for (int lane = 0; lane < lanes; lane += 16) {
        const __m512 total = _mm512_load_ps(w->total + lane);
        const __mmask16 any = _mm512_cmpneq_ps_mask(total, _mm512_setzero_ps());
        const __m512 share = _mm512_maskz_div_ps(any, _mm512_set1_ps(1), total);
        for (int d = 0; d < D; d += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(w->out[lane / 16][d + i]), share);
            turn(r);
            for (int i = 0; i < 16 && lane + i < lanes; i++) {
                const int token = (lane + i) / call->group;
                const int64_t head = kv_head * call->group + (lane + i) % call->group;
                if (places[token] < 0)
                    _mm256_storeu_si256((__m256i *)(call->out + (rows[token] * heads + head) * D + d),
                                        (__m256i)_mm512_cvtneps_pbh((__m512)r[i]));
                else
                    _mm512_storeu_ps(call->partials + (places[token] * heads + head) * (D + 1) + d, (__m512)r[i]);
            }
        }
        for (int i = lane; i < lane + 16 && i < lanes; i++) {
            const int64_t place = places[i / call->group], head = kv_head * call->group + i % call->group;
            if (place < 0) continue;
            call->partials[(place * heads + head) * (D + 1) + D] = w->largest[i] * call->factor + log2f(w->total[i]);
        }
    }
}

/* How many of a job's keys any of its rows sees: they come in the order of their positions, or see all keys. */
static INLINE int seen_keys(const Call *call, const Job *job, const int32_t *rows)
{
    const int last = (int)call->positions[rows[job->rows - 1]] + 1 - job->first_key;
    return last < job->keys ? last : job->keys;
}

static void attend_job(Work *w, const Call *call, const Job *job, int kv_head)
{
    const int32_t *rows = call->words + call->plan->rows_at + job->rows_at;
    const int32_t *table = call->words + call->plan->tables_at + job->table;
    const int lanes = job->rows * call->group, tiles = (lanes + 15) / 16;
    const int64_t stride = (int64_t)call->kv_heads * D;
    const bf16 *keys = call->keys + kv_head * D, *values = call->values + kv_head * D;
    load_queries(w, call, rows, lanes, kv_head);
    const int all = seen_keys(call, job, rows);
    for (int first = 0; first < all; first += KEYS) {
        const int count = all - first < KEYS ? all - first : KEYS, position = job->first_key + first;
        copy_keys(w, keys, table, call->block, stride, first, count);
        turn_values(w, values, table, call->block, stride, first, count);
        for (int t = 0; t < tiles; t += 2) {
            /* A part for every pair of tiles: all at once they would wait for each other. */
            const int part = (KEYS / 16 * 2 + tiles - 1) / tiles * 16, next = first + KEYS + t / 2 * part;
            const int until = first + 2 * KEYS < all ? first + 2 * KEYS : all;
            fetch(keys, values, table, call->block, stride, next, next + part < until ? next + part : until);
            const int both = t + 1 < tiles, seen = w->position[16 * (t + both) + 15] + 1 - position;
            const int here = seen < count ? seen : count;
            if (here <= 0) continue;
            if (both) attend_keys(w, t, 1, position, here, call->factor);
            else attend_keys(w, t, 0, position, here, call->factor);
        }
    }
    store_results(w, call, rows, call->words + call->plan->places_at + job->rows_at, lanes, kv_head);
}

static void store_few(const Few *few, const Call *call, int row, int place, int lane, int64_t head)
{
    const int64_t heads = call->kv_heads * call->group;
    float found[D];
    finish_few(few, lane, found);
    if (place < 0) {
        for (int d = 0; d < D; d += 16)
            _mm256_storeu_si256((__m256i *)(call->out + (row * heads + head) * D + d),
                                (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(found + d)));
        return;
    }
    float *partial = call->partials + (place * heads + head) * (D + 1);
    memcpy(partial, found, sizeof found);
    partial[D] = few->largest[lane] * call->factor + log2f(few->total[lane]);
}

/* A job of few queries, for `heads` key-value heads from number `from` on. */
static void attend_few(Few *w, const Call *call, const Job *job, int from, int heads)
{
    const int32_t *rows = call->words + call->plan->rows_at + job->rows_at;
    const int32_t *places = call->words + call->plan->places_at + job->rows_at;
    const int32_t *table = call->words + call->plan->tables_at + job->table;
    const int lanes = job->rows * call->group, block = call->block, parts = heads * lanes * (NEAR / 16);
    const int64_t stride = (int64_t)call->kv_heads * D;
    const bf16 *keys = call->keys + from * D, *values = call->values + from * D;
    bf16 weight[FEW][NEAR] __attribute__((aligned(64)));
    for (int head = 0; head < heads; head++) begin_few(w + head, lanes);
    const int all = seen_keys(call, job, rows);
    for (int first = 0; first < all; first += NEAR) {
        const int count = all - first < NEAR ? all - first : NEAR, next = first + NEAR;
        const int until = next + NEAR < all ? next + NEAR : all;
        int part = 0;
        for (int head = 0; head < heads; head++) {
            for (int lane = 0; lane < lanes; lane++) {
                const int row = rows[lane / call->group], number = (from + head) * call->group + lane % call->group;
                const int seen = (int)call->positions[row] + 1 - job->first_key - first;
                const bf16 *query = call->query.at + row * call->query.row + number * call->query.head;
                __m512 score[NEAR / 16];
                for (int k = 0; k < NEAR; k += 16) {
                    /* A part of the next keys for each product: all at once they would wait for each other. */
                    const int begin = next + NEAR * part / parts, end = next + NEAR * ++part / parts;
                    fetch_few(keys, values, table, block, stride, heads * D, begin, end < until ? end : until);
                    if (k >= count) score[k / 16] = _mm512_setzero_ps();
                    else {
                        const bf16 *near = at_key(keys, table, block, stride, first + k);
                        score[k / 16] = scores_of_16(query, near + head * D, stride);
                    }
                }
                weigh_few(w + head, lane, score, seen < count ? seen : count, call->factor, weight[lane]);
            }
            for (int lane = 0; lane < lanes; lane += 2) {
                const bf16 *from_head = values + head * D;
                if (lane + 1 < lanes)
                    add_few(w + head, lane, 2, weight + lane, from_head, table, block, stride, first, count);
                else
                    add_few(w + head, lane, 1, weight + lane, from_head, table, block, stride, first, count);
            }
        }
    }
    for (int head = 0; head < heads; head++)
        for (int lane = 0; lane < lanes; lane++) {
            const int token = lane / call->group;
            const int64_t number = (from + head) * call->group + lane % call->group;
            store_few(w + head, call, rows[token], places[token], lane, number);
        }
}

static void merge(const Call *call, const Merge *merge)
{
    const int64_t heads = call->kv_heads * call->group, step = heads * (D + 1);
    for (int head = 0; head < heads; head++) {
        const float *from = call->partials + merge->first_place * step + head * (D + 1);
        float largest = -INFINITY, total = 0, sum[D] = {0};
        for (int i = 0; i < merge->places; i++) largest = fmaxf(largest, from[i * step + D]);
        for (int i = 0; i < merge->places; i++) {
            const float weight = exp2f(from[i * step + D] - largest);
            total += weight;
            for (int d = 0; d < D; d++) sum[d] += weight * from[i * step + d];
        }
        for (int d = 0; d < D; d += 16)
            _mm256_storeu_si256(
                (__m256i *)(call->out + (merge->row * heads + head) * D + d),
                (__m256i)_mm512_cvtneps_pbh(_mm512_div_ps(_mm512_loadu_ps(sum + d), _mm512_set1_ps(total))));
    }
}

/* Queries of a job at most. */
int warmpath_lanes(void)
{
    return LANES;
}

/* Up to so many queries of a job are few. */
int warmpath_few(void)
{
    return FEW;
}

/* Write a row's KV to its slot. */
static void write_row(bf16 *slots, const Given *given, int64_t slot, int row, int kv_heads)
{
    for (int head = 0; head < kv_heads; head++)
        memcpy(
            slots + (slot * kv_heads + head) * D, given->at + row * given->row + head * given->head, D * sizeof(bf16));
}

/* Write what is new, then attend every job of the plan. `query`, `key` and `value` [rows, heads, D]; `slots` of the
 * real rows; `keys` and `values` [slots, kv_heads, D] of one layer; `out` [rows, heads, D]; `partials` has D + 1
 * numbers a place and head. Padding rows are written nowhere and become zeros. */
void warmpath_attend(
    Given query, Given key, Given value, const int64_t *slots, bf16 *keys, bf16 *values, bf16 *out,
    const int32_t *words, const int64_t *positions, float *partials, int kv_heads, int group, int block, float scale)
{
    const Plan *plan = (const Plan *)words;
    const Job *jobs = (const Job *)(words + plan->jobs_at);
    const Merge *merges = (const Merge *)(words + plan->merges_at);
    const Call call = {plan, words, positions, query, keys, values, out, partials, kv_heads, group, block,
                       scale * 1.44269504f /* log2(e) */};
    const int tasks = plan->many * kv_heads + plan->jobs - plan->many;
    const int64_t width = (int64_t)kv_heads * group * D;
    memset(out + plan->real_rows * width, 0, (plan->rows - plan->real_rows) * width * sizeof(bf16));
#pragma omp parallel
    {
        static __thread Work memory;
        static __thread Few few_memory[HEADS];
        Work *work = &memory;
        Few *few = few_memory;
        /* Or the compiler asks for the thread's addresses again in the innermost loops. */
        __asm__("" : "+r"(work), "+r"(few));
        const TileShapes before = take_tiles();
#pragma omp for
        for (int row = 0; row < plan->real_rows; row++) {
            write_row(keys, &key, slots[row], row, kv_heads);
            write_row(values, &value, slots[row], row, kv_heads);
        }
#pragma omp for schedule(dynamic, 1)
        for (int task = 0; task < tasks; task++) {
            if (task < plan->many * kv_heads) {
                attend_job(work, &call, jobs + task / kv_heads, task % kv_heads);
                continue;
            }
            const Job *job = jobs + plan->many + (task - plan->many * kv_heads);
            for (int head = 0; head < kv_heads; head += HEADS)
                attend_few(few, &call, job, head, kv_heads - head < HEADS ? kv_heads - head : HEADS);
        }
        leave_tiles(&before);
#pragma omp for
        for (int i = 0; i < plan->merges; i++) merge(&call, merges + i);
    }
}
