//! Types as the text form spells them.

use std::fmt;

use crate::layout::{At, Move};
use crate::mesh::AxisId;
use crate::space::Space;
use crate::types::TensorType;

/// A type as the text form spells it, for messages.
pub fn show<'a>(space: &'a Space, ty: &'a TensorType) -> TypeText<'a> {
    TypeText { space, ty }
}

/// A type as the text form spells it: `bf16[b s@ulysses m] partial(tp) on pp=1`.
#[derive(Clone, Copy)]
pub struct TypeText<'a> {
    /// Where dimensions and axes have their names.
    pub space: &'a Space,
    /// The type.
    pub ty: &'a TensorType,
}

impl fmt::Display for TypeText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { space, ty } = *self;
        let axis = |a: AxisId| space.mesh.axes[a].name.as_str();
        let list = |f: &mut fmt::Formatter<'_>, axes: &[AxisId]| {
            for (i, &a) in axes.iter().enumerate() {
                write!(f, "{}{}", if i == 0 { "" } else { "," }, axis(a))?;
            }
            Ok(())
        };
        // `ring`; `ring+1` where parts have moved; `ring+1(0..2)` where only some ranks hold any.
        let seat = |f: &mut fmt::Formatter<'_>, a: AxisId| {
            f.write_str(axis(a))?;
            let Some(Move { by, only, .. }) = ty.layout.moved_along(a) else { return Ok(()) };
            write!(f, "+{by}")?;
            match only {
                Some((start, end)) => write!(f, "({start}..{end})"),
                None => Ok(()),
            }
        };
        write!(f, "{}[", ty.dtype)?;
        for (i, (&dim, axes)) in ty.dims.iter().zip(&ty.layout.split).enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { " " }, space.dims[dim].name)?;
            match axes.as_slice() {
                [] => {}
                [one] => {
                    f.write_str("@")?;
                    seat(f, *one)?;
                }
                many => {
                    for (i, &a) in many.iter().enumerate() {
                        f.write_str(if i == 0 { "@(" } else { "," })?;
                        seat(f, a)?;
                    }
                    f.write_str(")")?;
                }
            }
        }
        f.write_str("]")?;
        if !ty.layout.partial.is_empty() {
            f.write_str(" partial(")?;
            list(f, &ty.layout.partial)?;
            f.write_str(")")?;
        }
        if let Some(At { axis: a, coordinate }) = ty.layout.at {
            write!(f, " on {}={coordinate}", axis(a))?;
        }
        Ok(())
    }
}
