//! Matrix products by cuBLASLt. The heuristic is queried once for each shape.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasLtMatmulDescAttributes_t as Attribute};
use cudarc::driver;
use ithaca_ir::DType;

use crate::cuda::device::{Activation, Form, Matrix, Product};
use crate::cuda::error::CudaError;

/// Bytes of the workspace of a stream, as NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The alignment in bytes that the library assumes by default.
const ALIGNMENT: u64 = 256;

/// A product with the alignments of its addresses in place of the addresses.
type Shape = ([i64; 11], [bool; 2], [u32; 4], [DType; 2], (bool, Activation));

/// The descriptors and the algorithm for products of a shape.
#[derive(Clone, Copy)]
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// The library's handle, plans and workspaces.
pub(super) struct Products {
    handle: Cell<Option<sys::cublasLtHandle_t>>,
    plans: RefCell<BTreeMap<Shape, Plan>>,
    workspaces: RefCell<BTreeMap<usize, driver::sys::CUdeviceptr>>,
}

impl Products {
    /// Opens the library, which [`cublas_lt`](crate::cuda::available::cublas_lt) has found.
    pub(super) fn new() -> Result<Self, CudaError> {
        let handle = result::create_handle().map_err(failed("cublasLtCreate"))?;
        Ok(Self {
            handle: Cell::new(Some(handle)),
            plans: RefCell::default(),
            workspaces: RefCell::default(),
        })
    }

