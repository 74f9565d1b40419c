// A block of threads on the host: each thread has a stack of its own, and they take turns on one thread of the machine.
// Threads change where they must wait for one another: at barriers, and at the instructions that a warp does together.
// What is known to be wrong ends the program: a barrier or a product that not all come to, an address that is not
// aligned or lies outside shared memory.
//
// Blocks differ in what a device may do either way: whether an asynchronous copy is done at once or as late as it may be,
// and which thread goes first. Shared memory starts as bits that are no number.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define ITHACA_SHARED(name) unsigned char* const name = ::on_host::the_block->shared

namespace on_host {

[[noreturn]] inline void wrong(const char* what) {
    std::fprintf(stderr, "a kernel on the host: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
    std::abort();
}

#if defined(__x86_64__)
// Leaves the stack that runs, keeping where it is in `from`, for another.
__attribute__((naked, noinline)) inline void change_stack(void**, void*) {
    __asm__(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}
#endif

// What is to be copied to shared memory, from nothing for zeros.
struct Copy {
    void* to;
    const void* from;
};

struct Thread {
    std::unique_ptr<unsigned char[]> stack;
    bool is_done = true;
    std::vector<std::vector<Copy>> groups;  // the last is not committed yet
#if defined(__x86_64__)
    void* top = nullptr;
#else
    ucontext_t context;
#endif
};

// The instruction that the lanes of a warp meet at, and what each brings.
struct Warp {
    int at = 0, arrived = 0;
    unsigned meetings = 0;
    void* lane[32] = {};
};

struct Block;
inline thread_local Block* the_block = nullptr;

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    unsigned char* shared = nullptr;
    size_t shared_bytes = 0;
    unsigned n = 0, current = 0, live = 0, at_barrier = 0, barriers = 0, idle = 0;
    bool copies_late = false, backwards = false;
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
    Thread outside;

    static constexpr size_t kStack = size_t{1} << 17;

    static void start() {
        Block& b = *the_block;
        b.body(b.argument);
        b.threads[b.current].is_done = true;
        --b.live;
        b.idle = 0;
        if (b.at_barrier > 0 && b.at_barrier == b.live) wrong("it ends while others are at a barrier");
        b.pass_on();
        std::abort();
    }

    void go(Thread& from, Thread& to) {
#if defined(__x86_64__)
        change_stack(&from.top, to.top);
#else
        swapcontext(&from.context, &to.context);
#endif
    }

    // Lets the next thread run, or whoever began the block when all are done.
    void pass_on() {
        Thread& mine = threads[current];
        if (live == 0) return go(mine, outside);
        if (++idle > 2 * n + 2) wrong("all wait, and nobody can go on");
        do current = (backwards ? current + n - 1 : current + 1) % n;
        while (threads[current].is_done);
        Thread& next = threads[current];
        if (&next == &mine) return;
        threadIdx.x = current;
        go(mine, next);
    }

    void run(unsigned number) {
        copies_late = number % 2 == 0;
        backwards = number / 2 % 2 == 1;
        std::memset(shared, 0xFF, shared_bytes);
        warps.assign(n / 32, Warp{});
        at_barrier = idle = 0;
        live = n;
        for (unsigned i = 0; i < n; ++i) {
            Thread& thread = threads[i];
            thread.is_done = false;
            thread.groups.clear();
            thread.groups.emplace_back();
            if (thread.stack == nullptr) thread.stack.reset(new unsigned char[kStack]);
#if defined(__x86_64__)
            // As if `start` had been called: a return address that is none, and registers to be restored.
            auto** top = reinterpret_cast<void**>(
                (reinterpret_cast<uintptr_t>(thread.stack.get()) + kStack) / 16 * 16);
            *--top = nullptr;
            *--top = reinterpret_cast<void*>(&Block::start);
            for (int i = 0; i < 6; ++i) *--top = nullptr;
            thread.top = top;
#else
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.get();
            thread.context.uc_stack.ss_size = kStack;
            thread.context.uc_link = nullptr;
            makecontext(&thread.context, &Block::start, 0);
#endif
        }
        current = backwards ? n - 1 : 0;
        threadIdx.x = current;
        go(outside, threads[current]);
    }

    void wait_for_all() {
        if (++at_barrier == live) {
            at_barrier = idle = 0;
            ++barriers;
            return;
        }
        for (const unsigned before = barriers; barriers == before;) pass_on();
    }

    // Comes to instruction `at` with `mine`; the last lane to come does `work` for all.
    template <typename Mine, typename Work>
    void meet(int at, Mine& mine, const Work& work) {
        Warp& warp = warps[current / 32];
        if (warp.arrived > 0 && warp.at != at) wrong("lanes of its warp are at different instructions");
        warp.at = at;
        warp.lane[current % 32] = &mine;
        if (++warp.arrived == 32) {
            work([&](int lane) -> Mine& { return *static_cast<Mine*>(warp.lane[lane]); });
            warp.arrived = 0;
            idle = 0;
            ++warp.meetings;
            return;
        }
        for (const unsigned before = warp.meetings; warp.meetings == before;) pass_on();
    }

    void check(const void* at, size_t bytes) const {
        const auto* p = static_cast<const unsigned char*>(at);
        if (reinterpret_cast<uintptr_t>(at) % 16 != 0) wrong("an address that is no multiple of 16");
        if (p < shared || p + bytes > shared + shared_bytes) wrong("an address outside shared memory");
    }

    static void copy(const Copy& c) {
        if (c.from != nullptr) std::memcpy(c.to, c.from, 16);
        else std::memset(c.to, 0, 16);
    }
};

// Runs `body` as each thread of each block.
template <typename Body>
void launch(unsigned blocks, unsigned threads, size_t shared_bytes, Body body) {
    static thread_local Block block;
    if (threads == 0 || threads % 32 != 0 || threads > 1024) wrong("a block is not a number of warps");
    block.n = threads;
    if (block.threads.size() < threads) block.threads.resize(threads);
    block.shared = static_cast<unsigned char*>(std::aligned_alloc(256, (shared_bytes + 255) / 256 * 256));
    block.shared_bytes = shared_bytes;
    block.body = [](void* of) { (*static_cast<Body*>(of))(); };
    block.argument = &body;
    the_block = &block;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (unsigned i = 0; i < blocks; ++i) {
        blockIdx.x = i;
        block.run(i);
    }
    the_block = nullptr;
    std::free(block.shared);
    gridDim.x = blockDim.x = 1;
    blockIdx.x = threadIdx.x = 0;
}

inline uint32_t two_halves(uint16_t low, uint16_t high) { return static_cast<uint32_t>(high) << 16 | low; }

// `ldmatrix.x4`: of matrix m, lane 8 m + i brings the address of row i.
struct Rows {
    const unsigned char* row;
    uint32_t* x;
};
template <bool kTransposed>
void load_rows(uint32_t (&x)[4], const void* row) {
    the_block->check(row, 16);
    Rows mine{static_cast<const unsigned char*>(row), x};
    the_block->meet(kTransposed ? 2 : 1, mine, [](const auto& lane) {
        for (int m = 0; m < 4; ++m) {
            uint16_t matrix[8][8];
            for (int i = 0; i < 8; ++i) std::memcpy(matrix[i], lane(8 * m + i).row, 16);
            for (int l = 0; l < 32; ++l) {
                const int i = l / 4, j = l % 4 * 2;
                lane(l).x[m] = kTransposed ? two_halves(matrix[j][i], matrix[j + 1][i]) : two_halves(matrix[i][j], matrix[i][j + 1]);
            }
        }
    });
}

// `mma.m16n8k16`, by the figures of the PTX manual: element i of a fragment of lane l, where g = l / 4 and t = l % 4, is
// a: row g, or g + 8 where i is 2, 3, 6 or 7; column 2 t + i % 2, or 8 more where i >= 4;
// b: row 2 t + i % 2, or 8 more where i >= 2; column g;
// c: row g, or g + 8 where i >= 2; column 2 t + i % 2.
struct Fragments {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
};
template <typename Widen>
void multiply(int at, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Widen& widen) {
    Fragments mine{c, a, {b0, b1}};
    the_block->meet(at, mine, [&](const auto& lane) {
        float left[16][16], right[8][16];
        for (int l = 0; l < 32; ++l) {
            const int g = l / 4, t = l % 4;
            const auto half = [&](const uint32_t* x, int i) { return widen(static_cast<uint16_t>(x[i / 2] >> 16 * (i % 2))); };
            for (int i = 0; i < 8; ++i) {
                const bool is_lower = i == 2 || i == 3 || i == 6 || i == 7;
                left[is_lower ? g + 8 : g][2 * t + i % 2 + (i >= 4 ? 8 : 0)] = half(lane(l).a, i);
            }
            for (int i = 0; i < 4; ++i) right[g][2 * t + i % 2 + (i >= 2 ? 8 : 0)] = half(lane(l).b, i);
        }
        for (int l = 0; l < 32; ++l) {
            for (int i = 0; i < 4; ++i) {
                const int row = l / 4 + (i >= 2 ? 8 : 0), column = 2 * (l % 4) + i % 2;
                float sum = 0;
                for (int k = 0; k < 16; ++k) sum += left[row][k] * right[column][k];
                lane(l).c[i] += sum;
            }
        }
    });
}

template <typename A>
struct Exchange {
    A x, z;
    int bits;
};
struct Vote {
    bool own;
    uint32_t all;
};

}  // namespace on_host

inline void __syncthreads() { on_host::the_block->wait_for_all(); }

namespace ithaca::warp {

inline void load_matrices(uint32_t (&x)[4], const void* row) { on_host::load_rows<false>(x, row); }
inline void load_transposed(uint32_t (&x)[4], const void* row) { on_host::load_rows<true>(x, row); }

inline void copy_async(void* to, const void* from, bool is_there) {
    on_host::Block& block = *on_host::the_block;
    block.check(to, 16);
    if (is_there && reinterpret_cast<uintptr_t>(from) % 16 != 0) on_host::wrong("it copies from no multiple of 16");
    const on_host::Copy copy{to, is_there ? from : nullptr};
    if (block.copies_late) block.threads[block.current].groups.back().push_back(copy);
    else block.copy(copy);
}
inline void commit_copies() {
    on_host::Block& block = *on_host::the_block;
    block.threads[block.current].groups.emplace_back();
}
template <int kLeft>
void wait_for_copies() {
    on_host::Block& block = *on_host::the_block;
    auto& groups = block.threads[block.current].groups;
    while (groups.size() > kLeft + 1) {
        for (const on_host::Copy& copy : groups.front()) block.copy(copy);
        groups.erase(groups.begin());
    }
}

inline float power_of_two(float x) {
    const float z = std::exp2(x);
    return z < 0x1p-126f ? 0.0f : z;
}

template <typename T>
struct Element;
template <>
struct Element<__nv_bfloat16> {
    static uint32_t pack(float x, float y) { return on_host::two_halves(__float2bfloat16(x).bits, __float2bfloat16(y).bits); }
    static void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        on_host::multiply(3, sum, a, b0, b1, [](uint16_t bits) { return __bfloat162float(__nv_bfloat16{bits}); });
    }
};
template <>
struct Element<__half> {
    static uint32_t pack(float x, float y) { return on_host::two_halves(__float2half(x).bits, __float2half(y).bits); }
    static void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        on_host::multiply(4, sum, a, b0, b1, [](uint16_t bits) { return __half2float(__half{bits}); });
    }
};

template <typename A>
A other_lane(A x, int bits) {
    on_host::Exchange<A> mine{x, 0, bits};
    on_host::the_block->meet(sizeof(A) == 4 ? 5 : 6, mine, [](const auto& lane) {
        for (int l = 0; l < 32; ++l) lane(l).z = lane(l ^ lane(l).bits).x;
    });
    return mine.z;
}

inline uint32_t ballot(bool own) {
    on_host::Vote mine{own, 0};
    on_host::the_block->meet(7, mine, [](const auto& lane) {
        uint32_t all = 0;
        for (int l = 0; l < 32; ++l) all |= static_cast<uint32_t>(lane(l).own) << l;
        for (int l = 0; l < 32; ++l) lane(l).all = all;
    });
    return mine.all;
}

}  // namespace ithaca::warp
