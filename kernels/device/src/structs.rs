//! The structs that the kernels' headers declare, and that launches pass by value.
//!
//! [`layout_checks`] returns C++ assertions on the size of every struct, which each compilation of the kernels includes.

use std::fmt::Write as _;

use ithaca_ir::ops::{Binary, Unary};

use crate::argument::{ArgType, Argument, Pointer, Scalar, StructType, Word};

/// The most dimensions of a tensor that a kernel takes.
pub const MOST_DIMS: usize = 10;

/// The most ranks whose memory the kernel `sum_members` sums.
pub const MOST_MEMBERS: usize = 64;

/// Row-major indices of a shape, and the offset that each of `K` tensors has for each of them, in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Walk<const K: usize> {
    pub(crate) n: i64,
    pub(crate) extent: [i64; MOST_DIMS],
    pub(crate) stride: [[i64; MOST_DIMS]; K],
}

impl<const K: usize> Default for Walk<K> {
    fn default() -> Self {
        Self { n: 0, extent: [0; MOST_DIMS], stride: [[0; MOST_DIMS]; K] }
    }
}

impl Paged {
    /// No pages.
    pub(crate) fn none() -> Self {
        let nowhere = || Inverse { runs: Pointer::NONE, n: 0 };
        Self {
            table: Pointer::NONE,
            pages: nowhere(),
            slots: nowhere(),
            entries: 0,
            page_tokens: 1,
            n_slots: 0,
            first: 0,
            others_from: 0,
            others_to: 0,
        }
    }
}

impl HostPages {
    /// No pages are in host memory.
    pub(crate) fn none() -> Self {
        let pages = Paged::none();
        Self { pages, copy: Pointer::NONE, current: Pointer::NONE, start: Pointer::NONE }
    }
}

impl<const K: usize> Walk<K> {
    /// Elements.
    pub(crate) fn size(&self) -> i64 {
        self.extent.iter().take(usize::try_from(self.n).unwrap_or(0)).product()
    }

    const NAME: &'static str = match K {
        1 => "ithaca::Walk<1>",
        2 => "ithaca::Walk<2>",
        3 => "ithaca::Walk<3>",
        _ => "ithaca::Walk<4>",
    };
}

impl<const K: usize> Argument for Walk<K> {
    const TYPE: ArgType = ArgType::Struct(&StructType {
        name: Self::NAME,
        fields: &[
            ("n", <i64 as Argument>::TYPE),
            ("extent", <[i64; MOST_DIMS] as Argument>::TYPE),
            ("stride", <[[i64; MOST_DIMS]; K] as Argument>::TYPE),
        ],
    });

    fn words(&self, out: &mut Vec<Word>) {
        self.n.words(out);
        self.extent.words(out);
        self.stride.words(out);
    }
}

