//! A digest by which processes compare texts.

/// FNV-1a, 64 bits, of parts; a separator distinguishes them from their concatenation.
pub(super) fn digest<'a>(parts: impl IntoIterator<Item = &'a str>) -> u64 {
    let bytes = parts.into_iter().flat_map(|part| part.bytes().chain([0xff]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
