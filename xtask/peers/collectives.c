/* A peer of `oxccl bench`: MPI's operations on f32, measured by the same rule.
 *
 *   mpicc -O2 -o collectives collectives.c
 *   mpiexec -n 2 ./collectives [--warmup N] [--iters N] [--budget-ms N] --op OP BYTES... [--op OP BYTES...]...
 *
 * Each call begins behind a barrier; its time is that of its slowest rank. Options hold for what stands behind them. Where
 * so many calls would take longer than the budget, there are fewer, at least five. BYTES is the size of the larger tensor
 * of a rank, 0 for a barrier. One line of standard output for each size, of ping_pong half the round trip:
 *   op bytes median_us min_us max_us
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST = 5 };

static const char *const NAMES[] = {"all_reduce", "all_gather_into", "reduce_scatter_into", "all_to_all_into",
                                    "broadcast", "barrier", "ping_pong", "all_reduce_async"};
enum op { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, BARRIER, PING_PONG, ALL_REDUCE_ASYNC, OPS };

static int rank, world;

static int ascending(const void *left, const void *right) {
  double l = *(const double *)left, r = *(const double *)right;
  return (l > r) - (l < r);
}

static void give_up(const char *why) {
  fprintf(stderr, "collectives: %s\n", why);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static int number(const char *text) {
  char *end;
  long n = strtol(text ? text : "", &end, 10);
  if (!text || !*text || *end || n < 0 || n > 1 << 30) give_up("an option or a size is not a number in range");
  return (int)n;
}

static float value(int of, int i) { return (float)(of + 1 + i % 5); }

static float sum(int i) { return (float)(world * (world + 1) / 2 + world * (i % 5)); }

/* What `out` has at `i` after the operation. */
static float expected(enum op op, int part, int i) {
  switch (op) {
    case ALL_GATHER: return value(i / part, i % part);
    case REDUCE_SCATTER: return sum(rank * part + i);
    case ALL_TO_ALL: return value(i / part, rank * part + i % part);
    case BROADCAST:
    case PING_PONG: return value(0, i);
    default: return sum(i);
  }
}

static void call(enum op op, float *in, float *out, int count) {
  int part = count / world;
  MPI_Request request;
  switch (op) {
    case ALL_REDUCE: MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case ALL_GATHER: MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD); break;
    case REDUCE_SCATTER: MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case ALL_TO_ALL: MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD); break;
    case BROADCAST: MPI_Bcast(out, count, MPI_FLOAT, 0, MPI_COMM_WORLD); break;
    case PING_PONG:
      if (rank == 0) {
        MPI_Send(in, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(out, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      } else if (rank == 1) {
        MPI_Recv(out, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(out, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
      }
      break;
    case ALL_REDUCE_ASYNC:
      MPI_Iallreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
      break;
    default: MPI_Barrier(MPI_COMM_WORLD);
  }
}

static double timed(enum op op, float *in, float *out, int count) {
  MPI_Barrier(MPI_COMM_WORLD);
  double begin = MPI_Wtime();
  call(op, in, out, count);
  return MPI_Wtime() - begin;
}

static int fewer(int calls, int least, double most) {
  if (calls > least && most < calls) return most > least ? (int)most : least;
  return calls;
}

static void measure(enum op op, int bytes, int warmup, int iters, double budget) {
  int count = bytes / 4, parts = op == ALL_GATHER || op == REDUCE_SCATTER || op == ALL_TO_ALL;
  if (bytes % 4 || (op == BARRIER) != (bytes == 0)) give_up("a size is not whole f32s, or a barrier has one");
  if (parts && count % world) give_up("a size has no equal part for each rank");
  float *in = malloc(bytes + 4), *out = malloc(bytes + 4);
  if (!in || !out) give_up("out of memory");
  /* Written, so that no page is still missing. */
  for (int i = 0; i < count; i++) in[i] = value(rank, i), out[i] = op == BROADCAST && rank == 0 ? value(0, i) : 0;

  /* The first warm-ups say how long a call takes, with its barrier. */
  int first = warmup < LEAST ? warmup : LEAST;
  double took = 1e9;
  for (int i = 0; i < first; i++) {
    double begin = MPI_Wtime();
    timed(op, in, out, count);
    double time = MPI_Wtime() - begin;
    if (time < took) took = time;
  }
  if (first) {
    MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    took = took > 1e-9 ? took : 1e-9;
    warmup = fewer(warmup, first, budget / 4 / took);
    iters = fewer(iters, LEAST, budget / took);
  }
  for (int i = first; i < warmup; i++) timed(op, in, out, count);

  double *own = malloc(sizeof(double) * iters), *slowest = malloc(sizeof(double) * iters);
  if (!own || !slowest) give_up("out of memory");
  for (int i = 0; i < iters; i++) own[i] = timed(op, in, out, count);
  int has = op == REDUCE_SCATTER ? count / world : op == PING_PONG && rank > 1 ? 0 : count;
  for (int i = 0; i < has; i++) {
    if (out[i] != expected(op, count / world, i)) give_up("wrong result");
  }
  MPI_Reduce(own, slowest, iters, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    qsort(slowest, iters, sizeof(double), ascending);
    double us = op == PING_PONG ? 0.5e6 : 1e6, median = (slowest[(iters - 1) / 2] + slowest[iters / 2]) / 2;
    printf("%s %d %.3f %.3f %.3f\n", NAMES[op], bytes, median * us, slowest[0] * us, slowest[iters - 1] * us);
    fflush(stdout);
  }
  free(own);
  free(slowest);
  free(in);
  free(out);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  int warmup = 5, iters = 20, budget_ms = 1000;
  enum op op = OPS;
  if (world < 2) give_up("it needs at least 2 ranks");
  for (int i = 1; i < argc; i++) {
    const char *next = i + 1 < argc ? argv[i + 1] : NULL;
    if (!strcmp(argv[i], "--warmup")) warmup = number(next), i++;
    else if (!strcmp(argv[i], "--iters")) iters = number(next), i++;
    else if (!strcmp(argv[i], "--budget-ms")) budget_ms = number(next), i++;
    else if (!strcmp(argv[i], "--op")) {
      for (op = 0; op < OPS && strcmp(NAMES[op], next ? next : ""); op++) {}
      if (op == OPS) give_up("no such operation");
      i++;
    } else {
      if (op == OPS) give_up("--op comes before the sizes");
      if (iters < 1) give_up("--iters must be at least 1");
      measure(op, number(argv[i]), warmup, iters, budget_ms * 1e-3);
    }
  }
  MPI_Finalize();
  return 0;
}
