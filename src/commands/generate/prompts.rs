//! Prompts that decoding continues.

use std::path::Path;

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_kernels::store::{self, TensorSource, Tensors};
use ithaca_kernels::tensor::{Tensor, index};

use crate::cli::RunArgs;
use crate::error::{Failure, Result};

/// Token ids of each sequence.
pub(super) struct Prompts {
    pub(super) sequences: Vec<Vec<f64>>,
}

impl Prompts {
    /// Those of the arguments; `None` if they are to be random.
    pub(super) fn of(args: &RunArgs) -> Result<Option<Self>> {
        let sequences = match (&args.decoding.prompt, &args.subject.inputs) {
            (Some(text), _) => text.split(';').map(parsed).collect::<Result<Vec<_>>>()?,
            (None, Some(path)) => stored(path)?,
            (None, None) => return Ok(None),
        };
        Ok(Some(Self { sequences }))
    }

    /// Refuses ids that are none of so many tokens.
    ///
    /// # Errors
    /// `C12`.
    pub(super) fn check(&self, vocabulary: u64) -> Result<()> {
        for (sequence, ids) in self.sequences.iter().enumerate() {
            let is_token = |id: f64| id >= 0.0 && id.fract() == 0.0 && id < vocabulary as f64;
            if let Some(at) = ids.iter().position(|&id| !is_token(id)) {
                let id = ids[at];
                let message = format!(
                    "`{id}` at position {at} of the prompt of sequence {sequence} is no token of the vocabulary, 0 to {}",
                    vocabulary.saturating_sub(1)
                );
                let help = "make prompts with the tokenizer of the model";
                return Err(Diagnostic::new("C12", message).help(help).into());
            }
        }
        Ok(())
    }

    /// The number of tokens of each.
    pub(super) fn lengths(&self) -> Vec<u64> {
        self.sequences.iter().map(|ids| ids.len() as u64).collect()
    }

    pub(super) fn longest(&self) -> usize {
        self.sequences.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// The inputs of a step that takes `chunk` tokens of each prompt from `start` on.
    pub(super) fn part(&self, start: usize, chunk: usize) -> Tensors {
        let rows = self.sequences.iter().map(|ids| ids.get(start..).unwrap_or_default());
        let rows: Vec<&[f64]> = rows.map(|ids| &ids[..ids.len().min(chunk)]).collect();
        let padded =
            |row: &&[f64]| row.iter().copied().chain(std::iter::repeat(0.0)).take(chunk).collect::<Vec<_>>();
        let ids = rows.iter().flat_map(padded).collect();
        let new = rows.iter().map(|row| row.len() as f64).collect();
        let inputs = [
            ("input_ids", Tensor::new(vec![rows.len(), chunk], ids)),
            ("new_tokens", Tensor::new(vec![rows.len()], new)),
        ];
        inputs.into_iter().collect()
    }
}

fn parsed(text: &str) -> Result<Vec<f64>> {
    let ids = text.split([',', ' ']).map(str::trim).filter(|id| !id.is_empty());
    let id = |id: &str| {
        id.parse::<u32>().map(f64::from).map_err(|_| {
            let refusal = Diagnostic::new("C00", format!("`--prompt` has `{id}`, which is no token id"));
            Failure::from(refusal.help("give whole numbers, as in `--prompt 1,5,7`"))
        })
    };
    ids.map(id).collect()
}

/// The prompts in a file: `prompt_ids`, each as long as `prompt_lengths` says.
fn stored(path: &Path) -> Result<Vec<Vec<f64>>> {
    let file = store::open(path)?;
    let ids = file.read("prompt_ids")?;
    let lengths = file.read("prompt_lengths")?;
    let (rows, width) = (ids.shape.first().copied().unwrap_or(0), ids.shape.get(1).copied().unwrap_or(0));
    let fits = |length: &f64| *length >= 0.0 && length.fract() == 0.0 && *length <= width as f64;
    if let Some(sequence) =
        lengths.data.iter().position(|length| !fits(length)).filter(|_| ids.shape.len() == 2)
    {
        let message = format!(
            "`{}` has {} for sequence {sequence} in `prompt_lengths`, and `prompt_ids` have {} for each sequence",
            path.display(),
            lengths.data[sequence],
            counted(width as u64, "place")
        );
        return Err(Diagnostic::new("C10", message).help("give the number of ids of each prompt").into());
    }
    if ids.shape.len() != 2 || lengths.shape != [rows] {
        let message = format!(
            "`{}` has `prompt_ids` {:?} and `prompt_lengths` {:?}, not ids [sequences, tokens] and lengths [sequences]",
            path.display(),
            ids.shape,
            lengths.shape
        );
        return Err(Diagnostic::new("C10", message).into());
    }
    let sequences = ids.data.chunks(width.max(1)).zip(&lengths.data);
    Ok(sequences.map(|(ids, &length)| ids[..index(length as u64)].to_vec()).collect())
}
