//! Where the elements of a tensor lie in the wire of a message, or in a tensor that it is a part of, as a kernel can address them.
//!
//! A wire has, for each peer, the blocks of its tensors one after another ([`crate::message`]). Where all peers have blocks of
//! one shape, the elements of one tensor are as far apart along each dimension as those of a dense tensor are, but for
//! one dimension that is cut into the blocks: there index `i` is `i / len` blocks and `i % len` neighbours further. So a
//! kernel may write a tensor where it will be sent from, and read one where it was received.

use std::ops::Mul;

use crate::boxes::Side;
use crate::dim::{DimId, Part};
use crate::message::{Parcel, is_shared};
use crate::ops::table::op::Op;
use crate::space::Space;
use crate::types::TensorType;

/// Bytes that kernels load at once: a tensor in a wire starts at a multiple of it, and so does each of its blocks.
pub const VECTOR: u64 = 16;

/// Where the elements of a tensor lie, in elements from the start of a wire or of the tensor that it is a part of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strided {
    /// The first element.
    pub start: u64,
    /// The distance between neighbours along each dimension.
    pub strides: Vec<u64>,
    /// The dimension that is cut into blocks; none where the tensor is dense.
    pub cut: Option<Cut>,
}

/// A dimension that is cut into equal blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Its place among the dimensions of the tensor.
    pub place: usize,
    /// Indices of a block.
    pub len: u64,
    /// The distance between blocks.
    pub stride: u64,
}

impl Strided {
    /// The parcel `part` of a message on one side of its wire, the same on every rank; none where ranks differ, or where a
    /// block is more than one box.
    pub fn of(space: &Space, parcels: &[Parcel], side: Side, part: usize) -> Option<Strided> {
        let own = parcels.get(part)?;
        if !parcels.iter().all(|parcel| is_even(space, parcel)) {
            return None;
        }
        let elements = |parcel: &Parcel| space.max_local_elements(end(parcel, side));
        let before: u64 = parcels[..part].iter().map(elements).sum();
        let mut shape = space.max_local_shape(end(own, side));
        let Some((dim, blocks)) = cut_dim(space, own, side) else {
            return is_shared(&own.op, side).then(|| Strided {
                start: before,
                strides: row_major(&shape),
                cut: None,
            });
        };
        let place = end(own, side).position(dim)?;
        if !shape[place].is_multiple_of(blocks) {
            return None;
        }
        let whole = row_major(&shape);
        shape[place] /= blocks;
        let strides = row_major(&shape);
        let stride = parcels.iter().map(elements).sum::<u64>() / blocks;
        let cut = Cut { place, len: shape[place], stride };
        // A dimension in front that is cut alone is dense.
        let is_dense = strides == whole && stride == cut.len * strides[place];
        Some(Strided { start: before / blocks, strides, cut: (!is_dense).then_some(cut) })
    }

    /// A tensor in another of which it is a part along the first dimension, the same on every rank; none where it is no such part.
    /// Each run of the dimension has a block of it.
    pub fn of_part(space: &Space, whole: &TensorType, part: &TensorType) -> Option<Strided> {
        let (place, taken) = part_of(space, whole, part)?;
        let fetched = |&d: &DimId| space.dims[d].fetched.is_some();
        let even = |ty: &TensorType| {
            ty.layout.moved.is_empty() && space.deals_evenly(ty) && !ty.dims.iter().any(fetched)
        };
        if whole.dtype != part.dtype || whole.layout != part.layout || !even(whole) || !even(part) {
            return None;
        }
        let (all, own) = (space.max_local_shape(whole), space.max_local_shape(part));
        let runs = taken.runs / space.mesh.degree(&part.layout.split[place]).max(1);
        let is_first = own[..place].iter().all(|&n| n == 1);
        if !is_first || runs == 0 || all[place] != taken.count * own[place] || own[place] % runs != 0 {
            return None;
        }
        let strides = row_major(&own);
        let len = own[place] / runs;
        let cut = Cut { place, len, stride: taken.count * len * strides[place] };
        Some(Strided { start: taken.index * len * strides[place], strides, cut: (runs > 1).then_some(cut) })
    }

    /// Whether all that begins in it does so at a multiple of [`VECTOR`] for elements of `bytes`.
    pub fn is_aligned(&self, bytes: u64) -> bool {
        let blocks = self.cut.map_or(0, |cut| cut.stride);
        [self.start, blocks].iter().all(|n| (n * bytes).is_multiple_of(VECTOR))
    }

