//! Attributes of what training adds: scans, gradients, the loss, the optimizer.

use super::{Attr, AttrError, Attrs, Names};
use crate::dim::DimId;
use crate::ops::{AdamW, Gradient, Loss, Op, Optimizer, Random, Scan, ScanOrder, Stage, Target, Unary};

fn dim(names: Names<'_>, d: DimId) -> Attr {
    Attr::Word(names.space.dims[d].name.clone())
}

/// The attributes of a scan, of the program's calls and of the schedule's.
pub(crate) fn scan_attrs(scan: &Scan, names: Names<'_>) -> Vec<(&'static str, Attr)> {
    let mut attrs = vec![("over", dim(names, scan.over)), ("carried", Attr::Int(scan.carried as u64))];
    match scan.order {
        ScanOrder::Ascending => {}
        ScanOrder::Descending => attrs.push(("order", Attr::Word(scan.order.name().to_owned()))),
    }
    attrs
}

/// The scan among the attributes of a call, if there is one.
pub(crate) fn read_scan(attrs: &mut Attrs, names: Names<'_>) -> Result<Option<Scan>, AttrError> {
    let Some(over) = attrs.optional_dim("over", names)? else { return Ok(None) };
    let carried = usize::try_from(attrs.int("carried")?).map_err(|_| "`carried` is too large".to_owned())?;
    let order = match attrs.optional("order") {
        None => ScanOrder::Ascending,
        Some(Attr::Word(word)) if ScanOrder::parse(&word).is_some() => {
            ScanOrder::parse(&word).unwrap_or_default()
        }
        Some(other) => return Err(attrs.wrong("order", "ascending or descending", &other)),
    };
    Ok(Some(Scan { over, carried, order }))
}

/// The attributes of a stage, of the program's calls and of the schedule's.
pub(crate) fn stage_attrs(stage: Stage, names: Names<'_>) -> Vec<(&'static str, Attr)> {
    let mut attrs = vec![("stage", Attr::Int(stage.number))];
    attrs.extend(stage.along.map(|a| ("along", Attr::Word(names.space.mesh.axes[a].name.clone()))));
    attrs
}

/// The stage among the attributes of a call, if there is one.
pub(crate) fn read_stage(attrs: &mut Attrs, names: Names<'_>) -> Result<Option<Stage>, AttrError> {
    if !attrs.has("stage") {
        return Ok(None);
    }
    let number = attrs.int("stage")?;
    let along = if attrs.has("along") { Some(attrs.axis("along", names)?) } else { None };
    Ok(Some(Stage { number, along }))
}

/// The attribute of a stride, of the program's calls and of the schedule's; none where it is zero.
pub(crate) fn stride_attrs(stride: u64) -> Option<(&'static str, Attr)> {
    (stride != 0).then_some(("stride", Attr::Int(stride)))
}

/// The stride among the attributes of a call.
pub(crate) fn read_stride(attrs: &mut Attrs) -> Result<u64, AttrError> {
    if attrs.has("stride") { attrs.int("stride") } else { Ok(0) }
}

pub(super) fn read_target(attrs: &mut Attrs) -> Result<Target, AttrError> {
    let word = attrs.word("target")?;
    let target = Target::ALL.into_iter().find(|t| t.name() == word);
    target.ok_or_else(|| attrs.wrong("target", "param or state", &Attr::Word(word)))
}

pub(super) fn embed_attrs(over: DimId, padding: Option<u64>, names: Names<'_>) -> Vec<(&'static str, Attr)> {
    let mut attrs = vec![("over", dim(names, over))];
    attrs.extend(padding.map(|row| ("padding", Attr::Int(row))));
    attrs
}

pub(super) fn read_embed(attrs: &mut Attrs, names: Names<'_>) -> Result<(DimId, Option<u64>), AttrError> {
    let over = attrs.dim("over", names)?;
    let padding = if attrs.has("padding") { Some(attrs.int("padding")?) } else { None };
    Ok((over, padding))
}

pub(super) fn gradient_attrs(gradient: &Gradient, names: Names<'_>) -> Vec<(&'static str, Attr)> {
    match gradient {
        Gradient::Unary(f) => vec![("of", Attr::Word(f.name().to_owned()))],
        Gradient::Embed { over, padding } => embed_attrs(*over, *padding, names),
        Gradient::RmsNorm { over, eps, offset } => {
            let mut attrs = vec![("over", dim(names, *over)), ("eps", Attr::Float(*eps))];
            if *offset != 0.0 {
                attrs.push(("offset", Attr::Float(*offset)));
            }
            attrs
        }
        Gradient::RmsScale { over, eps } => {
            let over = over.iter().map(|&d| dim(names, d)).collect();
            vec![("over", Attr::List(over)), ("eps", Attr::Float(*eps))]
        }
        Gradient::Softmax { over } => vec![("over", dim(names, *over))],
        Gradient::LayerNorm { over, eps } => vec![("over", dim(names, *over)), ("eps", Attr::Float(*eps))],
        Gradient::CrossEntropy { over, ignore } => {
            vec![("over", dim(names, *over)), ("ignore", label(*ignore))]
        }
        Gradient::Sink => Vec::new(),
    }
}

