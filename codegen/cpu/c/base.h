/* The beginning of every compiled attention: the arguments of a call. ELEMENT is the type of q, k, v and out. */

/* Block sizes: queries of a work item, keys of a step. call.py has the same numbers. */
enum { BLOCK_Q = 48, BLOCK_K = 64, MOST_READS = 16, MOST_NUMBERS = 16 };

typedef struct { const void *data; int64_t stride[6], size[6]; } Read;

/* The threads' progress in a round: what was taken and what is finished. */
struct Round { int64_t next_pack, packed, next_item, finished; };

typedef struct {
    const void *q, *k, *v;              /* the width is contiguous; strides are of elements: b, h, token */
    void *out;
    float *lse;                         /* [B, H, Sq], contiguous */
    int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3];
    int64_t B, H, Hkv, Sq, Sk, D, Dv, wide; /* wide: Dv rounded up to whole vectors */
    const uint8_t *map[2];              /* per block: 0 skip, 1 evaluate masks, 2 masks keep all */
    int64_t map_stride[2][3];           /* b, h, block of queries; map[0] also skips finite fills */
    const uint8_t *known[2];            /* for maps completed at run time: what follows from sizes alone */
    int64_t known_stride[2][3], lines[2][2]; /* lines: numbers of b and h with separate lines, or 1 */
    int64_t next_line, made;            /* shared counters */
    double hidden;                      /* no score behind a finite fill exceeds it */
    float scale;
    int32_t together;                   /* (b, key head) pairs per round */
    float *k_packed, *v_packed;         /* [2][pair of the round][block][D][BLOCK_K] and [token][wide] */
    float *scratch;                     /* [thread][scratch_size] */
    int64_t scratch_size;
    struct Round *rounds;               /* zeros */
    int64_t slot, bad;                  /* shared counters; bad: an index was out of range */
    int64_t whole[MOST_NUMBERS];        /* values of expressions of sizes */
    float real[MOST_NUMBERS];
    Read read[MOST_READS];
    /* decode.h: k and v are pages (strides of page, head, token), a row's tokens lie at its pages in `table`
       [rows][columns]; tokens starts[r] .. starts[r + 1] - 1 of q and of k_new, v_new are row r's, the first
       of them at position first[r], after held[r] keys. */
    const int64_t *table, *starts, *first, *held;
    int64_t columns, page, window;      /* window: the most keys that a query sees; 0: all */
    const void *k_new, *v_new;
    int64_t k_new_stride[2], v_new_stride[2];
    int64_t step, member;               /* queries of an item; a shared counter */
    int64_t parts;                      /* parts of the keys, with a separate item each */
    int64_t most;                       /* decode.h finds `parts` itself, at most so many; 0: it is given */
    float *partial;                     /* [item][part][BLOCK_Q * (wide + 2)] */
    int64_t *arrived;                   /* [item], zeros */
    const struct Gradients *gradients;  /* backward.h */
    const float *k_scale, *v_scale;     /* of pages of 8 bits, one for each page, head and token */
    int64_t k_scale_stride[3], v_scale_stride[3];
} Call;

/* Further arguments of a backward pass. Items are blocks of queries of a head, (b, h, block) in this order. */
struct Gradients {
    const void *grad;                   /* of out */
    const float *grad_lse;              /* [B, H, Sq] */
    int64_t grad_stride[3];
    int64_t wanted;                     /* OF_Q | OF_K | OF_V */
    float *grad_q;                      /* [B, H, Sq, D] */
    void *grad_k, *grad_v;              /* [B, Hkv, Sk, D or Dv] */
    float *q_packed, *grad_packed;      /* [item][BLOCK_Q][wide_k], times scale, and [item][BLOCK_Q][wide] */
    float *rows;                        /* [item][3][BLOCK_Q]: base, unit, delta */
    uint8_t *choice;                    /* [item]: the map to use, 2 for none */
    int64_t *added;                     /* [item], zeros: 1 + the last block of keys that was added */
    int64_t *counters;                  /* [4], zeros */
    float *sums[MOST_READS];            /* [B, H, Sq or Sk]: of reads by rows or by columns */
    /* One read by pairs: sums of rows first .. first + count - 1, separate for each batch (from `batch` on) and
       each head, or over all. */
    float *pairs;
    int64_t owner_stride, row_stride, first, count, batch, owners, number, each_batch, each_head;
};

/* ---- reads ---- */

/* The first of `count` consecutive indices, moved so that all are in range; sets `bad` if they were not. */
INLINE int64_t in_range_row(int64_t first, int count, int64_t size, int *bad) {
    if (first >= 0 && first + count <= size) return first;
    *bad = 1;
    return 0;
}

/* Consecutive elements along an axis. From an axis that is too short (in_range_row sets `bad`) nothing is
   read. */
#define COPY(TO, CONVERT, FROM, STRIDE, COUNT)                                                        \
    do {                                                                                              \
        const int64_t step = (STRIDE);                                                                \
        const __typeof__(*(FROM)) *const from = (FROM);                                               \
        if (bad) break;                                                                               \
        if (step == 1)                                                                                \
            for (int j = 0; j < (COUNT); ++j) TO[j] = CONVERT(from[j]);                               \
        else                                                                                          \
            for (int j = 0; j < (COUNT); ++j) TO[j] = CONVERT(from[j * step]);                        \
    } while (0)

/* ---- the program ---- */
