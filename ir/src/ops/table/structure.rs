//! The attributes of calls.

use crate::dim::DimId;
use crate::layout::At;
use crate::mesh::AxisId;
use crate::ops::attr::{AttrError, Attrs, Names};
use crate::ops::attribute::{Attribute, Written};
use crate::ops::declare::{attributes, words};
use crate::ops::info::AttrInfo;

attributes! {
    /// The results that each layer of a call returns by itself.
    ///
    /// The first `carried` arguments are handed from layer to layer, as results of the same number. Any other result of
    /// the function belongs to one layer: the call stacks them along `over`, in order of layers. An argument whose first
    /// dimension is `over` where the parameter has none is taken apart in the same way; any other is the same for all
    /// layers.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Scan {
        /// The dimension of layers, along which results of single layers are stacked; as long as the call has layers.
        pub over: DimId,
        /// The number of arguments and results that are handed on to the next layer; required with `over`.
        pub carried: usize,
        /// The order in which layers run.
        pub order: ScanOrder = ScanOrder::Ascending,
    }
}

words! {
    /// The order in which the layers of a loop run.
    #[derive(Default)]
    pub enum ScanOrder {
        /// The first layer first.
        #[default]
        Ascending = "ascending",
        /// The last layer first, as in a backward pass.
        Descending = "descending",
    }
}

attributes! {
    /// The stage of a pipeline that a call belongs to.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Stage {
        /// The number of the pipeline stage that runs the call; all ranks run it when left out.
        pub number as stage: u64,
        /// The mesh axis whose coordinate the number is; none before there is a mesh.
        pub along: Option<AxisId> = None,
    }
}

impl Stage {
    /// The stage of this number, of a program without a mesh.
    pub fn new(number: u64) -> Self {
        Self { number, along: None }
    }

    /// The ranks that run the stage; all of them before there is a mesh.
    pub fn at(self) -> Option<At> {
        self.along.map(|axis| At { axis, coordinate: self.number })
    }
}

/// Structs of attributes that a call has or lacks as a whole: the first attribute is there or not.
macro_rules! optional {
    ($Struct:ident) => {
        impl Attribute for Option<$Struct> {
            const KIND: &'static str = "";
            const PARTS: &'static [AttrInfo] = $Struct::PARTS;

            fn write(&self, key: &'static str, _: Option<&Self>, names: Names<'_>, out: &mut Written) {
                if let Some(value) = self {
                    value.write(key, None, names, out);
                }
            }

            fn read(
                attrs: &mut Attrs,
                key: &'static str,
                _: Option<Self>,
                names: Names<'_>,
            ) -> Result<Self, AttrError> {
                if attrs.has($Struct::PARTS[0].name) {
                    $Struct::read(attrs, key, None, names).map(Some)
                } else {
                    Ok(None)
                }
            }

            fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut DimId)) {
                if let Some(value) = self {
                    value.each_dim_mut(new);
                }
            }
        }
    };
}

optional!(Scan);
optional!(Stage);
