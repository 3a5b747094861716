/* A peer of `oxccl bench`: MPI_Allreduce of f32 sums, measured by the same rule.
 *
 *   mpicc -O2 -o allreduce allreduce.c
 *   mpiexec -n 2 ./allreduce WARMUP ITERS BYTES...
 *
 * Each call begins behind a barrier; its time is that of its slowest rank. One line of standard output for each size:
 *   bytes median_us min_us max_us
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *left, const void *right) {
  double l = *(const double *)left, r = *(const double *)right;
  return (l > r) - (l < r);
}

static void give_up(const char *why) {
  fprintf(stderr, "allreduce: %s\n", why);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int count, char **arguments) {
  MPI_Init(&count, &arguments);
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (count < 4) give_up("usage: allreduce WARMUP ITERS BYTES...");
  int warmup = atoi(arguments[1]), iters = atoi(arguments[2]);
  if (warmup < 0 || iters < 1) give_up("WARMUP must be at least 0, ITERS at least 1");
  double *own = malloc(sizeof(double) * iters), *slowest = malloc(sizeof(double) * iters);
  if (!own || !slowest) give_up("out of memory");
  for (int argument = 3; argument < count; argument++) {
    long long bytes = atoll(arguments[argument]);
    int elements = (int)(bytes / 4);
    if (bytes < 4 || bytes % 4 || bytes / 4 != elements) give_up("a size is not a multiple of 4 that MPI can count");
    float *in = malloc(bytes), *out = malloc(bytes);
    if (!in || !out) give_up("out of memory");
    /* Written, so that no page is still missing. */
    for (int i = 0; i < elements; i++) in[i] = (float)(rank + 1 + i % 5), out[i] = 0;
    for (int call = -warmup; call < iters; call++) {
      MPI_Barrier(MPI_COMM_WORLD);
      double begin = MPI_Wtime();
      MPI_Allreduce(in, out, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      if (call >= 0) own[call] = MPI_Wtime() - begin;
    }
    for (int i = 0; i < elements; i++) {
      if (out[i] != (float)(world * (world + 1) / 2 + world * (i % 5))) give_up("wrong result");
    }
    MPI_Reduce(own, slowest, iters, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) {
      qsort(slowest, iters, sizeof(double), ascending);
      double median = (slowest[(iters - 1) / 2] + slowest[iters / 2]) / 2;
      printf("%lld %.3f %.3f %.3f\n", bytes, median * 1e6, slowest[0] * 1e6, slowest[iters - 1] * 1e6);
      fflush(stdout);
    }
    free(in);
    free(out);
  }
  free(own);
  free(slowest);
  MPI_Finalize();
  return 0;
}
