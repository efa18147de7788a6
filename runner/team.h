/* Shares of work for torch's own thread team, so that two teams do not fight for the cores. */
#include <stdint.h>
#include <string.h>

typedef void (*Work)(const void *arguments, int64_t share, int64_t shares);

typedef struct {
    Work work;
    const void *arguments;
    int64_t shares;
} Job;

static void (*team)(void (*)(void *), void *, unsigned, unsigned);
static int (*member)(void), (*members)(void);

/* Give the OpenMP runtime's GOMP_parallel, omp_get_thread_num and omp_get_num_threads; without them one
 * thread does the work. */
void runner_team(void *parallel, void *thread_num, void *num_threads) {
    memcpy(&team, &parallel, sizeof team);
    memcpy(&member, &thread_num, sizeof member);
    memcpy(&members, &num_threads, sizeof members);
}

static void play(void *data) {
    const Job *job = data;
    for (int64_t share = member(); share < job->shares; share += members()) /* a limit may make them fewer */
        job->work(job->arguments, share, job->shares);
}

/* Do every share of the work; `elements` that are few stay with one thread. */
static void spread(Work work, const void *arguments, int64_t elements, int64_t threads) {
    int64_t useful = elements / 8192 + 1;
    Job job = {work, arguments, useful < threads ? useful : threads};
    if (job.shares < 2 || !team || !member || !members)
        work(arguments, 0, 1);
    else
        team(play, &job, (unsigned)job.shares, 0);
}
