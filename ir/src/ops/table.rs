//! The table of operations: what the text form, the reference page and the verifier share.

use std::ops::RangeInclusive;

/// Operations that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// Where values come from.
    Source,
    /// Products of matrices and look-ups.
    Linear,
    /// Element by element.
    Elementwise,
    /// Normalisation over a dimension.
    Norm,
    /// Attention and what surrounds it.
    Attention,
    /// Functions.
    Structure,
    /// Changes of layout: communication and slices.
    Layout,
}

/// A row of the table.
#[derive(Clone, Debug)]
pub struct OpInfo {
    /// The name in the text form.
    pub name: &'static str,
    /// The family.
    pub family: Family,
    /// How many operands it takes.
    pub operands: RangeInclusive<usize>,
    /// The dimensions of operands and result, as einsum would write them.
    pub signature: &'static str,
    /// Attributes with their meaning.
    pub attrs: &'static [(&'static str, &'static str)],
    /// One sentence.
    pub summary: &'static str,
}

const fn row(
    name: &'static str,
    family: Family,
    operands: RangeInclusive<usize>,
    signature: &'static str,
    attrs: &'static [(&'static str, &'static str)],
    summary: &'static str,
) -> OpInfo {
    OpInfo { name, family, operands, signature, attrs, summary }
}

const BINDING: &[(&str, &str)] = &[
    ("name", "the tensor's name in the file; `{layer}` stands for the layer"),
    ("stored", "its shape in the file; the shape of the type when left out"),
    ("view", "the shape as which it is seen, its elements in the same order; `stored` when left out"),
    ("window", "the range of each dimension of the view that is taken; all when left out"),
];
const NORM: &[(&str, &str)] =
    &[("over", "the dimension that is normalised"), ("eps", "added under the root")];
const MOVE: &[(&str, &str)] = &[("axis", "the mesh axis"), ("dim", "the dimension")];

