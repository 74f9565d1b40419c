//! Caches of keys and values, and the tokens that are generated with them.

use crate::dim::DimId;
use crate::ops::declare::{attributes, ops};
use crate::ops::table::rotary::Rotary;

ops! {
    /// Operations of a step that continues sequences. `start` is the number of tokens of each sequence before the step, `end`
    /// the number after it; the new tokens of a sequence are the first `end − start` of the step's.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Cache {
        family Cache {
            /// The number of tokens after a step, from the number before it and the number of new ones.
            Advance = "advance", "b, b -> b", Compute, Vector, Zero;
            /// The position of each token of a step, from `start` and `end`; zero behind the new ones.
            TokenPositions {
                /// The tokens of the step.
                rows: DimId,
            } = "token_positions", "b, b -> b t", Compute, Vector, Zero;
            /// The cache with the new rows of x at their positions, from cache, x, `start` and `end`. No row is written behind the
            /// end of the cache. Rows are converted to the element type of the cache. One of eight bits has a scale for each row:
            /// the last operand and result, `f32` without the last dimension; a row is divided by its scale, the largest
            /// magnitude in it over 448.
            Append {
                /// The tokens of the cache.
                over: DimId,
                /// The tokens of the step.
                rows: DimId,
                /// The cache is a ring of the last tokens: the token at a position is written at the position modulo the tokens of
                /// the cache.
                wraps: bool = false,
            } = "append", "b c k d, b t k d, b, b, (b c k) -> b c k d, (b c k)", Compute, Vector, Zero;
            /// `append` to a cache in pages, from the cache, x, `start`, `end` and a table: entry n of a sequence is the page that has
            /// its tokens from n times the slots of a page on. No row is written where the table has no page, −1. Where pages are
            /// in two memories, the table numbers those of the host after those of the device, and rows of the others are left out.
            AppendPages {
                /// The pages of all sequences.
                pages: DimId,
                /// The slots of a page.
                slots: DimId,
                /// The tokens of the step.
                rows: DimId,
                /// The pages in host memory, which the table numbers after these.
                beyond: Option<DimId> = None,
                /// The pages on the device, which the table numbers before these, which are in host memory.
                after: Option<DimId> = None,
            } = "append_pages", "p s k d, b t k d, b, b, b n, (p s k) -> p s k d, (p s k)", Compute, Vector, Zero;
            /// The tokens of each sequence from its pages, by a table; zero where it has none. Of pages in host memory the third
            /// operand is what `upload` copied before the step, and the fourth the pages themselves, which have the tokens from
            /// `start` on, the fifth.
            GatherPages {
                /// The pages of all sequences.
                pages: DimId,
                /// The slots of a page.
                slots: DimId,
                /// The tokens of a sequence: its entries times the slots of a page.
                over: DimId,
                /// The pages in host memory, which the table numbers after the others.
                beyond: Option<DimId> = None,
            } = "gather_pages", "p s k d, b n, (q s k d), (q s k d), (b) -> b c k d", Compute, Vector, Zero;
            /// A copy on the device of a state in host memory. It is made on the stream `host`, beside kernels.
            Upload = "upload", "x -> x", Compute, Vector, Zero;
            /// The row of each sequence's last new token, from x, `start` and `end`; zero without one. A rank that lacks the row
            /// contributes zero.
            LastToken {
                /// The tokens of the step.
                over: DimId,
            } = "last_token", "b t m, b, b -> b m", Compute, Vector, Zero;
            /// The place of the largest element, the first of equal ones, and the element. With a second operand the result is
            /// that operand's element at the place.
            Argmax {
                /// The dimension that is searched.
                over: DimId,
                /// The dimension that distinguishes the results of ranks that hold parts of `over`; the first of the results.
                parts: Option<DimId> = None,
            } = "argmax", "b v, (b v) -> (p) b, (p) b", Compute, Vector, Operands(1);
            /// The second operand where the first is positive, else the third; integers.
            Choose = "choose", "b, b, b -> b", Compute, Vector, Zero;
        }
    }
}

attributes! {
    /// Attributes of `rotate_append`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct RotateAppend {
        /// The rotation of keys, and of queries if they are operands.
        pub rotary: Rotary,
        /// The tokens of the caches, or the slots of a page.
        pub slots: DimId,
        /// The tokens of the step.
        pub rows: DimId,
        /// The caches are rings, as of `append`.
        pub wraps: bool = false,
        /// The pages of all sequences; the operand after the lengths is their table.
        pub pages: Option<DimId> = None,
        /// The last operand are queries, and the last result these, rotated.
        pub queries: bool = false,
    }
}
