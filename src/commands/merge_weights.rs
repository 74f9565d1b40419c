//! `merge-weights`: joins the parts of a checkpoint.

use ithaca_kernels::store::{self, shards};

use super::session::{Done, Session};
use crate::cli::MergeWeightsArgs;
use crate::error::Result;
use crate::files;
use crate::kind::{self, Wanted};
use ithaca_ir::diagnostic::counted;

pub(super) fn merge_weights(args: &MergeWeightsArgs, session: &mut Session<'_>) -> Result<Done> {
    kind::expect(&args.shards, Wanted::Shards)?;
    files::check_file(&args.output)?;
    store::check_writable(&args.output)?;
    (session.progress)("joining");
    let shards::Joined { tensors, ranks, bytes } = shards::join(&args.shards, &args.output)?;
    let ranks = if ranks == 1 { "one rank".to_owned() } else { format!("{ranks} ranks") };
    Ok(Done::success(format!(
        "joined {} of {bytes} bytes from {ranks}\nwrote {}\n",
        counted(tensors as u64, "tensor"),
        args.output.display()
    )))
}