    /// The loops along a dimension of `extent` indices, outer first: how many steps, and how far apart.
    pub fn loops(&self, place: usize, extent: u64) -> Vec<(u64, u64)> {
        match self.cut {
            Some(cut) if cut.place == place => {
                vec![(extent / cut.len.max(1), cut.stride), (cut.len, self.strides[place])]
            }
            Some(_) | None => vec![(extent, self.strides[place])],
        }
    }
}

/// The dimension of `part` that is a part of one of `whole`, by its place, where all others are the same.
pub fn part_of(space: &Space, whole: &TensorType, part: &TensorType) -> Option<(usize, Part)> {
    let mut others = whole.dims.iter().zip(&part.dims).enumerate().filter(|(_, (a, b))| a != b);
    let (place, (of, own)) = others.next()?;
    let taken = space.dims[*own].part.filter(|taken| taken.of == *of)?;
    (whole.dims.len() == part.dims.len() && others.next().is_none()).then_some((place, taken))
}

/// The type of a parcel's tensor on one side.
pub fn end(parcel: &Parcel, side: Side) -> &TensorType {
    match side {
        Side::Sent => &parcel.from,
        Side::Received => &parcel.to,
    }
}

/// The dimension that is cut into a block for each peer, and how many these are.
fn cut_dim(space: &Space, parcel: &Parcel, side: Side) -> Option<(DimId, u64)> {
    match (&parcel.op, side) {
        (Op::AllToAll { axis, split: dim, .. }, Side::Sent)
        | (Op::AllToAll { axis, concat: dim, .. }, Side::Received) => Some((*dim, space.mesh.size(*axis))),
        (Op::AllGather { axis, dim }, Side::Received) | (Op::ReduceScatter { axis, dim }, Side::Sent) => {
            Some((*dim, space.mesh.degree(axis)))
        }
        _ => None,
    }
}

/// Whether every rank has as much of a parcel, on both sides, and in boxes.
fn is_even(space: &Space, Parcel { op, from, to }: &Parcel) -> bool {
    let boxes = matches!(
        op,
        Op::AllToAll { .. } | Op::AllGather { .. } | Op::ReduceScatter { .. } | Op::AllReduce { .. }
    );
    let even = |ty: &TensorType| {
        ty.layout.moved.is_empty()
            && space.deals_evenly(ty)
            && ty.dims.iter().all(|&d| space.dims[d].fetched.is_none())
    };
    boxes && even(from) && even(to) && from.layout.at == to.layout.at
}

