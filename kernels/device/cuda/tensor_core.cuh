// Instructions of a warp that C++ has no words for: products of small matrices (mma), their operands from shared memory
// (ldmatrix), copies to shared memory that others wait for (cp.async). PTX ISA, sections 9.7.14 and 9.7.9; every GPU from
// sm_80 on has them.
//
// Where there is no device, `thread_block.h` of the host's headers has the same functions: a launch is then a block of
// threads one after another, and products are made from the layouts that the manual gives.
#pragma once

#include "warp.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

// Whether there are products of warpgroups of four warps (wgmma, section 9.7.15), as on sm_90a.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ITHACA_WARPGROUPS
#endif

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

// The same of 16 bytes that are there.
__device__ inline void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared_address(to)), "l"(from) : "memory");
}

// What this thread has begun to copy since the last call becomes a group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all of this thread's groups but the last `kLeft` are there, for products as well.
template <int kLeft>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#ifdef ITHACA_WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// 2^x, zero for minus infinity.
__device__ inline float power_of_two(float x) {
    float z;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(x));
    return z;
}

// 1 / x, to the last bit or the one before.
__device__ inline float reciprocal(float x) {
    float z;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(x));
    return z;
}

#ifdef ITHACA_WARPGROUPS

// The lower half of a matrix descriptor: a tile with the 128-byte swizzle at a multiple of 1024 bytes. Rows of 128 bytes, groups
// of eight rows 1024 bytes apart; of a tile that is read transposed, the next 64 columns are `chunk` bytes further. An offset of
// 16 bytes is 1.
//
// The asm reads the address of shared memory at each use, which lets the compiler compute descriptors in uniform registers: a
// copy in a vector register takes two R2UR before each product.
__device__ inline uint32_t in_shared(const void* at, int chunk) {
    uint32_t start;
    asm volatile("mov.u32 %0, ithaca_shared;" : "=r"(start));
    const uint32_t address = start + (shared_address(at) - shared_address(ithaca_shared));
    return (address & 0x3FFFF) >> 4 | static_cast<uint32_t>(chunk) >> 4 << 16;
}
// The upper half: 128-byte swizzle, 1024 bytes between groups of eight rows.
#define ITHACA_TILE_HIGH "0x40000040"