/// Declares structs: the C++ name, and the fields in their order.
macro_rules! structs {
    ($($(#[$doc:meta])* $name:ident $cpp:literal { $($(#[$of_field:meta])* $field:ident: $ty:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq)]
            pub(crate) struct $name {
                $($(#[$of_field])* pub(crate) $field: $ty,)*
            }

            impl Argument for $name {
                const TYPE: ArgType = ArgType::Struct(&StructType {
                    name: $cpp,
                    fields: &[$((stringify!($field), <$ty as Argument>::TYPE)),*],
                });

                fn words(&self, out: &mut Vec<Word>) {
                    $(self.$field.words(out);)*
                }
            }
        )*

        /// Every type that is declared here.
        const DECLARED: &[ArgType] = &[$(<$name as Argument>::TYPE),*];
    };
}

structs! {
    /// Operands with a storage type.
    Reals "ithaca::Reals" {
        data: Pointer,
        /// 0 to 3: f64, f32, f16, bf16.
        storage: i32,
    }

    /// Results with a storage type, numbered as for [`Reals`].
    Written "ithaca::kernel::Written" {
        data: Pointer,
        storage: i32,
    }

    /// Positions of tokens, three numbers for each run.
    Sequence "ithaca::kernel::Sequence" {
        runs: Pointer,
        n: i64,
    }

    /// Which token has a position, three numbers for each run.
    Inverse "ithaca::kernel::Inverse" {
        runs: Pointer,
        n: i64,
    }

    /// A cache and the rows of a step.
    Appended "ithaca::kernel::Appended" {
        start: Pointer,
        end: Pointer,
        sequences: Walk<1>,
        rows: Sequence,
        slots: Inverse,
        n_rows: i64,
        n_slots: i64,
        capacity: i64,
        wraps: bool,
    }

    /// Rows of a step, and the pages that they are written to.
    AppendedPages "ithaca::kernel::AppendedPages" {
        start: Pointer,
        end: Pointer,
        rows: Sequence,
        pages: Paged,
        n_rows: i64,
    }

    /// The rotation of keys and queries.
    Rotation "ithaca::kernel::Rotation" {
        frequencies: Pointer,
        extent: i64,
        width: i64,
        apart: i64,
        amplitude: f64,
        kv_heads: i64,
        heads: i64,
        each: i64,
    }

    /// The pages of a cache, and the table that says which page has which tokens.
    Paged "ithaca::kernel::Paged" {
        table: Pointer,
        pages: Inverse,
        slots: Inverse,
        entries: i64,
        page_tokens: i64,
        n_slots: i64,
        first: i64,
        others_from: i64,
        others_to: i64,
    }

    /// Pages in host memory, a copy of them of before a step, and where the step's tokens start.
    HostPages "ithaca::kernel::HostPages" {
        pages: Paged,
        copy: Pointer,
        current: Pointer,
        start: Pointer,
    }

    /// A band, within chunks or not, or a table of strips.
    Mask "ithaca::kernel::Mask" {
        left: i64,
        right: i64,
        chunk: i64,
        strips: Pointer,
    }

    /// A bias by relative position.
    Bias "ithaca::kernel::Bias" {
        bounds: Pointer,
        per_side: i64,
        both_sides: bool,
        table: Reals,
    }

    /// The dropout of weights.
    Dropout "ithaca::kernel::Dropout" {
        rate: f64,
        seed: u64,
        key: Pointer,
    }

    /// The offsets of the rows of a tensor `[front, tokens, heads, width]` begin.
    Rows "ithaca::kernel::Rows" {
        front: i64,
        token: i64,
        head: i64,
        token_run: i64,
        token_block: i64,
        head_run: i64,
        head_block: i64,
    }

    /// The parts of q, k and v that a rank holds, and how scores are computed.
    AttentionShape "ithaca::kernel::AttentionShape" {
        front: i64,
        queries: i64,
        heads: i64,
        keys: i64,
        kv_heads: i64,
        width: i64,
        value_width: i64,
        first_head: i64,
        first_kv_head: i64,
        group: i64,
        dropped_head: i64,
        sequences: Walk<1>,
        first_sequence: i64,
        query_positions: Sequence,
        key_positions: Sequence,
        starts: Pointer,
        ends: Pointer,
        valid_keys: i64,
        ring: i64,
        step: i64,
        mask: Mask,
        scale: f64,
        softcap: f64,
        bias: Bias,
        dropout: Dropout,
        q: Rows,
        k: Rows,
        v: Rows,
        o: Rows,
        d_o: Rows,
        dq: Rows,
        dk: Rows,
        dv: Rows,
    }

    /// The parts of an attention of few queries.
    Splitting "ithaca::kernel::Splitting" {
        parts: i64,
        row_blocks: i64,
        lanes: i32,
        is_wide: bool,
    }

    /// A product of the slots of experts with their weights.
    ExpertProducts "ithaca::kernel::ExpertProducts" {
        rows: i64,
        columns: i64,
        inner: i64,
        x_expert: i64,
        x_row: i64,
        y_expert: i64,
        y_step: i64,
        z_expert: i64,
        z_row: i64,
    }

    /// Operands of the backward pass of an attention, after q, k and v.
    Gradient "ithaca::kernel::Gradient" {
        d_o: Reals,
        lse: Reals,
        delta: Reals,
    }

    /// The dimensions of a tensor with the positions held of each.
    Places "ithaca::kernel::Places" {
        n: i32,
        extent: [i64; MOST_DIMS],
        stride: [i64; MOST_DIMS],
        positions: [Sequence; MOST_DIMS],
    }

    /// Parts of a tensor that follow each other on a wire.
    Pieces "ithaca::kernel::Pieces" {
        table: Pointer,
        n: i64,
    }

    /// The shape of a tensor whose dimension in the middle is cut into pieces.
    PiecesShape "ithaca::kernel::PiecesShape" {
        outer: i64,
        tokens: i64,
        inner: i64,
    }

    /// The routing of tokens to experts.
    Route "ithaca::kernel::Route" {
        experts: i64,
        top: i64,
        sigmoid: bool,
        shares: bool,
        scale: f64,
        groups: i64,
        kept: i64,
    }

    /// The rows of a table that a rank has, and the tokens that ask for them.
    Lookup "ithaca::kernel::Lookup" {
        ids: Pointer,
        n_tokens: i64,
        first_row: i64,
        n_rows: i64,
        padding: i64,
    }

    /// The groups of a rank's tokens.
    Groups "ithaca::kernel::Groups" {
        sequences: i64,
        tokens: i64,
        each_sequences: i64,
        each_tokens: i64,
    }

    /// The destinations of a rank's tokens.
    Slots "ithaca::kernel::Slots" {
        places: Pointer,
        groups: Groups,
        top: i64,
        slots: i64,
        first: i64,
        held: i64,
        width: i64,
    }

    /// The places of the runs of members' blocks.
    MemberRuns "ithaca::kernel::MemberRuns" {
        runs: i64,
        adjacent: i64,
        again: i64,
        member: i64,
    }

    /// The rows that are padding.
    Padding "ithaca::kernel::Padding" {
        n: i32,
        positions: [Sequence; 2],
        valid: [i64; 2],
        step: [i64; 2],
        extent: [i64; 2],
    }

    /// Labels, and the label that is ignored.
    Labels "ithaca::kernel::Labels" {
        data: Pointer,
        ignore: i64,
        padding: Padding,
    }

    /// The part of it that a rank holds.
    Vocabulary "ithaca::kernel::Vocabulary" {
        first: i64,
        extent: i64,
        columns: i64,
        stride: i64,
    }

    /// Constants of the optimizer.
    AdamW "ithaca::kernel::AdamW" {
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
    }
}

/// The type of the argument of `sum_members`: the same block in the memory of several ranks.
pub const MEMBERS: ArgType = ArgType::Struct(&StructType {
    name: "ithaca::kernel::Members",
    fields: &[
        ("n", ArgType::Scalar(Scalar::I64)),
        ("from", ArgType::Array(MOST_MEMBERS, &ArgType::Scalar(Scalar::Pointer))),
    ],
});

/// Assertions in C++ that the kernels' structs and numbers are as large as declared here, and functions numbered alike.
pub fn layout_checks() -> String {
    let mut text = String::new();
    let mut check = |name: &str, bytes: usize| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "static_assert(sizeof({name}) == {bytes}, \"{name}\");");
    };
    let walks = [<Walk<1>>::TYPE, <Walk<2>>::TYPE, <Walk<3>>::TYPE, <Walk<4>>::TYPE, MEMBERS];
    for ty in walks.iter().chain(DECLARED) {
        if let ArgType::Struct(of) = ty {
            check(of.name, ty.bytes());
        }
    }
    let scalars = [
        ("bool", Scalar::Bool),
        ("int", Scalar::I32),
        ("int64_t", Scalar::I64),
        ("uint64_t", Scalar::U64),
        ("double", Scalar::F64),
        ("const void*", Scalar::Pointer),
    ];
    scalars.iter().for_each(|(name, scalar)| check(name, scalar.bytes()));
    // Launches pass functions by number.
    let functions = Unary::ALL.map(|f| (format!("Unary::{f:?}"), f as i32)).into_iter();
    for (function, number) in functions.chain(Binary::ALL.map(|f| (format!("Binary::{f:?}"), f as i32))) {
        let _ = writeln!(text, "static_assert(int(ithaca::kernel::{function}) == {number}, \"{function}\");");
    }
    text
}