pub(super) fn loss_attrs(loss: &Loss, names: Names<'_>) -> Vec<(&'static str, Attr)> {
    match loss {
        Loss::CrossEntropy { over, ignore } | Loss::Pick { over, ignore } => {
            vec![("over", dim(names, *over)), ("ignore", label(*ignore))]
        }
        Loss::Valid { ignore } => vec![("ignore", label(*ignore))],
    }
}

pub(super) fn random_attrs(random: &Random) -> Vec<(&'static str, Attr)> {
    match random {
        Random::Key { seed } => vec![("seed", Attr::Int(*seed))],
        Random::FoldIn | Random::LayerKey => Vec::new(),
        Random::DropoutMask { rate, seed } => vec![("rate", Attr::Float(*rate)), ("seed", Attr::Int(*seed))],
        Random::Dropout { rate } => vec![("rate", Attr::Float(*rate))],
    }
}

pub(super) fn optimizer_attrs(optimizer: &Optimizer) -> Vec<(&'static str, Attr)> {
    match optimizer {
        Optimizer::AdamW(AdamW { lr, beta1, beta2, eps, weight_decay }) => vec![
            ("lr", Attr::Float(*lr)),
            ("beta1", Attr::Float(*beta1)),
            ("beta2", Attr::Float(*beta2)),
            ("eps", Attr::Float(*eps)),
            ("weight_decay", Attr::Float(*weight_decay)),
        ],
        Optimizer::ClipFactor { max_norm } => vec![("max_norm", Attr::Float(*max_norm))],
    }
}

/// The operation called `name`, one of those that this file knows.
pub(super) fn read(name: &str, attrs: &mut Attrs, names: Names<'_>) -> Result<Op, AttrError> {
    Ok(match name {
        "unary_backward" => {
            let word = attrs.word("of")?;
            let f = Unary::ALL.into_iter().find(|f| f.name() == word);
            let f = f.ok_or_else(|| attrs.wrong("of", "a function of one element", &Attr::Word(word)))?;
            Op::Gradient(Gradient::Unary(f))
        }
        "embed_backward" => {
            let (over, padding) = read_embed(attrs, names)?;
            Op::Gradient(Gradient::Embed { over, padding })
        }
        "rms_norm_backward" => Op::Gradient(Gradient::RmsNorm {
            over: attrs.dim("over", names)?,
            eps: attrs.float("eps")?,
            offset: attrs.optional_float("offset")?.unwrap_or(0.0),
        }),
        "rms_scale_backward" => {
            Op::Gradient(Gradient::RmsScale { over: attrs.dims("over", names)?, eps: attrs.float("eps")? })
        }
        "layer_norm_backward" => {
            Op::Gradient(Gradient::LayerNorm { over: attrs.dim("over", names)?, eps: attrs.float("eps")? })
        }
        "softmax_backward" => Op::Gradient(Gradient::Softmax { over: attrs.dim("over", names)? }),
        "sink_backward" => Op::Gradient(Gradient::Sink),
        "cross_entropy" => Op::Loss(Loss::CrossEntropy {
            over: attrs.dim("over", names)?,
            ignore: read_label(attrs, "ignore")?,
        }),
        "cross_entropy_backward" => Op::Gradient(Gradient::CrossEntropy {
            over: attrs.dim("over", names)?,
            ignore: read_label(attrs, "ignore")?,
        }),
        "pick" => {
            Op::Loss(Loss::Pick { over: attrs.dim("over", names)?, ignore: read_label(attrs, "ignore")? })
        }
        "valid" => Op::Loss(Loss::Valid { ignore: read_label(attrs, "ignore")? }),
        "key" => Op::Random(Random::Key { seed: attrs.int("seed")? }),
        "fold_in" => Op::Random(Random::FoldIn),
        "layer_key" => Op::Random(Random::LayerKey),
        "dropout_mask" => {
            Op::Random(Random::DropoutMask { rate: attrs.float("rate")?, seed: attrs.int("seed")? })
        }
        "dropout" => Op::Random(Random::Dropout { rate: attrs.float("rate")? }),
        "adamw" => Op::Optimizer(Optimizer::AdamW(AdamW {
            lr: attrs.float("lr")?,
            beta1: attrs.float("beta1")?,
            beta2: attrs.float("beta2")?,
            eps: attrs.float("eps")?,
            weight_decay: attrs.float("weight_decay")?,
        })),
        "clip_factor" => Op::Optimizer(Optimizer::ClipFactor { max_norm: attrs.float("max_norm")? }),
        _ => unreachable!("the table and the lists of readers name the same operations"),
    })
}

/// A label may be negative, which whole numbers of the text are not.
pub(super) fn label(label: i64) -> Attr {
    match u64::try_from(label) {
        Ok(label) => Attr::Int(label),
        Err(_) => Attr::Float(label as f64),
    }
}

pub(super) fn read_label(attrs: &mut Attrs, key: &str) -> Result<i64, AttrError> {
    let x = attrs.float(key)?;
    match x.fract() == 0.0 && (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&x) {
        true => Ok(x as i64),
        false => Err(attrs.wrong(key, "a whole number of 32 bits", &Attr::Float(x))),
    }
}
