//! Types of attributes: how each is read from the text form and written to it.
//!
//! A [`Value`] is one attribute. An [`Attribute`] is that, or a struct of several.

use std::ops::Range;

use super::attr::{Attr, AttrError, Attrs, Names};
use super::info::AttrInfo;
use crate::dim::DimId;
use crate::dtype::DType;
use crate::handles::FuncId;
use crate::mesh::{Axes, AxisId};

/// Attributes with their names, in the order of the text form.
pub(crate) type Written = Vec<(&'static str, Attr)>;

/// The reason why an attribute is not a value of the wanted type.
pub(crate) enum Refused {
    /// It is of another kind.
    Kind(Attr),
    /// The message says it.
    Message(AttrError),
}

impl From<AttrError> for Refused {
    fn from(message: AttrError) -> Self {
        Refused::Message(message)
    }
}

/// A type whose values are single attributes.
pub(crate) trait Value: Sized + PartialEq {
    /// The values, as messages describe them: "a whole number".
    const KIND: &'static str;
    /// A list of values, as messages describe it.
    const LIST: &'static str = "a list";
    /// Whether the text form has the attribute where it is its default too.
    const WRITTEN_ALWAYS: bool = false;

    /// The attribute.
    fn to_attr(&self, names: Names<'_>) -> Attr;

    /// The value that an attribute spells.
    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused>;

    /// Calls `new` on every dimension in the value.
    fn each_dim_mut(&mut self, _new: &mut dyn FnMut(&mut DimId)) {}
}

/// A type of fields of operations: an attribute, or a struct of several.
pub(crate) trait Attribute: Sized {
    /// [`Value::KIND`]; empty for a struct.
    const KIND: &'static str;
    /// The attributes of a struct.
    const PARTS: &'static [AttrInfo] = &[];

    /// Adds the attribute `key` to `out`, unless it is the default.
    fn write(&self, key: &'static str, default: Option<&Self>, names: Names<'_>, out: &mut Written);

    /// Takes the attribute `key` from `attrs`; `default` where it is absent.
    fn read(
        attrs: &mut Attrs,
        key: &'static str,
        default: Option<Self>,
        names: Names<'_>,
    ) -> Result<Self, AttrError>;

    /// Calls `new` on every dimension.
    fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut DimId));
}

impl<T: Value> Attribute for T {
    const KIND: &'static str = T::KIND;

    fn write(&self, key: &'static str, default: Option<&Self>, names: Names<'_>, out: &mut Written) {
        if T::WRITTEN_ALWAYS || default != Some(self) {
            out.push((key, self.to_attr(names)));
        }
    }

    fn read(
        attrs: &mut Attrs,
        key: &'static str,
        default: Option<Self>,
        names: Names<'_>,
    ) -> Result<Self, AttrError> {
        match (attrs.take(key), default) {
            (Some(attr), _) => T::from_attr(attr, names).map_err(|refused| match refused {
                Refused::Kind(found) => attrs.wrong(key, T::KIND, &found),
                Refused::Message(message) => message,
            }),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(attrs.missing(key)),
        }
    }

    fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut DimId)) {
        Value::each_dim_mut(self, new);
    }
}

/// An optional attribute has the default `None`.
impl<T: Value> Value for Option<T> {
    const KIND: &'static str = T::KIND;

    fn to_attr(&self, names: Names<'_>) -> Attr {
        self.as_ref().expect("an absent attribute equals its default").to_attr(names)
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        T::from_attr(attr, names).map(Some)
    }

    fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut DimId)) {
        if let Some(value) = self {
            Value::each_dim_mut(value, new);
        }
    }
}

impl<T: Value> Value for Vec<T> {
    const KIND: &'static str = T::LIST;
    const LIST: &'static str = "a list of lists";

    fn to_attr(&self, names: Names<'_>) -> Attr {
        Attr::List(self.iter().map(|item| item.to_attr(names)).collect())
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        match attr {
            Attr::List(items) => items.into_iter().map(|item| T::from_attr(item, names)).collect(),
            other => Err(Refused::Kind(other)),
        }
    }

    fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut DimId)) {
        self.iter_mut().for_each(|value| Value::each_dim_mut(value, new));
    }
}

impl Value for u64 {
    const KIND: &'static str = "a whole number";
    const LIST: &'static str = "a list of sizes";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        Attr::Int(*self)
    }

    fn from_attr(attr: Attr, _: Names<'_>) -> Result<Self, Refused> {
        match attr {
            Attr::Int(n) => Ok(n),
            other => Err(Refused::Kind(other)),
        }
    }
}

impl Value for usize {
    const KIND: &'static str = "a whole number";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        Attr::Int(*self as u64)
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        let n = u64::from_attr(attr, names)?;
        usize::try_from(n).map_err(|_| Refused::Kind(Attr::Int(n)))
    }
}

