// Mixtures of experts, and parts of dimensions: from types to kernels.
#pragma once

#include "attention.hpp"
#include "kernels/experts.cuh"

namespace ithaca {

inline void route(const Device& device, Queue queue, const kernel::Route& route, const std::vector<View>& x,
                  const std::vector<View>& z) {
    const int64_t tokens = Local(device, x[0].type).size / route.experts;
    with_float(x[0].type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::route<T>, tokens, device.stream(queue), route, as<T>(x[0].data),
               x.size() > 1 ? as<T>(x[1].data) : static_cast<T*>(nullptr), as<T>(z[0].data), as<int32_t>(z[1].data), tokens);
    });
}

inline void route_backward(const Device& device, Queue queue, const kernel::Route& route, const std::vector<View>& x,
                           const std::vector<View>& z) {
    const int64_t tokens = Local(device, x[0].type).size / route.experts;
    with_float(x[0].type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::route_backward<T>, tokens, device.stream(queue), route, as<T>(x[0].data), as<int32_t>(x[1].data),
               reals(x[2]), as<T>(z[0].data), tokens);
    });
}

// Of which capacity slots are: tokens of a group, and slots of it at an expert.
struct Capacity {
    int64_t group, slots;
};

// What kernels know of slots: `filled` has them, their first dimension being the experts.
inline kernel::Slots slots_of(const Device& device, const Capacity& capacity, View choices, View filled) {
    const Local lc(device, choices.type), lf(device, filled.type);
    const int64_t top = lc.extents.back(), tokens = top > 0 ? lc.size / top : 0;
    return {as<int32_t>(choices.data),   top,           tokens / capacity.group, capacity.group, capacity.slots,
            lf.box.front().start, lf.extents.front(), lf.extents.back()};
}

inline Reals no_gates() { return {nullptr, Storage::F32}; }

inline void dispatch(const Device& device, Queue queue, const Capacity& capacity, const std::vector<View>& x,
                     const std::vector<View>& z) {
    const kernel::Slots slots = slots_of(device, capacity, x[0], z[0]);
    const int64_t n = slots.held * slots.groups * kernel::kLanes;
    with_float(z[0].type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::dispatch<T>, n, device.stream(queue), slots, as<T>(x[1].data),
               x.size() > 2 ? reals(x[2]) : no_gates(), x.size() > 2, as<T>(z[0].data), n);
    });
}

inline void combine(const Device& device, Queue queue, const Capacity& capacity, const std::vector<View>& x,
                    const std::vector<View>& z) {
    const kernel::Slots slots = slots_of(device, capacity, x[0], x[1]);
    const int64_t n = slots.groups * slots.group * kernel::kLanes;
    with_float(z[0].type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::combine<T>, n, device.stream(queue), slots, as<T>(x[1].data),
               x.size() > 2 ? reals(x[2]) : no_gates(), x.size() > 2, as<T>(z[0].data), n);
    });
}

inline void slot_products(const Device& device, Queue queue, const Capacity& capacity, const std::vector<View>& x,
                          const std::vector<View>& z) {
    const kernel::Slots slots = slots_of(device, capacity, x[0], x[1]);
    const int64_t n = slots.groups * slots.group * slots.top;
    with_float(x[1].type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::slot_products<T>, n, device.stream(queue), slots, as<T>(x[1].data), as<T>(x[2].data),
               as<Acc<T>>(z[0].data), n);
    });
}

inline void concat(const Device& device, Queue queue, View x, View y, View z) {
    const Local lx(device, x.type), ly(device, y.type), lz(device, z.type);
    Walk<1> rows;
    for (size_t d = 0; d + 1 < z.type.dims.size(); ++d) {
        rows.extent[rows.n] = lz.extents[d];
        rows.stride[0][rows.n++] = stride_of(y.type, ly, z.type.dims[d]);
    }
    with_bits(z.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::concat<T>, lz.size, device.stream(queue), as<T>(x.data), as<T>(y.data), as<T>(z.data), rows, lz.size,
               lx.extents.back(), ly.extents.back());
    });
}

inline void cut(const Device& device, Queue queue, int64_t start, View x, View z) {
    const Local lx(device, x.type), lz(device, z.type);
    with_bits(z.type.dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::cut<T>, lz.size, device.stream(queue), as<T>(x.data), as<T>(z.data), lz.size, lx.extents.back(),
               lz.extents.back(), start);
    });
}

}  // namespace ithaca
