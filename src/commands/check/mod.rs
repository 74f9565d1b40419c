//! `check`: makes every plan of `ithaca.toml`, and reviews the differences from the committed plans.

mod again;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use ithaca_ir::diagnostic::counted;
use ithaca_ir::{Diagnostic, Diagnostics};
use ithaca_passes::plan::{Review, ReviewOptions, review};
use ithaca_passes::registry::Registry;
use rayon::prelude::*;

use super::session::{CommandOutput, Session};
use crate::cli::CheckArgs;
use crate::error::{Failure, Result};
use crate::kind::Kind;
use crate::project::{self, Entry, Project};
use crate::{files, subject};

pub(super) use again::again;

/// A plan beside the committed one.
struct Compared {
    path: PathBuf,
    json: String,
    state: State,
}

enum State {
    Same,
    /// No section of a review differs, but the text does: the alternatives.
    Restated,
    Differs(Review),
    /// No plan is committed.
    Missing,
}

pub(super) fn check(args: &CheckArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let project = project::read(session.registry, &args.file)?;
    (session.progress)(&format!("making {}", counted(project.entries.len() as u64, "plan")));
    let registry = session.registry;
    let compared: Vec<Result<Compared>> =
        project.entries.par_iter().map(|entry| compare(&project, entry, registry, args.bless)).collect();
    let stale = stale(&project);
    let mut out = String::new();
    let mut mistakes: Diagnostics = Vec::new();
    let mut to_write = Vec::new();
    let [mut same, mut differing, mut missing] = [0_u64; 3];
    for (entry, compared) in project.entries.iter().zip(compared) {
        let name = entry.names.join(" ");
        // Writing to a string cannot fail.
        match compared {
            Err(failure) => {
                let about = |d: Diagnostic| Diagnostic { message: format!("{name}: {}", d.message), ..d };
                mistakes.extend(failure.diagnostics.into_iter().map(|d| about(d.at(entry.place))));
            }
            Ok(Compared { path, json, state }) => {
                match &state {
                    State::Same | State::Restated => {
                        same += 1;
                        let _ = writeln!(out, "{name}: as committed");
                    }
                    State::Differs(review) => {
                        differing += 1;
                        let _ = write!(out, "{name}: differs\n{}", review.text(session.width));
                    }
                    State::Missing => {
                        missing += 1;
                        let _ = writeln!(out, "{name}: not committed");
                    }
                }
                if !matches!(state, State::Same) {
                    to_write.push((path, json.into_bytes()));
                }
            }
        }
    }
    for path in &stale {
        let _ = writeln!(out, "{}: nothing in {} names it; delete it", path.display(), args.file.display());
    }
    if !out.is_empty() {
        let _ = writeln!(out, "{}", total(same, differing, missing, stale.len() as u64));
    }
    if !mistakes.is_empty() {
        let context = (!out.is_empty()).then_some(out);
        return Err(Failure { context, ..project.file.refuse(mistakes) });
    }
    let mut code = u8::from(differing + missing > 0 || !stale.is_empty());
    if args.bless {
        files::write_all(&project.plans, &to_write)?;
        for (path, _) in &to_write {
            let _ = writeln!(out, "wrote {}", project.plans.join(path).display());
        }
        code = u8::from(!stale.is_empty());
    } else if differing + missing > 0 {
        out += "`ithaca check --bless` writes the plans\n";
    }
    Ok(CommandOutput { text: out, code })
}

/// Makes a plan, and compares it with the committed one. A committed plan that cannot be read is replaced where plans are
/// `written`.
fn compare(project: &Project, entry: &Entry, registry: &Registry, written: bool) -> Result<Compared> {
    let path = entry.path();
    let committed = project.plans.join(&path);
    let plan = entry.request.plan(registry)?;
    let json = plan.to_json();
    let state = if !committed.exists() {
        State::Missing
    } else {
        match subject::plan(registry, &committed) {
            Ok(before) => {
                let review = review(&before, &plan, &ReviewOptions::default());
                if !review.changes.is_empty() {
                    State::Differs(review)
                } else if files::read_text(&committed)? == json {
                    State::Same
                } else {
                    State::Restated
                }
            }
            Err(_) if written => State::Missing,
            Err(failure) => return Err(failure),
        }
    };
    Ok(Compared { path, json, state })
}

/// Plans at places of plans, which no entry has, sorted.
fn stale(project: &Project) -> Vec<PathBuf> {
    let inside = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let models = inside(&project.plans);
    let clusters = models.iter().flat_map(|model| inside(model));
    let workloads = clusters.flat_map(|cluster| inside(&cluster));
    let named: Vec<PathBuf> = project.entries.iter().map(|e| project.plans.join(e.path())).collect();
    let is_plan = |path: &PathBuf| matches!(Kind::of(path), Ok(Kind::Plan));
    let mut stale: Vec<PathBuf> = workloads.filter(|path| !named.contains(path)).filter(is_plan).collect();
    stale.sort();
    stale
}

fn total(same: u64, differing: u64, missing: u64, stale: u64) -> String {
    let parts =
        [(same, "as committed"), (differing, "different"), (missing, "not committed"), (stale, "not named")];
    let parts: Vec<String> =
        parts.iter().filter(|(n, _)| *n > 0).map(|(n, state)| format!("{n} {state}")).collect();
    format!("{}: {}", counted(same + differing + missing + stale, "plan"), parts.join(", "))
}
