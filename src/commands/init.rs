//! `init`: writes `ithaca.toml`.

use std::collections::BTreeSet;
use std::path::Path;

use ithaca_ir::Diagnostic;
use ithaca_passes::import;

use super::session::CommandOutput;
use crate::cli::{InitArgs, PROJECT};
use crate::error::Result;
use crate::{files, project, subject};

/// The file, but for the lines of models.
const TEMPLATE: &str = include_str!("init.toml");

/// The line of the template that models replace.
const NO_MODEL: &str = "# llama-3-8b = \"models/llama-3-8b\"\n";

pub(super) fn init(args: &InitArgs) -> Result<CommandOutput> {
    if Path::new(PROJECT).exists() {
        let message = format!("`{PROJECT}` exists, and `ithaca init` overwrites nothing");
        return Err(Diagnostic::new("C01", message)
            .help("edit it, or run `ithaca init` in another folder")
            .into());
    }
    let mut lines = String::new();
    let mut names = BTreeSet::new();
    for model in &args.models {
        let described = subject::described(model)?;
        if import::program_text(&described.config).is_some() {
            let message =
                format!("`{}` is a program in text form, which has a workload of its own", model.display());
            let refusal = Diagnostic::new("C00", message);
            let help = "a project plans models for workloads; write the plan of a program by `ithaca plan … -o PLAN`";
            return Err(refusal.help(help).into());
        }
        let name = project::name_of(&described.name);
        // Names with dots are quoted, or they would be names of tables.
        let key = if name.contains('.') { quoted(&name) } else { name.clone() };
        lines += &format!("{key} = {}\n", quoted(&model.display().to_string()));
        if !names.insert(name.clone()) {
            let message = format!("two models are named `{name}`, as their folders are");
            return Err(Diagnostic::new("C00", message)
                .help("add one of them to the file under another name")
                .into());
        }
    }
    let (text, next) = if args.models.is_empty() {
        (TEMPLATE.to_owned(), "name your models in it; then `ithaca check --bless` writes their plans")
    } else {
        (TEMPLATE.replace(NO_MODEL, &lines), "`ithaca check --bless` writes the plans that it names")
    };
    files::write(Path::new(PROJECT), text.as_bytes())?;
    Ok(CommandOutput::success(format!("wrote {PROJECT}: {next}\n")))
}

/// A text of TOML, which may be a key.
fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}
