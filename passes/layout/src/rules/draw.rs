//! Random spaces, types and attributes for checking a rule. A seed determines everything.

use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::{Axis, AxisId};
use ithaca_ir::ops::Attr;
use ithaca_ir::{DType, Dim, DimId, Fetched, Layout, Mesh, Order, Part, Space, TensorType};

use super::sizes::Focus;
use super::syntax::{Rule, Term};

/// Random numbers: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let number = usize::try_from((z ^ (z >> 31)) >> 33).expect("31 bits fit");
        number % n.max(1)
    }

    /// True with probability 1/`n`.
    pub(super) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(super) fn one_of<T: Clone>(&mut self, items: &[T]) -> Option<T> {
        (!items.is_empty()).then(|| items[self.below(items.len())].clone())
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// A space, and the random choices made in it.
#[derive(Debug)]
pub(super) struct Draw {
    pub(super) rng: Rng,
    pub(super) space: Space,
    /// The kinds of layouts to draw.
    layouts: Layouts,
    /// The size to test, if any.
    focus: Option<Focus>,
    made: usize,
}

/// The layouts in which a rule is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layouts {
    /// Dimensions split over axes.
    Split,
    /// Pending sums as well.
    Pending,
    /// Moved parts as well.
    Moved,
}

impl Draw {
    /// A random space for a rule: some dimensions, and a mesh of up to 8 ranks if the rule needs one. With `focus` one
    /// dimension has the stated size, and the others are small.
    pub(super) fn new(rule: &Rule, seed: u64, focus: Option<Focus>) -> Self {
        let mut draw = Self {
            rng: Rng::new(seed),
            space: Space::default(),
            layouts: match rule {
                _ if rule.mentions(&["permute", "merge", "accumulate"]) => Layouts::Moved,
                _ if rule.changes_layouts() => Layouts::Pending,
                _ => Layouts::Split,
            },
            focus,
            made: 0,
        };
        let (dims, axes) = literals(rule);
        let needed = rule.changes_layouts() || !axes.is_empty();
        // A large program on many ranks takes too long, and few layouts fit its size.
        if needed || draw.focus.as_ref().is_none_or(|focus| focus.size <= 32) {
            draw.mesh(&axes, rule.changes_layouts());
        } else {
            draw.space.mesh = Mesh::single();
        }
        draw.dims(rule, &dims);
        draw
    }

    fn mesh(&mut self, named: &[String], needed: bool) {
        let mut names: Vec<String> = named.to_vec();
        let more = match (needed || !named.is_empty(), self.rng.below(4)) {
            (false, 0 | 1) => 0,
            (true, 0..3) | (false, 2) => 1,
            (true | false, _) => 2,
        };
        let spare = ["ring", "ulysses", "tp"].iter().filter(|n| !named.iter().any(|m| m == *n)).copied();
        names.extend(spare.take(more).map(str::to_owned));
        let mut ranks = 1;
        for name in names {
            let sizes: Vec<u64> = [2, 2, 3, 4, 8, 1].into_iter().filter(|n| ranks * n <= 8).collect();
            let size = self.rng.one_of(&sizes).unwrap_or(1);
            ranks *= size;
            self.space.mesh.axes.push(Axis { name, size });
        }
        if self.space.mesh.ranks() == 1 && named.is_empty() && !needed {
            self.space.mesh = Mesh::single();
        }
    }

