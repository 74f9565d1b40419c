//! From what was understood of a model to its program.
//!
//! Dimensions: `b` sequences, `s` tokens, `m` hidden width, `h` query heads, `k` key/value heads where they are fewer,
//! `d` head width, `f` MLP width, `v` vocabulary, `p` learned positions; T5, BERT, experts and latents have more. Query heads that share a key/value head are a
//! granule of `h`, so no pass can tear a group.

mod bert;
mod cx;
mod dims;
mod drops;
mod experts;
mod gated;
mod gpt2;
mod latent;
mod loss;
mod plain;
mod t5;
mod tensors;

use ithaca_ir::entity::Arena;
use ithaca_ir::module::Output;
use ithaca_ir::ops::{Binary, Binding, OpError, Unary};
use ithaca_ir::{DType, Diagnostic, FuncId, Function, FunctionBuilder, Level, Module, Op, Space, TensorType};

use crate::spec::{Family, Model, Spec, Structure};
use crate::workload::{Mode, Workload};
use cx::Cx;
use dims::Dims;
use drops::{Drops, Place};
use tensors::{Built, Tensors};

/// The program of a model.
///
/// # Errors
/// The invariant of the language that it would break; a description that was checked breaks none.
pub(super) fn module(model: &Model, name: &str, workload: &Workload) -> Result<Module, Diagnostic> {
    let drops = Drops::of(&model.dropout, workload.mode);
    let built = match &model.structure {
        Structure::Decoder(spec) => decoder(spec, name, workload, drops),
        Structure::T5(spec) => t5::module(spec, name, workload, drops),
        Structure::Bert(spec) => bert::module(spec, name, workload, drops),
    };
    let built = built.map_err(|e| Diagnostic::new(e.code, e.message))?;
    match workload.mode {
        Mode::Train => loss::of_logits(&built, workload.labels),
        Mode::Prefill | Mode::Decode => Ok(built),
    }
}

fn decoder(spec: &Spec, name: &str, workload: &Workload, drops: Drops) -> Result<Module, OpError> {
    let mut space = Space::default();
    let dims = Dims::declare(&mut space, spec, workload);
    let dtype = workload.dtype.unwrap_or(spec.dtype);
    let tensors = Tensors { dtype, heads: [dims.h, dims.k], width: dims.d };
    let cx = Cx { spec, dims, tensors, drops };
    let mut functions: Arena<FuncId, Function> = Arena::new();

    let embed = functions.push(cx.embed(&space)?);
    let mut blocks = Vec::new();
    for kind in &spec.kinds {
        let name = match spec.kinds.len() {
            1 => "block".to_owned(),
            _ => format!("block_{}", kind.label),
        };
        let none = Arena::new();
        let builder = FunctionBuilder::new(name, &space, &none);
        let block = match spec.family {
            Family::Llama
            | Family::Mistral
            | Family::Qwen2
            | Family::Qwen3
            | Family::Phi3
            | Family::Gemma2
            | Family::Olmo2
            | Family::Mixtral
            | Family::Qwen3Moe
            | Family::DeepseekV3 => gated::block(&cx, kind, builder)?,
            Family::Starcoder2 => plain::block(&cx, kind, &plain::STARCODER2, builder)?,
            Family::GptNeox => plain::block(&cx, kind, &plain::GPT_NEOX, builder)?,
            Family::Gpt2 => gpt2::block(&cx, kind, builder)?,
        };
        blocks.push(functions.push(block));
    }
    let head = functions.push(cx.head(&space)?);
    let main = cx.main(&space, &functions, embed, &blocks, head)?;
    functions.push(main);
    Ok(Module { level: Level::Program, name: name.to_owned(), pipeline: Vec::new(), space, functions })
}

