// A CUDA program that knows nothing of hegm and has no agent: steps.cu STEPS PAD_MIB [pace=SECONDS] [digest=STEPS].
//
// Each step is a kernel over a state on the GPU, whose sum is printed; PAD_MIB of a pattern ride along and are folded
// into the digest, as in mixed.py.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

static void check(cudaError_t error) {
    if (error != cudaSuccess) {
        fprintf(stderr, "%s\n", cudaGetErrorString(error));
        exit(1);
    }
}

__global__ void fill(uint64_t *pad, size_t count) {
    for (size_t at = blockIdx.x * (size_t)blockDim.x + threadIdx.x; at < count; at += (size_t)gridDim.x * blockDim.x)
        pad[at] = (at + 1) * 0x9E3779B97F4A7C15ull ^ at << 7;
}

__global__ void step(uint64_t *state, int count) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) state[at] = state[at] * 6364136223846793005ull + at + 1442695040888963407ull;
}

// Integers add up to the same in any order.
__global__ void add_up(const uint64_t *values, size_t count, unsigned long long *sum) {
    unsigned long long part = 0;
    for (size_t at = blockIdx.x * (size_t)blockDim.x + threadIdx.x; at < count; at += (size_t)gridDim.x * blockDim.x)
        part += values[at] * (at * 2 + 1);
    atomicAdd(sum, part);
}

static unsigned long long sum_of(const uint64_t *values, size_t count, unsigned long long *sum) {
    unsigned long long told;
    check(cudaMemset(sum, 0, sizeof told));
    add_up<<<512, 256>>>(values, count, sum);
    check(cudaMemcpy(&told, sum, sizeof told, cudaMemcpyDeviceToHost));
    return told;
}

int main(int argc, char **argv) {
    long steps = atol(argv[1]), digest_every = steps;
    size_t pads = (size_t)atol(argv[2]) << 17;
    double pace_s = 0;
    for (int index = 3; index < argc; index++) {
        if (!strncmp(argv[index], "pace=", 5)) pace_s = atof(argv[index] + 5);
        if (!strncmp(argv[index], "digest=", 7)) digest_every = atol(argv[index] + 7);
    }
    const int count = 1 << 20;
    uint64_t *pad, *state;
    unsigned long long *sum;
    check(cudaMalloc(&pad, pads * sizeof *pad));
    check(cudaMalloc(&state, count * sizeof *state));
    check(cudaMalloc(&sum, sizeof *sum));
    fill<<<512, 256>>>(pad, pads);
    fill<<<512, 256>>>(state, count);
    for (long done = 0; done < steps; done++) {
        step<<<count / 256, 256>>>(state, count);
        printf("%ld %llx\n", done, sum_of(state, count, sum));
        if ((done + 1) % digest_every == 0) printf("digest %llx\n", sum_of(pad, pads, sum));
        fflush(stdout);
        std::this_thread::sleep_for(std::chrono::duration<double>(pace_s));
    }
    return 0;
}