    /// Issues a product.
    ///
    /// # Safety
    /// The matrices and the stream belong to the current device.
    pub(super) unsafe fn multiply(
        &self,
        stream: driver::sys::CUstream,
        product: &Product,
    ) -> Result<(), CudaError> {
        let Some(handle) = self.handle.get() else {
            return Err(CudaError::Unsupported("a product on a device that was closed".to_owned()));
        };
        let plan = self.plan(handle, product)?;
        let workspace = self.workspace(stream)?;
        let (one, zero) = ([1.0_f32], [0.0_f32]);
        let (wide_one, wide_zero) = ([1.0_f64], [0.0_f64]);
        let [one, zero]: [*const c_void; 2] = match product.dtype {
            DType::F64 => [wide_one.as_ptr().cast(), wide_zero.as_ptr().cast()],
            DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::I32 | DType::Bool => {
                [one.as_ptr().cast(), zero.as_ptr().cast()]
            }
        };
        let beta = if product.before.number() == 0 { zero } else { one };
        let [a, b, c] = [product.a, product.b, product.c].map(|m| device(m.at.number()));
        let before = device(added(product).at.number());
        let [la, lb, lc] = plan.layouts;
        if product.bias.number() != 0 {
            // Products of a shape share a description, and one thread issues them.
            let bias = product.bias.number();
            describe(plan.description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        // SAFETY: descriptions and layouts live as long as this, factors for the call; the caller guarantees the rest.
        unsafe {
            result::matmul(
                handle,
                plan.description,
                one,
                beta,
                a,
                la,
                b,
                lb,
                before,
                lc,
                c.cast_mut(),
                lc,
                &plan.algorithm,
                device(workspace).cast_mut(),
                WORKSPACE_BYTES,
                stream.cast(),
            )
        }
        .map_err(failed("cublasLtMatmul"))
    }

    /// Frees all resources; later products fail.
    pub(super) fn close(&self) {
        // SAFETY: neither running nor later work uses the handles. A failure cannot be reported from here.
        unsafe {
            for plan in std::mem::take(&mut *self.plans.borrow_mut()).into_values() {
                plan.layouts.iter().for_each(|&layout| ignore(result::destroy_matrix_layout(layout)));
                ignore(result::destroy_matmul_desc(plan.description));
            }
            for memory in std::mem::take(&mut *self.workspaces.borrow_mut()).into_values() {
                ignore(driver::result::free_sync(memory));
            }
            if let Some(handle) = self.handle.take() {
                ignore(result::destroy_handle(handle));
            }
        }
    }

    fn workspace(&self, stream: driver::sys::CUstream) -> Result<u64, CudaError> {
        let key = stream.addr();
        if let Some(&known) = self.workspaces.borrow().get(&key) {
            return Ok(known);
        }
        // SAFETY: the workspace is written before it is read.
        let memory = unsafe { driver::result::malloc_sync(WORKSPACE_BYTES) }
            .map_err(|e| CudaError::Failed { call: "cuMemAlloc", detail: e.to_string() })?;
        self.workspaces.borrow_mut().insert(key, memory);
        Ok(memory)
    }

    fn plan(&self, handle: sys::cublasLtHandle_t, product: &Product) -> Result<Plan, CudaError> {
        let Product {
            dtype,
            result,
            rows,
            columns,
            inner,
            batch,
            a,
            b,
            before: _,
            bias,
            bias_step,
            activation,
            c,
        } = *product;
        let has_bias = bias.number() != 0;
        let numbers =
            [rows, columns, inner, batch, a.leading, a.step, b.leading, b.step, c.leading, c.step, bias_step];
        let matrices = [(a, dtype), (b, dtype), (added(product), result), (c, result)];
        let alignments = matrices.map(|(m, dtype)| alignment(m, dtype, batch));
        let transposed = [a, b].map(|m| m.form == Form::Transposed);
        let shape: Shape = (numbers, transposed, alignments, [dtype, result], (has_bias, activation));
        if let Some(&known) = self.plans.borrow().get(&shape) {
            return Ok(known);
        }
        let (data, compute, scale) = types(dtype)?;
        let description =
            result::create_matmul_desc(compute, scale).map_err(failed("cublasLtMatmulDescCreate"))?;
        let attributes = [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, a.form),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, b.form),
        ];
        for (attribute, form) in attributes {
            let transposed: i32 = match form {
                Form::Plain => 0,
                Form::Transposed => 1,
            };
            describe(description, attribute, &transposed)?;
        }
        let (sum, _, _) = types(result)?;
        if has_bias {
            describe(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue(activation))?;
            describe(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &sum)?;
            describe(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.number())?;
            if batch > 1 {
                describe(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, &bias_step)?;
            }
        }
        let layouts = [
            layout(data, (rows, inner, a), batch)?,
            layout(data, (inner, columns, b), batch)?,
            layout(sum, (rows, columns, c), batch)?,
        ];
        let preference = result::create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?;
        let prefer = |attribute, value: *const c_void, bytes| {
            // SAFETY: the preference is alive; the caller guarantees the attribute.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, value, bytes) }
                .map_err(failed("cublasLtMatmulPreferenceSetAttribute"))
        };
        let limit = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let most = WORKSPACE_BYTES as u64;
        // The attributes are a 64-bit number and four of 32 bits.
        prefer(limit, (&raw const most).cast(), 8)?;
        for (attribute, alignment) in ALIGNMENTS.into_iter().zip(alignments) {
            prefer(attribute, (&raw const alignment).cast(), 4)?;
        }
        let [a, b, c] = layouts;
        // SAFETY: everything is alive.
        let found = unsafe { result::get_matmul_algo_heuristic(handle, description, a, b, c, c, preference) };
        // SAFETY: the preference is not used afterwards.
        unsafe { result::destroy_matmul_pref(preference) }
            .map_err(failed("cublasLtMatmulPreferenceDestroy"))?;
        let algorithm = found.map_err(failed("cublasLtMatmulAlgoGetHeuristic"))?.algo;
        let plan = Plan { description, layouts, algorithm };
        self.plans.borrow_mut().insert(shape, plan);
        Ok(plan)
    }
}

/// Sets an attribute of a description that is alive.
fn describe<T: Copy>(
    description: sys::cublasLtMatmulDesc_t,
    attribute: Attribute,
    value: &T,
) -> Result<(), CudaError> {
    // SAFETY: the value has the size that is stated, which the library checks for the attribute.
    unsafe {
        let value: *const T = value;
        result::set_matmul_desc_attribute(description, attribute, value.cast(), size_of::<T>())
    }
    .map_err(failed("cublasLtMatmulDescSetAttribute"))
}