impl Cx<'_> {
    /// `@embed`: tokens to the residual stream, learned positions added.
    fn embed(&self, space: &Space) -> Built<Function> {
        let Dims { b, s, m, v, p, .. } = self.dims;
        let none = Arena::new();
        let mut f = FunctionBuilder::new("embed", space, &none);
        let ids = f.param(TensorType::new(DType::I32, [b, s]), Some("input_ids"));
        let key = self.drops.key(&mut f, Place::Embedding);
        let table = self.tensors.weight(&mut f, self.embedding(), &[v, m])?;
        let mut x = f.push(Op::Embed { over: v, padding: self.spec.padding }, &[table, ids])?;
        if let Some(p) = p {
            let positions = self.positions(&mut f)?;
            let table = self.tensors.weight(&mut f, "transformer.wpe.weight", &[p, m])?;
            let embedded = f.push(Op::Embed { over: p, padding: None }, &[table, positions])?;
            x = f.push(Op::Binary(Binary::Add), &[x, embedded])?;
        }
        if self.spec.family == Family::Gemma2 {
            // The library keeps the factor in the table's element type, made from single precision.
            let factor = rounded((self.spec.hidden as f64).sqrt(), DType::F32);
            let factor = rounded(factor, self.tensors.dtype);
            x = f.push(Op::Scale { factor }, &[x])?;
        }
        x = self.drops.drop(&mut f, key, Place::Embedding, x)?;
        f.name(x, Some("x"));
        Ok(f.finish([Output { name: None, value: x }]))
    }

    /// `@head`: the last norm, and a score for each token of the vocabulary.
    fn head(&self, space: &Space) -> Built<Function> {
        let Dims { b, s, m, v, .. } = self.dims;
        let none = Arena::new();
        let mut f = FunctionBuilder::new("head", space, &none);
        let x = f.param(self.tensors.ty(&[b, s, m]), Some("x"));
        let normed = match self.spec.family {
            Family::Llama
            | Family::Mistral
            | Family::Qwen2
            | Family::Qwen3
            | Family::Phi3
            | Family::Gemma2
            | Family::Olmo2
            | Family::Mixtral
            | Family::Qwen3Moe
            | Family::DeepseekV3 => self.rms_norm(&mut f, x, "model.norm.weight", m)?,
            Family::Starcoder2 => self.layer_norm(&mut f, x, "model.norm")?,
            Family::GptNeox => self.layer_norm(&mut f, x, "gpt_neox.final_layer_norm")?,
            Family::Gpt2 => self.layer_norm(&mut f, x, "transformer.ln_f")?,
        };
        let name = match self.spec.family {
            _ if self.spec.tied => self.embedding(),
            Family::GptNeox => "embed_out.weight",
            Family::Llama
            | Family::Mistral
            | Family::Qwen2
            | Family::Qwen3
            | Family::Phi3
            | Family::Gemma2
            | Family::Olmo2
            | Family::Starcoder2
            | Family::Gpt2
            | Family::Mixtral
            | Family::Qwen3Moe
            | Family::DeepseekV3 => "lm_head.weight",
        };
        let weight = self.tensors.weight(&mut f, name, &[v, m])?;
        let mut logits = f.einsum(normed, weight, &[b, s, v])?;
        if let Some(cap) = self.spec.logit_cap {
            logits = f.push(Op::Scale { factor: 1.0 / cap }, &[logits])?;
            logits = f.push(Op::Unary(Unary::Tanh), &[logits])?;
            logits = f.push(Op::Scale { factor: cap }, &[logits])?;
        }
        f.name(logits, Some("logits"));
        Ok(f.finish([Output { name: None, value: logits }]))
    }

    fn main(
        &self,
        space: &Space,
        functions: &Arena<FuncId, Function>,
        embed: FuncId,
        blocks: &[FuncId],
        head: FuncId,
    ) -> Built<Function> {
        let Dims { b, s, .. } = self.dims;
        let mut f = FunctionBuilder::new("main", space, functions);
        let ids =
            f.push_as(Op::Input(Binding::named("input_ids")), &[], TensorType::new(DType::I32, [b, s]))?;
        f.name(ids, Some("input_ids"));
        let key = self.drops.first_key(&mut f)?;
        let mut x = f.call(embed, 0..1, &self.drops.with_key(&[ids], key, Place::Embedding))?[0];
        for (kind, layers) in &self.spec.runs {
            x = f.call(blocks[*kind], layers.clone(), &self.drops.with_key(&[x], key, Place::Block))?[0];
        }
        let logits = f.call(head, 0..1, &[x])?[0];
        f.name(logits, Some("logits"));
        Ok(f.finish([Output { name: Some("logits".to_owned()), value: logits }]))
    }
}

/// The nearest number of an element type, single precision at most; ties go to the even one.
fn rounded(x: f64, dtype: DType) -> f64 {
    let digits = match dtype {
        DType::F64 | DType::F32 | DType::I32 | DType::Bool => 24,
        DType::F16 => 11,
        DType::BF16 => 8,
    };
    let unit = 2f64.powi(x.log2().floor() as i32 + 1 - digits);
    (x / unit).round_ties_even() * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_rounded_as_the_element_type_holds_them() {
        // sqrt(3072) and sqrt(3584), the widths of published models.
        assert_eq!(rounded(3072f64.sqrt(), DType::BF16), 55.5);
        assert_eq!(rounded(3584f64.sqrt(), DType::BF16), 59.75);
        assert_eq!(rounded(3072f64.sqrt(), DType::F32), f64::from(3072f32.sqrt()));
        assert_eq!(rounded(64.0, DType::F16), 64.0);
    }
}