    fn dims(&mut self, rule: &Rule, named: &[String]) {
        let names = ["b", "s", "h", "d", "m", "f"].map(str::to_owned);
        let names = names.iter().filter(|n| !named.contains(n)).chain(named);
        let names: Vec<String> = names.cloned().collect();
        let focus = self.focus.clone().map(|focus| (self.rng.below(names.len()), focus.size));
        for (i, name) in names.into_iter().enumerate() {
            let size = match focus {
                None => self.rng.one_of(&[2, 3, 4, 4, 6, 8, 8, 12]).unwrap_or(4),
                Some((at, size)) if at == i => size,
                Some((_, size)) => self.rng.one_of(&[1, 2, 2, 3, size.min(16)]).unwrap_or(2),
            };
            let uneven = self.rng.once_in(5);
            let orders = [Order::Zigzag { parts: 2 }, Order::Striped { parts: 2, block: 1 }];
            let order = match self.rng.once_in(6).then(|| self.rng.one_of(&orders)).flatten() {
                Some(order) if order.check(size).is_ok() => order,
                _ => Order::Contiguous,
            };
            self.space.dims.push(Dim { uneven, order, ..Dim::new(name, size) });
        }
        if rule.mentions(&["repeat", "sum_copies"]) {
            let of = self.rng.one_of(&self.space.dims.ids().collect::<Vec<_>>());
            let of = of.filter(|&d| self.space.dims[d].order == Order::Contiguous);
            let times = self.rng.one_of(&[2, 3]).unwrap_or(2);
            if let Some(of) = of {
                let Dim { size, uneven, .. } = self.space.dims[of];
                let granule = if uneven { times } else { 1 };
                let plain = Dim::new(self.free_name(), size * times);
                self.space.dims.push(Dim { copies: Some(of), granule, uneven, ..plain });
            }
        }
        if rule.mentions(&["take", "join"]) {
            self.parts();
        }
        if rule.mentions(&["fetch", "fetch_sum"]) {
            self.fetched();
        }
    }

    /// A random dimension that fits.
    fn one_dim(&mut self, fits: impl Fn(&Dim) -> bool) -> Option<DimId> {
        let candidates = self.space.dims.iter().filter(|(_, dim)| fits(dim)).map(|(id, _)| id);
        self.rng.one_of(&candidates.collect::<Vec<_>>())
    }

    /// Declares both halves of a dimension, of a rank's shard along the first axis or of the whole.
    fn parts(&mut self) {
        let axis = self.space.mesh.axes.ids().next().filter(|_| self.rng.once_in(2));
        let runs = axis.map_or(1, |axis| self.space.mesh.size(axis));
        let fits = |dim: &Dim| {
            let plain = dim.order == Order::Contiguous && dim.copies.is_none() && dim.fetched.is_none();
            plain && dim.size.is_multiple_of(2 * runs * dim.granule)
        };
        let Some(of) = self.one_dim(fits) else { return };
        for index in 0..2 {
            let Dim { size, granule, .. } = self.space.dims[of];
            let plain = Dim::new(self.free_name(), size / 2);
            let part = Some(Part { of, index, count: 2, runs });
            self.space.dims.push(Dim { granule, part, ..plain });
        }
    }

    /// Declares a dimension fetched from another along the first axis: each rank's own tokens and some others.
    fn fetched(&mut self) {
        let Some(axis) = self.space.mesh.axes.ids().next() else { return };
        let n = self.space.mesh.size(axis);
        let fits = |dim: &Dim| n > 1 && dim.divides_evenly(n) && dim.copies.is_none();
        let Some(of) = self.one_dim(fits) else { return };
        let (size, each) = (self.space.size(of), self.space.size(of) / n);
        let mut parts = Vec::new();
        for i in 0..n {
            let before = self.rng.below(3) as u64;
            let needed = (i * each).saturating_sub(before)..((i + 1) * each).min(size);
            parts.push(Vec::from([needed]));
        }
        let total = parts.iter().flatten().map(|r| r.end - r.start).sum();
        let plain = Dim::new(self.free_name(), total);
        self.space.dims.push(Dim { fetched: Some(Fetched::new(of, parts)), ..plain });
    }

    /// A new dimension with one of `sizes`, or with a size to test.
    pub(super) fn sized_dim(&mut self, sizes: &[u64]) -> DimId {
        let focus = self.focus.clone().filter(|_| self.rng.once_in(2));
        match focus {
            None => self.fresh_dim(sizes),
            Some(focus) if self.rng.once_in(2) => self.fresh_dim(&[focus.size]),
            Some(focus) => self.fresh_dim(&focus.others),
        }
    }

    /// The largest size of a dimension to test.
    pub(super) fn largest(&self) -> u64 {
        self.focus.as_ref().map_or(0, |focus| focus.others.iter().fold(focus.size, |n, &m| n.max(m)))
    }

