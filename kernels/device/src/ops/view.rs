//! Tensors of a rank as kernels see them, and the record of a launch.

use std::rc::Rc;

use ithaca_ir::strided::{Strided, row_major};
use ithaca_ir::{DType, DimId, Rank, Space, TensorType, boxes};

use crate::address::Region;
use crate::argument::{Arg, Pointer, arguments};
use crate::catalogue::{bits_type, c_type};
use crate::error::LowerError;
use crate::flash::{ALIGNMENT, Block};
use crate::ops::trace::{List, Shared, Trace};
use crate::record::{Grid, Launch, Record};
use crate::structs::{MOST_DIMS, Reals, Sequence, Walk, Written};
use crate::threads::{BLOCK_OF_COLUMNS, Columns, block_of_rows, lanes, packs};
use crate::value::Int;

/// A buffer with the type of its tensor.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) ty: &'a TensorType,
    /// Its first element.
    pub(crate) at: Pointer,
    /// The layout in a wire where a dimension is cut into blocks; `None` if dense.
    pub(crate) strided: Option<&'a Strided>,
}

impl View<'_> {
    /// The dimension that is cut, by place, the indices of a block, and the distance between blocks.
    pub(crate) fn cut(&self) -> Option<(usize, i64, i64)> {
        let cut = self.strided?.cut?;
        Some((cut.place, signed(cut.len), signed(cut.stride)))
    }
}

/// Refuses a cache of another type than the rows: kernels move and read rows as they are.
pub(crate) fn as_stored(x: View<'_>, cache: View<'_>) -> Result<(), LowerError> {
    if x.ty.dtype == cache.ty.dtype {
        return Ok(());
    }
    LowerError::unsupported(format!("a cache of {} beside activations of {}", cache.ty.dtype, x.ty.dtype))
}

/// A rank for which operations are lowered.
#[derive(Clone, Copy)]
pub(crate) struct Cx<'a> {
    pub(crate) space: &'a Space,
    pub(crate) rank: Rank,
    /// Records of the rank.
    pub(crate) trace: &'a Trace,
    /// Lists of the task that are the same for all ranks.
    pub(crate) shared: &'a Shared,
    /// Whether each argument of the frame starts at a multiple of [`ALIGNMENT`].
    pub(crate) arguments_aligned: &'a [bool],
    /// Whether each result starts at a multiple of [`ALIGNMENT`].
    pub(crate) results_aligned: &'a [bool],
}

/// The part of a tensor that a rank holds: dense, row-major.
#[derive(Clone, Debug)]
pub(crate) struct Local {
    region: boxes::Region,
    pub(crate) extents: Vec<i64>,
    pub(crate) strides: Vec<i64>,
    pub(crate) size: i64,
}

impl Local {
    pub(crate) fn new(region: boxes::Region) -> Self {
        let extents: Vec<i64> = region.iter().map(|r| signed(r.end.saturating_sub(r.start))).collect();
        let strides = row_major(&extents);
        let size = extents.iter().product();
        Self { region, extents, strides, size }
    }

    /// How far a block starts from the start of the part, along each dimension.
    pub(crate) fn distances(&self, block: &boxes::Region) -> Vec<i64> {
        block.iter().zip(&self.region).map(|(b, own)| signed(b.start - own.start)).collect()
    }
}

/// The rows of `K` tensors along a dimension.
pub(crate) struct RowsAlong<const K: usize> {
    pub(crate) walk: Walk<K>,
    /// Rows.
    pub(crate) n: i64,
    /// Elements of a row.
    pub(crate) width: i64,
    /// The distance between neighbours of a row, in each tensor.
    pub(crate) strides: [i64; K],
}

/// A leg of a walk along a dimension: the number of steps, and their stride in each of `K` tensors.
pub(crate) type Leg<const K: usize> = (i64, [i64; K]);

/// Sizes are below 2^63.
pub(crate) fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// The distance between neighbours along `dim`; zero where the tensor lacks it.
pub(crate) fn stride_of(ty: &TensorType, local: &Local, dim: DimId) -> i64 {
    ty.position(dim).map_or(0, |d| local.strides[d])
}

/// The error for a dimension that the tensor of an operation lacks.
pub(crate) fn place(ty: &TensorType, dim: DimId) -> Result<usize, LowerError> {
    let missing = "an operation over a dimension that its tensor lacks";
    ty.position(dim).ok_or_else(|| LowerError::Unsupported(missing.to_owned()))
}

