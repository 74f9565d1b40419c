// Instructions of a warp that C++ has no words for: products of small matrices (mma), their operands from shared memory
// (ldmatrix), copies to shared memory that others wait for (cp.async). PTX ISA, sections 9.7.14 and 9.7.9; every GPU from
// sm_80 on has them.
//
// Where there is no device, `thread_block.h` of the host's headers has the same functions: a launch is then a block of
// threads one after another, and products are made from the layouts that the manual gives.
#pragma once

#include "warp.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

namespace ithaca::warp {

__device__ inline uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

// Four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8, and gets of each matrix
// elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
__device__ inline void load_matrices(uint32_t (&x)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row)));
}

// The same of the transposed matrices.
__device__ inline void load_transposed(uint32_t (&x)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row)));
}

// Begins to copy 16 bytes to shared memory, or zeros where there are none to copy.
__device__ inline void copy_async(void* to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

// What this thread has begun to copy since the last call becomes a group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all of this thread's groups but the last `kLeft` are there.
template <int kLeft>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// 2^x, zero for minus infinity.
__device__ inline float power_of_two(float x) {
    float z;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(x));
    return z;
}

// An element type that tensor cores multiply.
template <typename T>
struct Element;
template <>
struct Element<__nv_bfloat16> {
    // Two numbers as a register, the first in the lower half.
    __device__ static uint32_t pack(float x, float y) {
        uint32_t z;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
        return z;
    }
    // sum += a b, of 16 x 16 and 16 x 8. Lane l has of a: rows l / 4 and, in a[1] and a[3], l / 4 + 8; columns 2 (l % 4)
    // and the next, in a[2] and a[3] 8 further. Of b: rows 2 (l % 4) and the next, in b[1] 8 further; column l / 4. Of
    // the sum: row l / 4, in sum[2] and sum[3] 8 further; columns 2 (l % 4) and the next.
    __device__ static void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
template <>
struct Element<__half> {
    __device__ static uint32_t pack(float x, float y) {
        uint32_t z;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
        return z;
    }
    __device__ static void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

}  // namespace ithaca::warp

#endif
