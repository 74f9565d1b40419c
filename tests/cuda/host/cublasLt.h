// cuBLASLt on the host: the batched product that emitted programs call, as loops, with the library's checks of its arguments.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_INITIALIZED = 1, CUBLAS_STATUS_INVALID_VALUE = 7 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_64F = 70 };
enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
    CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE = 10,
    CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26,
};
enum cublasLtEpilogue_t {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_RELU_BIAS = 6,
    CUBLASLT_EPILOGUE_GELU_BIAS = 36,
};
enum cublasLtMatrixLayoutAttribute_t {
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,
};
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};

struct cublasLtMatmulDescOpaque_t {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    int32_t transposed[2];
    cublasLtEpilogue_t epilogue;
    const void* bias;
    int64_t bias_step;
    cudaDataType_t bias_type;
};
struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType_t type;
    uint64_t rows, columns;
    int64_t leading, step;
    int32_t batch;
};
struct cublasLtMatmulPreferenceOpaque_t {
    uint32_t alignments[4];
};
using cublasLtHandle_t = struct cublasLtContext*;
using cublasLtMatmulDesc_t = cublasLtMatmulDescOpaque_t*;
using cublasLtMatrixLayout_t = cublasLtMatrixLayoutOpaque_t*;
using cublasLtMatmulPreference_t = cublasLtMatmulPreferenceOpaque_t*;
// An algorithm is for matrices that are aligned so.
struct cublasLtMatmulAlgo_t {
    uint32_t alignments[4];
};
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
};

struct cublasLtContext {};

