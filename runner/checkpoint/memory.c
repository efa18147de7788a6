/* Copy and check a training state's memory while training waits for it, or wants the memory bus itself. */
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "../team.h"

#define LINE 64

typedef struct {
    char *to;
    const char *from;
    int64_t lines;
} Copy;

/* Past the caches: they would first fetch what is about to be overwritten, and give up what is in use. */
static void copy_lines(char *to, const char *from, int64_t lines) {
#ifdef __SSE2__
    for (int64_t at = 0; at < lines * LINE; at += sizeof(__m128i))
        _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
    _mm_sfence();
#else
    memcpy(to, from, lines * LINE);
#endif
}

static void copy_share(const void *arguments, int64_t share, int64_t shares) {
    const Copy *c = arguments;
    int64_t start = c->lines * share / shares, end = c->lines * (share + 1) / shares;
    copy_lines(c->to + start * LINE, c->from + start * LINE, end - start);
}

/* `to` starts on a cache line, and does not overlap `from`. */
void runner_copy(char *to, const char *from, int64_t size, int64_t threads) {
    Copy copy = {to, from, size / LINE};
    spread(copy_share, &copy, copy.lines, threads);
    int64_t whole = copy.lines * LINE;
    memcpy(to + whole, from + whole, size - whole);
}

/* Whether any of `count` IEEE numbers has all bits of its exponent, `ones`, set: nan or infinity. */
int64_t runner_any_not_finite_32(const uint32_t *bits, int64_t count, uint32_t ones) {
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found |= -(uint32_t)((bits[i] & ones) == ones);
    return found != 0;
}

int64_t runner_any_not_finite_16(const uint16_t *bits, int64_t count, uint16_t ones) {
    uint16_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found |= (uint16_t)-((bits[i] & ones) == ones);
    return found != 0;
}
