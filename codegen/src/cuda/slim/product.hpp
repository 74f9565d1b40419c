// Matrix products by cuBLASLt. The algorithm is chosen once for each shape.
#pragma once

#include <array>
#include <map>

#include "profile.hpp"
#include "safetensors.hpp"

namespace ithaca {

// An address in the memory of the device, in bytes. It converts to a pointer of any type.
struct Address {
    char* at = nullptr;

    Address operator+(int64_t bytes) const { return {at + bytes}; }
    template <typename T>
    operator T*() const {
        return reinterpret_cast<T*>(at);
    }
};

// Column-major; `step` is the distance between the matrices of a batch.
struct Matrix {
    Address at;
    cublasOperation_t op;
    int64_t leading, step;
};

class Products {
  public:
    Products() { ITHACA_CUBLAS(cublasLtCreate(&handle_)); }
    ~Products() {
        for (auto& [shape, plan] : plans_) {
            for (cublasLtMatrixLayout_t layout : plan.layouts) cublasLtMatrixLayoutDestroy(layout);
            cublasLtMatmulDescDestroy(plan.description);
        }
        for (void* memory : workspaces_) cudaFree(memory);
        cublasLtDestroy(handle_);
    }
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    // c[i] = a[i] b[i] for matrices `rows x inner` and `inner x columns`.
    void multiply(Queue queue, cudaStream_t stream, DType dtype, std::array<int64_t, 4> sizes, const Matrix& a, const Matrix& b,
                  const Matrix& c) {
        const Plan& plan = plan_for(dtype, sizes, a, b, c);
        void*& workspace = workspaces_[queue];
        if (workspace == nullptr) ITHACA_CUDA(cudaMalloc(&workspace, kWorkspaceBytes));
        const double wide[] = {1, 0};
        const float narrow[] = {1, 0};
        const bool is_wide = dtype == DType::F64;
        const void *one = is_wide ? static_cast<const void*>(wide) : narrow, *zero = is_wide ? static_cast<const void*>(wide + 1) : narrow + 1;
        const auto& [la, lb, lc] = plan.layouts;
        ITHACA_CUBLAS(cublasLtMatmul(handle_, plan.description, one, a.at, la, b.at, lb, zero, c.at, lc, c.at, lc, &plan.algorithm,
                                     workspace, kWorkspaceBytes, stream));
    }

  private:
    static constexpr size_t kWorkspaceBytes = size_t{32} << 20;

    struct Plan {
        cublasLtMatmulDesc_t description;
        std::array<cublasLtMatrixLayout_t, 3> layouts;
        cublasLtMatmulAlgo_t algorithm;
    };

    // The largest power of two up to 256 that divides the address of every matrix of the batch.
    static uint32_t alignment(const Matrix& m, DType dtype, int64_t batch) {
        const uint64_t bits = reinterpret_cast<uint64_t>(m.at.at) | static_cast<uint64_t>(batch > 1 ? m.step * bytes_of(dtype) : 0) | 256;
        return static_cast<uint32_t>(bits & (~bits + 1));
    }

    const Plan& plan_for(DType dtype, const std::array<int64_t, 4>& sizes, const Matrix& a, const Matrix& b, const Matrix& c) {
        const auto [rows, columns, inner, batch] = sizes;
        std::vector<int64_t> shape(sizes.begin(), sizes.end());
        uint32_t alignments[3];
        for (const Matrix* m : {&a, &b, &c}) {
            uint32_t& aligned = alignments[m == &a ? 0 : m == &b ? 1 : 2] = alignment(*m, dtype, batch);
            shape.insert(shape.end(), {static_cast<int64_t>(dtype), m->op, m->leading, m->step, aligned});
        }
        const auto known = plans_.find(shape);
        if (known != plans_.end()) return known->second;

        static constexpr cudaDataType_t types[] = {CUDA_R_64F, CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF};
        const cudaDataType_t type = types[static_cast<size_t>(dtype)], scale = dtype == DType::F64 ? CUDA_R_64F : CUDA_R_32F;
        Plan plan{};
        ITHACA_CUBLAS(cublasLtMatmulDescCreate(&plan.description, dtype == DType::F64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, scale));
        const int32_t count = static_cast<int32_t>(batch);
        const int64_t extents[3][2] = {{rows, inner}, {inner, columns}, {rows, columns}};
        for (int i = 0; i < 3; ++i) {
            const Matrix& m = i == 0 ? a : i == 1 ? b : c;
            const bool plain = m.op == CUBLAS_OP_N;
            cublasLtMatrixLayout_t& layout = plan.layouts[static_cast<size_t>(i)];
            ITHACA_CUBLAS(cublasLtMatrixLayoutCreate(&layout, type, static_cast<uint64_t>(extents[i][plain ? 0 : 1]),
                                                     static_cast<uint64_t>(extents[i][plain ? 1 : 0]), m.leading));
            ITHACA_CUBLAS(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
            ITHACA_CUBLAS(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &m.step, sizeof m.step));
            if (i == 2) continue;
            const auto transposed = i == 0 ? CUBLASLT_MATMUL_DESC_TRANSA : CUBLASLT_MATMUL_DESC_TRANSB;
            const auto op = static_cast<int32_t>(m.op);
            ITHACA_CUBLAS(cublasLtMatmulDescSetAttribute(plan.description, transposed, &op, sizeof op));
        }
        cublasLtMatmulPreference_t preference = nullptr;
        ITHACA_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
        const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
            ITHACA_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspaceBytes));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[0]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[1]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[2]);
        cublasLtMatmulHeuristicResult_t found{};
        int n_found = 0;
        const auto& [la, lb, lc] = plan.layouts;
        ITHACA_CUBLAS(cublasLtMatmulAlgoGetHeuristic(handle_, plan.description, la, lb, lc, lc, preference, 1, &found, &n_found));
        if (n_found == 0) fail(__FILE__, __LINE__, "cublasLtMatmulAlgoGetHeuristic", "no algorithm for this product");
        cublasLtMatmulPreferenceDestroy(preference);
        plan.algorithm = found.algo;
        return plans_.emplace(shape, plan).first->second;
    }

    cublasLtHandle_t handle_ = nullptr;
    std::map<std::vector<int64_t>, Plan> plans_;
    void* workspaces_[2] = {};
};

}  // namespace ithaca