/// The C++ type of a tensor of real numbers.
pub(crate) fn float(ty: &TensorType) -> Result<&'static str, LowerError> {
    if ty.dtype.is_arithmetic() {
        Ok(c_type(ty.dtype))
    } else {
        LowerError::unsupported(format!("arithmetic on {}", ty.dtype))
    }
}

/// The C++ type as wide as neighbours of a tensor.
pub(crate) fn bits_of(dtype: DType, neighbours: i64) -> &'static str {
    bits_type(dtype.bytes() * neighbours.unsigned_abs())
}

/// Operands with a storage type.
pub(crate) fn reals(x: View<'_>) -> Reals {
    Reals { data: x.at, storage: storage(x.ty.dtype) }
}

/// Results with a storage type.
pub(crate) fn written(z: View<'_>) -> Written {
    Written { data: z.at, storage: storage(z.ty.dtype) }
}

/// The number of `ithaca::Storage`.
pub(crate) fn storage(dtype: DType) -> i32 {
    match dtype {
        DType::F64 => 0,
        DType::F32 | DType::F8E4M3 | DType::I32 | DType::Bool => 1,
        DType::F16 => 2,
        DType::BF16 => 3,
    }
}

/// Adds a dimension to a walk, or joins it to the one before where both are one run over memory.
pub(crate) fn step<const K: usize>(
    walk: &mut Walk<K>,
    extent: i64,
    strides: [i64; K],
) -> Result<(), LowerError> {
    if extent == 1 {
        return Ok(());
    }
    let mut d = usize::try_from(walk.n).unwrap_or(MOST_DIMS);
    let joins = |d: usize| (0..K).all(|k| walk.stride[k][d] == extent * strides[k]);
    if d > 0 && joins(d - 1) {
        d -= 1;
        walk.n -= 1;
        return step(walk, walk.extent[d] * extent, strides);
    }
    if d >= MOST_DIMS {
        return LowerError::unsupported(format!("a tensor of more than {MOST_DIMS} dimensions"));
    }
    walk.extent[d] = extent;
    for (row, stride) in walk.stride.iter_mut().zip(strides) {
        row[d] = stride;
    }
    walk.n += 1;
    Ok(())
}