/// Distances between neighbours along each dimension of a dense tensor.
pub fn row_major<T: Copy + From<u8> + Mul<Output = T>>(shape: &[T]) -> Vec<T> {
    let mut strides = vec![T::from(1); shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boxes::Region;
    use crate::dim::Dim;
    use crate::dtype::DType;
    use crate::mesh::{Mesh, Rank};
    use crate::message;

    fn space() -> (Space, [DimId; 4]) {
        let mut space = Space { mesh: Mesh::new([("dp", 2), ("u", 4)]), ..Space::default() };
        let dims =
            [("b", 4), ("s", 16), ("h", 8), ("d", 4)].map(|(n, size)| space.dims.push(Dim::new(n, size)));
        (space, dims)
    }

    fn ty(space: &Space, dims: &[DimId], split: &[(DimId, &str)]) -> TensorType {
        let mut ty = TensorType::new(DType::F32, dims.iter().copied());
        for (dim, axis) in split {
            let place = ty.position(*dim).unwrap();
            ty.layout.split[place].push(space.mesh.axis(axis).unwrap());
        }
        ty
    }

    /// The place of each element of a rank's part, from the blocks themselves.
    fn by_blocks(space: &Space, parcels: &[Parcel], side: Side, part: usize, rank: Rank) -> Vec<u64> {
        let whole = space.local_box(end(&parcels[part], side), rank);
        let mut places = vec![u64::MAX; usize::try_from(crate::boxes::elements(&whole)).unwrap()];
        let mut at = 0;
        for piece in message::wire(space, parcels, side, rank).blocks.iter().flatten() {
            for index in indices(&piece.region) {
                if piece.parcel == part {
                    let offset =
                        index.iter().zip(&whole).fold(0, |n, (i, r)| n * (r.end - r.start) + i - r.start);
                    places[usize::try_from(offset).unwrap()] = at;
                }
                at += 1;
            }
        }
        places
    }

    fn indices(region: &Region) -> Vec<Vec<u64>> {
        region.iter().fold(vec![vec![]], |all, r| {
            all.iter().flat_map(|i| r.clone().map(move |j| [i.as_slice(), &[j]].concat())).collect()
        })
    }

    fn by_strides(space: &Space, parcels: &[Parcel], side: Side, part: usize) -> Vec<u64> {
        let strided = Strided::of(space, parcels, side, part).unwrap();
        let shape = space.max_local_shape(end(&parcels[part], side));
        let region: Region = shape.iter().map(|&n| 0..n).collect();
        let place = |index: Vec<u64>| {
            let along = |(d, &i): (usize, &u64)| match strided.cut {
                Some(cut) if cut.place == d => i / cut.len * cut.stride + i % cut.len * strided.strides[d],
                _ => i * strided.strides[d],
            };
            strided.start + index.iter().enumerate().map(along).sum::<u64>()
        };
        indices(&region).into_iter().map(place).collect()
    }

    #[test]
    fn strides_are_where_the_blocks_are() {
        let (space, [b, s, h, d]) = space();
        let u = space.mesh.axis("u").unwrap();
        let outer = [(b, "dp"), (s, "u")];
        let dims = [b, s, h, d];
        let (rows, heads) = (ty(&space, &dims, &outer), ty(&space, &dims, &[(b, "dp"), (h, "u")]));
        let whole = ty(&space, &dims, &[(b, "dp")]);
        let narrow = (ty(&space, &[b, s, h], &outer), ty(&space, &[b, s, h], &[(b, "dp"), (h, "u")]));
        let there = Op::all_to_all(u, h, s);
        let back = Op::all_to_all(u, s, h);
        let parcel = |op: &Op, from: &TensorType, to: &TensorType| Parcel {
            op: op.clone(),
            from: from.clone(),
            to: to.clone(),
        };
        let mut partial = whole.clone();
        partial.layout.partial.push(u);
        let messages = [
            vec![parcel(&there, &rows, &heads)],
            vec![parcel(&back, &heads, &rows)],
            vec![
                parcel(&there, &rows, &heads),
                parcel(&there, &narrow.0, &narrow.1),
                parcel(&there, &rows, &heads),
            ],
            vec![parcel(&Op::AllGather { axis: u.into(), dim: s }, &rows, &whole); 2],
            vec![parcel(&Op::ReduceScatter { axis: u.into(), dim: h }, &partial, &heads); 2],
            vec![parcel(&Op::AllReduce { axis: u.into() }, &partial, &whole); 2],
        ];
        for (n, parcels) in messages.iter().enumerate() {
            for side in [Side::Sent, Side::Received] {
                for part in 0..parcels.len() {
                    let found = by_strides(&space, parcels, side, part);
                    for rank in space.mesh.iter_ranks() {
                        let expected = by_blocks(&space, parcels, side, part, rank);
                        assert_eq!(found, expected, "message {n}, {side:?}, part {part}, rank {rank:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_dense_has_no_cut() {
        let (space, [_, s, h, d]) = space();
        let u = space.mesh.axis("u").unwrap();
        let (rows, heads) = (ty(&space, &[s, h, d], &[(s, "u")]), ty(&space, &[s, h, d], &[(h, "u")]));
        let one = [Parcel { op: Op::all_to_all(u, h, s), from: rows, to: heads }];
        assert!(Strided::of(&space, &one, Side::Received, 0).unwrap().cut.is_none());
        assert!(Strided::of(&space, &one, Side::Sent, 0).unwrap().cut.is_some());
        let two = [one[0].clone(), one[0].clone()];
        let cut = Cut { place: 0, len: 4, stride: 64 };
        assert_eq!(
            Strided::of(&space, &two, Side::Received, 1).unwrap(),
            Strided { start: 32, strides: vec![8, 4, 1], cut: Some(cut) }
        );
    }

    #[test]
    fn uneven_parts_are_left_alone() {
        let (mut space, [b, s, h, d]) = space();
        let u = space.mesh.axis("u").unwrap();
        space.dims[s].uneven = true;
        let (rows, heads) = (ty(&space, &[b, s, h, d], &[(s, "u")]), ty(&space, &[b, s, h, d], &[(h, "u")]));
        let one = [Parcel { op: Op::all_to_all(u, h, s), from: rows, to: heads }];
        let found = |space: &Space| Strided::of(space, &one, Side::Sent, 0);
        assert!(found(&space).is_some(), "parts of one length");
        space.dims[s].size += 1;
        assert_eq!(found(&space), None);
    }
}