// Registers of a sum belong to products from here until they are waited for.
template <int kN>
__device__ inline void hold(float (&sum)[kN][4]) {
    ITHACA_UNROLL
    for (int n = 0; n < kN; ++n)
        ITHACA_UNROLL
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sum[n][i])::"memory");
}
template <int kN>
__device__ inline void begin_products(float (&sum)[kN][4]) {
    hold(sum);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all groups of products but the last `kLeft` have ended.
template <int kLeft>
__device__ inline void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Registers of `kN` times 8 columns.
template <int kN, int kAll>
__device__ inline float (&columns(float (&sum)[kAll][4], int first))[kN][4] {
    return reinterpret_cast<float (&)[kN][4]>(sum[first]);
}

#define ITHACA_SUM_2(s) "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]), "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]), "+f"(s[1][3])
#define ITHACA_SUM_4(s) ITHACA_SUM_2(s), "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]), "+f"(s[3][0]), "+f"(s[3][1]), "+f"(s[3][2]), "+f"(s[3][3])
#define ITHACA_SUM_6(s) ITHACA_SUM_4(s), "+f"(s[4][0]), "+f"(s[4][1]), "+f"(s[4][2]), "+f"(s[4][3]), "+f"(s[5][0]), "+f"(s[5][1]), "+f"(s[5][2]), "+f"(s[5][3])
#define ITHACA_SUM_8(s) ITHACA_SUM_6(s), "+f"(s[6][0]), "+f"(s[6][1]), "+f"(s[6][2]), "+f"(s[6][3]), "+f"(s[7][0]), "+f"(s[7][1]), "+f"(s[7][2]), "+f"(s[7][3])
#define ITHACA_SUM_12(s) ITHACA_SUM_8(s), "+f"(s[8][0]), "+f"(s[8][1]), "+f"(s[8][2]), "+f"(s[8][3]), "+f"(s[9][0]), "+f"(s[9][1]), "+f"(s[9][2]), "+f"(s[9][3]), "+f"(s[10][0]), "+f"(s[10][1]), "+f"(s[10][2]), "+f"(s[10][3]), "+f"(s[11][0]), "+f"(s[11][1]), "+f"(s[11][2]), "+f"(s[11][3])
#define ITHACA_SUM_16(s) ITHACA_SUM_12(s), "+f"(s[12][0]), "+f"(s[12][1]), "+f"(s[12][2]), "+f"(s[12][3]), "+f"(s[13][0]), "+f"(s[13][1]), "+f"(s[13][2]), "+f"(s[13][3]), "+f"(s[14][0]), "+f"(s[14][1]), "+f"(s[14][2]), "+f"(s[14][3]), "+f"(s[15][0]), "+f"(s[15][1]), "+f"(s[15][2]), "+f"(s[15][3])

// sum = a b^T, or sum += a b^T where `adds`, of 64 rows and as many rows as there are sums, both of 16 columns in shared memory;
// and sum += a b, of 64 rows in registers and 16 rows in shared memory.
#define ITHACA_WARPGROUP_PRODUCTS(type, n, columns, sums, a, b, adds_at, r0, r1, r2, r3, b_at)                                     \
    __device__ static void multiply_rows(float (&sum)[n][4], uint32_t from_a, uint32_t from_b, bool adds) {                        \
        asm volatile("{.reg .pred p; .reg .b64 da, db; setp.ne.b32 p, " adds_at ", 0; mov.b64 da, {" a ", " ITHACA_TILE_HIGH "}; mov.b64 db, {" b ", " ITHACA_TILE_HIGH "}; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." \
                     type " {" sums "}, da, db, p, 1, 1, 0, 0;}"                                                             \
                     : ITHACA_SUM_##n(sum)                                                                                         \
                     : "r"(from_a), "r"(from_b), "r"(static_cast<int>(adds)));                                                     \
    }                                                                                                                              \
    __device__ static void add_weighed(float (&sum)[n][4], const uint32_t (&left)[4], uint32_t from_b) {                           \
        asm volatile("{.reg .pred p; .reg .b64 db; setp.eq.b32 p, 0, 0; mov.b64 db, {" b_at ", " ITHACA_TILE_HIGH "}; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type     \
                     " {" sums "}, {" r0 ", " r1 ", " r2 ", " r3 "}, db, p, 1, 1, 1;}"                                       \
                     : ITHACA_SUM_##n(sum)                                                                                         \
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(from_b));                                       \
    }
#define ITHACA_WARPGROUP_ELEMENT(type)                                                                                             \
    ITHACA_WARPGROUP_PRODUCTS(type, 2, "16", "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", "%8", "%9", "%10", "%11", "%12") \
    ITHACA_WARPGROUP_PRODUCTS(type, 4, "32", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "%16", "%17", "%18", "%16", "%17", "%18", "%19", "%20") \
    ITHACA_WARPGROUP_PRODUCTS(type, 8, "64", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31", "%32", "%33", "%34", "%32", "%33", "%34", "%35", "%36") \
    ITHACA_WARPGROUP_PRODUCTS(type, 12, "96", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47", "%48", "%49", "%50", "%48", "%49", "%50", "%51", "%52") \
    ITHACA_WARPGROUP_PRODUCTS(type, 16, "128", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63", "%64", "%65", "%66", "%64", "%65", "%66", "%67", "%68")
#else
#define ITHACA_WARPGROUP_ELEMENT(type)
#endif

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
    ITHACA_WARPGROUP_ELEMENT("bf16")
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
    ITHACA_WARPGROUP_ELEMENT("f16")
};

}  // namespace ithaca::warp

#endif
