/* Words between the processes of one machine: each has a slot of shared memory that only it writes.
 *
 * Round `turn` puts its words on page turn & 1 and then raises `turn`. Nobody begins round t + 2, which
 * reuses the page, before everybody raised t + 1, and thus has read round t.
 */
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE 64

typedef struct {
    _Alignas(LINE) _Atomic uint32_t turn;
    _Alignas(LINE) _Atomic uint32_t sleepers; /* those who wait for `turn`; a wake is a system call */
    _Alignas(LINE) double words[];            /* two pages of `room` */
} Slot;

/* Bytes of one rank's slot with `room` words a page. */
int64_t runner_board_bytes(int64_t room) {
    int64_t bytes = (int64_t)sizeof(Slot) + 2 * room * (int64_t)sizeof(double);
    return (bytes + LINE - 1) / LINE * LINE;
}

static Slot *slot_of(void *board, int64_t rank, int64_t room) {
    return (Slot *)((char *)board + rank * runner_board_bytes(room));
}

/* Show `words` of this rank to all others. */
void runner_board_show(void *board, int64_t rank, int64_t room, uint32_t turn, const double *words, int64_t count) {
    Slot *mine = slot_of(board, rank, room);
    memcpy(mine->words + (turn & 1) * room, words, (size_t)count * sizeof *words);
    atomic_store(&mine->turn, turn);
    if (atomic_load(&mine->sleepers))
        syscall(SYS_futex, &mine->turn, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether `slot` is in a round that is at least `turn`; counters may wrap. */
static inline int reached(Slot *slot, uint32_t turn) {
    return (int32_t)(atomic_load_explicit(&slot->turn, memory_order_acquire) - turn) >= 0;
}

/* Wait for one rank: watch for `spin_ns`, then sleep. Return whether it came before `end`. */
static int await(Slot *slot, uint32_t turn, int64_t spin_ns, int64_t end) {
    int64_t began = now_ns(), spun = began + spin_ns;
    while (!reached(slot, turn) && now_ns() < spun)
        for (int i = 0; i < 32 && !reached(slot, turn); i++)
            pause_briefly();
    while (!reached(slot, turn)) {
        int64_t left = end - now_ns();
        if (left <= 0)
            return 0;
        struct timespec wait = {left / 1000000000, left % 1000000000};
        atomic_fetch_add(&slot->sleepers, 1);
        uint32_t seen = atomic_load(&slot->turn);
        if ((int32_t)(seen - turn) < 0)
            syscall(SYS_futex, &slot->turn, FUTEX_WAIT, seen, &wait, NULL, 0);
        atomic_fetch_sub(&slot->sleepers, 1);
    }
    return 1;
}

/* Put every rank's `count` words of round `turn` into out[world, count]. Return -1, or the first rank that
 * did not come within `limit_ns`; the call may then be repeated. */
int64_t runner_board_read(void *board, int64_t world, int64_t room, uint32_t turn, double *out, int64_t count,
                          int64_t spin_ns, int64_t limit_ns) {
    int64_t end = now_ns() + limit_ns;
    for (int64_t rank = 0; rank < world; rank++) {
        Slot *slot = slot_of(board, rank, room);
        if (!await(slot, turn, spin_ns, end))
            return rank;
        memcpy(out + rank * count, slot->words + (turn & 1) * room, (size_t)count * sizeof *out);
    }
    return -1;
}

/* Replace elements from..to of every row of rows[world, stride] by their mean, added in the order of the rows. */
void runner_mean_rows(float *rows, int64_t world, int64_t stride, int64_t from, int64_t to) {
    enum { BLOCK = 1024 };
    float sum[BLOCK], share = (float)(1.0 / (double)world);
    for (int64_t at = from; at < to; at += BLOCK) {
        int64_t n = to - at < BLOCK ? to - at : BLOCK;
        memcpy(sum, rows + at, (size_t)n * sizeof *sum);
        for (int64_t rank = 1; rank < world; rank++)
            for (int64_t i = 0; i < n; i++)
                sum[i] += rows[rank * stride + at + i];
        for (int64_t i = 0; i < n; i++)
            sum[i] *= share;
        for (int64_t rank = 0; rank < world; rank++)
            memcpy(rows + rank * stride + at, sum, (size_t)n * sizeof *sum);
    }
}
