//! Arguments of kernels: their types in C++, and their values.
//!
//! A type has the size and the layout of a value by the rules of C. The bytes of a launch and the initializer in emitted C++
//! come from the same [`Arg`].

use crate::address::{Address, Region};
use crate::value::{Int, Varying};

/// A scalar of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scalar {
    /// `int`.
    I32,
    /// `int64_t`.
    I64,
    /// `uint64_t`.
    U64,
    /// `double`.
    F64,
    /// `bool`.
    Bool,
    /// A pointer.
    Pointer,
}

impl Scalar {
    /// Bytes; also the alignment.
    pub fn bytes(self) -> usize {
        match self {
            Scalar::Bool => 1,
            Scalar::I32 => 4,
            Scalar::I64 | Scalar::U64 | Scalar::F64 | Scalar::Pointer => 8,
        }
    }
}

/// The type of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgType {
    /// A number, a Boolean or a pointer.
    Scalar(Scalar),
    /// An array.
    Array(usize, &'static ArgType),
    /// A struct of the kernels' headers.
    Struct(&'static StructType),
}

/// A struct of the kernels' headers.
#[derive(Debug, PartialEq, Eq)]
pub struct StructType {
    /// Its C++ name.
    pub name: &'static str,
    /// The names and types of its fields, in order.
    pub fields: &'static [(&'static str, ArgType)],
}

impl ArgType {
    /// Bytes.
    pub fn bytes(&self) -> usize {
        match self {
            ArgType::Scalar(scalar) => scalar.bytes(),
            ArgType::Array(n, of) => n * of.bytes(),
            ArgType::Struct(ty) => {
                let end = ty.fields.iter().fold(0, |end, (_, field)| place(end, field) + field.bytes());
                end.next_multiple_of(self.alignment())
            }
        }
    }

    /// The alignment, bytes.
    pub fn alignment(&self) -> usize {
        match self {
            ArgType::Scalar(scalar) => scalar.bytes(),
            ArgType::Array(_, of) => of.alignment(),
            ArgType::Struct(ty) => ty.fields.iter().map(|(_, field)| field.alignment()).max().unwrap_or(1),
        }
    }

    /// Calls `of` with the offset and the type of each scalar, in order of [`Arg::words`].
    pub fn each_scalar(&self, of: &mut impl FnMut(usize, Scalar)) {
        self.each_from(0, of);
    }

    fn each_from(&self, start: usize, of: &mut impl FnMut(usize, Scalar)) {
        match self {
            ArgType::Scalar(scalar) => of(start, *scalar),
            ArgType::Array(n, element) => {
                (0..*n).for_each(|i| element.each_from(start + i * element.bytes(), of));
            }
            ArgType::Struct(ty) => {
                let mut end = start;
                for (_, field) in ty.fields {
                    let at = place(end, field);
                    field.each_from(at, of);
                    end = at + field.bytes();
                }
            }
        }
    }
}

/// The offset of a field after `end` bytes.
fn place(end: usize, field: &ArgType) -> usize {
    end.next_multiple_of(field.alignment())
}

/// An argument of a launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Arg {
    /// Its type.
    pub ty: ArgType,
    /// Its scalars, in order of declaration.
    pub words: Vec<Word>,
}

impl Arg {
    pub(crate) fn of<T: Argument>(value: T) -> Self {
        let mut words = Vec::new();
        value.words(&mut words);
        Self { ty: T::TYPE, words }
    }

    /// The bytes in memory, where `number` returns the values of integers and addresses.
    pub fn bytes(&self, mut number: impl FnMut(&Word) -> u64) -> Vec<u8> {
        let mut bytes = vec![0; self.ty.bytes()];
        let mut words = self.words.iter();
        self.ty.each_scalar(&mut |at, scalar| {
            let word = words.next().expect("an argument has a word for each scalar of its type");
            let n = scalar.bytes();
            bytes[at..at + n].copy_from_slice(&low_bytes(number(word))[..n]);
        });
        bytes
    }
}

