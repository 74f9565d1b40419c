// Operations on local tensors: shapes and strides from types and the rank, then a kernel.
#pragma once

#include "kernels/copy.cuh"
#include "kernels/elementwise.cuh"
#include "kernels/norm.cuh"
#include "kernels/rotary.cuh"
#include "launch.hpp"

namespace ithaca {

using kernel::Binary;
using kernel::Unary;

inline void unary(const Device& device, Queue queue, Unary f, View x, View z) {
    const int64_t n = Local(device, x.type).size;
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::unary<T>, n, device.stream(queue), f, as<T>(x.data), as<T>(z.data), n);
    });
}

inline void scale(const Device& device, Queue queue, double factor, View x, View z) {
    const int64_t n = Local(device, x.type).size;
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::scale<T>, n, device.stream(queue), factor, as<T>(x.data), as<T>(z.data), n);
    });
}

inline void cast(const Device& device, Queue queue, View x, View z) {
    const int64_t n = Local(device, x.type).size;
    with_any(x.type.dtype, [&](auto t) {
        with_any(z.type.dtype, [&](auto u) {
            using From = decltype(t);
            using To = decltype(u);
            launch(kernel::cast<From, To>, n, device.stream(queue), as<From>(x.data), as<To>(z.data), n);
        });
    });
}

inline void binary(const Device& device, Queue queue, Binary f, View x, View y, View z) {
    const Local lx(device, x.type), ly(device, y.type);
    Walk<1> walk;
    for (size_t d = 0; d < x.type.dims.size(); ++d) {
        walk.extent[walk.n] = lx.extents[d];
        walk.stride[0][walk.n++] = stride_of(y.type, ly, x.type.dims[d]);
    }
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::binary<T>, lx.size, device.stream(queue), f, as<T>(x.data), as<T>(y.data), as<T>(z.data), walk, lx.size);
    });
}

// Adds every dimension of x but `over` to the walk, with the strides of x and of the others.
template <int K>
Walk<K> rows_of(const Device& device, View x, int over, const View* const (&others)[K - 1]) {
    const Local lx(device, x.type);
    Walk<K> rows;
    for (size_t d = 0; d < x.type.dims.size(); ++d) {
        if (x.type.dims[d] == over) continue;
        rows.extent[rows.n] = lx.extents[d];
        rows.stride[0][rows.n] = lx.strides[d];
        for (int k = 1; k < K; ++k) {
            const Type& other = others[k - 1]->type;
            rows.stride[k][rows.n] = stride_of(other, Local(device, other), x.type.dims[d]);
        }
        ++rows.n;
    }
    return rows;
}

// Every dimension of x but `over`, with the strides of x.
inline Walk<1> lines_of(const Device& device, View x, int over) {
    const Local lx(device, x.type);
    Walk<1> lines;
    for (size_t d = 0; d < x.type.dims.size(); ++d) {
        if (x.type.dims[d] == over) continue;
        lines.extent[lines.n] = lx.extents[d];
        lines.stride[0][lines.n++] = lx.strides[d];
    }
    return lines;
}

inline int64_t extent_along(const Device& device, const Type& type, int dim) {
    return Local(device, type).extents[position(type, dim)];
}
inline int64_t stride_along(const Device& device, const Type& type, int dim) {
    return stride_of(type, Local(device, type), dim);
}

inline void rms_norm(const Device& device, Queue queue, int over, double eps, double offset, View x, View weight,
                     View z) {
    const Walk<2> rows = rows_of<2>(device, x, over, {&weight});
    const int64_t n = rows.size();
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::rms_norm<T>, n, device.stream(queue), as<T>(x.data), as<T>(weight.data), as<T>(z.data), rows, n,
               extent_along(device, x.type, over), stride_along(device, x.type, over),
               stride_along(device, weight.type, over), eps, offset);
    });
}

