// What training adds: sums, gradients, the loss and the optimizer: shapes from types and the rank, then a kernel.
#pragma once

#include "attention.hpp"
#include "kernels/gradient.cuh"
#include "kernels/loss.cuh"
#include "kernels/norm_backward.cuh"
#include "kernels/optimizer.cuh"
#include "kernels/sum.cuh"

namespace ithaca {

using kernel::AdamW;

inline void fill(const Device& device, Queue queue, double value, View z) {
    const int64_t n = Local(device, z.type).size;
    with_float(z.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::fill<T>, n, device.stream(queue), value, as<T>(z.data), n);
    });
}

// Two walks: over the dimensions of `z`, and over those of `x` that it lacks. Both say where each of K tensors has an
// element, by its stride along a dimension of x.
template <int K, typename Stride>
std::pair<Walk<K>, Walk<K>> kept_and_summed(const Device& device, const Type& x, const Type& z, const Stride& stride) {
    std::pair<Walk<K>, Walk<K>> out;
    auto add = [&](Walk<K>& walk, const Type& type, int dim) {
        walk.extent[walk.n] = Local(device, type).extents[position(type, dim)];
        for (int k = 0; k < K; ++k) walk.stride[k][walk.n] = stride(k, dim);
        ++walk.n;
    };
    for (int dim : z.dims) add(out.first, z, dim);
    for (int dim : x.dims)
        if (position(z, dim) < 0) add(out.second, x, dim);
    return out;
}

// Over the dimensions that z lacks.
inline void sum(const Device& device, Queue queue, View x, View z) {
    const Local lx(device, x.type);
    const auto [kept, summed] =
        kept_and_summed<1>(device, x.type, z.type, [&](int, int dim) { return stride_of(x.type, lx, dim); });
    const Walk<1> result = kept, lost = summed;
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::sum<T>, result.size(), device.stream(queue), as<T>(x.data), as<T>(z.data), result, lost, result.size(),
               lost.size());
    });
}

// Along the dimensions that x lacks.
inline void expand(const Device& device, Queue queue, View x, View z) {
    const Local lx(device, x.type), lz(device, z.type);
    Walk<2> walk;
    for (size_t d = 0; d < z.type.dims.size(); ++d) {
        walk.extent[walk.n] = lz.extents[d];
        walk.stride[0][walk.n] = lz.strides[d];
        walk.stride[1][walk.n++] = stride_of(x.type, lx, z.type.dims[d]);
    }
    with_bits(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::copy_box<T>, lz.size, device.stream(queue), as<T>(x.data), as<T>(z.data), walk, lz.size);
    });
}

inline void unary_backward(const Device& device, Queue queue, Unary f, View x, View d, View z) {
    const int64_t n = Local(device, x.type).size;
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::unary_backward<T>, n, device.stream(queue), f, as<T>(x.data), as<T>(d.data), as<T>(z.data), n);
    });
}

// `padding` is a row that learns nothing, or negative.
inline void embed_backward(const Device& device, Queue queue, int64_t padding, View ids, View d, View z) {
    const Local li(device, ids.type), ld(device, d.type), lz(device, z.type);
    Walk<1> tokens, columns;
    for (size_t i = 0; i < ids.type.dims.size(); ++i) {
        tokens.extent[tokens.n] = li.extents[i];
        tokens.stride[0][tokens.n++] = stride_of(d.type, ld, ids.type.dims[i]);
    }
    for (size_t i = 1; i < z.type.dims.size(); ++i) {
        columns.extent[columns.n] = lz.extents[i];
        columns.stride[0][columns.n++] = stride_of(d.type, ld, z.type.dims[i]);
    }
    constexpr int64_t kTile = 32;
    const int64_t width = columns.size(), n = li.size * ((width + kTile - 1) / kTile);
    fill(device, queue, 0, z);
    with_float(d.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::embed_backward<T, kTile>, n, device.stream(queue), as<int32_t>(ids.data), as<T>(d.data), as<T>(z.data),
               tokens, columns, li.size, width, lz.box.front().start, lz.extents.front(), padding, n);
    });
}

inline void sink_backward(const Device& device, Queue queue, View o, View d_o, View before, View after, View z, View d_before,
                          View d_logits) {
    const int64_t rows = Local(device, before.type).size, n = Local(device, o.type).size;
    with_part(o, before, [&](auto t, auto l) {
        using T = decltype(t);
        using L = decltype(l);
        launch(kernel::sink_backward<T, L>, rows, device.stream(queue), as<T>(o.data), as<T>(d_o.data), as<L>(before.data),
               as<L>(after.data), as<T>(z.data), as<L>(d_before.data), rows > 0 ? n / rows : 0, rows);
    });
    // What lse gains the logits lose.
    sum(device, queue, d_before, d_logits);
    scale(device, queue, -1, d_logits, d_logits);
}

