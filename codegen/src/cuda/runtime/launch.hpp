// Tensors of a rank as kernels see them, and the launch of a kernel.
#pragma once

#include "config.hpp"
#include "device.hpp"
#include "kernels/numeric.cuh"

namespace ithaca {

// How a tensor lies in a wire: its first element, the distances between neighbours, and the dimension that is cut into
// blocks, of `run` indices each and so far apart; none where `cut` is -1.
struct Strided {
    int64_t start = 0;
    std::vector<int64_t> strides = {};
    int cut = -1;
    int64_t run = 0, block = 0;
};

// A buffer with the type of what lies in it, and how it lies where that is in a wire.
struct View {
    const Type& type;
    char* data;
    const Strided* strided = nullptr;

    bool is_cut() const { return strided != nullptr && strided->cut >= 0; }
};

// The part of a tensor that a rank holds.
struct Local {
    Region box;
    std::vector<int64_t> extents, strides;
    int64_t size = 1;

    Local(const Device& device, const Type& type) : box(device.space().local_box(type, device.rank())) {
        for (const Range& r : box) extents.push_back(r.size());
        strides = row_major(extents);
        for (int64_t extent : extents) size *= extent;
    }
};

// The same, with the strides that the tensor has where it lies: along a dimension that is cut those inside a block.
inline Local local_of(const Device& device, View x) {
    Local local(device, x.type);
    if (x.is_cut()) local.strides = x.strided->strides;
    return local;
}

inline int position(const Type& type, int dim) {
    for (size_t d = 0; d < type.dims.size(); ++d)
        if (type.dims[d] == dim) return static_cast<int>(d);
    return -1;
}

// Distance between neighbours along `dim`; zero when the tensor lacks it.
inline int64_t stride_of(const Type& type, const Local& local, int dim) {
    const int d = position(type, dim);
    return d < 0 ? 0 : local.strides[d];
}

// A part of a walk along a dimension: how many steps, and how far apart they are in each of K tensors.
template <int K>
struct Leg {
    int64_t steps;
    int64_t strides[K];
};

// The walk along a dimension of `extent` indices, outer legs first: two where one tensor is cut there.
template <int K>
std::vector<Leg<K>> legs(const Device& device, int dim, int64_t extent, const View* const (&views)[K]) {
    Leg<K> inner{extent, {}}, outer{1, {}};
    int cut = -1;
    for (int k = 0; k < K; ++k) {
        inner.strides[k] = stride_of(views[k]->type, local_of(device, *views[k]), dim);
        if (views[k]->is_cut() && views[k]->type.dims[static_cast<size_t>(views[k]->strided->cut)] == dim) cut = k;
    }
    if (cut < 0) return {inner};
    const Strided& s = *views[cut]->strided;
    for (int k = 0; k < K; ++k) outer.strides[k] = k == cut ? s.block : inner.strides[k] * s.run;
    outer.steps = extent / s.run;
    inner.steps = s.run;
    return {outer, inner};
}

// Kernels take any grid; one large enough to fill the device, and no larger than needed.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t threads, cudaStream_t stream, Arguments... arguments) {
    if (threads <= 0) return;
    constexpr int64_t kBlock = 256, kMostBlocks = int64_t{1} << 20;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(std::min((threads + kBlock - 1) / kBlock, kMostBlocks)));
    config.blockDim = dim3(static_cast<unsigned>(kBlock));
    config.stream = stream;
    ITHACA_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

// A kernel whose threads work together: it takes any number of blocks, but these threads and this shared memory.
template <typename... Parameters, typename... Arguments>
void launch_blocks(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, cudaStream_t stream,
                   Arguments... arguments) {
    if (blocks <= 0) return;
    constexpr int64_t kMostBlocks = int64_t{1} << 20;
    ITHACA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(std::min(blocks, kMostBlocks)));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    ITHACA_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

// Calls `body` with a value of the element type; config.hpp says which types the program has, the rest is not compiled.
template <typename Body>
void with_float(DType dtype, const Body& body) {
    switch (dtype) {
#if ITHACA_HAS_F64
        case DType::F64: return body(double{});
#endif
#if ITHACA_HAS_F32
        case DType::F32: return body(float{});
#endif
#if ITHACA_HAS_F16
        case DType::F16: return body(__half{});
#endif
#if ITHACA_HAS_BF16
        case DType::BF16: return body(__nv_bfloat16{});
#endif
        default: fail(__FILE__, __LINE__, "with_float", "an element type that config.hpp does not announce");
    }
}

// As `with_float`, 32-bit integers included.
template <typename Body>
void with_any(DType dtype, const Body& body) {
    if (dtype == DType::I32) return body(int32_t{});
    with_float(dtype, body);
}

// Calls `body` with an integer as wide as an element: for what moves elements and does not compute.
template <typename Body>
void with_bits(DType dtype, const Body& body) {
    switch (bytes_of(dtype)) {
        case 8: return body(uint64_t{});
        case 4: return body(uint32_t{});
        case 2: return body(uint16_t{});
        default: return body(uint8_t{});
    }
}

template <typename T>
T* as(char* data) {
    return reinterpret_cast<T*>(data);
}

}  // namespace ithaca
