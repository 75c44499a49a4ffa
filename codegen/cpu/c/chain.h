/* Several compiled functions, one after another, on the same threads: each thread calls all of them, and waits
   for the others in between. */

typedef struct { void (*run)(void *); void *argument; } Link;
typedef struct { void *from; int64_t bytes; } Counters;
typedef struct {
    int64_t links, counters, flags, members, arrived;
    const Link *link;
    const Counters *counter;
    int64_t *const *flag;               /* what is not zero where an index was out of range */
} Chain;

/* Sets the counters of all functions to zero; to be called before the threads start. */
void attngraph_clear(Chain *c) {
    c->arrived = 0;
    for (int64_t n = 0; n < c->counters; ++n) memset(c->counter[n].from, 0, (size_t)c->counter[n].bytes);
}

/* Whether a function found an index out of range; to be called when the threads are done. */
int attngraph_failed(const Chain *c) {
    for (int64_t n = 0; n < c->flags; ++n)
        if (*c->flag[n]) return 1;
    return 0;
}

void attngraph_chain(Chain *c) {
    for (int64_t n = 0; n < c->links; ++n) {
        if (n) meet(&c->arrived, n, c->members);
        c->link[n].run(c->link[n].argument);
    }
}
