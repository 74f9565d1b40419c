//! The table of operations: what the text form, the reference page and the verifier share.

use std::ops::RangeInclusive;

use super::coalesced::MAX_COALESCED;
use super::parts::MAX_PARTS;

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
    /// Numbers drawn at random, and dropout.
    Random,
    /// Attention and what surrounds it.
    Attention,
    /// Mixtures of experts.
    Experts,
    /// What training adds: the loss, gradients, the optimizer.
    Training,
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
    (
        "name",
        "the tensor's name in the file; `{layer}` stands for the layer, `{expert}` for each index of the first dimension",
    ),
    ("stored", "its shape in the file; the shape of the type when left out"),
    ("view", "the shape as which it is seen, its elements in the same order; `stored` when left out"),
    ("window", "the range of each dimension of the view that is taken; all when left out"),
    ("ahead", "how many places further on the last dimension is read; 0 when left out"),
    ("fill", "what is read in padding and beyond the end; 0 when left out"),
];
const NORM: &[(&str, &str)] =
    &[("over", "the dimension that is normalised"), ("eps", "added under the root")];
const SOFTMAX: &[(&str, &str)] = &[("over", "the dimension that is summed over")];
const SEED: &[(&str, &str)] = &[("seed", "what the key is made of")];
const RATE: (&str, &str) = ("rate", "the share of elements that are dropped");
const ASSIGN: &[(&str, &str)] = &[
    ("target", "what is written: param, a weight, or state"),
    BINDING[0],
    BINDING[1],
    BINDING[2],
    BINDING[3],
    BINDING[4],
    BINDING[5],
];
const EMBED: &[(&str, &str)] = &[
    ("over", "the dimension of the table that is looked up"),
    ("padding", "the row of padding tokens, through which no gradient flows; none when left out"),
];
const LABELS: &[(&str, &str)] = &[LOSS[1]];
const LOSS: &[(&str, &str)] = &[("over", "the vocabulary"), ("ignore", "the label that counts for nothing")];
const MOVE: &[(&str, &str)] = &[("axis", "the mesh axis"), ("dim", "the dimension")];

const ROUTE: &[(&str, &str)] = &[
    ("over", "the experts to choose from, the last dimension of the logits"),
    ("top", "how many are chosen, the last dimension of the result"),
    ("scoring", "softmax over all experts, or sigmoid of each"),
    ("gates", "scores of the chosen, or shares: divided by their sum"),
    ("scale", "factor of the gates; 1 when left out"),
    ("groups", "best(KEPT, COUNT): experts are in COUNT groups, and only the KEPT best are chosen from"),
];
const SLOTS: &[(&str, &str)] = &[
    ("experts", "the dimension of the experts that slots have"),
    ("top", "the last dimension of the choices"),
    (
        "capacity",
        "dealt(sequence=…, groups=…, slots=…): tokens of a group share slots, dealt in order of position; a slot for \
         every token when left out",
    ),
];

const ATTENTION: &[(&str, &str)] = &[
    ("heads", "query heads"),
    ("kv_heads", "key/value heads; each serves a run of heads / kv_heads query heads"),
    ("queries", "the query sequence"),
    ("keys", "the key sequence, or what is fetched of it"),
    ("width", "the width of a head, which the scores sum over"),
    ("mask", "which keys a query sees, by position: see [the masks](text.md#masks)"),
    ("scale", "factor of the scores"),
    ("softcap", "bound of the scaled scores, softcap · tanh(score / softcap); none when left out"),
    ("bias", "relative(buckets=…, max_distance=…, sides=both|before): a bias learned by relative position"),
    ("dropout", "uniform(rate=…, seed=…, keyed=position|stream); none when left out"),
    ("returns", "output; with_lse: also lse in f32; part: both in f32, of the keys that the rank holds"),
    ("parts", "the dimension that tells apart the results of ranks with the same queries and other keys"),
    ("movement", "how keys and queries visit each other; in sharded programs only"),
];
const SCORES: &[(&str, &str)] = &[
    ("heads", "query heads"),
    ("kv_heads", "key/value heads"),
    ("queries", "the query sequence"),
    ("keys", "the key sequence"),
    ("width", "the width of a head"),
    ("mask", "which keys a query sees, by position"),
    ("scale", "factor of the scores"),
    ("softcap", "bound of the scaled scores"),
    ("columns", "the dimension of the keys that a rank holds, as columns"),
];

