//! Every diagnostic code of this crate with its rule: the list that the reference page is generated from.

use std::fmt::Write;

/// A diagnostic code and the rule whose violation it reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// For example `V07`.
    pub code: &'static str,
    /// The rule, one sentence.
    pub rule: &'static str,
}

const fn code(code: &'static str, rule: &'static str) -> Code {
    Code { code, rule }
}

/// Codes of texts that cannot be read.
pub const PARSE: &[Code] = &[
    code("E01", "each token is one that the grammar allows in its place"),
    code("E02", "characters and strings are well formed"),
    code("E03", "numbers fit: whole ones in 64 bits, counts in 32, real ones are finite"),
    code("E04", "the file starts with a version and a level that are known"),
    code("E05", "every operation is declared"),
    code("E06", "every name is declared before it is used"),
    code("E07", "no name is defined twice"),
    code("E08", "an operation has the attributes of its declaration, each of the right kind"),
    code("E09", "attributes are not more than 64 in one place, nor nested deeper than 16 levels"),
    code("E10", "a text is shorter than 4 GiB"),
    code("E11", "a value that is written as a number has the number of its definition"),
];

/// Invariants of modules.
pub const MODULE: &[Code] = &[
    code("V01", "an operation has as many operands as its declaration says"),
    code(
        "V02",
        "values are numbered in order of definition and defined before use; `main` takes no parameters",
    ),
    code("V03", "the stated type of a result is the one that follows from operands and attributes"),
    code("V04", "element types fit the operation"),
    code("V05", "operands have the dimensions that the operation needs"),
    code("V06", "a type names each dimension once and has a split for each"),
    code("V07", "operands that share a dimension split it alike, and one axis splits one dimension"),
    code("V08", "a dimension that an operation needs whole is not split"),
    code(
        "V09",
        "a split deals whole granules evenly, or at least one to every rank where the dimension is uneven",
    ),
    code("V10", "a type uses each mesh axis once, as a split or as a pending sum"),
    code(
        "V11",
        "only changes of layout, calls, `accumulate` and `join` see pending sums, and neither sources nor outputs of `main` have any",
    ),
    code("V12", "no `reshard` is left in a per-rank program"),
    code("V13", "on the program level there is no mesh, no layout and no change of layout"),
    code(
        "V14",
        "arguments of a call have the types of the parameters; the type of a value that layers carry stays the same",
    ),
    code("V15", "functions have different names, a callee comes before its callers, and `main` is the last"),
    code("V16", "a collective finds its axis where it needs it"),
    code("V17", "a binding has a name, and takes as many stored elements as its type has"),
    code("V18", "a call runs over 1 to 65536 layers, and no function runs more than 2^40 times"),
    code("V19", "outputs of `main` have different names, those of other functions have none"),
    code("V20", "query heads are a multiple of key/value heads"),
    code("V21", "query heads split by whole groups that share a key/value head"),
    code(
        "V22",
        "dimensions have different names, sizes from 1 to 2^40, and granules, padding, copies and parts that fit",
    ),
    code("V23", "mesh axes have different names, sizes from 1, and at most 2^20 ranks in all"),
    code("V24", "no tensor has more than 2^62 bytes, and no attribute is infinite or not a number"),
    code(
        "V25",
        "a mask fits its sequences: lengths and tables are those of its queries and keys, bounds of documents ascend from 0, and `causal` between different lengths states its alignment",
    ),
    code("V26", "a rank has fetched every key that its queries see"),
    code(
        "V27",
        "a token order is a permutation of the dimension, and fetched elements are elements of its sequence",
    ),
    code(
        "V28",
        "parts move along axes that split a dimension, by less than a round, and no pending sum does",
    ),
    code("V29", "attention has a movement in sharded programs only"),
    code(
        "V30",
        "bindings of one stored tensor that is assigned are equal, or are windows of one shape that do not meet, and are all of weights or all of states",
    ),
    code("V31", "a weight or state that is assigned has one type wherever it is read or assigned"),
    code("V32", "where a gradient flows back, operations have adjoints"),
    code(
        "V33",
        "values of `main` alone are on some ranks only; what an operation or a call reads is where it runs; only `main` calls on stages",
    ),
    code(
        "V34",
        "collectives that are coalesced are of one kind, between the same ranks and of one element type, one for each operand; fetches are not coalesced",
    ),
];

/// Invariants of schedules.
pub const SCHEDULE: &[Code] = &[
    code(
        "S01",
        "frames, buffers and events that are referred to exist; names are different; `main` is the last frame",
    ),
    code("S02", "arguments and results of a frame are numbered without gaps, and each has one buffer"),
    code("S03", "the buffers of a task have the number and the content that its work needs"),
    code("S04", "offsets are multiples of 256, and buffers and frames of callees lie inside the frame"),
    code("S05", "an event is recorded once, and before it is waited for, in order of issue"),
    code("S06", "a buffer is read only after it was written, and before anything overwrites it"),
    code("S07", "tasks that touch the same bytes, one of them writing, are ordered by a stream or by events"),
    code("S08", "a task writes where it reads only if it works element by element"),
    code("S09", "a call passes each argument and takes each result, with the callee's types and bytes"),
    code("S10", "over several layers the buffer of result i, if it is carried, is that of argument i"),
    code("S11", "inputs and arguments are not written"),
    code("S12", "no collective is on the stream `compute`"),
    code("S13", "weights and states that are written are bound alike everywhere, as V30 and V31 say"),
    code(
        "S14",
        "blocks are packed, exchanged and unpacked for one collective, in wires that hold those of every rank; what is not packed is its blocks in a row, or lies in the wire, as one of its parts, where those who use it address it",
    ),
    code(
        "S15",
        "after a collective each rank holds the elements of its type, each once from every rank whose part is summed, and every send meets its receive",
    ),
    code("S16", "all ranks of a communicator come to the same collectives in the same order"),
    code("S17", "no rank waits for one that does not come, nor ranks for each other in a circle"),
    code("S18", "a schedule computes its program"),
    code(
        "S19",
        "on the stream `host` are copies from host memory, on `to_host` copies to it, and nothing else reads or writes states there but steps that append to caches",
    ),
];

/// The rule of `code`, if it is one of this crate's.
pub fn rule(code: &str) -> Option<&'static str> {
    SECTIONS.iter().flat_map(|(_, codes)| codes.iter()).find(|c| c.code == code).map(|c| c.rule)
}

/// The sections of this crate's codes, with their titles.
pub const SECTIONS: &[(&str, &[Code])] = &[
    ("Texts that cannot be read", PARSE),
    ("Invariants of modules", MODULE),
    ("Invariants of schedules", SCHEDULE),
];

/// The page `docs/book/src/diagnostics.md`, of these sections: a title and its codes.
pub fn reference(sections: &[(&str, &[Code])]) -> String {
    let mut out = String::from(
        "# Diagnostics\n\nEach code stands for a rule; the diagnostic says how it was broken. This page is made from the \
         tables of codes; do not edit it.\n",
    );
    for (title, codes) in sections {
        write!(out, "\n## {title}\n\n| code | rule |\n|---|---|\n")
            .expect("writing to a string does not fail");
        for Code { code, rule } in *codes {
            writeln!(out, "| `{code}` | {rule} |").expect("writing to a string does not fail");
        }
    }
    out
}
