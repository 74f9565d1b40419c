//! Tensors of a rank as kernels see them, and the launch of a kernel.

use ithaca_ir::boxes::Region;
use ithaca_ir::strided::Strided;
use ithaca_ir::{DType, DimId, Rank, Space, TensorType};

use crate::cuda::arguments::{Address, Arguments, MOST_DIMS, Reals, Sequence, Walk, Written};
use crate::cuda::device::{Device, Grid, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::flash::Block;
use crate::cuda::tables::Tables;
use ithaca_device::catalogue::{bits_type, c_type};

/// A buffer with the type of what lies in it.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct View<'a> {
    pub(in crate::cuda) ty: &'a TensorType,
    /// Its first element.
    pub(in crate::cuda) at: Address,
    /// How it lies in a wire, where a dimension is cut into blocks; it is dense where there is none.
    pub(in crate::cuda) strided: Option<&'a Strided>,
}

impl View<'_> {
    /// The dimension that is cut, by place, the indices of a block, and the distance between blocks.
    pub(in crate::cuda) fn cut(&self) -> Option<(usize, i64, i64)> {
        let cut = self.strided?.cut?;
        Some((cut.place, signed(cut.len), signed(cut.stride)))
    }
}

/// A rank, and the stream that its kernels go to.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Cx<'a> {
    pub(in crate::cuda) space: &'a Space,
    pub(in crate::cuda) rank: Rank,
    pub(in crate::cuda) device: &'a dyn Device,
    pub(in crate::cuda) tables: &'a Tables<'a>,
    pub(in crate::cuda) stream: Stream,
    /// The layer that runs.
    pub(in crate::cuda) layer: u64,
}

/// The part of a tensor that a rank holds: dense, row-major.
#[derive(Clone, Debug)]
pub(in crate::cuda) struct Local {
    pub(in crate::cuda) region: Region,
    pub(in crate::cuda) extents: Vec<i64>,
    pub(in crate::cuda) strides: Vec<i64>,
    pub(in crate::cuda) size: i64,
}

impl Local {
    pub(in crate::cuda) fn new(region: Region) -> Self {
        let extents: Vec<i64> = region.iter().map(|r| signed(r.end.saturating_sub(r.start))).collect();
        let strides = row_major(&extents);
        let size = extents.iter().product();
        Self { region, extents, strides, size }
    }
}

/// A part of a walk along a dimension: how many steps, and how far apart they are in each of `K` tensors.
pub(in crate::cuda) type Leg<const K: usize> = (i64, [i64; K]);

/// Distances between neighbours along each dimension of a dense tensor.
pub(in crate::cuda) fn row_major(extents: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; extents.len()];
    for d in (1..extents.len()).rev() {
        strides[d - 1] = strides[d] * extents[d];
    }
    strides
}

/// Sizes are below 2^63.
pub(in crate::cuda) fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// The distance between neighbours along `dim`; zero where the tensor lacks it.
pub(in crate::cuda) fn stride_of(ty: &TensorType, local: &Local, dim: DimId) -> i64 {
    ty.position(dim).map_or(0, |d| local.strides[d])
}

/// A dimension that an operation is told of and its tensor lacks.
pub(in crate::cuda) fn place(ty: &TensorType, dim: DimId) -> Result<usize, CudaError> {
    ty.position(dim).ok_or_else(|| unsupported("an operation over a dimension that its tensor lacks"))
}

pub(in crate::cuda) fn unsupported(what: &str) -> CudaError {
    CudaError::Unsupported(what.to_owned())
}

/// The C++ type of a tensor of real numbers.
pub(in crate::cuda) fn float(ty: &TensorType) -> Result<&'static str, CudaError> {
    match ty.dtype.is_float() {
        true => Ok(c_type(ty.dtype)),
        false => Err(CudaError::Unsupported(format!("arithmetic on {}", ty.dtype.name()))),
    }
}

