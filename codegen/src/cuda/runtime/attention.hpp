// Attention, forward and backward, and what joins its parts: shapes from types and the rank, then a kernel.
#pragma once

#include "kernels/attention.cuh"
#include "kernels/attention_backward.cuh"
#include "kernels/flash.cuh"
#include "kernels/flash_backward.cuh"
#include "kernels/partial.cuh"
#include "ops.hpp"

namespace ithaca {

using Views = std::vector<View>;
using kernel::Dropout;

// A mask that keeps keys from `left` positions before the query to `right` behind it; negative is unbounded.
inline kernel::Mask band(int64_t left, int64_t right) { return {left, right, nullptr}; }
// A mask that is a table of strips.
inline kernel::Mask strips(const double* table) { return {-1, -1, table}; }

// Buckets of a bias: the distances at which they start.
struct Buckets {
    const double* bounds = nullptr;  // none: no bias
    int64_t per_side = 0;
    bool both_sides = false;
};

// What the program says of an attention: its roles, the positions held, and how scores are made.
struct Attention {
    int heads, kv_heads, keys;  // dimensions
    kernel::Sequence query_positions, key_positions;
    kernel::Mask mask;
    double scale;
    double softcap;  // zero: none
    Buckets buckets = {};
    Dropout dropout = {};
};

inline Reals reals(View x) {
    switch (x.type.dtype) {
        case DType::F64: return {x.data, Storage::F64};
        case DType::F16: return {x.data, Storage::F16};
        case DType::BF16: return {x.data, Storage::BF16};
        case DType::F32: case DType::I32: case DType::Bool: return {x.data, Storage::F32};
    }
    return {x.data, Storage::F32};
}

inline kernel::Written written(View z) { return {z.data, reals(z).storage}; }

// Whether every row begins at a multiple of 16 bytes, of elements of two, where the first one does.
inline bool is_aligned(const kernel::Rows& rows) {
    const int64_t all = rows.front | rows.token | rows.head | rows.token_block | rows.head_block;
    return all % 8 == 0;
}

// Whether the kernels on tensor cores, which are for these widths, compute an attention of operands `x`, the first
// `n_rows` of which have rows, to the first results `z`. The runtime that is told a schedule decides the same.
inline bool takes(const kernel::AttentionShape& s, int width, int value_width, const Views& x, size_t n_rows, const Views& z,
                  size_t n_results) {
    const auto starts_well = [](const View& view) { return reinterpret_cast<uintptr_t>(view.data) % 16 == 0; };
    for (size_t i = 0; i < n_rows; ++i)
        if (x[i].type.dtype != x[0].type.dtype || !starts_well(x[i])) return false;
    for (size_t i = 0; i < n_results; ++i)
        if (!starts_well(z[i])) return false;
    for (const kernel::Rows* rows : {&s.q, &s.k, &s.v, &s.o, &s.d_o, &s.dq, &s.dk, &s.dv})
        if (!is_aligned(*rows)) return false;
    return s.width == width && s.value_width == value_width && s.bias.bounds == nullptr;
}

// Blocks that are for so many rows.
inline int64_t blocks_of(int64_t rows, int64_t in_block) { return (rows + in_block - 1) / in_block; }

// Calls `body` with a value of the element type if tensor cores multiply it and there are kernels for the widths.
template <int kWidth, int kValueWidth, typename Body>
bool with_half(DType dtype, const Body& body) {
    if constexpr (kernel::flash_widths(kWidth, kValueWidth).width != 0) {
#if ITHACA_HAS_F16
        if (dtype == DType::F16) return body(__half{}), true;
#endif
#if ITHACA_HAS_BF16
        if (dtype == DType::BF16) return body(__nv_bfloat16{}), true;
#endif
    }
    static_cast<void>(dtype);
    static_cast<void>(body);
    return false;
}

// The operands behind the first `n`: a bias where there are buckets, then a key where one is left.
struct Behind {
    const View* bias = nullptr;
    const View* key = nullptr;
};
inline Behind behind(const Attention& a, const Views& x, size_t n) {
    Behind out;
    if (a.buckets.bounds != nullptr && n < x.size()) out.bias = &x[n++];
    if (n < x.size()) out.key = &x[n];
    return out;
}

// Where the rows of a tensor [... tokens heads width] begin.
inline kernel::Rows rows_of(const Device& device, View x) {
    const std::vector<int64_t> strides = local_of(device, x).strides;
    const size_t token = strides.size() - 3;
    kernel::Rows rows{token > 0 ? strides[token - 1] : 0, strides[token], strides[token + 1], 0, 0, 0, 0};
    if (!x.is_cut()) return rows;
    const Strided& s = *x.strided;
    const size_t cut = static_cast<size_t>(s.cut);
    if (cut == token) rows.token_run = s.run, rows.token_block = s.block;
    else if (cut == token + 1) rows.head_run = s.run, rows.head_block = s.block;
    else fail(__FILE__, __LINE__, "rows_of", "an attention whose sequences are cut into blocks");
    return rows;
}

// q [... queries heads width], k [... keys kv_heads width], v [... keys kv_heads e], and what stands behind.
inline kernel::AttentionShape shape_of(const Device& device, const Attention& a, View q, View k, View v, Behind more) {
    const Local lq(device, q.type), lk(device, k.type), lv(device, v.type);
    const Space& space = device.space();
    const size_t n = q.type.dims.size();
    kernel::AttentionShape s{};
    s.front = 1;
    std::vector<int64_t> whole;
    for (size_t d = 0; d + 3 < n; ++d) whole.push_back(space.dims[q.type.dims[d]].size);
    const std::vector<int64_t> steps = row_major(whole);
    for (size_t d = 0; d + 3 < n; ++d) {
        s.front *= lq.extents[d];
        s.sequences.extent[d] = lq.extents[d];
        s.sequences.stride[0][d] = steps[d];
        s.first_sequence += lq.box[d].start * steps[d];
    }
    s.sequences.n = static_cast<int>(n) - 3;
    s.queries = lq.extents[n - 3];
    s.heads = lq.extents[n - 2];
    s.width = lq.extents[n - 1];
    s.keys = lk.extents[n - 3];
    s.kv_heads = lk.extents[n - 2];
    s.value_width = lv.extents[n - 1];
    s.first_head = lq.box[n - 2].start;
    s.dropped_head = space.origin(a.heads, s.first_head);
    s.first_kv_head = lk.box[n - 2].start;
    s.group = space.dims[a.heads].size / space.dims[a.kv_heads].size;
    s.query_positions = a.query_positions;
    s.key_positions = a.key_positions;
    s.valid_keys = space.dims[space.sequence(a.keys)].valid;
    s.mask = a.mask;
    s.scale = a.scale;
    s.softcap = a.softcap;
    if (more.bias != nullptr) s.bias = {a.buckets.bounds, a.buckets.per_side, a.buckets.both_sides, reals(*more.bias)};
    s.dropout = a.dropout;
    if (more.key != nullptr) s.dropout.key = as<int32_t>(more.key->data);
    s.q = rows_of(device, q);
    s.k = rows_of(device, k);
    s.v = rows_of(device, v);
    return s;
}

// Calls `body` with a value of the operands' element type and one of the results', which is the same or f32.
template <typename Body>
void with_result(DType from, DType to, const Body& body) {
    with_float(from, [&](auto t) {
        if (to == from) return body(t, t);
        body(t, float{});
    });
}

// From q, k, v and maybe a bias and a key to o and maybe lse. The widths are those of keys and of values.
template <int kWidth, int kValueWidth>
void attention(const Device& device, Queue queue, const Attention& a, const Views& x, const Views& z) {
    kernel::AttentionShape s = shape_of(device, a, x[0], x[1], x[2], behind(a, x, 3));
    s.o = rows_of(device, z[0]);
    float* const lse = z.size() > 1 ? as<float>(z[1].data) : nullptr;
    const auto on_tensor_cores = [&](auto t) {
        using T = decltype(t);
        constexpr kernel::FlashWidths kFor = kernel::flash_widths(kWidth, kValueWidth);
        using Tile = kernel::FlashTile<kFor.width, kFor.value_width>;
        const int64_t n = s.front * s.heads * blocks_of(s.queries, Tile::kRows);
        launch_blocks(kernel::flash<T, kFor.width, kFor.value_width>, n, Tile::kThreads,
                      sizeof(kernel::FlashShared<T, kFor.width, kFor.value_width>), device.stream(queue), as<T>(x[0].data),
                      as<T>(x[1].data), as<T>(x[2].data), written(z[0]), lse, s, n);
    };
    if (takes(s, kWidth, kValueWidth, x, 3, z, 1) && with_half<kWidth, kValueWidth>(x[0].type.dtype, on_tensor_cores)) return;
    auto tiled = [&](auto t, auto u, auto tiled_kernel, int64_t tile) {
        using T = decltype(t);
        using O = decltype(u);
        const int64_t n = s.front * s.queries * s.heads * ((s.value_width + tile - 1) / tile);
        launch(tiled_kernel, n, device.stream(queue), as<T>(x[0].data), as<T>(x[1].data), as<T>(x[2].data),
               as<O>(z[0].data), lse, s, n);
    };
    with_result(x[0].type.dtype, z[0].type.dtype, [&](auto t, auto u) {
        using T = decltype(t);
        using O = decltype(u);
        if (s.value_width <= 64) return tiled(t, u, kernel::attention<T, O, 64>, 64);
        tiled(t, u, kernel::attention<T, O, 128>, 128);
    });
}

// The gradient of the bias, if it is asked for. A call of its own: inlined, some compilers take it for a read beyond the end
// where there is none.
[[gnu::noinline]] inline const View* bias_of(const Views& gradients) {
    return gradients.size() > 3 ? &gradients[3] : nullptr;
}

// From q, k, v, d_o, lse, delta and maybe a bias and a key to dq, dk, dv and maybe the gradient of the bias.
template <int kWidth, int kValueWidth>
void attention_backward(const Device& device, Queue queue, const Attention& a, const Views& x, const Views& z) {
    kernel::AttentionShape s = shape_of(device, a, x[0], x[1], x[2], behind(a, x, 6));
    s.d_o = rows_of(device, x[3]);
    s.dq = rows_of(device, z[0]);
    s.dk = rows_of(device, z[1]);
    s.dv = rows_of(device, z[2]);
    const kernel::Gradient g{reals(x[3]), reals(x[4]), reals(x[5])};
    const auto on_tensor_cores = [&](auto t) {
        using T = decltype(t);
        constexpr kernel::FlashWidths kFor = kernel::flash_widths(kWidth, kValueWidth);
        using Tile = kernel::FlashBackwardTile<kFor.width, kFor.value_width>;
        constexpr size_t kShared = sizeof(kernel::FlashBackwardShared<T, kFor.width, kFor.value_width>);
        const T *q = as<T>(x[0].data), *k = as<T>(x[1].data), *v = as<T>(x[2].data);
        int64_t n = s.front * s.heads * blocks_of(s.queries, Tile::kRows);
        launch_blocks(kernel::flash_backward_queries<T, kFor.width, kFor.value_width>, n, Tile::kThreads, kShared,
                      device.stream(queue), q, k, v, g, written(z[0]), s, n);
        n = s.front * s.kv_heads * blocks_of(s.keys, Tile::kRows) * Tile::kParts;
        launch_blocks(kernel::flash_backward_keys<T, kFor.width, kFor.value_width>, n, Tile::kThreads, kShared,
                      device.stream(queue), q, k, v, g, written(z[1]), written(z[2]), s, n);
    };
    if (takes(s, kWidth, kValueWidth, x, 4, z, 3) && with_half<kWidth, kValueWidth>(x[0].type.dtype, on_tensor_cores)) return;
    constexpr int64_t kTile = 64;
    with_result(x[0].type.dtype, z[0].type.dtype, [&](auto t, auto u) {
        using T = decltype(t);
        using O = decltype(u);
        const T *q = as<T>(x[0].data), *k = as<T>(x[1].data), *v = as<T>(x[2].data);
        const int64_t rows = s.front * s.queries * s.heads * ((s.width + kTile - 1) / kTile);
        launch(kernel::attention_backward_queries<T, O, kTile>, rows, device.stream(queue), q, k, v, g, as<O>(z[0].data), s, rows);
        const int64_t widest = std::max(s.width, s.value_width);
        const int64_t columns = s.front * s.keys * s.kv_heads * ((widest + kTile - 1) / kTile);
        launch(kernel::attention_backward_keys<T, O, kTile>, columns, device.stream(queue), q, k, v, g, as<O>(z[1].data),
               as<O>(z[2].data), s, columns);
        const View* const bias = bias_of(z);
        if (bias == nullptr) return;
        const int64_t n = Local(device, bias->type).size;
        launch(kernel::attention_backward_bias<T>, n, device.stream(queue), q, k, v, g, as<float>(bias->data), s, n);
    });
}

// Explicit rows: the scores of the keys held.
inline void scores(const Device& device, Queue queue, const Attention& a, View q, View k, View z) {
    const kernel::AttentionShape s = shape_of(device, a, q, k, k, {});
    const int64_t n = s.front * s.queries * s.heads;
    with_float(q.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::scores<T>, n, device.stream(queue), as<T>(q.data), as<T>(k.data), as<float>(z.data), s,
               Local(device, z.type).extents.back(), n);
    });
}

