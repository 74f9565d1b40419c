//! Where continuations end: at tokens that the caller names, or that the files of the model name.

use std::collections::BTreeSet;
use std::path::Path;

use ithaca_ir::Diagnostic;
use serde_json::Value;

use crate::cli::RunArgs;
use crate::error::{Failure, Result};
use crate::{files, subject};

/// The field of a description that names the tokens at which continuations end.
const FIELD: &str = "eos_token_id";

/// The tokens at which a sequence is finished.
#[derive(Clone, Debug, Default)]
pub(super) struct Stops {
    ids: BTreeSet<u64>,
}

impl Stops {
    /// Those of `--stop`; else those of the model, but none where outputs are expected, which are of as many steps as they are.
    ///
    /// # Errors
    /// `C00` for a text that is no list of ids, `C02` for a file of the model that cannot be read.
    pub(super) fn of(args: &RunArgs) -> Result<Self> {
        match args.decoding.stop.as_deref() {
            Some("none") => Ok(Self::default()),
            Some(text) => parsed(text),
            None if args.expect.is_some() => Ok(Self::default()),
            None => of_model(&args.subject.subject),
        }
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Whether a sequence ends with this token.
    pub(super) fn has(&self, token: f64) -> bool {
        self.ids.contains(&(token as u64))
    }
}

fn parsed(text: &str) -> Result<Stops> {
    let id = |id: &str| {
        id.parse::<u64>().map_err(|_| {
            let refusal = Diagnostic::new("C00", format!("`--stop` has `{id}`, which is no token id"));
            Failure::from(refusal.help("give whole numbers, as in `--stop 2,7`, or `--stop none`"))
        })
    };
    let ids = text.split([',', ' ']).map(str::trim).filter(|id| !id.is_empty()).map(id);
    Ok(Stops { ids: ids.collect::<Result<_>>()? })
}

/// Those of `generation_config.json`, else those of `config.json`.
fn of_model(path: &Path) -> Result<Stops> {
    let model = subject::model(path)?;
    let generation = model.folder.join("generation_config.json");
    let ids = |of: &Value| of.get(FIELD).filter(|ids| !ids.is_null()).cloned();
    let named = if generation.exists() {
        let text = files::read_text(&generation)?;
        let parsed: Value = serde_json::from_str(&text)
            .map_err(|e| Diagnostic::new("C02", format!("`{}` is not JSON: {e}", generation.display())))?;
        ids(&parsed)
    } else {
        None
    };
    let ids = match named.or_else(|| ids(&model.config)) {
        Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).collect(),
        Some(id) => id.as_u64().into_iter().collect(),
        None => BTreeSet::new(),
    };
    Ok(Stops { ids })
}
