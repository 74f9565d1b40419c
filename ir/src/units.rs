//! Times and sizes for people.

/// A time in the largest of s, ms and us that it fills, to three decimals.
pub fn seconds(s: f64) -> String {
    match s {
        0.0 => "0 s".to_owned(),
        s if s >= 1.0 => format!("{s:.3} s"),
        s if s >= 1e-3 => format!("{:.3} ms", s * 1e3),
        s => format!("{:.3} us", s * 1e6),
    }
}

/// A size in GiB from 0.1 GiB on, in MiB from 0.1 MiB on, in bytes below.
pub fn bytes(bytes: u64) -> String {
    let gib = bytes as f64 / f64::from(1u32 << 30);
    match gib {
        gib if gib >= 0.1 => format!("{gib:.2} GiB"),
        gib if gib >= 0.1 / 1024.0 => format!("{:.2} MiB", gib * 1024.0),
        _ => format!("{bytes} B"),
    }
}