// `squares` are sums over the `count` elements of x, on all ranks together, that share an index of `squares`.
inline void rms_scale(const Device& device, Queue queue, double count, double eps, View x, View squares, View weight,
                      View z) {
    const Local lx(device, x.type);
    Walk<3> walk;
    walk.n = static_cast<int>(x.type.dims.size());
    for (int d = 0; d < walk.n; ++d) {
        walk.extent[d] = lx.extents[d];
        walk.stride[0][d] = lx.strides[d];
        walk.stride[1][d] = stride_of(squares.type, Local(device, squares.type), x.type.dims[d]);
        walk.stride[2][d] = stride_of(weight.type, Local(device, weight.type), x.type.dims[d]);
    }
    const int64_t n = walk.size();
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::rms_scale<T>, n, device.stream(queue), as<T>(x.data), as<Acc<T>>(squares.data),
               as<T>(weight.data), as<T>(z.data), walk, n, count, eps);
    });
}

inline void layer_norm(const Device& device, Queue queue, int over, double eps, View x, View weight, View bias, View z) {
    const Walk<3> rows = rows_of<3>(device, x, over, {&weight, &bias});
    const int64_t n = rows.size();
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::layer_norm<T>, n, device.stream(queue), as<T>(x.data), as<T>(weight.data), as<T>(bias.data),
               as<T>(z.data), rows, n, extent_along(device, x.type, over), stride_along(device, x.type, over),
               stride_along(device, weight.type, over), stride_along(device, bias.type, over), eps);
    });
}

inline void softmax(const Device& device, Queue queue, int over, View x, View z) {
    const Walk<1> lines = lines_of(device, x, over);
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::softmax<T>, lines.size(), device.stream(queue), as<T>(x.data), as<T>(z.data), lines, lines.size(),
               extent_along(device, x.type, over), stride_along(device, x.type, over));
    });
}

// `frequencies` is a table of width / 2 angles per position.
struct Pairs {
    int64_t spread, apart;
};
inline void rotary_pairs(const Device& device, Queue queue, int over, int64_t width, Pairs pairs, double amplitude,
                         const double* frequencies, View x, View positions, View z) {
    const Local local(device, x.type);
    Walk<3> rows;
    for (size_t d = 0; d < x.type.dims.size(); ++d) {
        if (x.type.dims[d] == over) continue;
        for (const Leg<3>& leg : legs<3>(device, x.type.dims[d], local.extents[d], {&x, &positions, &z})) {
            rows.extent[rows.n] = leg.steps;
            for (int k = 0; k < 3; ++k) rows.stride[k][rows.n] = leg.strides[k];
            ++rows.n;
        }
    }
    const int64_t n = rows.size(), extent = extent_along(device, x.type, over);
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::rotary<T>, n * (extent - width / 2), device.stream(queue), as<T>(x.data), as<int32_t>(positions.data),
               frequencies, as<T>(z.data), rows, n, extent, stride_along(device, x.type, over), width, pairs.spread, pairs.apart,
               amplitude);
    });
}

// Element i of the first half of the width pairs with element i of the second half.
inline void rotary(const Device& device, Queue queue, int over, int64_t width, double amplitude,
                   const double* frequencies, View x, View positions, View z) {
    rotary_pairs(device, queue, over, width, {1, width / 2}, amplitude, frequencies, x, positions, z);
}

// Elements 2i and 2i + 1 are a pair.
inline void rotary_neighbours(const Device& device, Queue queue, int over, int64_t width, double amplitude,
                              const double* frequencies, View x, View positions, View z) {
    rotary_pairs(device, queue, over, width, {2, 1}, amplitude, frequencies, x, positions, z);
}

// The table's first dimension is looked up.
inline void embed(const Device& device, Queue queue, View table, View ids, View z) {
    const Local lt(device, table.type), lz(device, z.type);
    const int64_t rows = lt.extents.front(), width = lt.strides.front();
    with_float(table.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::embed<T>, lz.size, device.stream(queue), as<T>(table.data), as<int32_t>(ids.data), as<T>(z.data),
               lz.size, width, lt.box.front().start, rows);
    });
}

inline void positions(const Device& device, Queue queue, const kernel::Sequence& sequence, View z) {
    const Local lz(device, z.type);
    const Space& space = device.space();
    launch(kernel::positions<int32_t>, lz.size, device.stream(queue), as<int32_t>(z.data), lz.size, sequence,
           space.dims[space.sequence(z.type.dims[0])].valid);
}

