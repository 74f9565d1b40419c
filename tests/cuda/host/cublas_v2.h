// cuBLAS on the host: the batched product that emitted programs call, as loops, with cuBLAS's checks of its arguments.
#pragma once

#include <algorithm>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
};
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_64F = 70 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };

struct cublasContext {
    cudaStream_t stream;
};
using cublasHandle_t = cublasContext*;

inline cublasStatus_t cublasCreate(cublasHandle_t* h) {
    *h = new cublasContext{nullptr};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t h) {
    delete h;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s) {
    h->stream = s;
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

// Column-major, as in the original: a is m x k, b is k x n, c is m x n, before transposition.
template <typename T, typename A>
void product(bool ta, bool tb, int m, int n, int k, A alpha, const T* a, int64_t lda, int64_t sa, const T* b,
             int64_t ldb, int64_t sb, A beta, T* c, int64_t ldc, int64_t sc, int batches) {
    for (int64_t i = 0; i < batches; ++i, a += sa, b += sb, c += sc) {
        for (int64_t column = 0; column < n; ++column) {
            for (int64_t row = 0; row < m; ++row) {
                A sum = 0;
                for (int64_t l = 0; l < k; ++l)
                    sum += value(a[ta ? l + row * lda : row + l * lda]) *
                           value(b[tb ? column + l * ldb : l + column * ldb]);
                T& z = c[row + column * ldc];
                store(z, beta == A(0) ? alpha * sum : alpha * sum + beta * value(z));
            }
        }
    }
}

}  // namespace cublas_on_host

inline cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                                                 int n, int k, const void* alpha, const void* a, cudaDataType_t at,
                                                 int lda, long long sa, const void* b, cudaDataType_t bt, int ldb,
                                                 long long sb, const void* beta, void* c, cudaDataType_t ct, int ldc,
                                                 long long sc, int batches, cublasComputeType_t compute,
                                                 cublasGemmAlgo_t) {
    const bool fits = h->stream != nullptr && m >= 0 && n >= 0 && k >= 0 && batches >= 0 &&
                      lda >= std::max(1, ta == CUBLAS_OP_N ? m : k) && ldb >= std::max(1, tb == CUBLAS_OP_N ? k : n) &&
                      ldc >= std::max(1, m) && at == bt && at == ct;
    if (!fits || (compute == CUBLAS_COMPUTE_64F) != (at == CUDA_R_64F)) return CUBLAS_STATUS_INVALID_VALUE;
    auto run = [&](auto element, auto scalar) {
        using T = decltype(element);
        using A = decltype(scalar);
        cublas_on_host::product<T, A>(ta == CUBLAS_OP_T, tb == CUBLAS_OP_T, m, n, k, *static_cast<const A*>(alpha),
                                      static_cast<const T*>(a), lda, sa, static_cast<const T*>(b), ldb, sb,
                                      *static_cast<const A*>(beta), static_cast<T*>(c), ldc, sc, batches);
    };
    switch (at) {
        case CUDA_R_64F: run(double{}, double{}); break;
        case CUDA_R_32F: run(float{}, float{}); break;
        case CUDA_R_16F: run(__half{}, float{}); break;
        case CUDA_R_16BF: run(__nv_bfloat16{}, float{}); break;
    }
    return CUBLAS_STATUS_SUCCESS;
}