/// The epilogue that adds a bias.
fn epilogue(activation: Activation) -> sys::cublasLtEpilogue_t {
    match activation {
        Activation::Identity => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
        Activation::Relu => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU_BIAS,
        Activation::GeluTanh => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
    }
}

/// The matrices that are added; the result's, which are not read, where none are.
fn added(product: &Product) -> Matrix {
    let is_none = product.before.number() == 0;
    Matrix { at: if is_none { product.c.at } else { product.before }, ..product.c }
}

/// The alignment attributes of both operands, of the matrix that is added, and of the result.
const ALIGNMENTS: [sys::cublasLtMatmulPreferenceAttributes_t; 4] = {
    use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
    [
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    ]
};

/// The alignment of all matrices of a batch in bytes, at most [`ALIGNMENT`]: a part of a tensor may start at any element.
fn alignment(m: Matrix, dtype: DType, batch: i64) -> u32 {
    let step = if batch > 1 { m.step.unsigned_abs() * dtype.bytes() } else { 0 };
    let bits = (m.at.number() | step | ALIGNMENT).trailing_zeros();
    1 << bits
}

/// The layout in memory of a batch of matrices `(rows, columns, matrix)`.
fn layout(
    data: sys::cudaDataType,
    (rows, columns, m): (i64, i64, Matrix),
    batch: i64,
) -> Result<sys::cublasLtMatrixLayout_t, CudaError> {
    let (rows, columns) = match m.form {
        Form::Plain => (rows, columns),
        Form::Transposed => (columns, rows),
    };
    let layout = result::create_matrix_layout(data, rows.unsigned_abs(), columns.unsigned_abs(), m.leading)
        .map_err(failed("cublasLtMatrixLayoutCreate"))?;
    let count =
        i32::try_from(batch).map_err(|_| CudaError::Unsupported(format!("a product of {batch} matrices")))?;
    let step = sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
    let number = sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
    // SAFETY: the layout is alive; the attributes are a 32-bit and a 64-bit number.
    unsafe {
        result::set_matrix_layout_attribute(layout, number, (&raw const count).cast(), 4)
            .and_then(|()| result::set_matrix_layout_attribute(layout, step, (&raw const m.step).cast(), 8))
    }
    .map_err(failed("cublasLtMatrixLayoutSetAttribute"))?;
    Ok(layout)
}

/// The types of elements, of the arithmetic, and of the factors.
fn types(
    dtype: DType,
) -> Result<(sys::cudaDataType, sys::cublasComputeType_t, sys::cudaDataType), CudaError> {
    use sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F};
    use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F, CUDA_R_64F};
    Ok(match dtype {
        DType::F64 => (CUDA_R_64F, CUBLAS_COMPUTE_64F, CUDA_R_64F),
        DType::F32 => (CUDA_R_32F, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        DType::F16 => (CUDA_R_16F, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        DType::BF16 => (CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        DType::F8E4M3 | DType::I32 | DType::Bool => {
            return Err(CudaError::Unsupported(format!("a matrix product of {}", dtype.name())));
        }
    })
}

fn device(at: u64) -> *const c_void {
    std::ptr::without_provenance(usize::try_from(at).unwrap_or(0))
}

fn failed(call: &'static str) -> impl Fn(CublasError) -> CudaError {
    move |error| CudaError::Failed { call, detail: error.to_string() }
}

/// Ignores a failure that cannot be reported.
pub(super) fn ignore<E>(_: Result<(), E>) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::arguments::Address;

    #[test]
    fn alignments_include_the_step_of_a_batch() {
        let matrix = |at, step| Matrix { at: Address(at), form: Form::Plain, leading: 8, step };
        let aligned = |at, step, batch| alignment(matrix(at, step), DType::BF16, batch);
        assert_eq!(aligned(0x1000, 64, 2), 128);
        assert_eq!(aligned(0x1000, 64, 1), 256);
        assert_eq!(aligned(0x1006, 64, 4), 2);
        assert_eq!(aligned(0x1000, 0, 4), 256);
    }
}
