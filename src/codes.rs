//! The diagnostic codes of the command line with their rules, and the codes of all packages for the reference page.

use ithaca_ir::codes::Code;

const fn code(code: &'static str, rule: &'static str) -> Code {
    Code { code, rule }
}

/// Codes of the command line.
pub const COMMAND_LINE: &[Code] = &[
    code("C00", "arguments are known, complete, and go together"),
    code("C01", "files can be read, and places can be written to"),
    code("C02", "a configuration and a plan are JSON"),
    code("C03", "a program that is run or verified is a whole program"),
    code("C04", "the mesh has one rank for each GPU"),
    code("C05", "a file has a kind that the command reads"),
    code("C10", "files of tensors are complete, and have every tensor in its shape"),
    code("C11", "a run fits in the memory of this machine"),
    code("C12", "tokens are in the vocabulary"),
    code("C13", "a run completes"),
    code("C14", "a run takes minutes on this machine, not hours"),
    code(
        "C15",
        "the shards of a checkpoint belong to one plan, are complete, and agree where they have the same element",
    ),
    code("C16", "a checkpoint has exactly the weights and states of the training that continues from it"),
    code("C17", "the processes of a run find each other, are one for each rank, and run the same plan"),
    code("C18", "the tokens of a rank that choose an expert fit the expert's slots"),
    code("C19", "the tokens of a sequence fit its cache"),
    code(
        "C20",
        "a run on CUDA devices finds a driver, a GPU, NVRTC, cuBLASLt, and NCCL where it is requested",
    ),
    code(
        "C21",
        "arguments of another framework state a layout and a workload, and those that change the computation are understood",
    ),
    code("C30", "`ithaca.toml` is TOML, its keys are known and of the right kind, and what they name exists"),
];

/// The sections of every package, in the order of the reference page.
pub fn sections() -> Vec<(&'static str, &'static [Code])> {
    let own: &[(&str, &[Code])] = &[("The command line", COMMAND_LINE)];
    [own, ithaca_passes::codes::SECTIONS, ithaca_ir::codes::SECTIONS, ithaca_codegen::codes::SECTIONS]
        .concat()
}
