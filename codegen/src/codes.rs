//! Every diagnostic code of this crate with the rule behind it, for the reference page.

use ithaca_ir::codes::Code;

const fn code(code: &'static str, rule: &'static str) -> Code {
    Code { code, rule }
}

/// Codes of schedules that have no emitted form.
pub const EMIT: &[Code] = &[
    code("S40", "every task and collective of the schedule has an emitted form"),
    code("S42", "dropout of an emitted attention is keyed by position"),
    code("S43", "every operation of the program has a form in PyTorch"),
    code("S44", "every rank runs the operations that PyTorch differentiates"),
];

/// The sections of this crate's codes, with their titles.
pub const SECTIONS: &[(&str, &[Code])] = &[("Emission", EMIT)];
