//! Programs in text form as descriptions of models: a JSON object whose only field, `program`, is the text.
//!
//! Such a program is its own workload: its sizes are fixed, and it is imported as it is.

use ithaca_ir::{Diagnostic, DimId, Module};
use ithaca_pass::roles::Roles;
use serde_json::Value;

use crate::workload::Workload;

const FIELD: &str = "program";

/// The description of a program in text form.
pub fn of_program(text: &str) -> Value {
    Value::Object([(FIELD.to_owned(), text.into())].into_iter().collect())
}

/// The text of the program that a description is, where it is one.
pub fn program_text(config: &Value) -> Option<&str> {
    let fields = config.as_object().filter(|fields| fields.len() == 1)?;
    fields.get(FIELD)?.as_str()
}

/// The workload of a program: its sequences, and the tokens of the longest, one where it has none.
pub fn workload_of(module: &Module) -> Workload {
    let roles = Roles::of(module);
    let largest =
        |dims: &mut dyn Iterator<Item = &DimId>| dims.map(|&dim| module.space.size(dim)).max().unwrap_or(1);
    let (batch, sequence) = (largest(&mut roles.batches.iter()), largest(&mut roles.sequences.iter()));
    Workload::prefill(batch, sequence)
}

/// The program of a text, for the workload that it has.
///
/// # Errors
/// `M10` for another workload, `E` and `V` diagnostics for a text that is no program.
pub(crate) fn import(text: &str, workload: &Workload) -> Result<Module, Diagnostic> {
    let module = ithaca_ir::text::parse(text).map_err(ithaca_pass::first)?;
    let own = workload_of(&module);
    let [of_program, stated] = [&own, workload].map(|w| (w.mode, w.batch, w.sequence));
    if of_program != stated {
        let message = format!(
            "the program has {} sequences of {} tokens, and the workload {} of {}",
            own.batch, own.sequence, workload.batch, workload.sequence
        );
        return Err(Diagnostic::new("M10", message).help("a program in text form has its own workload"));
    }
    Ok(module)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = include_str!("../../../examples/attention.ith");

    #[test]
    fn a_program_is_its_own_description_and_workload() {
        let config = of_program(TEXT);
        assert_eq!(program_text(&config), Some(TEXT));
        let module = ithaca_ir::text::parse(TEXT).unwrap();
        let workload = workload_of(&module);
        assert_eq!((workload.batch, workload.sequence), (1, 120));
        assert_eq!(crate::import(&config, "unused", &workload), Ok(module));
        let longer = Workload { sequence: 240, ..workload };
        assert_eq!(crate::import(&config, "unused", &longer).unwrap_err().code, "M10");
        assert_eq!(crate::facts(&config, &[]).unwrap_err().code, "M02");
    }
}
