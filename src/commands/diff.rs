//! `diff`: the differences between two plans.

use std::fmt::Write;
use std::path::Path;

use super::session::{Done, Session};
use crate::error::Result;
use crate::subject;

pub(super) fn diff([before, after]: [&Path; 2], session: &Session<'_>) -> Result<Done> {
    let plan = |path| subject::plan(session.registry, path);
    let (before, after) = (plan(before)?, plan(after)?);
    let changes = ithaca_passes::plan::diff(&before, &after);
    let mut text = String::new();
    for change in &changes {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{change}");
    }
    if changes.is_empty() {
        text.push_str("no difference\n");
    }
    Ok(Done { text, code: u8::from(!changes.is_empty()) })
}