/// The C++ integer as wide as an element.
pub(in crate::cuda) fn bits(ty: &TensorType) -> &'static str {
    bits_type(ty.dtype)
}

/// Numbers whose storage a kernel is told.
pub(in crate::cuda) fn reals(x: View<'_>) -> Reals {
    Reals { data: x.at, storage: storage(x.ty.dtype) }
}

/// Results whose storage a kernel is told.
pub(in crate::cuda) fn written(z: View<'_>) -> Written {
    Written { data: z.at, storage: storage(z.ty.dtype) }
}

/// The number of `ithaca::Storage`.
pub(super) fn storage(dtype: DType) -> i32 {
    match dtype {
        DType::F64 => 0,
        DType::F32 | DType::I32 | DType::Bool => 1,
        DType::F16 => 2,
        DType::BF16 => 3,
    }
}

/// Adds a dimension to a walk.
pub(in crate::cuda) fn step<const K: usize>(
    walk: &mut Walk<K>,
    extent: i64,
    strides: [i64; K],
) -> Result<(), CudaError> {
    let d = usize::try_from(walk.n).unwrap_or(MOST_DIMS);
    if d >= MOST_DIMS {
        return Err(CudaError::Unsupported(format!("a tensor of more than {MOST_DIMS} dimensions")));
    }
    walk.extent[d] = extent;
    for (row, stride) in walk.stride.iter_mut().zip(strides) {
        row[d] = stride;
    }
    walk.n += 1;
    Ok(())
}