// Gradients of a norm over one dimension: dx, d_weight and maybe d_bias. Until dx is written its memory has what rows need
// more than once, if it has the room.
inline void norm_backward(const Device& device, Queue queue, kernel::Centre centre, int over, double eps, double offset, View x,
                          View weight, View d, View dx, View d_weight, const View* d_bias) {
    const Local lx(device, x.type);
    const Walk<2> rows = rows_of<2>(device, x, over, {&weight});
    Walk<1> starts;
    starts.n = rows.n;
    std::vector<int64_t> extents;
    for (int i = 0; i < rows.n; ++i) {
        starts.extent[i] = rows.extent[i];
        starts.stride[0][i] = rows.stride[0][i];
        extents.push_back(rows.extent[i]);
    }
    const std::vector<int64_t> numbers = row_major(extents);
    const auto [kept, summed] = kept_and_summed<3>(device, x.type, d_weight.type, [&](int k, int dim) -> int64_t {
        const int at = position(x.type, dim), before = position(x.type, over);
        if (k == 0) return lx.strides[at];
        if (dim == over) return 0;
        return k == 1 ? numbers[at - (at > before ? 1 : 0)] : lx.strides[at];
    });
    const Walk<3> result = kept, lost = summed;
    const int64_t n = rows.size(), width = extent_along(device, x.type, over), stride = stride_along(device, x.type, over);
    const int64_t w_stride = stride_along(device, weight.type, over);
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        using M = kernel::Moments<Acc<T>>;
        const bool room = lx.size * static_cast<int64_t>(sizeof(T)) >= n * static_cast<int64_t>(sizeof(M));
        M* const moments = room ? as<M>(dx.data) : nullptr;
        if (room)
            launch(kernel::norm_moments<T>, n, device.stream(queue), as<T>(x.data), moments, starts, n, width, stride, eps, centre);
        launch(kernel::norm_backward_weight<T>, result.size(), device.stream(queue), as<T>(x.data), as<T>(d.data), moments,
               as<T>(d_weight.data), d_bias != nullptr ? as<T>(d_bias->data) : nullptr, result, lost, result.size(), lost.size(),
               width, stride, eps, centre);
        launch(kernel::norm_backward<T>, n, device.stream(queue), as<T>(x.data), as<T>(weight.data), as<T>(d.data), as<T>(dx.data),
               rows, n, width, stride, w_stride, eps, offset, centre);
    });
}

inline void rms_norm_backward(const Device& device, Queue queue, int over, double eps, double offset, View x, View weight, View d,
                              View dx, View d_weight) {
    norm_backward(device, queue, kernel::Centre::None, over, eps, offset, x, weight, d, dx, d_weight, nullptr);
}

inline void layer_norm_backward(const Device& device, Queue queue, int over, double eps, View x, View weight, View d, View dx,
                                View d_weight, View d_bias) {
    norm_backward(device, queue, kernel::Centre::Mean, over, eps, 0, x, weight, d, dx, d_weight, &d_bias);
}

inline void rms_scale_backward(const Device& device, Queue queue, double count, double eps, View x, View squares, View weight, View d,
                               View dx, View d_squares, View d_weight) {
    const Local lx(device, x.type), ls(device, squares.type), lw(device, weight.type);
    auto one = [&](kernel::ScaleResult which, View z) {
        const auto [kept, summed] = kept_and_summed<3>(device, x.type, z.type, [&](int k, int dim) {
            return k == 0 ? stride_of(x.type, lx, dim) : k == 1 ? stride_of(squares.type, ls, dim) : stride_of(weight.type, lw, dim);
        });
        const Walk<3> result = kept, lost = summed;
        with_float(x.type.dtype, [&](auto t) {
            using T = decltype(t);
            auto run = [&](auto u) {
                using Z = decltype(u);
                launch(kernel::rms_scale_backward<T, Z>, result.size(), device.stream(queue), which, as<T>(x.data),
                       as<Acc<T>>(squares.data), as<T>(weight.data), as<T>(d.data), as<Z>(z.data), result, lost, result.size(),
                       lost.size(), count, eps);
            };
            if (which == kernel::ScaleResult::Squares) return run(Acc<T>{});
            run(t);
        });
    };
    one(kernel::ScaleResult::X, dx);
    one(kernel::ScaleResult::Squares, d_squares);
    one(kernel::ScaleResult::Weight, d_weight);
}

inline void softmax_backward(const Device& device, Queue queue, int over, View y, View d, View z) {
    const Walk<1> lines = lines_of(device, y, over);
    with_float(y.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::softmax_backward<T>, lines.size(), device.stream(queue), as<T>(y.data), as<T>(d.data), as<T>(z.data), lines,
               lines.size(), extent_along(device, y.type, over), stride_along(device, y.type, over));
    });
}

