//! Degrees that are legal, as messages list them.

/// `size` and the degrees up to it that are legal.
pub(super) fn legal_degrees(size: u64, what: &str, legal: impl Fn(u64) -> bool) -> String {
    let degrees: Vec<String> = (1..=size.min(4096)).filter(|&p| legal(p)).map(|p| p.to_string()).collect();
    let shown = if degrees.len() > 24 { &degrees[..24] } else { &degrees[..] };
    format!("legal {what} degrees: {}{}", shown.join(", "), if degrees.len() > 24 { ", …" } else { "" })
}