/// Every operation.
pub const TABLE: &[OpInfo] = &[
    row("param", Family::Source, 0..=0, "-> any", BINDING, "a weight, read from the file of parameters"),
    row("input", Family::Source, 0..=0, "-> any", BINDING, "a model input, read from the file of inputs"),
    row(
        "state",
        Family::Source,
        0..=0,
        "-> any",
        BINDING,
        "what a step left under a name for the next one; zero before the first",
    ),
    row("assign", Family::Source, 1..=1, "any ->", ASSIGN, "writes a weight or a state; later reads see it"),
    row("fill", Family::Source, 0..=0, "-> any", &[("value", "the number")], "a tensor of one number"),
    row("positions", Family::Source, 0..=0, "-> s", &[], "the position of each token; zero for padding"),
    row(
        "einsum",
        Family::Linear,
        2..=2,
        "x, y -> z",
        &[],
        "sum of products over the dimensions that the result lacks",
    ),
    row("sum", Family::Linear, 1..=1, "x -> y", &[], "sum over the dimensions that the result lacks"),
    row(
        "expand",
        Family::Linear,
        1..=1,
        "y -> x",
        &[],
        "the same elements along dimensions that the operand lacks",
    ),
    row(
        "embed",
        Family::Linear,
        2..=2,
        "v m, b s -> b s m",
        EMBED,
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
    row("div", Family::Elementwise, 2..=2, "x, y -> x", &[], "x / y; y may lack dimensions of x"),
    row(
        "log_add_exp",
        Family::Elementwise,
        2..=2,
        "x, y -> x",
        &[],
        "log(exp(x) + exp(y)); −∞ where both are",
    ),
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
    row("softmax", Family::Norm, 1..=1, "x -> x", SOFTMAX, "exp(x) / Σ exp(x) over a dimension"),
    row(
        "key",
        Family::Random,
        0..=0,
        "->",
        SEED,
        "where keys begin; a training step folds its number into it",
    ),
    row(
        "fold_in",
        Family::Random,
        2..=2,
        "key, number -> key",
        &[],
        "another key for each whole number, which is i32 or real",
    ),
    row("layer_key", Family::Random, 1..=1, "key -> key", &[], "the key of the layer that runs"),
    row(
        "dropout_mask",
        Family::Random,
        1..=1,
        "key -> any",
        &[RATE, ("seed", "what tells the mask from others that are drawn from the key")],
        "one where an element is kept, drawn by its position along each dimension; one byte for each element",
    ),
    row(
        "dropout",
        Family::Random,
        2..=2,
        "x, x -> x",
        &[RATE],
        "x where the mask is one, divided by the share that is kept, else zero",
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
            (
                "pairs",
                "neighbours: elements 2i and 2i + 1; halves when left out: i of the first and i of the second",
            ),
            ("turn", "back: by the opposite angle, the adjoint; forth when left out"),
        ],
        "rotary position embedding",
    ),
    row(
        "attention",
        Family::Attention,
        3..=5,
        "b s h d, b t k d, b t k e, (r h), (key) -> b s h e, (b s h)",
        ATTENTION,
        "scaled dot-product attention with grouped key/value heads; behind q, k and v the bias, and the key that dropout draws from",
    ),
    row(
        "attention_backward",
        Family::Attention,
        6..=8,
        "b s h d, b t k d, b t k e, b s h e, b s h, b s h, (r h), (key) -> b s h d, b t k d, b t k e, (r h)",
        ATTENTION,
        "gradients for q, k, v and the bias (in f32) from q, k, v, d_o, lse, delta = Σ d_o · o, the bias and the key",
    ),
    row(
        "merge",
        Family::Attention,
        4..=4,
        "b s h e, b s h, b s h e, b s h -> b s h e, b s h",
        &[],
        "o and lse of two sets of keys become those of their union (online softmax)",
    ),
    row(
        "merge_parts",
        Family::Attention,
        2..=2,
        "p b s h e, p b s h -> b s h e, b s h",
        &[("over", "the dimension of parts, the first")],
        "o and lse of many sets of keys become those of their union",
    ),
    row(
        "accumulate",
        Family::Attention,
        2..=2,
        "x, x -> x",
        &[],
        "x + y; a rank that holds nothing of y adds nothing",
    ),
    row(
        "sink",
        Family::Attention,
        3..=3,
        "b s h e, b s h, h -> b s h e, b s h",
        &[],
        "a learned logit for each head enters the denominator of the softmax, once",
    ),
    row(
        "scores",
        Family::Attention,
        2..=2,
        "b s h d, b t k d -> b s h c",
        SCORES,
        "scaled, capped and masked scores of the keys that a rank holds; masked ones are −∞",
    ),
    row(
        "row_lse",
        Family::Attention,
        1..=1,
        "b s h c -> (p) b s h",
        &[
            ("over", "the dimension of columns"),
            ("parts", "the dimension that tells apart the results of ranks that hold parts of `over`"),
        ],
        "logarithm of the sum of exponentials over a dimension",
    ),
    row(
        "weigh",
        Family::Attention,
        3..=3,
        "b s h c, b s h, b t k e -> b s h e",
        SCORES,
        "Σ exp(scores − lse) · v over the keys that a rank holds",
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
        "sum_copies",
        Family::Attention,
        1..=1,
        "kr -> k",
        &[("from", "the dimension of the operand, one that copies"), ("to", "the dimension of the result")],
        "the adjoint of repeat: sums the copies of each element",
    ),
    row(
        "route",
        Family::Experts,
        1..=2,
        "b s r, (r) -> b s n, b s n",
        ROUTE,
        "the experts of each token, the best first, and their weights; a bias takes part in the choice only",
    ),
    row(
        "route_backward",
        Family::Experts,
        3..=3,
        "b s r, b s n, b s n -> b s r",
        ROUTE,
        "the gradient of the logits, from logits, choices and the gradient of the gates",
    ),
    row(
        "dispatch",
        Family::Experts,
        2..=3,
        "b s n, b s m, (b s n) -> e b s m",
        SLOTS,
        "every token in its slots at the experts of its choice, times its gates; zero where no token is",
    ),
    row(
        "combine",
        Family::Experts,
        2..=3,
        "b s n, e b s m, (b s n) -> b s m",
        SLOTS,
        "every token sums its slots, times its gates; a rank sums the experts that it holds",
    ),
    row(
        "slot_products",
        Family::Experts,
        3..=3,
        "b s n, e b s m, b s m -> b s n",
        SLOTS,
        "the product of a token with each of its slots, the gradient of a gate",
    ),
    row(
        "concat",
        Family::Elementwise,
        2..=2,
        "x a, x b -> x c",
        &[("over", "the last dimension of the result")],
        "x and behind it y along the last dimension; y may lack dimensions of x",
    ),
    row(
        "cut",
        Family::Elementwise,
        1..=1,
        "x c -> x a",
        &[("to", "the last dimension of the result"), ("start", "the first element that is taken")],
        "a window of the last dimension",
    ),
    row(
        "unary_backward",
        Family::Training,
        2..=2,
        "x, dy -> dx",
        &[("of", "the function of one element")],
        "dy · f'(x)",
    ),
    row(
        "embed_backward",
        Family::Training,
        2..=2,
        "b s, b s m -> v m",
        EMBED,
        "each row sums the gradients of the tokens that looked it up",
    ),
    row(
        "rms_norm_backward",
        Family::Training,
        3..=3,
        "x, m, x -> x, m",
        &[
            ("over", "the dimension that is normalised"),
            ("eps", "added under the root"),
            ("offset", "added to the weight; 0 when left out"),
        ],
        "gradients of rms_norm for x and the weight",
    ),
    row(
        "rms_scale_backward",
        Family::Training,
        4..=4,
        "b s h d, b s, h d, b s h d -> b s h d, b s, h d",
        &[("over", "the dimensions over which the squares were summed"), ("eps", "added under the root")],
        "gradients of rms_scale for x, the squares and the weight",
    ),
    row(
        "layer_norm_backward",
        Family::Training,
        3..=3,
        "x, m, x -> x, m, m",
        NORM,
        "gradients of layer_norm for x, the weight and the bias",
    ),
    row(
        "softmax_backward",
        Family::Training,
        2..=2,
        "x, x -> x",
        SOFTMAX,
        "y · (dy − Σ y · dy), from the result y of a softmax and its gradient",
    ),
    row(
        "sink_backward",
        Family::Training,
        4..=4,
        "b s h e, b s h e, b s h, b s h -> b s h e, b s h, h",
        &[],
        "gradients of sink for o, lse and the logits, from its result o, d_o, lse before and after",
    ),
    row(
        "cross_entropy",
        Family::Training,
        2..=2,
        "b s v, b s -> b s, b s",
        LOSS,
        "negative log-likelihood of each label, zero where it is ignored, and the lse of the logits",
    ),
    row(
        "cross_entropy_backward",
        Family::Training,
        4..=4,
        "b s v, b s, b s, b s -> b s v",
        LOSS,
        "(exp(logit − lse) − [v = label]) · d_nll, from logits, labels, lse and d_nll; zero at ignored labels",
    ),
    row(
        "pick",
        Family::Training,
        2..=2,
        "b s v, b s -> b s",
        LOSS,
        "the logit of each label, zero where it is ignored; a rank that lacks it contributes zero",
    ),
    row(
        "valid",
        Family::Training,
        1..=1,
        "b s -> b s",
        LABELS,
        "1 for labels that count, 0 for those that are ignored",
    ),
    row(
        "adamw",
        Family::Training,
        6..=6,
        "w, w, w, w, scalar, scalar -> w, w, w",
        &[
            ("lr", "learning rate"),
            ("beta1", "decay of the first moment"),
            ("beta2", "decay of the second moment"),
            ("eps", "added to the root of the second moment"),
            ("weight_decay", "a step multiplies weights by 1 − lr · weight_decay"),
        ],
        "one step of AdamW: weights and moments from w, g, m, v, the count of steps from 1, and the factor of the gradient",
    ),
    row(
        "clip_factor",
        Family::Training,
        1..=1,
        "scalar -> scalar",
        &[("max_norm", "the largest norm that is left as it is")],
        "min(1, max_norm / (sqrt(squares) + 1e-6))",
    ),
    row(
        "take",
        Family::Attention,
        1..=1,
        "h -> hp",
        &[("to", "the dimension of the result, declared to be a part of a dimension of x")],
        "one of several equal parts of a dimension, of what each rank holds",
    ),
    row(
        "join",
        Family::Attention,
        1..=MAX_PARTS,
        "hp, … -> h",
        &[("to", "the dimension of the result, of which the operands have the parts")],
        "the parts of a dimension, in order, become the dimension again",
    ),
    row(
        "call",
        Family::Structure,
        0..=64,
        "any -> any",
        &[
            ("callee", "the function"),
            ("layers", "runs once for each; 0..1 when left out"),
            ("stride", "how much further the layers are for each layer of the caller; 0 when left out"),
            ("over", "the dimension of layers, along which what layers keep of their own is stacked"),
            ("carried", "how many results are handed on to the next layer, with `over`"),
            ("order", "ascending, or descending: the last layer first"),
        ],
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
    row(
        "fetch",
        Family::Layout,
        1..=1,
        "x -> x",
        &[("to", "the dimension of the result, one that is fetched from a dimension of x")],
        "brings every rank the tokens that it needs",
    ),
    row(
        "fetch_sum",
        Family::Layout,
        1..=1,
        "x -> x",
        &[("from", "the dimension of x, one that is fetched")],
        "the adjoint of fetch: what was computed for fetched tokens goes home and is summed",
    ),
    row(
        "coalesced",
        Family::Layout,
        2..=MAX_COALESCED,
        "x, y, … -> x, y, …",
        &[("ops", "the collectives, as `[all_to_all(axis=u, split=h, concat=s), …]`, one for each operand")],
        "several collectives of one kind, between the same ranks and of one element type, as one message",
    ),
];