// A dimension of the labels that has padding, with its positions.
struct Padded {
    int dim;
    kernel::Sequence positions;
};

inline kernel::Labels labels_of(const Device& device, View labels, int64_t ignore, const std::vector<Padded>& padded) {
    const Local local(device, labels.type);
    const Space& space = device.space();
    kernel::Labels out{as<int32_t>(labels.data), ignore, {}};
    for (const Padded& p : padded) {
        const int at = position(labels.type, p.dim);
        kernel::Padding& padding = out.padding;
        padding.positions[padding.n] = p.positions;
        padding.valid[padding.n] = space.dims[space.sequence(p.dim)].valid;
        padding.step[padding.n] = local.strides[at];
        padding.extent[padding.n++] = local.extents[at];
    }
    return out;
}

// Elements of a dimension that a rank holds, those of padding left out.
inline int64_t held_of(const Device& device, const Type& type, int dim) {
    const Range held = Local(device, type).box[position(type, dim)];
    return std::max<int64_t>(0, std::min(held.end, device.space().dims[dim].valid) - held.start);
}

inline kernel::Vocabulary vocabulary_of(const Device& device, const Type& logits, int over) {
    const Range held = Local(device, logits).box[position(logits, over)];
    return {held.start, held.size(), held_of(device, logits, over), stride_along(device, logits, over)};
}

inline void cross_entropy(const Device& device, Queue queue, int over, int64_t ignore, const std::vector<Padded>& padded, View x,
                          View labels, View nll, View lse) {
    const Walk<1> rows = lines_of(device, x, over);
    const kernel::Labels l = labels_of(device, labels, ignore, padded);
    const kernel::Vocabulary v = vocabulary_of(device, x.type, over);
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::cross_entropy<T>, rows.size(), device.stream(queue), as<T>(x.data), l, as<Acc<T>>(nll.data),
               as<Acc<T>>(lse.data), rows, v, rows.size());
    });
}

inline void cross_entropy_backward(const Device& device, Queue queue, int over, int64_t ignore, const std::vector<Padded>& padded,
                                   View x, View labels, View lse, View d, View z) {
    const Walk<1> rows = lines_of(device, x, over);
    const kernel::Labels l = labels_of(device, labels, ignore, padded);
    const kernel::Vocabulary v = vocabulary_of(device, x.type, over);
    const int64_t n = Local(device, x.type).size;
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::cross_entropy_backward<T>, n, device.stream(queue), as<T>(x.data), l, as<Acc<T>>(lse.data),
               as<Acc<T>>(d.data), as<T>(z.data), rows, v, n);
    });
}

inline void pick(const Device& device, Queue queue, int over, int64_t ignore, const std::vector<Padded>& padded, View x, View labels,
                 View z) {
    const Walk<1> rows = lines_of(device, x, over);
    const kernel::Labels l = labels_of(device, labels, ignore, padded);
    const kernel::Vocabulary v = vocabulary_of(device, x.type, over);
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::pick<T>, rows.size(), device.stream(queue), as<T>(x.data), l, as<Acc<T>>(z.data), rows, v, rows.size());
    });
}

inline void valid(const Device& device, Queue queue, int64_t ignore, const std::vector<Padded>& padded, View labels, View z) {
    const int64_t n = Local(device, labels.type).size;
    const kernel::Labels l = labels_of(device, labels, ignore, padded);
    launch(kernel::valid<float>, n, device.stream(queue), l, as<float>(z.data), n);
}

inline void row_lse(const Device& device, Queue queue, int over, View x, View z) {
    const Walk<1> lines = lines_of(device, x, over);
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::row_lse<T>, lines.size(), device.stream(queue), as<T>(x.data), as<Acc<T>>(z.data), lines,
               held_of(device, x.type, over), stride_along(device, x.type, over), lines.size());
    });
}

inline void adamw(const Device& device, Queue queue, const AdamW& constants, View w, View g, View m, View v, View step, View clip,
                  View zw, View zm, View zv) {
    const int64_t n = Local(device, w.type).size;
    with_float(w.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::adamw<T>, n, device.stream(queue), constants, as<T>(w.data), reals(g), as<T>(m.data), as<T>(v.data), reals(step),
               reals(clip), as<T>(zw.data), as<T>(zm.data), as<T>(zv.data), n);
    });
}

inline void clip_factor(const Device& device, Queue queue, double max_norm, View squares, View z) {
    const int64_t n = Local(device, squares.type).size;
    with_float(squares.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::clip_factor<T>, n, device.stream(queue), max_norm, as<T>(squares.data), as<T>(z.data), n);
    });
}

}  // namespace ithaca