impl Cx<'_> {
    pub(crate) fn local(&self, ty: &TensorType) -> Local {
        Local::new(self.space.local_box(ty, self.rank))
    }

    /// The part of a tensor that the rank holds, with the strides that it has in its buffer: along a dimension that is cut
    /// those inside a block.
    pub(crate) fn local_of(&self, view: View<'_>) -> Local {
        let mut local = self.local(view.ty);
        if let Some(strided) = view.strided {
            local.strides = strided.strides.iter().map(|&stride| signed(stride)).collect();
        }
        local
    }

    /// The walk along a dimension of `extent` indices over some tensors, outer legs first: two where one of them is cut
    /// there, as at most one may be.
    pub(crate) fn legs<const K: usize>(
        &self,
        dim: DimId,
        extent: i64,
        views: [View<'_>; K],
    ) -> Result<Vec<Leg<K>>, LowerError> {
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
            _ => LowerError::unsupported("a walk over tensors that are cut alike"),
        }
    }

    /// The global indices of the part that the rank holds.
    pub(crate) fn region<'l>(&self, local: &'l Local) -> &'l boxes::Region {
        self.trace.depends_on_place.set(true);
        &local.region
    }

    /// Whether a tensor starts at a multiple of [`ALIGNMENT`].
    pub(crate) fn is_aligned(&self, at: Pointer) -> bool {
        self.starts_aligned(at.region) && at.bytes.cast_unsigned().is_multiple_of(ALIGNMENT)
    }

    fn starts_aligned(&self, region: Region) -> bool {
        let of = |known: &[bool], i: usize| known.get(i).copied().unwrap_or(false);
        match region {
            Region::Argument(i) => of(self.arguments_aligned, i),
            Region::Result(i) => of(self.results_aligned, i),
            Region::Frame
            | Region::Source(_)
            | Region::Table(_)
            | Region::Finding
            | Region::Overflow
            | Region::Workspace
            | Region::Counts => true,
            Region::Null => false,
        }
    }

    /// The most neighbours, as many as [`ALIGNMENT`] bytes have at most, that move at once where tensors start at `at` and
    /// have all `numbers` of elements as multiples.
    pub(crate) fn neighbours(&self, dtype: DType, at: &[Pointer], numbers: &[i64]) -> i64 {
        let (mut n, bytes) = (signed(ALIGNMENT / dtype.bytes()), signed(dtype.bytes()));
        let fits = |n: i64| {
            let starts = |at: &Pointer| self.starts_aligned(at.region) && at.bytes % (n * bytes) == 0;
            n == 1 || (at.iter().all(starts) && numbers.iter().all(|number| number % n == 0))
        };
        while !fits(n) {
            n /= 2;
        }
        n
    }

    /// Copies a box: tensor 0 of the walk is the destination. Elements are of `dtype`.
    pub(crate) fn copy_box(
        &self,
        dtype: DType,
        [from, to]: [Pointer; 2],
        mut walk: Walk<2>,
    ) -> Result<(), LowerError> {
        let n = usize::try_from(walk.n).unwrap_or(0);
        let mut each = 1;
        if let Some(last) = n.checked_sub(1)
            && walk.stride.iter().all(|strides| strides[last] == 1)
        {
            let outer = walk.stride.iter().flat_map(|strides| &strides[..last]);
            let numbers: Vec<i64> = outer.chain([&walk.extent[last]]).copied().collect();
            each = self.neighbours(dtype, &[from, to], &numbers);
            walk.extent[last] /= each;
            walk.stride
                .iter_mut()
                .flat_map(|strides| &mut strides[..last])
                .for_each(|stride| *stride /= each);
        }
        let (kernel, size) = (format!("copy_box<{}>", bits_of(dtype, each)), walk.size());
        self.launch(&kernel, size, arguments![from, to, walk, size])
    }

    /// Workspace of so many bytes, which all kernels of the task share; none where it is empty.
    pub(crate) fn workspace(&self, bytes: i64) -> Pointer {
        self.trace.workspace.set(self.trace.workspace.get().max(bytes));
        Pointer { region: if bytes > 0 { Region::Workspace } else { Region::Null }, bytes: 0 }
    }

    /// A list of reals.
    pub(crate) fn reals(&self, numbers: Vec<f64>) -> Pointer {
        self.trace.list(List::Reals(Rc::new(numbers.into_iter().map(f64::to_bits).collect())))
    }

    /// A list of integers.
    pub(crate) fn integers(&self, numbers: Vec<i64>) -> Pointer {
        self.trace.list(List::Integers(numbers))
    }

    /// The strips of the task's mask, which `strips` makes.
    pub(crate) fn mask_strips(&self, strips: impl FnOnce() -> Vec<f64>) -> Pointer {
        let bits = || Rc::new(strips().into_iter().map(f64::to_bits).collect());
        self.trace.list(List::Reals(Rc::clone(self.shared.mask_strips.get_or_init(bits))))
    }

    /// Launches a kernel, unless `n` is zero.
    pub(crate) fn launch(&self, kernel: &str, threads: i64, args: Vec<Arg>) -> Result<(), LowerError> {
        if threads > 0 {
            let grid = Grid::Threads(Int::Const(threads));
            self.trace.add(Record::Launch(Launch { kernel: kernel.to_owned(), grid, args }));
        }
        Ok(())
    }

    /// Launches the kernel for elements of the type of `x`, unless `n` is zero.
    pub(crate) fn launch_of(
        &self,
        name: &str,
        x: &TensorType,
        n: i64,
        args: Vec<Arg>,
    ) -> Result<(), LowerError> {
        self.launch(&format!("{name}<{}>", float(x)?), n, args)
    }

    /// Launches a kernel for each element of `x`, whose number is the last argument. A thread takes neighbours.
    pub(crate) fn elementwise(&self, name: &str, x: View<'_>, mut args: Vec<Arg>) -> Result<(), LowerError> {
        let n = self.local(x.ty).size;
        args.push(Arg::of(n));
        self.launch_of(name, x.ty, packs(n, x.ty.dtype), args)
    }

    /// Launches a kernel whose threads share rows of `width` elements; their number is the last argument.
    pub(crate) fn launch_rows(
        &self,
        kernel: &str,
        (n, width, dtype): (i64, i64, DType),
        mut args: Vec<Arg>,
    ) -> Result<(), LowerError> {
        let lanes = lanes(width, dtype);
        args.push(Arg::of(lanes));
        let block = block_of_rows(lanes);
        self.launch_blocks(kernel, (n + block.rows - 1) / block.rows, block, args)
    }

    /// Launches a kernel of cooperating threads, unless there are no blocks.
    pub(crate) fn launch_blocks(
        &self,
        kernel: &str,
        blocks: i64,
        of: Block,
        args: Vec<Arg>,
    ) -> Result<(), LowerError> {
        let Block { threads, shared_bytes, .. } = of;
        if blocks > 0 {
            let grid = Grid::Blocks { blocks: Int::Const(blocks), threads, shared_bytes };
            self.trace.add(Record::Launch(Launch { kernel: kernel.to_owned(), grid, args }));
        }
        Ok(())
    }

    /// Launches a kernel whose blocks sum columns; the number of threads that take neighbours is the last argument.
    pub(crate) fn launch_columns(
        &self,
        kernel: &str,
        columns: Columns,
        mut args: Vec<Arg>,
    ) -> Result<(), LowerError> {
        args.push(Arg::of(columns.lanes));
        self.launch_blocks(kernel, columns.packs * columns.chunks, BLOCK_OF_COLUMNS, args)
    }

    /// Copies bytes, unless source and destination are the same.
    pub(crate) fn copy(&self, bytes: u64, from: Pointer, to: Pointer) -> Result<(), LowerError> {
        if bytes > 0 && from != to {
            let (from, to) = (from.address(), to.address());
            self.trace.add(Record::Copy { from, to, bytes: Int::Const(signed(bytes)) });
        }
        Ok(())
    }

    /// The positions of a dimension of a tensor, as this rank holds it.
    pub(crate) fn sequence(&self, ty: &TensorType, dim: DimId) -> Result<Sequence, LowerError> {
        let local = self.local(ty);
        let held = self.region(&local)[place(ty, dim)?].clone();
        let runs = self.space.position_runs(dim, held.clone());
        let numbers = runs
            .iter()
            .flat_map(|run| [signed(run.index - held.start), signed(run.position), signed(run.len)]);
        let numbers: Vec<i64> = numbers.collect();
        let n = signed(runs.len() as u64);
        // A rank without elements has no positions.
        let runs = if numbers.is_empty() { Pointer::NONE } else { self.integers(numbers) };
        Ok(Sequence { runs, n })
    }

    /// The dimensions of x that `keep` accepts, with these strides along each.
    pub(crate) fn walk_by<const K: usize>(
        &self,
        x: &TensorType,
        keep: impl Fn(DimId) -> bool,
        strides: impl Fn(DimId) -> [i64; K],
    ) -> Result<Walk<K>, LowerError> {
        let mut walk = Walk::default();
        for (&dim, extent) in x.dims.iter().zip(self.local(x).extents).filter(|(dim, _)| keep(**dim)) {
            step(&mut walk, extent, strides(dim))?;
        }
        Ok(walk)
    }

    /// The dimensions of x that `keep` accepts, with the strides of `others`.
    pub(crate) fn walk<const K: usize>(
        &self,
        x: &TensorType,
        keep: impl Fn(DimId) -> bool,
        others: [&TensorType; K],
    ) -> Result<Walk<K>, LowerError> {
        let locals = others.map(|ty| self.local(ty));
        let stride = |k: usize, dim| stride_of(others[k], &locals[k], dim);
        self.walk_by(x, keep, |dim| std::array::from_fn(|k| stride(k, dim)))
    }

    /// Every dimension of x but `over`, with the strides of x.
    pub(crate) fn lines(&self, x: &TensorType, over: DimId) -> Result<Walk<1>, LowerError> {
        self.walk(x, |dim| dim != over, [x])
    }

    /// The rows of some tensors, all of the dimensions of the first but `over`.
    pub(crate) fn rows<const K: usize>(
        &self,
        over: DimId,
        tensors: [&TensorType; K],
    ) -> Result<RowsAlong<K>, LowerError> {
        let walk = self.walk(tensors[0], |dim| dim != over, tensors)?;
        let width = self.extent_along(tensors[0], over)?;
        let strides = tensors.map(|ty| stride_of(ty, &self.local(ty), over));
        Ok(RowsAlong { n: walk.size(), walk, width, strides })
    }

    pub(crate) fn extent_along(&self, ty: &TensorType, dim: DimId) -> Result<i64, LowerError> {
        Ok(self.local(ty).extents[place(ty, dim)?])
    }

    /// Two walks: over the dimensions of `z`, and over those of `x` that it lacks. Both have the strides of `others`.
    pub(crate) fn kept_and_summed<const K: usize>(
        &self,
        x: &TensorType,
        z: &TensorType,
        others: [&TensorType; K],
    ) -> Result<(Walk<K>, Walk<K>), LowerError> {
        Ok((self.walk(z, |_| true, others)?, self.walk(x, |dim| !z.has(dim), others)?))
    }
}
