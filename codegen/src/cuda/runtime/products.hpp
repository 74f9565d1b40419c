// Matrix products by cuBLASLt, whose algorithms are chosen once for each shape.
#pragma once

#include <array>
#include <map>

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

// The element types of a product: one, or that of its operands and that of its result.
struct Types {
    Types(DType all) : operands(all), result(all) {}
    Types(DType operands, DType result) : operands(operands), result(result) {}
    DType operands, result;
};

// The end of a product: a bias for each row, with the distance between those of a batch, and a function.
struct Epilogue {
    cublasLtEpilogue_t kind = CUBLASLT_EPILOGUE_DEFAULT;
    Address bias;
    int64_t step = 0;
};

class Products : NotCopied {
  public:
    Products() { ITHACA_CUBLAS(cublasLtCreate(&handle_)); }
    ~Products() {
        for (void* memory : workspaces_) cudaFree(memory);
        cublasLtDestroy(handle_);
    }
    // d[i] = f(beta * c[i] + a[i] b[i] + bias[i]) for matrices `rows x inner` and `inner x columns`; c, d and the bias have the type
    // of the result.
    void multiply(Queue queue, cudaStream_t stream, Types of, int64_t rows, int64_t columns, int64_t inner, int64_t batch,
                  const std::array<Matrix, 4>& abcd, int beta, const Epilogue& end) {
        static constexpr cudaDataType_t types[] = {CUDA_R_64F, CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF};
        const bool is_wide = of.operands == DType::F64;
        cublasLtMatmulDescOpaque_t desc;
        ITHACA_CUBLAS(cublasLtMatmulDescInit(&desc, is_wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, is_wide ? CUDA_R_64F : CUDA_R_32F));
        cublasLtMatrixLayoutOpaque_t layouts[4];
        std::vector<int64_t> shape = {static_cast<int64_t>(of.operands), static_cast<int64_t>(of.result), rows, columns, inner, batch};
        uint32_t alignments[4];
        const int64_t extents[4][2] = {{rows, inner}, {inner, columns}, {rows, columns}, {rows, columns}};
        for (size_t i = 0; i < 4; ++i) {
            const Matrix& m = abcd[i];
            const DType type = i < 2 ? of.operands : of.result;
            const int32_t op = m.op, count = static_cast<int32_t>(batch);
            const auto stored = [&](bool first) { return static_cast<uint64_t>(extents[i][first == (op == CUBLAS_OP_N) ? 0 : 1]); };
            ITHACA_CUBLAS(cublasLtMatrixLayoutInit(&layouts[i], types[int(type)], stored(true), stored(false), m.leading));
            ITHACA_CUBLAS(cublasLtMatrixLayoutSetAttribute(&layouts[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
            ITHACA_CUBLAS(cublasLtMatrixLayoutSetAttribute(&layouts[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &m.step, sizeof m.step));
            const auto transposed = i == 0 ? CUBLASLT_MATMUL_DESC_TRANSA : CUBLASLT_MATMUL_DESC_TRANSB;
            if (i < 2) ITHACA_CUBLAS(cublasLtMatmulDescSetAttribute(&desc, transposed, &op, sizeof op));
            // The largest power of two up to 256 that divides the address of every matrix of the batch.
            const auto step = static_cast<uint64_t>(batch > 1 ? m.step * bytes_of(type) : 0);
            const uint64_t bits = reinterpret_cast<uint64_t>(m.at.at) | step | 256;
            alignments[i] = static_cast<uint32_t>(bits & (~bits + 1));
            shape.insert(shape.end(), {op, m.leading, m.step, alignments[i]});
        }
        if (end.bias.at != nullptr) {
            const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
                ITHACA_CUBLAS(cublasLtMatmulDescSetAttribute(&desc, attribute, &value, sizeof value));
            };
            set(CUBLASLT_MATMUL_DESC_EPILOGUE, end.kind);
            set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, types[int(of.result)]);
            set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, end.bias.at);
            if (batch > 1) set(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, end.step);
        }
        shape.insert(shape.end(), {end.bias.at != nullptr, end.kind, end.step});
        auto known = algorithms_.find(shape);
        if (known == algorithms_.end()) known = algorithms_.emplace(shape, choose(desc, layouts, alignments)).first;
        void*& workspace = workspaces_[queue];
        if (workspace == nullptr) ITHACA_CUDA(cudaMalloc(&workspace, kWorkspaceBytes));
        static constexpr double wide[] = {0, 1};
        static constexpr float narrow[] = {0, 1};
        const auto factor = [&](int i) -> const void* { return is_wide ? static_cast<const void*>(wide + i) : narrow + i; };
        const auto& [a, b, c, d] = abcd;
        ITHACA_CUBLAS(cublasLtMatmul(handle_, &desc, factor(1), a.at, &layouts[0], b.at, &layouts[1], factor(beta), c.at, &layouts[2], d.at,
                                     &layouts[3], &known->second, workspace, kWorkspaceBytes, stream));
    }

  private:
    static constexpr uint64_t kWorkspaceBytes = uint64_t{32} << 20;

    cublasLtMatmulAlgo_t choose(cublasLtMatmulDescOpaque_t& desc, cublasLtMatrixLayoutOpaque_t* layouts, const uint32_t* alignments) {
        cublasLtMatmulPreferenceOpaque_t preference;
        ITHACA_CUBLAS(cublasLtMatmulPreferenceInit(&preference));
        const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
            ITHACA_CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[0]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[1]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[3]);
        cublasLtMatmulHeuristicResult_t found{};
        int n_found = 0;
        ITHACA_CUBLAS(cublasLtMatmulAlgoGetHeuristic(handle_, &desc, &layouts[0], &layouts[1], &layouts[2], &layouts[3], &preference,
                                                     1, &found, &n_found));
        if (n_found == 0) fail(__FILE__, __LINE__, "cublasLtMatmulAlgoGetHeuristic", "no algorithm for this product");
        return found.algo;
    }

    cublasLtHandle_t handle_ = nullptr;
    std::map<std::vector<int64_t>, cublasLtMatmulAlgo_t> algorithms_;
    void* workspaces_[2] = {};
};

}  // namespace ithaca
