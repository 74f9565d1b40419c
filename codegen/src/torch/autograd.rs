//! Training by PyTorch's own differentiation: which programs it can differentiate, and its optimizer.

use ithaca_ir::ops::AdamW;
use ithaca_ir::{Diagnostic, Module, Op};

use super::python::{real, tuple};

/// The update of the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    /// Constants of AdamW.
    pub adamw: AdamW,
    /// The largest global norm of the gradients.
    pub clip: Option<f64>,
}

impl Optimizer {
    /// The constants that `train` reads.
    pub(super) fn constants(&self) -> String {
        let AdamW { lr, beta1, beta2, eps, weight_decay } = self.adamw;
        let betas = tuple([beta1, beta2].map(real));
        let [lr, eps, weight_decay] = [lr, eps, weight_decay].map(real);
        let clip = self.clip.map_or("None".to_owned(), real);
        format!(
            "\n# Of torch.optim.AdamW, and the largest norm of the gradients.\n\
             ADAMW = dict(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay})\nCLIP = {clip}\n"
        )
    }
}

/// Refuses a forward pass whose gradients PyTorch would not compute on every rank alike.
pub(super) fn check(module: &Module) -> Result<(), Diagnostic> {
    for function in module.functions.values() {
        for node in &function.nodes {
            let why = match &node.op {
                Op::Random(_) => "draws random numbers",
                Op::Scores { .. } | Op::Weigh { .. } => "computes the scores of attention apart",
                _ => {
                    let on_some = node.results.iter().any(|&value| {
                        let layout = &function.ty(value).layout;
                        layout.at.is_some() || layout.moved.iter().any(|part| part.only.is_some())
                    });
                    if !on_some {
                        continue;
                    }
                    "has a value on some ranks only"
                }
            };
            let message = format!(
                "`{}` of `@{}` {why}, which `--autograd` does not differentiate",
                node.op.name(),
                function.name
            );
            return Err(Diagnostic::new("S44", message)
                .help("omit `--autograd`: the program has its own backward pass"));
        }
    }
    Ok(())
}