    /// A new dimension.
    pub(super) fn fresh_dim(&mut self, sizes: &[u64]) -> DimId {
        let size = self.rng.one_of(sizes).unwrap_or(4);
        let name = self.free_name();
        self.space.dims.push(Dim::new(name, size))
    }

    /// `x0`, `x1`, …, skipping names that the rule uses.
    fn free_name(&mut self) -> String {
        loop {
            let name = format!("x{}", self.made);
            self.made += 1;
            if self.space.dim(&name).is_none() {
                return name;
            }
        }
    }

    /// The type of the replaced value.
    pub(super) fn ty(&mut self) -> TensorType {
        let mut dims: Vec<DimId> = self.space.dims.ids().collect();
        self.rng.shuffle(&mut dims);
        dims.truncate(1 + self.rng.below(4));
        let types = [DType::F32, DType::F32, DType::F32, DType::BF16, DType::F64, DType::F16];
        let dtype =
            if self.rng.once_in(12) { DType::I32 } else { self.rng.one_of(&types).unwrap_or(DType::F32) };
        let ty = TensorType::new(dtype, dims);
        let pending = self.layouts != Layouts::Split && dtype.is_float();
        let layout = self.layout(&ty, pending);
        let mut ty = ty.with_layout(layout);
        let splits: Vec<AxisId> = ty.layout.split.iter().flatten().copied().collect();
        if self.layouts == Layouts::Moved && ty.layout.partial.is_empty() && self.rng.once_in(3) {
            ty.layout = self.moved(&ty.layout, &splits);
        }
        ty
    }

    /// The layout with the parts along one of `axes` moved by some ranks.
    pub(super) fn moved(&mut self, layout: &Layout, axes: &[AxisId]) -> Layout {
        let Some(axis) = self.rng.one_of(axes) else { return layout.clone() };
        let n = self.space.mesh.size(axis);
        let by = self.rng.below(usize::try_from(n).unwrap_or(1)) as u64;
        layout.clone().moved(axis, by, n, None)
    }

    /// A random layout; with `pending` it may have pending sums.
    pub(super) fn layout(&mut self, ty: &TensorType, pending: bool) -> Layout {
        let mut layout = Layout::whole(ty.dims.len());
        let mut axes: Vec<AxisId> = self.space.mesh.axes.ids().collect();
        self.rng.shuffle(&mut axes);
        for axis in axes {
            match self.rng.below(6) {
                0 => {}
                1 if pending => layout = layout.with_partial(axis),
                _ if ty.dims.is_empty() => {}
                _ => {
                    let i = self.rng.below(ty.dims.len());
                    let mut split: AxisList = layout.split[i].clone();
                    split.push(axis);
                    if self.space.can_split(ty.dims[i], &split) {
                        layout.split[i] = split;
                    }
                }
            }
        }
        layout
    }

    /// Axes that the layout does not use.
    pub(super) fn free_axes(&self, layout: &Layout) -> Vec<AxisId> {
        self.space.mesh.axes.ids().filter(|&a| !layout.axes().any(|b| a == b)).collect()
    }
}

/// The names of dimensions and the names of axes that occur in a rule.
fn literals(rule: &Rule) -> (Vec<String>, Vec<String>) {
    let (mut dims, mut axes) = (Vec::new(), Vec::new());
    for (app, _) in rule.apps() {
        let declared = app.info().map(|info| info.attrs()).unwrap_or_default();
        for (key, term) in &app.attrs {
            let names = match declared.iter().find(|attr| attr.name == key.text).map(|attr| attr.kind) {
                Some(kind) if kind.starts_with("an axis of the mesh") => &mut axes,
                Some("a dimension" | "a list of dimensions") => &mut dims,
                _ => continue,
            };
            for term in [term].into_iter().chain(term.parts()) {
                match term {
                    Term::Literal(Attr::Word(word)) if !names.contains(word) => names.push(word.clone()),
                    _ => {}
                }
            }
        }
    }
    dims.retain(|d| !axes.contains(d) && ithaca_ir::text::is_identifier(d));
    axes.truncate(3);
    (dims, axes)
}