impl Cx<'_> {
    pub(in crate::cuda) fn local(&self, ty: &TensorType) -> Local {
        Local::new(self.space.local_box(ty, self.rank))
    }

    /// The part of a tensor that the rank holds, with the strides that it has where it lies: along a dimension that is cut
    /// those inside a block.
    pub(in crate::cuda) fn local_of(&self, view: View<'_>) -> Local {
        let mut local = self.local(view.ty);
        if let Some(strided) = view.strided {
            local.strides = strided.strides.iter().map(|&stride| signed(stride)).collect();
        }
        local
    }

    /// The walk along a dimension of `extent` indices over some tensors, outer legs first: two where one of them is cut
    /// there, as at most one may be.
    pub(in crate::cuda) fn legs<const K: usize>(
        &self,
        dim: DimId,
        extent: i64,
        views: [View<'_>; K],
    ) -> Result<Vec<Leg<K>>, CudaError> {
        let strides = views.map(|view| stride_of(view.ty, &self.local_of(view), dim));
        let mut cuts = views.iter().enumerate().filter_map(|(k, view)| {
            let (place, run, block) = view.cut()?;
            (view.ty.dims.get(place) == Some(&dim)).then_some((k, run, block))
        });
        match (cuts.next(), cuts.next()) {
            (None, _) => Ok(vec![(extent, strides)]),
            (Some((k, run, block)), None) if run > 0 => {
                let mut outer = strides.map(|stride| stride * run);
                outer[k] = block;
                Ok(vec![(extent / run, outer), (run, strides)])
            }
            _ => Err(unsupported("a walk over tensors that are cut alike")),
        }
    }

    /// Launches a kernel; nothing where there is nothing to do.
    pub(in crate::cuda) fn launch(
        &self,
        kernel: &str,
        threads: i64,
        arguments: Arguments,
    ) -> Result<(), CudaError> {
        match u64::try_from(threads) {
            Ok(0) | Err(_) => Ok(()),
            // SAFETY: operations here give a kernel what its parameters say, and the addresses are those of buffers as
            // large as the types of their tensors, which the schedule keeps from others until events allow it.
            Ok(threads) => unsafe {
                self.device.launch(self.stream, kernel, Grid::Threads(threads), arguments)
            },
        }
    }

    /// Launches a kernel whose threads work together; nothing where there are no blocks.
    pub(in crate::cuda) fn launch_blocks(
        &self,
        kernel: &str,
        blocks: i64,
        of: Block,
        arguments: Arguments,
    ) -> Result<(), CudaError> {
        let Block { threads, shared_bytes, .. } = of;
        match u64::try_from(blocks) {
            Ok(0) | Err(_) => Ok(()),
            Ok(blocks) => {
                let grid = Grid::Blocks { blocks, threads, shared_bytes };
                // SAFETY: as for any launch; threads and shared memory are those that the kernel is compiled for, which
                // its compilation asserts.
                unsafe { self.device.launch(self.stream, kernel, grid, arguments) }
            }
        }
    }

    /// Copies bytes; nothing where they are there.
    pub(in crate::cuda) fn copy(&self, bytes: u64, from: Address, to: Address) -> Result<(), CudaError> {
        if bytes == 0 || from == to {
            return Ok(());
        }
        // SAFETY: as for a launch.
        unsafe { self.device.copy(self.stream, from, to, bytes) }
    }

    /// The positions of a dimension of a tensor, as this rank holds it.
    pub(in crate::cuda) fn sequence(&self, ty: &TensorType, dim: DimId) -> Result<Sequence, CudaError> {
        let held = self.space.local_box(ty, self.rank)[place(ty, dim)?].clone();
        let runs = self.space.position_runs(dim, held.clone());
        let numbers = runs
            .iter()
            .flat_map(|run| [signed(run.index - held.start), signed(run.position), signed(run.len)]);
        let numbers: Vec<i64> = numbers.collect();
        let n = signed(runs.len() as u64);
        // A rank that holds nothing asks for no position.
        let runs = if numbers.is_empty() { Address::NONE } else { self.tables.integers(&numbers)? };
        Ok(Sequence { runs, n })
    }

    /// Every dimension of x but `over`, with the strides of x and of the others.
    pub(in crate::cuda) fn rows<const K: usize>(
        &self,
        x: &TensorType,
        over: DimId,
        others: [&TensorType; K],
    ) -> Result<Walk<K>, CudaError> {
        let local = self.local(x);
        let others = others.map(|ty| (ty, self.local(ty)));
        let mut rows = Walk::default();
        for (d, &dim) in x.dims.iter().enumerate().filter(|(_, dim)| **dim != over) {
            let strides = std::array::from_fn(|k| stride_of(others[k].0, &others[k].1, dim));
            step(&mut rows, local.extents[d], strides)?;
        }
        Ok(rows)
    }

    /// Every dimension of x but `over`, with the strides of x.
    pub(in crate::cuda) fn lines(&self, x: &TensorType, over: DimId) -> Result<Walk<1>, CudaError> {
        self.rows(x, over, [x])
    }

    pub(in crate::cuda) fn extent_along(&self, ty: &TensorType, dim: DimId) -> Result<i64, CudaError> {
        Ok(self.local(ty).extents[place(ty, dim)?])
    }

    pub(in crate::cuda) fn stride_along(&self, ty: &TensorType, dim: DimId) -> i64 {
        stride_of(ty, &self.local(ty), dim)
    }

    /// Two walks: over the dimensions of `z`, and over those of `x` that it lacks. Both say where each of K tensors has
    /// an element, by its stride along a dimension of x.
    pub(in crate::cuda) fn kept_and_summed<const K: usize>(
        &self,
        x: &TensorType,
        z: &TensorType,
        stride: impl Fn(usize, DimId) -> i64,
    ) -> Result<(Walk<K>, Walk<K>), CudaError> {
        let (lx, lz) = (self.local(x), self.local(z));
        let (mut kept, mut summed) = (Walk::default(), Walk::default());
        for (d, &dim) in z.dims.iter().enumerate() {
            step(&mut kept, lz.extents[d], std::array::from_fn(|k| stride(k, dim)))?;
        }
        for (d, &dim) in x.dims.iter().enumerate().filter(|(_, dim)| z.position(**dim).is_none()) {
            step(&mut summed, lx.extents[d], std::array::from_fn(|k| stride(k, dim)))?;
        }
        Ok((kept, summed))
    }
}
