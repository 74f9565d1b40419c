//! Every kernel that the runtime may launch, by name.
//!
//! A kernel's name is its C++ name within `ithaca::kernel`, template arguments included: `softmax<float>`. A schedule
//! needs some of them ([`DeviceProgram::kernels`](crate::DeviceProgram::kernels)), and only these are compiled for it.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use ithaca_ir::DType;

use crate::few_slots;
use crate::flash;
use crate::sources::SOURCES;
use crate::split;
use crate::structs::layout_checks;
use crate::threads;

/// The C++ type of an element.
pub fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::F16 => "__half",
        DType::BF16 => "__nv_bfloat16",
        DType::I32 => "int32_t",
        DType::F8E4M3 | DType::Bool => "uint8_t",
    }
}

/// The C++ type of computations on elements.
pub fn accumulator(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::I32 | DType::Bool => "float",
    }
}

/// The C++ type of this many bytes, a power of two up to 16, for kernels that move elements without computing.
pub fn bits_type(bytes: u64) -> &'static str {
    BITS[usize::try_from(bytes.ilog2()).unwrap_or(0)]
}

/// Types of 1, 2, 4, 8 and 16 bytes.
const BITS: [&str; 5] = ["uint8_t", "uint16_t", "uint32_t", "uint64_t", "uint4"];

/// Kernels with one element type.
const OF_FLOAT: [&str; 39] = [
    "unary",
    "binary",
    "scale",
    "clamp",
    "clamp_backward",
    "gated",
    "gated_backward",
    "norm",
    "embed_backward",
    "rms_scale",
    "softmax",
    "argmax",
    "rotary",
    "rotate_append",
    "rotate_append_pages",
    "sum_copies",
    "scores",
    "weigh",
    "fill",
    "sum_members",
    "sum_pieces",
    "unary_backward",
    "norm_moments",
    "norm_backward",
    "softmax_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "pick",
    "row_lse",
    "clip_factor",
    "dropout",
    "route",
    "route_backward",
    "dispatch",
    "combine",
    "slot_products",
    "filled_rows",
    "clear_rows",
    "attention_backward_bias",
];

/// Kernels that move elements.
const OF_BITS: [&str; 11] = [
    "copy_box",
    "repeat",
    "gather_pieces",
    "scatter_pieces",
    "concat",
    "cut",
    "embed",
    "append",
    "append_pages",
    "gather_pages",
    "last_token",
];

/// Every kernel for tensors of these element types, sorted.
pub fn catalogue(dtypes: &[DType]) -> BTreeSet<String> {
    let mut all: BTreeSet<String> = [
        "first_key",
        "fold_in",
        "fold_in_real",
        "layer_key",
        "dropout_mask",
        "positions<int32_t>",
        "valid<float>",
        "find_nan",
        "deal",
        "no_tokens",
        "list_tokens",
        "clear_counts",
        "advance",
        "token_positions",
        "choose",
    ]
    .map(str::to_owned)
    .into();
    for bits in BITS {
        all.extend(OF_BITS.iter().map(|name| format!("{name}<{bits}>")));
    }
    for &dtype in dtypes {
        for &other in dtypes.iter().filter(|&&other| other != DType::Bool && dtype != DType::Bool) {
            all.insert(format!("cast<{}, {}>", c_type(dtype), c_type(other)));
        }
        if !dtype.is_float() {
            continue;
        }
        let t = c_type(dtype);
        all.extend(OF_FLOAT.iter().map(|name| format!("{name}<{t}>")));
        let a = accumulator(dtype);
        all.extend([t, a].map(|z| format!("einsum<{t}, {z}>")));
        all.extend([t, a].map(|z| format!("dots<{t}, {z}>")));
        all.extend([t, a].map(|z| format!("rms_scale_backward<{t}, {z}>")));
        all.extend([t, a].map(|z| format!("norm_backward_weight<{t}, {z}>")));
        all.extend([(t, t), (a, t)].map(|(x, z)| format!("sum<{x}, {z}>")));
        let gradients = dtypes.iter().filter(|other| other.is_float());
        all.extend(gradients.map(|&g| format!("adamw<{t}, {}>", c_type(g))));
        if dtype.bytes() == 2 {
            all.extend(flash::ALL.iter().flat_map(|flash| flash.kernels(t)));
            all.extend(few_slots::kernels(t));
        }
        for o in [t, "float"] {
            all.extend([64, 128].map(|tile| format!("attention<{t}, {o}, {tile}>")));
            all.extend(split::kernels(t, o, dtype.bytes() == 2));
            all.insert(format!("merge_splits<{a}, {o}>"));
            all.insert(format!("attention_backward_queries<{t}, {o}, 64>"));
            all.insert(format!("attention_backward_keys<{t}, {o}, 64>"));
            let joining = ["merge", "merge_parts", "sink", "sink_backward"];
            all.extend(joining.map(|name| format!("{name}<{t}, {o}>")));
        }
    }
    all
}

/// C++ that includes every kernel, with assertions on the sizes of structs and on launch parameters.
pub fn translation_unit() -> String {
    let mut text = String::new();
    for (name, _) in SOURCES {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "#include \"{name}\"");
    }
    text.push_str("using namespace ithaca;\n");
    text + &layout_checks() + &flash::checks() + &split::checks() + &few_slots::checks() + &threads::checks()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_the_sources_is_in_the_catalogue() {
        let all = catalogue(&DType::ALL);
        let named = |name: &str| all.iter().any(|k| k == name || k.starts_with(&format!("{name}<")));
        for (file, text) in SOURCES {
            for declared in text.split("__global__ void ").skip(1) {
                let name = declared.split('(').next().unwrap_or_default();
                assert!(named(name), "{file}: `{name}` is not in the catalogue");
            }
        }
    }
}
