//! The attributes of attention.

use super::{Attr, AttrError, Attrs, Names};
use crate::dim::DimId;
use crate::mask;
use crate::ops::{Attention, Dropout, Keyed, Movement, RelativeBias, Returns, Sides};

pub(super) fn attrs(a: &Attention, names: Names<'_>) -> Vec<(&'static str, Attr)> {
    let dim = |d: DimId| Attr::Word(names.space.dims[d].name.clone());
    let mut attrs = vec![
        ("heads", dim(a.heads)),
        ("kv_heads", dim(a.kv_heads)),
        ("queries", dim(a.queries)),
        ("keys", dim(a.keys)),
        ("width", dim(a.width)),
        ("mask", mask::to_attr(&a.mask)),
        ("scale", Attr::Float(a.scale)),
    ];
    attrs.extend(a.softcap.map(|cap| ("softcap", Attr::Float(cap))));
    attrs.extend(a.bias.map(|bias| ("bias", bias_attr(bias, names))));
    attrs.extend(a.dropout.map(|dropout| ("dropout", dropout_attr(dropout))));
    if a.returns != Returns::Output {
        attrs.push(("returns", Attr::Word(a.returns.name().to_owned())));
    }
    attrs.extend(a.parts.map(|parts| ("parts", dim(parts))));
    attrs.extend(a.movement.as_ref().map(|movement| ("movement", movement_attr(movement))));
    attrs
}

pub(super) fn read(attrs: &mut Attrs, names: Names<'_>) -> Result<Attention, AttrError> {
    Ok(Attention {
        heads: attrs.dim("heads", names)?,
        kv_heads: attrs.dim("kv_heads", names)?,
        queries: attrs.dim("queries", names)?,
        keys: attrs.dim("keys", names)?,
        width: attrs.dim("width", names)?,
        mask: mask::from_attr(attrs.required("mask")?)?,
        scale: attrs.float("scale")?,
        softcap: attrs.optional_float("softcap")?,
        bias: attrs.optional("bias").map(|attr| read_bias(attrs, attr, names)).transpose()?,
        dropout: attrs.optional("dropout").map(|attr| read_dropout(attrs, attr)).transpose()?,
        returns: match attrs.optional("returns") {
            None => Returns::Output,
            Some(attr) => read_returns(attrs, &attr)?,
        },
        parts: attrs.optional_dim("parts", names)?,
        movement: attrs.optional("movement").map(|attr| read_movement(attrs, attr)).transpose()?,
    })
}

fn read_returns(attrs: &Attrs, attr: &Attr) -> Result<Returns, AttrError> {
    let found = Returns::ALL.into_iter().find(|r| matches!(attr, Attr::Word(w) if w == r.name()));
    found.ok_or_else(|| attrs.wrong("returns", "output, with_lse or part", attr))
}

fn bias_attr(bias: RelativeBias, names: Names<'_>) -> Attr {
    let sides = match bias.sides {
        Sides::Both => "both",
        Sides::Before => "before",
    };
    let args = vec![
        ("buckets".to_owned(), Attr::Word(names.space.dims[bias.buckets].name.clone())),
        ("max_distance".to_owned(), Attr::Int(bias.max_distance)),
        ("sides".to_owned(), Attr::Word(sides.to_owned())),
    ];
    Attr::Call("relative".to_owned(), args)
}

fn read_bias(attrs: &Attrs, attr: Attr, names: Names<'_>) -> Result<RelativeBias, AttrError> {
    let Attr::Call(name, args) = attr else {
        return Err(attrs.wrong("bias", "relative(…)", &attr));
    };
    if name != "relative" {
        return Err(format!("`{name}` is no bias of `attention`: relative(…)"));
    }
    let mut args = Attrs::new(name, args);
    let (buckets, max_distance) = (args.dim("buckets", names)?, args.int("max_distance")?);
    let sides = match args.word("sides")?.as_str() {
        "both" => Sides::Both,
        "before" => Sides::Before,
        other => return Err(args.wrong("sides", "both or before", &Attr::Word(other.to_owned()))),
    };
    args.finish()?;
    Ok(RelativeBias { buckets, max_distance, sides })
}

fn dropout_attr(dropout: Dropout) -> Attr {
    let keyed = match dropout.keyed {
        Keyed::Position => "position",
        Keyed::Stream => "stream",
    };
    let args = vec![
        ("rate".to_owned(), Attr::Float(dropout.rate)),
        ("seed".to_owned(), Attr::Int(dropout.seed)),
        ("keyed".to_owned(), Attr::Word(keyed.to_owned())),
    ];
    Attr::Call("uniform".to_owned(), args)
}

fn read_dropout(attrs: &Attrs, attr: Attr) -> Result<Dropout, AttrError> {
    let Attr::Call(name, args) = attr else {
        return Err(attrs.wrong("dropout", "uniform(…)", &attr));
    };
    if name != "uniform" {
        return Err(format!("`{name}` is no dropout of `attention`: uniform(…)"));
    }
    let mut args = Attrs::new(name, args);
    let (rate, seed) = (args.float("rate")?, args.int("seed")?);
    let keyed = match args.word("keyed")?.as_str() {
        "position" => Keyed::Position,
        "stream" => Keyed::Stream,
        other => return Err(args.wrong("keyed", "position or stream", &Attr::Word(other.to_owned()))),
    };
    args.finish()?;
    Ok(Dropout { rate, seed, keyed })
}

fn movement_attr(movement: &Movement) -> Attr {
    match movement.options.is_empty() {
        true => Attr::Word(movement.name.clone()),
        false => {
            let options = movement.options.iter().map(|(key, n)| (key.clone(), Attr::Int(*n)));
            Attr::Call(movement.name.clone(), options.collect())
        }
    }
}

fn read_movement(attrs: &Attrs, attr: Attr) -> Result<Movement, AttrError> {
    let expected = "a movement, such as rotate";
    match attr {
        Attr::Word(name) => Ok(Movement { name, options: Vec::new() }),
        Attr::Call(name, args) => {
            let number = |(key, value): (String, Attr)| match value {
                Attr::Int(n) => Ok((key, n)),
                other => Err(attrs.wrong("movement", "a movement with whole numbers", &other)),
            };
            let options = args.into_iter().map(number).collect::<Result<_, _>>()?;
            Ok(Movement { name, options })
        }
        other => Err(attrs.wrong("movement", expected, &other)),
    }
}
