//! Steps that continue sequences: lengths, rows of caches, the choice of tokens.

use ithaca_ir::ops::{Cache, RotateAppend};
use ithaca_ir::order::Run;
use ithaca_ir::{DimId, TensorType};

use super::attention::bytes;
use super::view::{Cx, RowsAlong, View, as_stored, bits_of, float, place, signed, step};
use crate::address::Region;
use crate::argument::{Arg, Pointer, arguments};
use crate::error::LowerError;
use crate::structs::{Appended, AppendedPages, HostPages, Inverse, Paged, Rotation, Walk};
use crate::threads::packs;

/// Where kernels note that a cache was too small.
const OVERFLOW: Pointer = Pointer { region: Region::Overflow, bytes: 0 };

impl Cx<'_> {
    pub(crate) fn cache(&self, op: &Cache, x: &[View<'_>], z: &[View<'_>]) -> Result<(), LowerError> {
        match op {
            Cache::Advance => {
                let n = self.local(z[0].ty).size;
                self.launch("advance", n, arguments![x[0].at, x[1].at, z[0].at, n])
            }
            Cache::TokenPositions { rows } => {
                let n = self.local(z[0].ty).size;
                let tokens = self.extent_along(z[0].ty, *rows)?;
                let sequence = self.sequence(z[0].ty, *rows)?;
                let arguments = arguments![x[0].at, x[1].at, z[0].at, sequence, tokens, n];
                self.launch("token_positions", n, arguments)
            }
            Cache::Append { over, rows, wraps } => {
                self.append((*over, *rows, *wraps), [x[0], x[1], x[2], x[3]], z[0])
            }
            Cache::AppendPages { rows, beyond, after, .. } => {
                self.append_pages(*rows, (*beyond, *after), [x[0], x[1], x[2], x[3], x[4]], z[0])
            }
            Cache::GatherPages { pages, over, beyond, .. } => {
                let beyond = beyond.map(|beyond| (*pages, beyond));
                self.gather_pages(*over, beyond, x, z[0])
            }
            Cache::Upload => self.copy(bytes(self.local(z[0].ty).size, z[0].ty), x[0].at, z[0].at),
            Cache::LastToken { over } => self.last_token(*over, [x[0], x[1], x[2]], z[0]),
            Cache::Argmax { over, .. } => {
                let RowsAlong { walk, n, width, strides: [stride] } = self.rows(*over, [x[0].ty])?;
                let valid = signed(self.space.dims[*over].valid);
                let positions = self.sequence(x[0].ty, *over)?;
                let places = x.get(1).map_or(Pointer::NONE, |places| places.at);
                let arguments =
                    arguments![x[0].at, places, z[0].at, z[1].at, walk, positions, valid, width, stride, n];
                let kernel = format!("argmax<{}>", float(x[0].ty)?);
                self.launch_rows(&kernel, (n, width, x[0].ty.dtype), arguments)
            }
            Cache::Choose => {
                let n = self.local(z[0].ty).size;
                self.launch("choose", n, arguments![x[0].at, x[1].at, x[2].at, z[0].at, n])
            }
        }
    }

    /// The rows of a step at their positions in a cache, in place or in a copy of it.
    fn append(
        &self,
        of: (DimId, DimId, bool),
        [cache, x, start, end]: [View<'_>; 4],
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let (lx, lz) = (self.local(x.ty), self.local(z.ty));
        as_stored(x, z)?;
        self.copy(bytes(lz.size, z.ty), cache.at, z.at)?;
        let inner: i64 = lx.extents[place(x.ty, of.1)? + 1..].iter().product();
        let place = self.appended(of, x, [start, end], z)?;
        let each = self.neighbours(x.ty.dtype, &[x.at, z.at], &[inner]);
        let n = lx.size / each;
        let arguments = arguments![x.at, z.at, place, inner / each, OVERFLOW, n];
        self.launch(&format!("append<{}>", bits_of(x.ty.dtype, each)), n, arguments)
    }

    /// Where the rows of x belong in a cache of the type of z.
    fn appended(
        &self,
        (over, rows, wraps): (DimId, DimId, bool),
        x: View<'_>,
        [start, end]: [View<'_>; 2],
        z: View<'_>,
    ) -> Result<Appended, LowerError> {
        let (lx, lz) = (self.local(x.ty), self.local(z.ty));
        let at = place(x.ty, rows)?;
        if start.ty.dims.iter().any(|d| !x.ty.dims[..at].contains(d)) {
            return LowerError::unsupported("`append` with lengths of dimensions behind the rows");
        }
        let mut sequences = Walk::<1>::default();
        let strides = self.local(start.ty).strides;
        for (&dim, &extent) in x.ty.dims[..at].iter().zip(&lx.extents) {
            let stride = start.ty.position(dim).map_or(0, |d| strides[d]);
            step(&mut sequences, extent, [stride])?;
        }
        Ok(Appended {
            start: start.at,
            end: end.at,
            sequences,
            rows: self.sequence(x.ty, rows)?,
            slots: self.inverse(z.ty, over)?,
            n_rows: lx.extents[at],
            n_slots: lz.extents[at],
            capacity: signed(self.space.dims[over].valid),
            wraps,
        })
    }

    /// The rows of a step at their positions in pages, in place or in a copy of them.
    fn append_pages(
        &self,
        rows: DimId,
        others: (Option<DimId>, Option<DimId>),
        [cache, x, start, end, table]: [View<'_>; 5],
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let (lx, lz) = (self.local(x.ty), self.local(z.ty));
        as_stored(x, z)?;
        self.copy(bytes(lz.size, z.ty), cache.at, z.at)?;
        let inner: i64 = lx.extents[2..].iter().product();
        let each = self.neighbours(x.ty.dtype, &[x.at, z.at], &[inner]);
        let place = self.appended_pages(rows, others, x, [start, end, table], z)?;
        let n = lx.size / each;
        let arguments = arguments![x.at, z.at, place, inner / each, OVERFLOW, n];
        self.launch(&format!("append_pages<{}>", bits_of(x.ty.dtype, each)), n, arguments)
    }

    /// Where the rows of x belong in pages of the type of z.
    fn appended_pages(
        &self,
        rows: DimId,
        others: (Option<DimId>, Option<DimId>),
        x: View<'_>,
        [start, end, table]: [View<'_>; 3],
        z: View<'_>,
    ) -> Result<AppendedPages, LowerError> {
        Ok(AppendedPages {
            start: start.at,
            end: end.at,
            rows: self.sequence(x.ty, rows)?,
            pages: self.paged(z, table, others)?,
            n_rows: self.extent_along(x.ty, rows)?,
        })
    }

    /// Rows of keys, rotated, and of values at their positions in caches, and rotated queries.
    pub(crate) fn rotate_append(
        &self,
        rotated: &RotateAppend,
        x: &[View<'_>],
        z: &[View<'_>],
    ) -> Result<(), LowerError> {
        let (k, v, q) = (x[2], x[3], rotated.queries().map(|i| x[i]));
        for (&cache, &z) in x.iter().zip(z).take(2) {
            self.copy(bytes(self.local(z.ty).size, z.ty), cache.at, z.at)?;
        }
        let at = place(k.ty, rotated.rows)? + 1;
        let heads = |x: View<'_>| {
            let extents = self.local(x.ty).extents;
            extents[at..extents.len() - 1].iter().product::<i64>()
        };
        let rotation = Rotation {
            kv_heads: heads(k),
            heads: q.map_or(0, heads),
            ..self.rotation(&rotated.rotary, k.ty)?
        };
        let n: i64 = self.local(k.ty).extents[..at].iter().product();
        let chunks = (rotation.kv_heads + rotation.heads + rotation.each - 1) / rotation.each;
        let threads = n * chunks * packs(rotation.extent - rotation.width / 2, k.ty.dtype);
        let queries = [q, q.and(z.get(2).copied())].map(|q| q.map_or(Pointer::NONE, |q| q.at));
        let mut arguments = arguments![k.at, v.at, queries[0], z[0].at, z[1].at, queries[1]];
        let lengths = [x[RotateAppend::START], x[RotateAppend::START + 1]];
        let kernel = match rotated.table() {
            None => {
                let of = (rotated.slots, rotated.rows, rotated.wraps);
                arguments.push(Arg::of(self.appended(of, k, lengths, z[0])?));
                "rotate_append"
            }
            Some(table) => {
                let [start, end] = lengths;
                let place =
                    self.appended_pages(rotated.rows, (None, None), k, [start, end, x[table]], z[0])?;
                arguments.push(Arg::of(place));
                "rotate_append_pages"
            }
        };
        arguments.extend(arguments![rotation, OVERFLOW, n]);
        self.launch_of(kernel, k.ty, threads, arguments)
    }

    /// The tokens of sequences that are in pages; `beyond` are the pages of the device, and those in host memory.
    fn gather_pages(
        &self,
        over: DimId,
        beyond: Option<(DimId, DimId)>,
        x: &[View<'_>],
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let (cache, table) = (x[0], x[1]);
        let local = self.local(z.ty);
        let inner: i64 = local.extents[2..].iter().product();
        let mut caches = vec![cache.at, z.at];
        caches.extend(x.get(2..4).into_iter().flatten().map(|of_host| of_host.at));
        let each = self.neighbours(z.ty.dtype, &caches, &[inner]);
        let n = local.size / each;
        let sequence = self.sequence(z.ty, over)?;
        let paged = self.paged(cache, table, (beyond.map(|(_, beyond)| beyond), None))?;
        let of_host = match (beyond, x) {
            (Some((pages, _)), [_, _, copy, current, start]) => HostPages {
                pages: self.paged(*copy, table, (None, Some(pages)))?,
                copy: copy.at,
                current: current.at,
                start: start.at,
            },
            _ => HostPages::none(),
        };
        let arguments =
            arguments![cache.at, z.at, sequence, paged, of_host, local.extents[1], inner / each, n];
        self.launch(&format!("gather_pages<{}>", bits_of(z.ty.dtype, each)), n, arguments)
    }

    /// The rank's part of a cache `[page slot …]` under a table `[sequence entry]`, which numbers pages of `beyond` after these, and
    /// those of `after` before them.
    pub(super) fn paged(
        &self,
        cache: View<'_>,
        table: View<'_>,
        (beyond, after): (Option<DimId>, Option<DimId>),
    ) -> Result<Paged, LowerError> {
        let (&[pages, slots, ..], &[_, entries]) = (&cache.ty.dims[..], &table.ty.dims[..]) else {
            return LowerError::unsupported("pages of sequences in more than one dimension");
        };
        let size = |dim: Option<DimId>| signed(dim.map_or(0, |dim| self.space.size(dim)));
        let (first, own) = (size(after), size(Some(pages)));
        let others = if after.is_some() { [0, first] } else { [own, own + size(beyond)] };
        Ok(Paged {
            table: table.at,
            pages: self.inverse(cache.ty, pages)?,
            slots: self.inverse(cache.ty, slots)?,
            entries: self.extent_along(table.ty, entries)?,
            page_tokens: signed(self.space.size(slots)),
            n_slots: self.extent_along(cache.ty, slots)?,
            first,
            others_from: others[0],
            others_to: others[1],
        })
    }

    fn last_token(&self, over: DimId, [x, start, end]: [View<'_>; 3], z: View<'_>) -> Result<(), LowerError> {
        let (lx, at) = (self.local(x.ty), place(x.ty, over)?);
        let walk = self.walk(z.ty, |_| true, [start.ty, x.ty])?;
        let n = walk.size();
        let arguments =
            arguments![x.at, start.at, end.at, z.at, walk, self.inverse(x.ty, over)?, lx.strides[at], n];
        self.launch(&format!("last_token<{}>", bits_of(x.ty.dtype, 1)), n, arguments)
    }

    /// The tokens of a dimension of a tensor by position, as this rank holds them.
    fn inverse(&self, ty: &TensorType, dim: DimId) -> Result<Inverse, LowerError> {
        let local = self.local(ty);
        let held = self.region(&local)[place(ty, dim)?].clone();
        let mut runs = self.space.position_runs(dim, held.clone());
        runs.sort_by_key(|run| run.position);
        let of_run = |run: &Run| [run.position, run.index - held.start, run.len].map(signed);
        let numbers: Vec<i64> = runs.iter().flat_map(of_run).collect();
        let n = signed(runs.len() as u64);
        let runs = if numbers.is_empty() { Pointer::NONE } else { self.integers(numbers) };
        Ok(Inverse { runs, n })
    }
}