// Repeats each element of dimension `from`; the result has dimension `to` in its place.
inline void repeat(const Device& device, Queue queue, int from, int to, View x, View z) {
    const Local lx(device, x.type), lz(device, z.type);
    const int d = position(x.type, from), e = position(z.type, to);
    const std::vector<Dim>& dims = device.space().dims;
    with_bits(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::repeat<T>, lz.size, device.stream(queue), as<T>(x.data), as<T>(z.data), lz.size, lx.extents[d],
               lz.extents[e], lz.strides[e], dims[to].size / dims[from].size, lx.box[d].start, lz.box[e].start);
    });
}

// The adjoint: sums the copies that this rank holds of each element of dimension `to`.
inline void sum_copies(const Device& device, Queue queue, int from, int to, View x, View z) {
    const Local lx(device, x.type), lz(device, z.type);
    const int d = position(x.type, from), e = position(z.type, to);
    const std::vector<Dim>& dims = device.space().dims;
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::sum_copies<T>, lz.size, device.stream(queue), as<T>(x.data), as<T>(z.data), lz.size, lx.extents[d],
               lz.extents[e], lz.strides[e], dims[from].size / dims[to].size, lx.box[d].start, lz.box[e].start);
    });
}

// Copies the part at `index` of each run of a dimension out of the tensor that has it, or into it.
enum class PartCopy { Out, Into };

inline void copy_part(const Device& device, Queue queue, PartCopy direction, int dim, View whole, View part) {
    const Part& cut = device.space().dims[dim].part;
    const Local lw(device, whole.type), lp(device, part.type);
    if (lp.size == 0) return;
    const int at = position(part.type, dim);
    const int64_t run = device.space().dims[cut.of].size / cut.runs, each = run / cut.count;
    const int64_t inner = lw.strides[at];
    const int out = direction == PartCopy::Out ? 0 : 1;
    Walk<2> walk;
    const auto step = [&](int64_t steps, int64_t of_part, int64_t of_whole) {
        if (steps == 1) return;
        walk.extent[walk.n] = steps;
        walk.stride[out][walk.n] = of_part;
        walk.stride[1 - out][walk.n++] = of_whole;
    };
    if (!part.is_cut()) {
        step(lw.size / (run * inner), each * inner, run * inner);
        step(each * inner, 1, 1);
    } else {
        // Blocks of the part are whole runs of the other tensor, or runs whole blocks.
        const Local own = local_of(device, part);
        for (size_t d = 0; d < own.extents.size(); ++d) {
            const int64_t extent = own.extents[d], here = own.strides[d], there = lw.strides[d];
            const bool is_part = static_cast<int>(d) == at, is_cut = static_cast<int>(d) == part.strided->cut;
            const int64_t few = is_part ? each : extent, many = is_part ? run : extent;
            const int64_t len = is_cut ? part.strided->run : few, block = is_cut ? part.strided->block : few * here;
            if (few % len == 0) {
                step(extent / few, few / len * block, many * there);
                step(few / len, block, len * there);
                step(len, here, there);
            } else {
                step(extent / len, block, len / few * many * there);
                step(len / few, few * here, many * there);
                step(few, here, there);
            }
        }
    }
    with_bits(part.type.dtype, [&](auto t) {
        using T = decltype(t);
        T* const there = as<T>(whole.data) + cut.index * each * inner;
        T* const here = as<T>(part.data);
        launch(kernel::copy_box<T>, lp.size, device.stream(queue), direction == PartCopy::Out ? there : here,
               direction == PartCopy::Out ? here : there, walk, lp.size);
    });
}

// One part of a dimension, of what this rank holds.
inline void take(const Device& device, Queue queue, int to, View x, View z) {
    copy_part(device, queue, PartCopy::Out, to, x, z);
}

// The parts of a dimension become the dimension again.
inline void join(const Device& device, Queue queue, int to, const std::vector<View>& parts, const std::vector<View>& z) {
    const int at = position(z[0].type, to);
    for (const View& part : parts) copy_part(device, queue, PartCopy::Into, part.type.dims[at], z[0], part);
}

inline void copy(const Device& device, Queue queue, int64_t bytes, const char* from, char* to) {
    if (bytes > 0 && from != to)
        ITHACA_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, device.stream(queue)));
}

}  // namespace ithaca