inline const char* cublasLtGetStatusString(cublasStatus_t status) { return status == CUBLAS_STATUS_SUCCESS ? "success" : "invalid value"; }
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = new cublasLtContext;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t desc, cublasComputeType_t compute, cudaDataType_t scale) {
    *desc = {compute, scale, {0, 0}, CUBLASLT_EPILOGUE_DEFAULT, nullptr, 0, scale};
    return (compute == CUBLAS_COMPUTE_64F) == (scale == CUDA_R_64F) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                                     const void* value, size_t n) {
    const auto set = [&](auto& to) {
        if (n != sizeof to) return CUBLAS_STATUS_INVALID_VALUE;
        std::memcpy(&to, value, n);
        return CUBLAS_STATUS_SUCCESS;
    };
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return set(desc->transposed[0]);
        case CUBLASLT_MATMUL_DESC_TRANSB: return set(desc->transposed[1]);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return set(desc->epilogue);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(desc->bias);
        case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: return set(desc->bias_step);
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return set(desc->bias_type);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType_t type, uint64_t rows,
                                               uint64_t columns, int64_t leading) {
    *layout = {type, rows, columns, leading, 0, 1};
    return leading >= static_cast<int64_t>(std::max<uint64_t>(rows, 1)) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                                       const void* value, size_t n) {
    const bool is_count = attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
    if (n != (is_count ? sizeof layout->batch : sizeof layout->step)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(is_count ? static_cast<void*>(&layout->batch) : &layout->step, value, n);
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference) {
    *preference = {{256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                           cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                           size_t n) {
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        return n == sizeof(uint64_t) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    if (n != sizeof(uint32_t)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&preference->alignments[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, n);
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatmulPreference_t preference, int most,
                                                     cublasLtMatmulHeuristicResult_t* found, int* n_found) {
    std::memcpy(found->algo.alignments, preference->alignments, sizeof preference->alignments);
    *n_found = std::min(most, 1);
    return CUBLAS_STATUS_SUCCESS;
}

namespace cublas_on_host {

inline double value(double x) { return x; }
inline float value(float x) { return x; }
inline float value(__half x) { return __half2float(x); }
inline float value(__nv_bfloat16 x) { return __bfloat162float(x); }
inline void store(double& z, double x) { z = x; }
inline void store(float& z, float x) { z = x; }
inline void store(__half& z, float x) { z = __float2half(x); }
inline void store(__nv_bfloat16& z, float x) { z = __float2bfloat16(x); }

// GELU is the approximation by tanh.
template <typename A>
A activated(cublasLtEpilogue_t epilogue, A x) {
    if (epilogue == CUBLASLT_EPILOGUE_RELU_BIAS) return std::max(x, A(0));
    if (epilogue == CUBLASLT_EPILOGUE_GELU_BIAS)
        return A(0.5) * x * (A(1) + std::tanh(A(0.79788456080286535588) * (x + A(0.044715) * x * x * x)));
    return x;
}

// Column-major; c is m x n, and the sum is over k; there is a bias for each row, or none.
template <typename T, typename R, typename A>
void product(bool ta, bool tb, int64_t m, int64_t n, int64_t k, A alpha, const T* a, int64_t lda, const T* b, int64_t ldb,
             A beta, const R* c, R* d, int64_t ld, cublasLtEpilogue_t epilogue, const R* bias) {
    for (int64_t column = 0; column < n; ++column) {
        for (int64_t row = 0; row < m; ++row) {
            A sum = 0;
            for (int64_t l = 0; l < k; ++l)
                sum += value(a[ta ? l + row * lda : row + l * lda]) * value(b[tb ? column + l * ldb : l + column * ldb]);
            const int64_t at = row + column * ld;
            sum = beta == A(0) ? alpha * sum : alpha * sum + beta * value(c[at]);
            if (bias != nullptr) sum += value(bias[row]);
            store(d[at], activated(epilogue, sum));
        }
    }
}

}  // namespace cublas_on_host

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t la, const void* b, cublasLtMatrixLayout_t lb, const void* beta,
                                     const void* c, cublasLtMatrixLayout_t lc, void* d, cublasLtMatrixLayout_t ld,
                                     const cublasLtMatmulAlgo_t* algo, void* workspace, size_t bytes, cudaStream_t stream) {
    if (cuda_on_host_graph != nullptr) {
        const auto again = [=, kept = std::make_tuple(*desc, *la, *lb, *lc, *ld, *algo)]() mutable {
            auto& [desc, la, lb, lc, ld, algo] = kept;
            if (cublasLtMatmul(handle, &desc, alpha, a, &la, b, &lb, beta, c, &lc, d, &ld, &algo, workspace, bytes, stream)) std::abort();
        };
        return cuda_on_host_ask(stream, again) == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    }
    const bool ta = desc->transposed[0] != 0, tb = desc->transposed[1] != 0;
    const uint64_t m = ta ? la->columns : la->rows, k = ta ? la->rows : la->columns, n = tb ? lb->rows : lb->columns;
    const bool is_alike = lc->type == ld->type && lc->leading == ld->leading && lc->step == ld->step && lc->batch == ld->batch;
    const bool fits = stream != nullptr && is_alike && ld->rows == m && ld->columns == n && (tb ? lb->columns : lb->rows) == k &&
                      la->batch == lb->batch && la->batch == ld->batch && la->type == lb->type && (la->type == ld->type || ld->type == desc->scale) &&
                      (desc->scale == CUDA_R_64F) == (la->type == CUDA_R_64F);
    // A bias has the type of the result and is added by an epilogue, which products in double precision do not have.
    const bool has_bias = desc->bias != nullptr;
    const bool ends = has_bias == (desc->epilogue != CUBLASLT_EPILOGUE_DEFAULT) &&
                      (!has_bias || (desc->bias_type == ld->type && desc->scale != CUDA_R_64F));
    if (!fits || !ends) return CUBLAS_STATUS_INVALID_VALUE;
    auto run_into = [&](auto element, auto result, auto scalar) {
        using T = decltype(element);
        using R = decltype(result);
        using A = decltype(scalar);
        for (int64_t i = 0; i < ld->batch; ++i) {
            const T *x = static_cast<const T*>(a) + i * la->step, *y = static_cast<const T*>(b) + i * lb->step;
            const R* const before = static_cast<const R*>(c) + i * ld->step;
            R* const z = static_cast<R*>(d) + i * ld->step;
            const void* const starts[] = {x, y, before, z};
            for (int j = 0; j < 4; ++j)
                if (reinterpret_cast<uintptr_t>(starts[j]) % algo->alignments[j] != 0) return CUBLAS_STATUS_INVALID_VALUE;
            cublas_on_host::product<T, R, A>(ta, tb, static_cast<int64_t>(m), static_cast<int64_t>(n), static_cast<int64_t>(k),
                                          *static_cast<const A*>(alpha), x, la->leading, y, lb->leading,
                                          *static_cast<const A*>(beta), before, z, ld->leading, desc->epilogue,
                                          desc->bias == nullptr ? nullptr : static_cast<const R*>(desc->bias) + i * desc->bias_step);
        }
        return CUBLAS_STATUS_SUCCESS;
    };
    const auto run = [&](auto element, auto scalar) {
        return la->type == ld->type ? run_into(element, element, scalar) : run_into(element, scalar, scalar);
    };
    switch (la->type) {
        case CUDA_R_64F: return run(double{}, double{});
        case CUDA_R_32F: return run(float{}, float{});
        case CUDA_R_16F: return run(__half{}, float{});
        case CUDA_R_16BF: return run(__nv_bfloat16{}, float{});
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}
