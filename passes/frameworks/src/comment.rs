//! The plan that an export is of, and comments of its text.

use ithaca_ir::wrap::wrapped;

/// The plan that is exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The name of the model.
    pub model: String,
    /// The plan in a line: workload, strategy and mesh.
    pub plan: String,
    /// GPUs of a node.
    pub node: u64,
}

/// Lines of comments.
pub(crate) fn commented(notes: &[String], mark: &str) -> String {
    const WIDTH: usize = 118;
    let lines = notes.iter().flat_map(|note| {
        let lines = wrapped(note, WIDTH, 2);
        lines.lines().map(|line| format!("{mark}{line}\n")).collect::<Vec<_>>()
    });
    lines.collect()
}
