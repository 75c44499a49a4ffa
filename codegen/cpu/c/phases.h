/* How threads share the phases of a token program, between which they wait for each other. Its tables and functions are
   emitted after this, and the functions that it exports at the end. */

int64_t attngraph_room(void);           /* elements that a thread needs for panels */
int64_t attngraph_arranged(int64_t tokens); /* for few rows that are arranged as a product reads them */

/* A product: its depth, from one token's elements to the next one's in the operand and in the result, and where the
   call has the addresses of operand, weight, scales, zeros (0: there are none) and result. */
typedef struct {
    Product *const *function;
    int64_t depth, ldx, ldy, left, weight, scale, zero, result;
} Factor;

/* Products of one width, whose columns a thread computes together, and what follows from them element by element.
   `depth`: the most that they add up. `deep`: whether threads may share the depth. */
typedef struct {
    const Factor *factor;
    int64_t factors, width, depth;
    int turned, across, deep;
    void (*follow)(const int64_t *c, int64_t t0, int64_t t1, int64_t c0, int64_t c1);
} Products;

/* Either groups of products, or definitions that are computed token by token. */
typedef void Tokens(const int64_t *c, int64_t t0, int64_t t1);
typedef struct { const Products *group; int64_t groups; Tokens *tokens; } Phase;

/* Elements of the sums of a group's parts of the depth, `parts` for each product. */
INLINE int64_t room_of_parts(const Products *g, int64_t parts, int64_t tokens) {
    return parts > 1 ? g->factors * parts * tokens * g->width : 0;
}

/* Computes an item of a group: some columns for some tokens, and one part of their depth. */
static void compute_item(const int64_t *c, const Products *g, Items of, int64_t item, float *sums, float *panels,
                         float *arranged) {
    const int64_t tokens = c[TOKENS], part = item / of.shares % of.parts;
    const int64_t c0 = item % of.shares * of.columns, c1 = smaller(c0 + of.columns, g->width);
    const int64_t t0 = item / of.shares / of.parts * of.rows, t1 = smaller(t0 + of.rows, tokens);
    for (int64_t n = 0; n < g->factors; ++n) {
        const Factor *f = g->factor + n;
        const int64_t is_whole = of.parts == 1, ldy = is_whole ? f->ldy : g->width;
        float *y = is_whole ? (float *)c[f->result] + t0 * ldy : sums + (n * of.parts + part) * tokens * ldy;
        (*f->function)((const float *)c[f->left] + t0 * f->ldx, f->ldx, (const void *)c[f->weight],
                       f->scale ? (const float *)c[f->scale] : 0, f->zero ? (const void *)c[f->zero] : 0, c0, y + c0,
                       ldy, t1 - t0, c1 - c0, f->depth * part / of.parts, f->depth * (part + 1) / of.parts, panels,
                       arranged);
    }
    if (of.parts == 1 && g->follow) g->follow(c, t0, t1, c0, c1);
}

/* Adds up the parts of a group's sums, and computes what follows, for this thread's columns. */
static void add_up(const int64_t *c, const Products *g, int64_t parts, const float *sums, int64_t member) {
    const int64_t tokens = c[TOKENS];
    const int64_t c0 = column_of(member, c[MEMBERS], g->width), c1 = column_of(member + 1, c[MEMBERS], g->width);
    for (int64_t n = 0; n < g->factors; ++n, sums += parts * tokens * g->width)
        add_parts(sums, parts, tokens, g->width, c0, c1, (float *)c[g->factor[n].result], g->factor[n].ldy);
    if (g->follow) g->follow(c, 0, tokens, c0, c1);
}

/* Takes items of a phase of products until there are none left. */
static void columns(int64_t *c, const Phase *phase, int64_t *counter, int64_t member, int64_t *met) {
    const int64_t tokens = c[TOKENS];
    float *panels = c[PANELS] ? (float *)c[PANELS] + member * attngraph_room() : 0, *sums = (float *)c[SUMS];
    float *arranged = (float *)c[ARRANGED] + member * attngraph_arranged(tokens);
    Items items[phase->groups];
    int64_t count = 0, divided = 0;
    for (int64_t n = 0; n < phase->groups; ++n) {
        const Products *g = phase->group + n;
        items[n] = items_of(g->width, g->depth, c, g->turned, g->across, g->deep);
        count += items[n].count, divided += items[n].parts > 1;
    }
    for (int64_t item; (item = take(counter)) < count;) {
        const Products *g = phase->group;
        const Items *of = items;
        float *to = sums;
        while (item >= of->count) {
            to += room_of_parts(g++, of->parts, tokens);
            item -= of++->count;
        }
        compute_item(c, g, *of, item, to, panels, arranged);
    }
    if (divided) meet(c + ARRIVED, ++*met, c[MEMBERS]);
    for (int64_t n = 0; divided && n < phase->groups; ++n) {
        if (items[n].parts > 1) add_up(c, phase->group + n, items[n].parts, sums, member);
        sums += room_of_parts(phase->group + n, items[n].parts, tokens);
    }
}

/* Computes all phases, and then the results of 16 bits, if there are any: what each thread runs. */
INLINE void all_phases(int64_t *c, const Phase *phases, int64_t count, Tokens *results) {
    const int64_t tokens = c[TOKENS], members = c[MEMBERS], member = take(c + MEMBER);
    const int64_t t0 = tokens * member / members, t1 = tokens * (member + 1) / members;
    int64_t met = 0;
    for (int64_t n = 0; n < count; ++n) {
        if (n) meet(c + ARRIVED, ++met, members);
        if (phases[n].groups) columns(c, phases + n, c + COUNTERS + n, member, &met);
        else phases[n].tokens(c, t0, t1);
    }
    if (results) {
        meet(c + ARRIVED, ++met, members);
        results(c, t0, t1);
    }
}

/* Computes one phase of many tokens, whose products are computed already: what each thread runs. */
INLINE void one_phase(int64_t *c, const Phase *phase) {
    const int64_t tokens = c[TOKENS], members = c[MEMBERS], member = take(c + MEMBER);
    const int64_t t0 = tokens * member / members, t1 = tokens * (member + 1) / members;
    if (phase->tokens) phase->tokens(c, t0, t1);
    for (const Products *g = phase->group; g < phase->group + phase->groups; ++g)
        if (g->follow) g->follow(c, t0, t1, 0, g->width);
}

/* The elements that all threads need for sums of parts of the depth. */
INLINE int64_t room_for_parts(const Phase *phases, int64_t count, int64_t tokens, int64_t members) {
    int64_t most = 0;
    for (int64_t n = 0; n < count; ++n) {
        int64_t room = 0;
        for (const Products *g = phases[n].group; g < phases[n].group + phases[n].groups; ++g)
            if (g->deep) room += g->factors * room_of_sums(g->width, g->depth, tokens, members);
        most = larger(most, room);
    }
    return most;
}
