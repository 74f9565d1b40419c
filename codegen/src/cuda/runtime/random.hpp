// Numbers drawn at random, and dropout: shapes from types and the rank, then a kernel.
#pragma once

#include "attention.hpp"
#include "kernels/random.cuh"

namespace ithaca {

inline void key(const Device& device, Queue queue, uint64_t seed, View z) {
    launch(kernel::first_key, 1, device.stream(queue), seed, as<int32_t>(z.data), 1);
}

inline void fold_in(const Device& device, Queue queue, View x, View number, View z) {
    const int32_t* const from = as<int32_t>(x.data);
    if (number.type.dtype == DType::I32)
        return launch(kernel::fold_in, 1, device.stream(queue), from, as<int32_t>(number.data), as<int32_t>(z.data), 1);
    launch(kernel::fold_in_real, 1, device.stream(queue), from, reals(number), as<int32_t>(z.data), 1);
}

inline void layer_key(const Device& device, Queue queue, int64_t layer, View x, View z) {
    launch(kernel::layer_key, 1, device.stream(queue), as<int32_t>(x.data), layer, as<int32_t>(z.data), 1);
}

// `positions` are those that the rank holds along each dimension.
inline void dropout_mask(const Device& device, Queue queue, uint64_t seed, double rate,
                         const std::vector<kernel::Sequence>& positions, View x, View z) {
    const Local local(device, z.type);
    kernel::Places places;
    for (const kernel::Sequence& sequence : positions) {
        places.extent[places.n] = local.extents[places.n];
        places.stride[places.n] = local.strides[places.n];
        places.positions[places.n++] = sequence;
    }
    launch(kernel::dropout_mask, local.size, device.stream(queue), as<int32_t>(x.data), seed, rate, places, as<uint8_t>(z.data),
           local.size);
}

inline void dropout(const Device& device, Queue queue, double rate, View x, View mask, View z) {
    const int64_t n = Local(device, x.type).size;
    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::dropout<T>, n, device.stream(queue), as<T>(x.data), as<uint8_t>(mask.data), as<T>(z.data), 1.0 / (1.0 - rate),
               n);
    });
}

}  // namespace ithaca
