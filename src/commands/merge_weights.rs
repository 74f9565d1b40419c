//! `merge-weights`: joins the shards of a checkpoint.

use std::path::Path;

use ithaca_kernels::store::{self, shards};

use super::session::{CommandOutput, Session};
use crate::error::Result;
use crate::files;
use crate::kind::{self, ExpectedKind};
use ithaca_ir::diagnostic::counted;

pub(super) fn merge_weights(
    folder: &Path,
    output: &Path,
    session: &mut Session<'_>,
) -> Result<CommandOutput> {
    kind::expect(folder, ExpectedKind::Shards)?;
    files::check_file(output)?;
    store::check_writable(output)?;
    (session.progress)("joining");
    let shards::Joined { tensors, ranks, bytes } = shards::join(folder, output)?;
    let ranks = if ranks == 1 { "one rank".to_owned() } else { format!("{ranks} ranks") };
    Ok(CommandOutput::success(format!(
        "joined {} of {bytes} bytes from {ranks}\nwrote {}\n",
        counted(tensors as u64, "tensor"),
        output.display()
    )))
}