// The values of the keys held, weighed by explicit rows. The rows stand for q in the shape, their columns for its width.
inline void weigh(const Device& device, Queue queue, const Attention& a, View rows, View lse, View v, View z) {
    const kernel::AttentionShape s = shape_of(device, a, rows, v, v, {});
    const int64_t n = Local(device, z.type).size;
    with_float(v.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::weigh<T>, n, device.stream(queue), reals(rows), reals(lse), as<T>(v.data), as<float>(z.data), s, s.width, n);
    });
}

// Calls `body` with values of the element types of o and lse.
template <typename Body>
void with_part(View o, View lse, const Body& body) {
    with_float(o.type.dtype, [&](auto t) { with_float(lse.type.dtype, [&](auto l) { body(t, l); }); });
}

// A rank that holds nothing of the second part keeps the first.
inline void merge(const Device& device, Queue queue, View o, View lse, View more_o, View more_lse, View z, View z_lse) {
    const int64_t n = Local(device, o.type).size, rows = Local(device, lse.type).size;
    if (Local(device, more_o.type).size == 0) {
        copy(device, queue, n * bytes_of(o.type.dtype), o.data, z.data);
        copy(device, queue, rows * bytes_of(lse.type.dtype), lse.data, z_lse.data);
        return;
    }
    with_part(o, lse, [&](auto t, auto l) {
        using T = decltype(t);
        using L = decltype(l);
        launch(kernel::merge<T, L>, n, device.stream(queue), as<T>(o.data), as<L>(lse.data), as<T>(more_o.data),
               as<L>(more_lse.data), as<T>(z.data), as<L>(z_lse.data), n / rows, n);
    });
}