/// The bytes of a number in little-endian order, as on all machines with CUDA.
fn low_bytes(number: u64) -> [u8; 8] {
    number.to_le_bytes()
}

/// The value of a scalar of an argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Word {
    /// An integer or a Boolean; the bits of an unsigned integer.
    Int(Int),
    /// A real number.
    Real(f64),
    /// A pointer.
    Address(Address),
}

/// A pointer while an operation is lowered for one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pointer {
    pub(crate) region: Region,
    pub(crate) bytes: i64,
}

impl Pointer {
    /// The null pointer.
    pub(crate) const NONE: Pointer = Pointer { region: Region::Null, bytes: 0 };

    /// The pointer plus `bytes`.
    pub(crate) fn offset(self, bytes: u64) -> Self {
        Pointer { bytes: self.bytes.wrapping_add(bytes.cast_signed()), ..self }
    }

    pub(crate) fn address(self) -> Address {
        Address { region: self.region, offset: Int::Const(self.bytes) }
    }
}

/// An argument type of kernels.
pub(crate) trait Argument: Copy {
    /// Its type in C++.
    const TYPE: ArgType;

    /// Adds its scalars, in order of declaration.
    fn words(&self, out: &mut Vec<Word>);
}

macro_rules! integers {
    ($($ty:ty: $scalar:ident;)*) => {
        $(impl Argument for $ty {
            const TYPE: ArgType = ArgType::Scalar(Scalar::$scalar);

            fn words(&self, out: &mut Vec<Word>) {
                out.push(Word::Int(Int::Const(i64::from(*self))));
            }
        })*
    };
}

integers! {
    bool: Bool;
    i32: I32;
    i64: I64;
}

impl Argument for u64 {
    const TYPE: ArgType = ArgType::Scalar(Scalar::U64);

    fn words(&self, out: &mut Vec<Word>) {
        out.push(Word::Int(Int::Const(self.cast_signed())));
    }
}

impl Argument for f64 {
    const TYPE: ArgType = ArgType::Scalar(Scalar::F64);

    fn words(&self, out: &mut Vec<Word>) {
        out.push(Word::Real(*self));
    }
}

impl Argument for Pointer {
    const TYPE: ArgType = ArgType::Scalar(Scalar::Pointer);

    fn words(&self, out: &mut Vec<Word>) {
        out.push(Word::Address(self.address()));
    }
}

/// The number of the current layer, as `int64_t`.
#[derive(Clone, Copy)]
pub(crate) struct Layer;

impl Argument for Layer {
    const TYPE: ArgType = ArgType::Scalar(Scalar::I64);

    fn words(&self, out: &mut Vec<Word>) {
        out.push(Word::Int(Varying { per_layer: 1, ..Varying::default() }.into_int()));
    }
}

impl<T: Argument, const N: usize> Argument for [T; N] {
    const TYPE: ArgType = ArgType::Array(N, &T::TYPE);

    fn words(&self, out: &mut Vec<Word>) {
        self.iter().for_each(|element| element.words(out));
    }
}

/// The arguments of a launch, in order.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => {
        vec![$($crate::argument::Arg::of($value)),*]
    };
}
pub(crate) use arguments;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::structs::{Reals, Walk};

    #[test]
    fn arguments_have_the_layout_of_c() {
        let reals = Arg::of(Reals { data: Pointer { region: Region::Frame, bytes: 9 }, storage: 2 });
        assert_eq!((reals.ty.bytes(), reals.words.len()), (16, 2));
        let number = |word: &Word| match word {
            Word::Int(n) => n.constant().unwrap().cast_unsigned(),
            Word::Real(x) => x.to_bits(),
            Word::Address(address) => address.offset.constant().unwrap().cast_unsigned(),
        };
        assert_eq!(reals.bytes(number), [9, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(<Walk<2>>::TYPE.bytes(), 8 + 3 * 10 * 8);
        assert_eq!(Arg::of(true).bytes(number), [1]);
        assert_eq!(Arg::of(-1_i32).bytes(number), [255; 4]);
    }
}
