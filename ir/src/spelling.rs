//! Names of the variants of an enum, declared once.

/// Gives an enum whose variants have no data `ALL`, its variants in the order of declaration; `name`, the spelling of each; and
/// `parse`, which takes other spellings of it too.
///
/// ```
/// #[derive(Clone, Copy, Debug, PartialEq)]
/// enum Side { Left, Right }
/// ithaca_ir::spellings! { Side { Left = "left" | "l", Right = "right" } }
///
/// assert_eq!(Side::ALL.map(Side::name), ["left", "right"]);
/// assert_eq!(Side::parse("l"), Some(Side::Left));
/// ```
#[macro_export]
macro_rules! spellings {
    ($Enum:ident { $( $variant:ident = $name:literal $(| $other:literal)* ),+ $(,)? }) => {
        impl $Enum {
            /// Every variant, in order.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// The spelling in texts, plans and options.
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $name ),+ }
            }

            /// The variant spelled `name`.
            pub fn parse(name: &str) -> Option<Self> {
                match name {
                    $( $name $(| $other)* => Some(Self::$variant), )+
                    _ => None,
                }
            }
        }
    };
}
