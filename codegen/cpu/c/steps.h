/* A loop over tokens: a token program is run for one token of each row after the other, on the same threads. Rows with
   more tokens stand before those with fewer, so the rows of a step are the first ones. */

/* Where a tensor of the rows begins at an even and at an odd step, what a row takes, and whether each step has rows of
   its own: those of tokens and results do, what is carried does not. */
typedef struct { char *even, *odd; int64_t bytes, moves; } Stream;
typedef struct { int64_t at, stream; } Slot;      /* the place in the program's call that has a stream's address */
typedef struct { int64_t from, to; } Copied;      /* streams; after the step */
typedef struct {
    void (*run)(int64_t *);
    int64_t *call;
    const Stream *stream;
    const Slot *slot;
    const Copied *copied;
    const int64_t *rows;                          /* of each step */
    int64_t steps, slots, copies, first_counter, counters, members, member, arrived;
} Loop;

static char *address(const Stream *s, int64_t step, int64_t done) {
    return (step & 1 ? s->odd : s->even) + (s->moves ? done * s->bytes : 0);
}

static void prepare(Loop *c, int64_t step, int64_t done) {
    c->call[0] = c->rows[step];
    for (int64_t n = 0; n < c->slots; ++n)
        c->call[c->slot[n].at] = (int64_t)address(c->stream + c->slot[n].stream, step, done);
    memset(c->call + c->first_counter, 0, sizeof(int64_t) * (size_t)c->counters);
}

void attngraph_loop(Loop *c) {
    int64_t is_first = take(&c->member) == 0, done = 0, met = 0;
    for (int64_t step = 0; step < c->steps; done += c->rows[step++]) {
        if (is_first) prepare(c, step, done);
        meet(&c->arrived, ++met, c->members);
        c->run(c->call);
        meet(&c->arrived, ++met, c->members);
        if (is_first)
            for (int64_t n = 0; n < c->copies; ++n) {
                const Stream *from = c->stream + c->copied[n].from, *to = c->stream + c->copied[n].to;
                memcpy(address(to, step, done), address(from, step, done), (size_t)(from->bytes * c->rows[step]));
            }
    }
}

/* One step of each row, whose token is the row's only one and not its first. */
typedef struct {
    void (*run)(int64_t *);
    int64_t *call;
    const int64_t *starts, *first;
    int64_t rows, bad;
} One;

void attngraph_one_step(One *c) {
    for (int64_t row = 0; row < c->rows; ++row)
        if (c->starts[row] != row || !c->first[row]) __atomic_store_n(&c->bad, 1, __ATOMIC_RELAXED);
    c->run(c->call);
}
