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
#include <functional>
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
    void* lane[128] = {};
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
    Warp four;                                                 // of four warps
    std::vector<std::vector<std::function<void()>>> products;  // theirs, in groups; the last is not committed yet
    CudaOnHostCall* body = nullptr;
    Thread outside;

    static constexpr size_t kStack = size_t{1} << 17;

    static void start() {
        Block& b = *the_block;
        (*b.body)();
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
        four = Warp{};
        products.assign(1, {});
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
        meet(warps[current / 32], 32, at, mine, work);
    }
    template <typename Mine, typename Work>
    void meet(Warp& warp, int lanes, int at, Mine& mine, const Work& work) {
        if (warp.arrived > 0 && warp.at != at) wrong("lanes of its warp are at different instructions");
        warp.at = at;
        warp.lane[current % lanes] = &mine;
        if (++warp.arrived == lanes) {
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
inline void launch(unsigned blocks, unsigned threads, size_t shared_bytes, CudaOnHostCall& body) {
    static thread_local Block block;
    if (threads == 0 || threads % 32 != 0 || threads > 1024) wrong("a block is not a number of warps");
    block.n = threads;
    if (block.threads.size() < threads) block.threads.resize(threads);
    block.shared = static_cast<unsigned char*>(std::aligned_alloc(256, (shared_bytes + 255) / 256 * 256));
    block.shared_bytes = shared_bytes;
    block.body = &body;
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

// `wgmma.m64nNk16`, by the figures of the PTX manual. A tile in shared memory is known by the address where it begins, in 16
// bytes, and by how far the next 64 columns are of one that is read transposed. Rows have 128 bytes; in them the 16 bytes
// that bits 4 to 6 of an address number are exchanged by bits 7 to 9.
struct Tile {
    uint32_t is;

    uint16_t at(uint32_t bytes) const {
        const uint32_t address = ((is & 0x3FFF) << 4) + bytes;
        uint16_t bits;
        if (address + 2 > the_block->shared_bytes) wrong("a tile outside shared memory");
        std::memcpy(&bits, the_block->shared + (address ^ (address >> 7 & 7) << 4), 2);
        return bits;
    }
    uint16_t row(uint32_t row, uint32_t column) const { return at(row * 128 + column * 2); }
    uint16_t transposed(uint32_t column, uint32_t row) const {
        return at(column / 64 * (is >> 16 << 4) + row * 128 + column % 64 * 2);
    }
};

// What a lane brings to a product of four warps: its sums, rows of the left operand in registers or the tile of all, and the
// right operand.
struct OfFour {
    float* sum;
    uint32_t left[4];
    Tile a, b;
    bool adds;
};

template <typename Work>
void meet_four(int at, OfFour mine, const Work& work) {
    Block& block = *the_block;
    if (block.n != 128) wrong("products of four warps in a block that has others");
    block.meet(block.four, 128, at, mine, work);
}

// Done at once, or when it is waited for. Of a 64 x 8 kN result, lane l of the four warps has row l / 32 * 16 + l % 32 / 4, or 8
// more where i % 4 >= 2, and column 8 (i / 4) + 2 (l % 4) + i % 2.
template <int kN, typename Widen>
void multiply_four(int at, const OfFour& mine, bool in_registers, const Widen& widen) {
    meet_four(at, mine, [=](const auto& lane) {
        std::vector<OfFour> lanes;
        for (int l = 0; l < 128; ++l) lanes.push_back(lane(l));
        const auto product = [=] {
            for (int l = 0; l < 128; ++l) {
                for (int i = 0; i < 4 * kN; ++i) {
                    const int lower = i % 4 / 2, row = l / 32 * 16 + l % 32 / 4 + 8 * lower, column = i / 4 * 8 + l % 4 * 2 + i % 2;
                    float sum = 0;
                    for (int k = 0; k < 16; ++k) {
                        const uint32_t pair = lanes[l / 4 * 4 + k % 8 / 2].left[lower + k / 8 * 2];
                        const uint16_t left = in_registers ? static_cast<uint16_t>(pair >> 16 * (k % 2)) : lanes[l].a.row(row, k);
                        sum += widen(left) * widen(in_registers ? lanes[l].b.transposed(column, k) : lanes[l].b.row(column, k));
                    }
                    lanes[l].sum[i] = (lanes[l].adds ? lanes[l].sum[i] : 0) + sum;
                }
            }
        };
        if (the_block->copies_late) the_block->products.back().push_back(product);
        else product();
    });
}

// The products of four warps that an element type has.
template <typename Widen>
struct OfFourWarps {
    template <int kN>
    static void multiply_rows(float (&sum)[kN][4], uint32_t a, uint32_t b, bool adds) {
        multiply_four<kN>(10, {&sum[0][0], {}, {a}, {b}, adds}, false, Widen());
    }
    template <int kN>
    static void add_weighed(float (&sum)[kN][4], const uint32_t (&left)[4], uint32_t b) {
        multiply_four<kN>(11, {&sum[0][0], {left[0], left[1], left[2], left[3]}, {}, {b}, true}, true, Widen());
    }
};
struct WidenBf16 {
    float operator()(uint16_t bits) const { return __bfloat162float(__nv_bfloat16{bits}); }
};
struct WidenHalf {
    float operator()(uint16_t bits) const { return __half2float(__half{bits}); }
};

template <typename A>
struct Exchange {
    A x, z;
    int of;
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
inline void copy_async(void* to, const void* from) { copy_async(to, from, true); }
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

inline float reciprocal(float x) { return 1 / x; }

#ifdef ITHACA_WARPGROUPS

inline uint32_t in_shared(const void* at, int chunk) {
    const ptrdiff_t place = static_cast<const unsigned char*>(at) - on_host::the_block->shared;
    if (place % 1024 != 0) on_host::wrong("a tile that is at no multiple of 1024");
    return static_cast<uint32_t>(place >> 4) | static_cast<uint32_t>(chunk >> 4) << 16;
}
template <int kN>
void hold(float (&)[kN][4]) {}
template <int kN>
void begin_products(float (&)[kN][4]) {}
inline void commit_products() {
    on_host::meet_four(8, on_host::OfFour{}, [](const auto&) { on_host::the_block->products.emplace_back(); });
}
template <int kLeft>
void wait_for_products() {
    on_host::meet_four(9, on_host::OfFour{}, [](const auto&) {
        auto& groups = on_host::the_block->products;
        while (groups.size() > kLeft + 1) {
            for (const auto& product : groups.front()) product();
            groups.erase(groups.begin());
        }
    });
}
template <int kN, int kAll>
float (&columns(float (&sum)[kAll][4], int first))[kN][4] {
    return reinterpret_cast<float (&)[kN][4]>(sum[first]);
}

#endif

template <typename T>
struct Element;
template <>
struct Element<__nv_bfloat16> : on_host::OfFourWarps<on_host::WidenBf16> {
    static uint32_t pack(float x, float y) { return on_host::two_halves(__float2bfloat16(x).bits, __float2bfloat16(y).bits); }
    static void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        on_host::multiply(3, sum, a, b0, b1, on_host::WidenBf16());
    }
};
template <>
struct Element<__half> : on_host::OfFourWarps<on_host::WidenHalf> {
    static uint32_t pack(float x, float y) { return on_host::two_halves(__float2half(x).bits, __float2half(y).bits); }
    static void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        on_host::multiply(4, sum, a, b0, b1, on_host::WidenHalf());
    }
};

template <typename A>
A from_lane(A x, int of) {
    on_host::Exchange<A> mine{x, 0, of};
    on_host::the_block->meet(sizeof(A) == 4 ? 5 : 6, mine, [](const auto& lane) {
        for (int l = 0; l < 32; ++l) lane(l).z = lane(lane(l).of).x;
    });
    return mine.z;
}
template <typename A>
A other_lane(A x, int bits) {
    return from_lane(x, static_cast<int>(threadIdx.x % 32) ^ bits);
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
inline bool uniform(bool condition) {
    const uint32_t all = ballot(condition);
    if (all != 0 && ~all != 0) on_host::wrong("lanes do not agree on a condition");
    return condition;
}

}  // namespace ithaca::warp
