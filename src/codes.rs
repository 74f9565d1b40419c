//! Every diagnostic code of the command line with the rule behind it, and all codes together for the reference page.

use ithaca_ir::codes::Code;

const fn code(code: &'static str, rule: &'static str) -> Code {
    Code { code, rule }
}

/// Codes of the command line.
pub const COMMAND_LINE: &[Code] = &[
    code("C00", "arguments are known, complete, and go together"),
    code("C01", "files can be read, and places can be written to"),
    code("C02", "a description or a plan is JSON"),
    code("C03", "a program that is run or verified is a whole one"),
    code("C04", "the mesh has as many ranks as there are GPUs"),
    code("C05", "a file is of a kind that the command reads"),
    code("C10", "tensors are there, of the right shape, in files that are whole"),
    code("C11", "a run fits in this machine's memory"),
    code("C12", "tokens are in the vocabulary"),
    code("C13", "a run comes to its end"),
    code("C14", "a run takes minutes on this machine, not hours"),
    code(
        "C15",
        "parts of a checkpoint are of one plan, leave nothing out, and agree where they have the same element",
    ),
    code("C16", "training continues from a checkpoint that has what the program keeps, and nothing else"),
    code("C17", "processes of one run find each other, are as many as the plan has ranks, and run the same"),
    code(
        "C20",
        "a run on CUDA devices finds a driver, a GPU, NVRTC, cuBLASLt, and NCCL where it is asked for",
    ),
];

/// The sections of every package, in the order of the reference page.
pub fn sections() -> Vec<(&'static str, &'static [Code])> {
    let own: &[(&str, &[Code])] = &[("The command line", COMMAND_LINE)];
    [own, ithaca_passes::codes::SECTIONS, ithaca_ir::codes::SECTIONS, ithaca_codegen::codes::SECTIONS]
        .concat()
}
