"""How fast this machine's memory can be read: a compiled loop over much more than the caches hold.

Each thread reads several streams at once, since a single stream leaves the memory idle between its requests.
Nothing is prefetched: processors do that for streams, and asking for lines by hand halved the speed of one.
"""

from __future__ import annotations

import ctypes
import statistics
import time

import torch

from attngraph.codegen.cpu import toolchain

SIZE, TURNS = 512 << 20, 7
SOURCE = r"""
#include <pthread.h>
#include <stddef.h>

#define STREAMS 8
#define LINE 16        // floats in a cache line

typedef struct { const float *from; size_t count; float sum; } Part;

static void *read_part(void *given) {
    Part *part = given;
    size_t each = part->count / STREAMS / LINE * LINE;
    float sums[LINE] = {0};
    for (size_t i = 0; i < each; i += LINE)
        for (int s = 0; s < STREAMS; s++) {
            const float *at = part->from + s * each + i;
            for (int l = 0; l < LINE; l++) sums[l] += at[l];
        }
    for (int l = 0; l < LINE; l++) part->sum += sums[l];
    return NULL;
}

float read_all(const float *from, size_t count, int threads) {
    pthread_t others[threads];
    Part parts[threads];
    size_t each = count / threads;
    for (int t = 0; t < threads; t++) {
        parts[t] = (Part){from + t * each, each, 0};
        if (t) pthread_create(&others[t], NULL, read_part, &parts[t]);
    }
    read_part(&parts[0]);
    float sum = parts[0].sum;
    for (int t = 1; t < threads; t++) { pthread_join(others[t], NULL); sum += parts[t].sum; }
    return sum;
}
"""


class Memory:
    """A block of memory to read.

    Raises:
        CompilerError: there is no C compiler.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._code, _ = toolchain.build(SOURCE)
        self._code.read_all.restype = ctypes.c_float
        self._block = torch.zeros(size // 4)

    def bandwidth(self) -> float:
        """Bytes per second with as many threads as torch has: the median of some turns."""
        seconds = []
        count = self._block.numel()
        for _ in range(TURNS):
            start = time.perf_counter()
            self._code.read_all(
                ctypes.c_void_p(self._block.data_ptr()), ctypes.c_size_t(count), torch.get_num_threads()
            )
            seconds.append(time.perf_counter() - start)
        return self._block.nbytes / statistics.median(seconds)
