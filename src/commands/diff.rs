//! `diff`: the differences between two plans.

use std::fmt::Write;

use ithaca_ir::Diagnostic;
use ithaca_passes::plan::{Review, ReviewOptions, Section, review};

use super::session::{CommandOutput, Session};
use crate::cli::DiffArgs;
use crate::error::{Failure, Result};
use crate::subject;

pub(super) fn diff(args: &DiffArgs, session: &Session<'_>) -> Result<CommandOutput> {
    let options = ReviewOptions { sections: sections(args)?, tolerance: tolerance(args)? };
    let plan = |path| subject::plan(session.registry, path);
    let (before, after) = (plan(&args.before)?, plan(&args.after)?);
    let review = review(&before, &after, &options);
    let code = u8::from(!review.changes.is_empty());
    let text = match &review {
        Review { changes, .. } if changes.is_empty() => "no difference\n".to_owned(),
        Review { changes, .. } if args.all => {
            let mut text = String::new();
            for change in changes {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{change}");
            }
            text
        }
        review => review.text(session.width),
    };
    Ok(CommandOutput { text, code })
}

/// The sections to compare: those named, or all but the alternatives.
fn sections(args: &DiffArgs) -> Result<Vec<Section>> {
    let named = args.only.iter().map(|name| {
        let names = Section::ALL.map(Section::name);
        Section::ALL.into_iter().find(|section| section.name() == name.trim()).ok_or_else(|| {
            let message = format!("`--only {name}` names no part of a plan");
            Failure::from(Diagnostic::new("C00", message).names("parts", name.trim(), names))
        })
    });
    let mut sections: Vec<Section> = named.collect::<Result<_>>()?;
    if sections.is_empty() {
        sections = ReviewOptions::default().sections;
    }
    if args.alternatives {
        sections.push(Section::Alternatives);
    }
    Ok(sections)
}

/// The tolerance as a part: of `1%`, 0.01.
fn tolerance(args: &DiffArgs) -> Result<f64> {
    let Some(text) = args.tolerance.as_deref() else { return Ok(0.0) };
    let trimmed = text.trim();
    let parsed = match trimmed.strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().map(|percent| percent / 100.0),
        None => trimmed.parse::<f64>(),
    };
    parsed.ok().filter(|part| (0.0..1.0).contains(part)).ok_or_else(|| {
        let message = format!("`--tolerance {text}` is not a part from 0 to 1");
        Diagnostic::new("C00", message).help("use a part or a percentage, as in `--tolerance 1%`").into()
    })
}
