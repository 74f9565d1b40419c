//! The macros that declare operations and attributes.
//!
//! One declaration yields the variant of the enum, the row of the table, the reader and the writer of attributes, and the
//! walk over dimensions. Inference, factor rule and adjoint are functions in the file of the operation's family.

/// Declares an enum of operations.
///
/// ```text
/// /// Documentation, for rustdoc and for the reference page.
/// RmsNorm { /// Documentation. over: DimId, /// … offset: f64 = 0.0 }
///     = "rms_norm", "x, m -> x", Compute, Vector, Results(4);
/// ```
/// are variant, attributes with types and defaults, name in the text form, signature, class, unit and FLOPs. The operands
/// are counted from the signature; `at most N` bounds their number where it ends in `…`. `groups` names the enums of other
/// declarations.
macro_rules! ops {
    (
        $(#[$meta:meta])*
        pub enum $Enum:ident {
            $(family $family:ident {
                $(
                    $(#[doc = $doc:literal])*
                    $variant:ident
                    $(( $(#[doc = $inner_doc:literal])* $inner:ident : $inner_ty:ty ))?
                    $({ $( $(#[doc = $field_doc:literal])* $field:ident : $field_ty:ty $(= $default:expr)? ),+ $(,)? })?
                    = $name:literal, $signature:literal $(at most $most:expr)?,
                    $class:ident, $unit:ident, $flops:ident $(($flops_each:literal))?;
                )*
            })*
            $(groups {
                $( $(#[doc = $group_doc:literal])* $group:ident($group_inner:ident : $group_ty:ty); )*
            })?
        }
    ) => {
        $(#[$meta])*
        pub enum $Enum {
            $($(
                $(#[doc = $doc])*
                $variant $(($inner_ty))? $({ $( $(#[doc = $field_doc])* $field: $field_ty ),+ })?,
            )*)*
            $($( $(#[doc = $group_doc])* $group($group_ty), )*)?
        }

        impl $Enum {
            /// The declarations of the variants, those of groups left out.
            pub(in crate::ops) const DECLARED: &'static [crate::ops::info::OpInfo] = &[
                $($(
                    crate::ops::info::OpInfo {
                        name: $name,
                        family: crate::ops::info::Family::$family,
                        class: crate::ops::info::Class::$class,
                        unit: crate::ops::info::Unit::$unit,
                        flops: crate::ops::info::Flops::$flops $(($flops_each))?,
                        operands: crate::ops::info::operands($signature, 0 $(+ $most)?),
                        results: crate::ops::info::results($signature),
                        signature: $signature,
                        attrs: &[
                            $( crate::ops::declare::attr_info!($inner, $inner_ty, ($($inner_doc)*), ()), )?
                            $($(
                                crate::ops::declare::attr_info!($field, $field_ty, ($($field_doc)*), ($($default)?)),
                            )+)?
                        ],
                        summary: concat!($($doc),*).trim_ascii(),
                    },
                )*)*
            ];

            /// The declaration.
            pub fn info(&self) -> &'static crate::ops::info::OpInfo {
                enum Index { $($( $variant, )*)* }
                match self {
                    $($( Self::$variant { .. } => &Self::DECLARED[Index::$variant as usize], )*)*
                    $($( Self::$group($group_inner) => $group_inner.info(), )*)?
                }
            }

            /// The name in the text form.
            pub fn name(&self) -> &'static str {
                self.info().name
            }

            /// Writes the attributes, in the order of the declaration.
            pub(in crate::ops) fn write_attrs(
                &self,
                names: crate::ops::attr::Names<'_>,
                out: &mut crate::ops::attribute::Written,
            ) {
                let _ = (&names, &out);
                match self {
                    $($(
                        Self::$variant $(($inner))? $({ $($field),+ })? => {
                            $( crate::ops::attribute::Attribute::write($inner, stringify!($inner), None, names, out); )?
                            $($(
                                crate::ops::attribute::Attribute::write(
                                    $field,
                                    stringify!($field),
                                    crate::ops::declare::default!(& $($default)?),
                                    names,
                                    out,
                                );
                            )+)?
                        }
                    )*)*
                    $($( Self::$group($group_inner) => $group_inner.write_attrs(names, out), )*)?
                }
            }

            /// The operation called `name`, with attributes taken from `attrs`; none when it is not declared here.
            pub(in crate::ops) fn read_attrs(
                name: &str,
                attrs: &mut crate::ops::attr::Attrs,
                names: crate::ops::attr::Names<'_>,
            ) -> Result<Option<Self>, crate::ops::attr::AttrError> {
                let _ = (&names, &attrs);
                let op = match name {
                    $($(
                        $name => Self::$variant
                            $(( <$inner_ty as crate::ops::attribute::Attribute>::read(attrs, stringify!($inner), None, names)? ))?
                            $({ $(
                                $field: crate::ops::attribute::Attribute::read(
                                    attrs,
                                    stringify!($field),
                                    crate::ops::declare::default!($($default)?),
                                    names,
                                )?
                            ),+ })?,
                    )*)*
                    _ => {
                        $($(
                            if let Some(op) = <$group_ty>::read_attrs(name, attrs, names)? {
                                return Ok(Some(Self::$group(op)));
                            }
                        )*)?
                        return Ok(None);
                    }
                };
                Ok(Some(op))
            }

            /// Calls `new` on every dimension that an attribute names.
            pub fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut crate::dim::DimId)) {
                let _ = &new;
                match self {
                    $($(
                        Self::$variant $(($inner))? $({ $($field),+ })? => {
                            $( crate::ops::attribute::Attribute::each_dim_mut($inner, new); )?
                            $($( crate::ops::attribute::Attribute::each_dim_mut($field, new); )+)?
                        }
                    )*)*
                    $($( Self::$group($group_inner) => $group_inner.each_dim_mut(new), )*)?
                }
            }
        }
    };
}

/// Declares an enum of operations without attributes: as [`ops`], and `ALL` of them.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        pub enum $Enum:ident {
            family $family:ident {
                $(
                    $(#[doc = $doc:literal])*
                    $variant:ident = $name:literal, $signature:literal, $class:ident, $unit:ident, $flops:ident($each:literal);
                )+
            }
        }
    ) => {
        crate::ops::declare::ops! {
            $(#[$meta])*
            pub enum $Enum {
                family $family {
                    $( $(#[doc = $doc])* $variant = $name, $signature, $class, $unit, $flops($each); )+
                }
            }
        }

        impl $Enum {
            /// Every function.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];
        }
    };
}

/// Declares a struct of attributes: the operation that has it has its fields as attributes. `as key` names the attribute
/// where it is not the field's name.
macro_rules! attributes {
    (
        $(#[$meta:meta])*
        pub struct $Struct:ident {
            $( $(#[doc = $doc:literal])* pub $field:ident $(as $key:ident)? : $ty:ty $(= $default:expr)? ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        pub struct $Struct { $( $(#[doc = $doc])* pub $field: $ty ),+ }

        impl crate::ops::attribute::Attribute for $Struct {
            const KIND: &'static str = "";
            const PARTS: &'static [crate::ops::info::AttrInfo] = &[
                $( crate::ops::declare::attr_info!($field $($key)?, $ty, ($($doc)*), ($($default)?)) ),+
            ];

            fn write(
                &self,
                _key: &'static str,
                _default: Option<&Self>,
                names: crate::ops::attr::Names<'_>,
                out: &mut crate::ops::attribute::Written,
            ) {
                $(
                    crate::ops::attribute::Attribute::write(
                        &self.$field,
                        crate::ops::declare::key!($field $($key)?),
                        crate::ops::declare::default!(& $($default)?),
                        names,
                        out,
                    );
                )+
            }

            fn read(
                attrs: &mut crate::ops::attr::Attrs,
                _key: &'static str,
                _default: Option<Self>,
                names: crate::ops::attr::Names<'_>,
            ) -> Result<Self, crate::ops::attr::AttrError> {
                $(
                    let $field = crate::ops::attribute::Attribute::read(
                        attrs,
                        crate::ops::declare::key!($field $($key)?),
                        crate::ops::declare::default!($($default)?),
                        names,
                    )?;
                )+
                Ok(Self { $($field),+ })
            }

            fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut crate::dim::DimId)) {
                $( crate::ops::attribute::Attribute::each_dim_mut(&mut self.$field, new); )+
            }
        }
    };
}

/// Declares a struct that is the value of one attribute: `name(field=…, field=…)`.
macro_rules! call {
    (
        $(#[$meta:meta])*
        pub struct $Struct:ident as $name:literal {
            $( $(#[doc = $doc:literal])* pub $field:ident : $ty:ty ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        pub struct $Struct { $( $(#[doc = $doc])* pub $field: $ty ),+ }

        impl crate::ops::attribute::Value for $Struct {
            const KIND: &'static str = crate::ops::declare::call_kind!($name $($field)+);

            fn to_attr(&self, names: crate::ops::attr::Names<'_>) -> crate::ops::attr::Attr {
                let fields = vec![
                    $( (stringify!($field).to_owned(), crate::ops::attribute::Value::to_attr(&self.$field, names)) ),+
                ];
                crate::ops::attr::Attr::Call($name.to_owned(), fields)
            }

            fn from_attr(
                attr: crate::ops::attr::Attr,
                names: crate::ops::attr::Names<'_>,
            ) -> Result<Self, crate::ops::attribute::Refused> {
                let fields = match attr {
                    crate::ops::attr::Attr::Call(name, fields) if name == $name => fields,
                    other => return Err(crate::ops::attribute::Refused::Kind(other)),
                };
                let mut fields = crate::ops::attr::Attrs::new($name, fields);
                let read = Self {
                    $( $field: crate::ops::attribute::Attribute::read(&mut fields, stringify!($field), None, names)? ),+
                };
                fields.finish()?;
                Ok(read)
            }

            fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut crate::dim::DimId)) {
                $( crate::ops::attribute::Value::each_dim_mut(&mut self.$field, new); )+
            }
        }
    };
}

/// Declares an enum whose variants are words of the text form.
macro_rules! words {
    (
        $(#[$meta:meta])*
        pub enum $Enum:ident {
            $( $(#[$word_meta:meta])* $variant:ident = $word:literal ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $Enum { $( $(#[$word_meta])* $variant ),+ }

        crate::spellings! { $Enum { $($variant = $word),+ } }

        impl crate::ops::attribute::Value for $Enum {
            const KIND: &'static str = crate::ops::declare::words_kind!($($word)+);

            fn to_attr(&self, _: crate::ops::attr::Names<'_>) -> crate::ops::attr::Attr {
                crate::ops::attr::Attr::Word(self.name().to_owned())
            }

            fn from_attr(
                attr: crate::ops::attr::Attr,
                _: crate::ops::attr::Names<'_>,
            ) -> Result<Self, crate::ops::attribute::Refused> {
                let found = Self::ALL.into_iter().find(|choice| attr.is_word(choice.name()));
                found.ok_or(crate::ops::attribute::Refused::Kind(attr))
            }
        }
    };
}

macro_rules! attr_info {
    ($field:ident $($key:ident)?, $ty:ty, ($($doc:literal)*), ($($default:expr)?)) => {
        crate::ops::info::AttrInfo {
            name: crate::ops::declare::key!($field $($key)?),
            kind: <$ty as crate::ops::attribute::Attribute>::KIND,
            default: crate::ops::declare::default_text!($($default)?),
            meaning: concat!($($doc),*).trim_ascii(),
            parts: <$ty as crate::ops::attribute::Attribute>::PARTS,
        }
    };
}

macro_rules! key {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $key:ident) => {
        stringify!($key)
    };
}

macro_rules! default {
    (&) => {
        None
    };
    (& $default:expr) => {
        Some(&$default)
    };
    () => {
        None
    };
    ($default:expr) => {
        Some($default)
    };
}

macro_rules! default_text {
    () => {
        None
    };
    ($default:expr) => {
        Some(stringify!($default))
    };
}

macro_rules! call_kind {
    ($name:literal $first:ident $($field:ident)*) => {
        concat!($name, "(", stringify!($first), "=…", $(", ", stringify!($field), "=…",)* ")")
    };
}

macro_rules! words_kind {
    ($first:literal $($word:literal)*) => {
        concat!($first $(, " or ", $word)*)
    };
}

pub(crate) use {
    attr_info, attributes, call, call_kind, default, default_text, functions, key, ops, words, words_kind,
};
