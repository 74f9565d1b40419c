//! Bindings: from a stored tensor to a rank's part of a value.
//!
//! The stored tensor, in the shape of the binding's view, is cut to its window and read in row-major order as the dimensions of the type at their
//! stored sizes. A dimension that copies another repeats each stored element in a row; where a dimension has an order,
//! an index gets the element at its position; indices after the stored elements are padding and zero.

use ithaca_ir::boxes::Region;
use ithaca_ir::ops::{Binding, source, state};
use ithaca_ir::{DType, Space, TensorType};

use crate::error::RunError;
use crate::positions;
use crate::store::{StoreError, TensorSource};
use crate::tensor::{self, Tensor, extents, index, whole};

/// A source as the type's dimensions, at their stored sizes: window taken, nothing copied or padded yet.
///
/// # Errors
/// [`RunError::Store`] when the tensor is missing, cannot be read, has another shape than the binding says, or holds a
/// number that an `i32` cannot.
pub fn load(
    space: &Space,
    binding: &Binding,
    ty: &TensorType,
    layer: u64,
    from: &dyn TensorSource,
) -> Result<Tensor<f64>, RunError> {
    let found = binding.stored_shape(space, ty);
    let mut stored = if binding.is_stack() {
        let mut data = Vec::new();
        for name in binding.stored_names(layer, found.first().copied().unwrap_or(0)) {
            data.extend(read(from, name, &found[1..], ty.dtype)?.data);
        }
        Tensor::new(found.iter().map(|&n| index(n)).collect(), data)
    } else {
        read(from, binding.stored_name(layer), &found, ty.dtype)?
    };
    if !binding.window.is_empty() {
        let seen = if binding.view.is_empty() { &found } else { &binding.view };
        let data = tensor::read_part(&whole(seen), &stored.data, &binding.window);
        stored = Tensor::new(extents(&binding.window), data);
    }
    stored.shape = ty.dims.iter().map(|&d| index(source::stored_size(space, d))).collect();
    if stored.shape.iter().product::<usize>() != stored.data.len() {
        return Err(RunError::invalid(format!("`{}` is bound to a type of another size", binding.name)));
    }
    if binding.ahead > 0 {
        read_ahead(&mut stored, index(binding.ahead), binding.fill as f64);
    }
    Ok(stored)
}

/// Moves every element `by` places to the front of its row; the end is filled up.
fn read_ahead(stored: &mut Tensor<f64>, by: usize, fill: f64) {
    let Some(&row) = stored.shape.last() else { return };
    if row == 0 {
        return;
    }
    let by = by.min(row);
    for row in stored.data.chunks_mut(row) {
        row.rotate_left(by);
        let kept = row.len() - by;
        row[kept..].fill(fill);
    }
}

/// A state as [`load`] gives a weight. Where the source has no tensor of its name, a weight in full precision begins as the
/// weight, and any other state as zeros.
///
/// # Errors
/// As [`load`], but for a missing tensor.
pub fn load_state(
    space: &Space,
    binding: &Binding,
    ty: &TensorType,
    layer: u64,
    from: &dyn TensorSource,
) -> Result<Tensor<f64>, RunError> {
    match from.shape(&binding.stored_names(layer, 1)[0]) {
        Some(_) => load(space, binding, ty, layer, from),
        None if binding.name.starts_with(state::MASTER) => {
            let name = binding.name[state::MASTER.len()..].to_owned();
            load(space, &Binding { name, ..binding.clone() }, ty, layer, from)
        }
        None => {
            let shape = ty.dims.iter().map(|&d| index(source::stored_size(space, d))).collect();
            Ok(Tensor::filled(shape, 0.0))
        }
    }
}

/// The tensor `name`, which must have this shape, and whole numbers where the type is one of integers.
fn read(
    from: &dyn TensorSource,
    name: String,
    expected: &[u64],
    dtype: DType,
) -> Result<Tensor<f64>, RunError> {
    let found = from.shape(&name).ok_or_else(|| from.missing(&name))?;
    if found != expected {
        let expected = expected.to_vec();
        return Err(StoreError::Shape { store: from.description(), name, found, expected }.into());
    }
    let stored = from.read(&name)?;
    match stored.data.iter().find(|&&x| f64::from(x as i32) != x) {
        Some(&value) if dtype == DType::I32 => {
            Err(StoreError::NotAnInteger { store: from.description(), name, value }.into())
        }
        Some(_) | None => Ok(stored),
    }
}

/// The elements of a loaded source in `region`, copies made and padding filled with `binding.fill`.
pub fn cut<T: Copy>(
    space: &Space,
    ty: &TensorType,
    region: &Region,
    (binding, stored): (&Binding, &Tensor<f64>),
    mut convert: impl FnMut(f64) -> T,
) -> Tensor<T> {
    let along = |(&d, range): (_, &std::ops::Range<u64>)| positions::loaded_from(space, d, range.clone());
    let shape = extents(region);
    let mut data = Vec::with_capacity(shape.iter().product());
    positions::each_place(ty.dims.iter().zip(region).map(along).collect(), &stored.shape, |_, place| {
        data.push(convert(place.map_or(binding.fill as f64, |i| stored.data[i])));
    });
    Tensor::new(shape, data)
}