/// Every operation.
pub const TABLE: &[OpInfo] = &[
    row("param", Family::Source, 0..=0, "-> any", BINDING, "a weight, read from the file of parameters"),
    row("input", Family::Source, 0..=0, "-> any", BINDING, "a model input, read from the file of inputs"),
    row("positions", Family::Source, 0..=0, "-> s", &[], "the position of each token; zero for padding"),
    row(
        "einsum",
        Family::Linear,
        2..=2,
        "x, y -> z",
        &[],
        "sum of products over the dimensions that the result lacks",
    ),
    row(
        "embed",
        Family::Linear,
        2..=2,
        "v m, b s -> b s m",
        &[("over", "the dimension of the table that is looked up")],
        "rows of a table, chosen by integers; a rank that lacks the row contributes zero",
    ),
    row("silu", Family::Elementwise, 1..=1, "x -> x", &[], "x · sigmoid(x)"),
    row("gelu", Family::Elementwise, 1..=1, "x -> x", &[], "x · Φ(x), by the error function"),
    row("gelu_tanh", Family::Elementwise, 1..=1, "x -> x", &[], "x · Φ(x), by the tanh approximation"),
    row("quick_gelu", Family::Elementwise, 1..=1, "x -> x", &[], "x · sigmoid(1.702 x)"),
    row("relu", Family::Elementwise, 1..=1, "x -> x", &[], "max(x, 0)"),
    row("tanh", Family::Elementwise, 1..=1, "x -> x", &[], "hyperbolic tangent"),
    row("add", Family::Elementwise, 2..=2, "x, y -> x", &[], "x + y; y may lack dimensions of x"),
    row("sub", Family::Elementwise, 2..=2, "x, y -> x", &[], "x − y; y may lack dimensions of x"),
    row("mul", Family::Elementwise, 2..=2, "x, y -> x", &[], "x · y; y may lack dimensions of x"),
    row("scale", Family::Elementwise, 1..=1, "x -> x", &[("factor", "the constant")], "x times a constant"),
    row(
        "cast",
        Family::Elementwise,
        1..=1,
        "x -> x",
        &[("to", "the element type")],
        "conversion of the element type",
    ),
    row(
        "rms_norm",
        Family::Norm,
        2..=2,
        "x, m -> x",
        &[
            ("over", "the dimension that is normalised"),
            ("eps", "added under the root"),
            ("offset", "added to the weight; 0 when left out"),
        ],
        "x / sqrt(mean(x²) + eps) · (offset + weight)",
    ),
    row(
        "rms_scale",
        Family::Norm,
        3..=3,
        "b s h d, b s, h d -> b s h d",
        &[("over", "the dimensions over which the squares were summed"), ("eps", "added under the root")],
        "x / sqrt(squares / n + eps) · weight, n being the elements of `over`; the end of a norm over several dimensions",
    ),
    row(
        "layer_norm",
        Family::Norm,
        3..=3,
        "x, m, m -> x",
        NORM,
        "(x − mean) / sqrt(variance + eps) · weight + bias",
    ),
    row(
        "rotary",
        Family::Attention,
        2..=2,
        "b s h d, s -> b s h d",
        &[
            ("over", "the dimension whose pairs are rotated"),
            ("width", "elements that are rotated; those behind pass through"),
            ("theta", "base of the frequencies"),
            ("scaling", "none, linear(…), llama3(…) or yarn(…)"),
        ],
        "rotary position embedding; element i of the first half pairs with element i of the second",
    ),
    row(
        "attention",
        Family::Attention,
        3..=3,
        "b s h d, b t k d, b t k e -> b s h e",
        &[
            ("heads", "query heads"),
            ("kv_heads", "key/value heads; each serves a run of heads / kv_heads query heads"),
            ("queries", "the query sequence"),
            ("keys", "the key sequence"),
            ("width", "the width of a head, which the scores sum over"),
            ("mask", "which keys a query sees, by position: see [the masks](text.md#masks)"),
            ("scale", "factor of the scores"),
            ("softcap", "bound of the scaled scores, softcap · tanh(score / softcap); none when left out"),
        ],
        "scaled dot-product attention with grouped key/value heads",
    ),
    row(
        "repeat",
        Family::Attention,
        1..=1,
        "k -> kr",
        &[("from", "the dimension of the operand"), ("to", "the dimension that copies it")],
        "repeats each element of a dimension in a row, as key/value heads are replicated",
    ),
    row(
        "call",
        Family::Structure,
        0..=64,
        "any -> any",
        &[("callee", "the function"), ("layers", "runs once for each; 0..1 when left out")],
        "runs a function for each layer; results become the first arguments of the next layer",
    ),
    row(
        "reshard",
        Family::Layout,
        1..=1,
        "x -> x",
        &[],
        "a change of layout that is yet to become collectives",
    ),
    row(
        "all_to_all",
        Family::Layout,
        1..=1,
        "x -> x",
        &[("axis", "the mesh axis"), ("split", "becomes split"), ("concat", "becomes whole along the axis")],
        "splits one dimension and joins another",
    ),
    row("all_gather", Family::Layout, 1..=1, "x -> x", MOVE, "joins a dimension"),
    row(
        "slice",
        Family::Layout,
        1..=1,
        "x -> x",
        MOVE,
        "keeps this rank's part of a dimension; nothing is sent",
    ),
    row(
        "reduce_scatter",
        Family::Layout,
        1..=1,
        "x -> x",
        MOVE,
        "sums, and keeps this rank's part of a dimension",
    ),
    row(
        "all_reduce",
        Family::Layout,
        1..=1,
        "x -> x",
        &[("axis", "the mesh axis")],
        "sums; every rank has the result",
    ),
    row(
        "permute",
        Family::Layout,
        1..=1,
        "x -> x",
        &[],
        "moves whole blocks between ranks, to the layout of the result",
    ),
];