/// A label. It may be negative, which whole numbers of the text form are not: then it is written as a real number.
impl Value for i64 {
    const KIND: &'static str = "a whole number of 32 bits";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        match u64::try_from(*self) {
            Ok(label) => Attr::Int(label),
            Err(_) => Attr::Float(*self as f64),
        }
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        let x = f64::from_attr(attr, names)?;
        if x.fract() == 0.0 && (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&x) {
            Ok(x as i64)
        } else {
            Err(Refused::Kind(Attr::Float(x)))
        }
    }
}

impl Value for f64 {
    const KIND: &'static str = "a number";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        Attr::Float(*self)
    }

    fn from_attr(attr: Attr, _: Names<'_>) -> Result<Self, Refused> {
        match attr {
            Attr::Float(x) => Ok(x),
            Attr::Int(n) => Ok(n as f64),
            other => Err(Refused::Kind(other)),
        }
    }
}

impl Value for bool {
    const KIND: &'static str = "true or false";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        Attr::Word(self.to_string())
    }

    fn from_attr(attr: Attr, _: Names<'_>) -> Result<Self, Refused> {
        [true, false].into_iter().find(|b| attr.is_word(&b.to_string())).ok_or(Refused::Kind(attr))
    }
}

impl Value for String {
    const KIND: &'static str = "a quoted string";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        Attr::Text(self.clone())
    }

    fn from_attr(attr: Attr, _: Names<'_>) -> Result<Self, Refused> {
        match attr {
            Attr::Text(text) => Ok(text),
            other => Err(Refused::Kind(other)),
        }
    }
}

/// The ranges of [`Layers`](crate::handles::Layers), and those of windows.
impl Value for Range<u64> {
    const KIND: &'static str = "a range such as 0..32";
    const LIST: &'static str = "a list of ranges";
    const WRITTEN_ALWAYS: bool = true;

    fn to_attr(&self, _: Names<'_>) -> Attr {
        Attr::Range(self.start, self.end)
    }

    fn from_attr(attr: Attr, _: Names<'_>) -> Result<Self, Refused> {
        match attr {
            Attr::Range(start, end) => Ok(start..end),
            other => Err(Refused::Kind(other)),
        }
    }
}

impl Value for DType {
    const KIND: &'static str = "an element type";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        Attr::Word(self.name().to_owned())
    }

    fn from_attr(attr: Attr, _: Names<'_>) -> Result<Self, Refused> {
        let word = word(attr)?;
        DType::parse(&word).ok_or_else(|| Refused::Message(format!("`{word}` is not an element type")))
    }
}

impl Value for DimId {
    const KIND: &'static str = "a dimension";
    const LIST: &'static str = "a list of dimensions";

    fn to_attr(&self, names: Names<'_>) -> Attr {
        Attr::Word(names.space.dims[*self].name.clone())
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        let word = word(attr)?;
        let found = names.space.dim(&word);
        found.ok_or_else(|| Refused::Message(format!("`{word}` is not a declared dimension")))
    }

    fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut DimId)) {
        new(self);
    }
}

impl Value for AxisId {
    const KIND: &'static str = "an axis of the mesh";

    fn to_attr(&self, names: Names<'_>) -> Attr {
        Attr::Word(names.space.mesh.axes[*self].name.clone())
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        let word = word(attr)?;
        let found = names.space.mesh.axis(&word);
        found.ok_or_else(|| Refused::Message(format!("`{word}` is not an axis of the mesh")))
    }
}

impl Value for Axes {
    const KIND: &'static str = "an axis of the mesh, or a list of axes";

    fn to_attr(&self, names: Names<'_>) -> Attr {
        match **self {
            [axis] => axis.to_attr(names),
            _ => Attr::List(self.iter().map(|axis| axis.to_attr(names)).collect()),
        }
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        let items = match attr {
            Attr::List(items) => items,
            one => vec![one],
        };
        let axes: Vec<AxisId> =
            items.into_iter().map(|item| AxisId::from_attr(item, names)).collect::<Result<_, _>>()?;
        let message = || format!("a collective communicates along 1 to {} axes, each named once", Axes::MOST);
        Axes::new(&axes).ok_or_else(|| Refused::Message(message()))
    }
}

impl Value for FuncId {
    const KIND: &'static str = "a function";

    fn to_attr(&self, names: Names<'_>) -> Attr {
        Attr::Func(names.functions.name_of(*self).unwrap_or("?").to_owned())
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        let name = match attr {
            Attr::Func(name) => name,
            other => return Err(Refused::Kind(other)),
        };
        let found = names.functions.called(&name);
        found.ok_or_else(|| Refused::Message(format!("no function `@{name}` stands before this call")))
    }
}

fn word(attr: Attr) -> Result<String, Refused> {
    match attr {
        Attr::Word(word) => Ok(word),
        other => Err(Refused::Kind(other)),
    }
}