#[cfg(test)]
mod tests {
    use ithaca_ir::Dim;

    use super::*;
    use crate::store::Tensors;

    #[test]
    fn windows_copies_and_padding() {
        let mut space = Space::default();
        let h = space.dims.push(Dim { valid: 2, ..Dim::new("h", 3) });
        let g = space.dims.push(Dim { copies: Some(h), ..Dim::new("g", 6) });
        let d = space.dims.push(Dim::new("d", 2));
        let source: Tensors =
            [("w", Tensor::new(vec![6, 2], (0..12).map(f64::from).collect()))].into_iter().collect();
        let binding = Binding { stored: vec![6, 2], window: vec![2..4, 0..2], ..Binding::named("w") };
        let cut_all = |ty: &TensorType| {
            let stored = load(&space, &binding, ty, 0, &source).unwrap();
            cut(&space, ty, &whole(&space.shape(ty)), (&binding, &stored), |x| x)
        };
        let padded = cut_all(&TensorType::new(DType::F32, [h, d]));
        assert_eq!(padded, Tensor::new(vec![3, 2], vec![4.0, 5.0, 6.0, 7.0, 0.0, 0.0]));
        let copied = cut_all(&TensorType::new(DType::F32, [g, d]));
        assert_eq!(copied.data, [4.0, 5.0, 4.0, 5.0, 6.0, 7.0, 6.0, 7.0, 0.0, 0.0, 0.0, 0.0]);
        let ty = TensorType::new(DType::F32, [g, d]);
        let stored = load(&space, &binding, &ty, 0, &source).unwrap();
        assert_eq!(cut(&space, &ty, &vec![1..3, 1..2], (&binding, &stored), |x| x).data, [5.0, 7.0]);
    }

    #[test]
    fn labels_are_read_ahead_and_padding_counts_for_nothing() {
        let mut space = Space::default();
        let [b, s] = [Dim::new("b", 2), Dim { valid: 3, ..Dim::new("s", 4) }].map(|d| space.dims.push(d));
        let source: Tensors =
            [("labels", Tensor::new(vec![2, 3], (1..7).map(f64::from).collect()))].into_iter().collect();
        let binding = Binding { ahead: 1, fill: -100, ..Binding::named("labels") };
        let ty = TensorType::new(DType::I32, [b, s]);
        let stored = load(&space, &binding, &ty, 0, &source).unwrap();
        let labels = cut(&space, &ty, &whole(&space.shape(&ty)), (&binding, &stored), |x| x as i32).data;
        assert_eq!(labels, [2, 3, -100, -100, 5, 6, -100, -100]);
    }

    #[test]
    fn a_window_of_a_view_takes_rows_that_alternate() {
        let mut space = Space::default();
        let [h, d, m] = [("h", 2), ("d", 2), ("m", 1)].map(|(n, s)| space.dims.push(Dim::new(n, s)));
        // Rows of queries, keys and values of head 0, then of head 1.
        let source: Tensors =
            [("qkv", Tensor::new(vec![12, 1], (0..12).map(f64::from).collect()))].into_iter().collect();
        let ty = TensorType::new(DType::F32, [h, d, m]);
        for (part, expected) in
            [[0.0, 1.0, 6.0, 7.0], [2.0, 3.0, 8.0, 9.0], [4.0, 5.0, 10.0, 11.0]].iter().enumerate()
        {
            let part = part as u64;
            let binding = Binding {
                stored: vec![12, 1],
                view: vec![2, 3, 2, 1],
                window: vec![0..2, part..part + 1, 0..2, 0..1],
                ..Binding::named("qkv")
            };
            assert_eq!(load(&space, &binding, &ty, 0, &source).unwrap().data, expected);
        }
    }

    #[test]
    fn wrong_shapes_and_broken_integers_are_refused() {
        let mut space = Space::default();
        let s = space.dims.push(Dim::new("s", 2));
        let source: Tensors =
            [("ids", Tensor::new(vec![2], vec![1.0, 2.5])), ("x", Tensor::new(vec![3], vec![0.0; 3]))]
                .into_iter()
                .collect();
        let ty = TensorType::new(DType::I32, [s]);
        let error = |name: &str| load(&space, &Binding::named(name), &ty, 0, &source).unwrap_err();
        assert!(matches!(error("ids"), RunError::Store(StoreError::NotAnInteger { .. })));
        assert!(matches!(error("x"), RunError::Store(StoreError::Shape { .. })));
        assert!(matches!(error("y"), RunError::Store(StoreError::Missing { .. })));
    }
}
