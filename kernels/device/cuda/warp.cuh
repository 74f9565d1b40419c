// Threads that work together: the shared memory of a block, and what lanes of a warp tell each other.
//
// Where there is no device, `thread_block.h` of the host's headers has the same: a launch is then a block of threads one
// after another.
#pragma once

#include "numeric.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

// The block's dynamic shared memory, by a name that PTX knows.
extern "C" {
extern __shared__ __align__(1024) unsigned char ithaca_shared[];
}
#define ITHACA_SHARED(name) unsigned char* const name = ithaca_shared

namespace ithaca::warp {

// The number that the lane whose number differs by these bits gave.
template <typename A>
__device__ inline A other_lane(A x, int bits) {
    return __shfl_xor_sync(0xFFFFFFFFu, x, bits);
}

// The number that a lane gave.
template <typename A>
__device__ inline A from_lane(A x, int lane) {
    return __shfl_sync(0xFFFFFFFFu, x, lane);
}

// A bit of every lane: whether its own is set.
__device__ inline uint32_t ballot(bool own) { return __ballot_sync(0xFFFFFFFFu, own); }

// A condition that is the same for all lanes. The vote tells the compiler, which then keeps the loop's shared values in uniform
// registers.
__device__ inline bool uniform(bool condition) { return __any_sync(0xFFFFFFFFu, condition) != 0; }

}  // namespace ithaca::warp

#else
#include <thread_block.h>
#endif