inline void merge_parts(const Device& device, Queue queue, View o, View lse, View z, View z_lse) {
    const int64_t n = Local(device, z.type).size, rows = Local(device, z_lse.type).size;
    if (n == 0) return;
    with_part(o, lse, [&](auto t, auto l) {
        using T = decltype(t);
        using L = decltype(l);
        launch(kernel::merge_parts<T, L>, n, device.stream(queue), as<T>(o.data), as<L>(lse.data), as<T>(z.data),
               as<L>(z_lse.data), Local(device, o.type).extents.front(), n / rows, n);
    });
}

inline void sink(const Device& device, Queue queue, View o, View lse, View logits, View z, View z_lse) {
    const Local rows(device, lse.type), heads(device, logits.type);
    const int64_t n = Local(device, o.type).size;
    if (n == 0) return;
    Walk<1> walk;
    for (size_t d = 0; d < lse.type.dims.size(); ++d) {
        walk.extent[walk.n] = rows.extents[d];
        walk.stride[0][walk.n++] = stride_of(logits.type, heads, lse.type.dims[d]);
    }
    with_part(o, lse, [&](auto t, auto l) {
        using T = decltype(t);
        using L = decltype(l);
        launch(kernel::sink<T, L>, n, device.stream(queue), as<T>(o.data), as<L>(lse.data), reals(logits), as<T>(z.data),
               as<L>(z_lse.data), walk, n / rows.size, n);
    });
}

// A rank that holds nothing of y keeps x.
inline void accumulate(const Device& device, Queue queue, View x, View y, View z) {
    const auto held = [&](const Type& type) { return elements(device.space().local_box(type, device.rank())); };
    if (held(y.type) > 0) return binary(device, queue, Binary::Add, x, y, z);
    copy(device, queue, held(x.type) * bytes_of(x.type.dtype), x.data, z.data);
}

}  // namespace ithaca
