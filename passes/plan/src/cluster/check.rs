//! Checking a cluster: whether every number is possible.

use std::ops::RangeInclusive;

use ithaca_ir::Diagnostic;

use crate::cluster::{
    Accelerator, AttentionKernel, AttentionRate, CachedRate, Cluster, Efficiency, Level, Measured,
    MeasuredKernels, Peak, ScoreBytes, SharedCores, Sourced,
};

/// The largest cluster, devices.
const MAX_DEVICES: u64 = 1 << 20;

/// The largest memory of a device, bytes.
const MAX_BYTES: u64 = 1 << 50;

/// Checks every number of a cluster.
pub(super) fn check(cluster: &Cluster) -> Result<(), Diagnostic> {
    let Cluster {
        name,
        devices_per_node,
        host_memory_bytes,
        accelerator,
        levels,
        summary: _,
        runtime: _,
        ranks: _,
    } = cluster;
    if name.is_empty() {
        return Err(impossible("name", "is empty"));
    }
    count("devices_per_node", devices_per_node)?;
    if let Some(memory) = host_memory_bytes {
        memory_bytes("host_memory_bytes", memory)?;
    }
    check_accelerator(accelerator)?;
    if levels.is_empty() {
        return Err(impossible("levels", "is empty: a cluster has at least one level"));
    }
    let (node, innermost) = (devices_per_node.value, levels[0].devices.value.max(1));
    if !node.is_multiple_of(innermost) && !innermost.is_multiple_of(node) {
        let problem =
            format!("is {node}, and the innermost level joins {innermost}: one is a multiple of the other");
        return Err(impossible("devices_per_node", &problem));
    }
    let (mut inside, mut ranks_inside) = (1, 1);
    for (i, level) in levels.iter().enumerate() {
        check_level(&format!("levels[{i}]"), level)?;
        let (devices, ranks) = (level.devices.value, level.ranks());
        let of_inside = |key: &str, number: u64, inside: u64| {
            let problem =
                format!("is {number}, which is not a larger multiple of the {inside} of the level inside");
            impossible(&format!("levels[{i}].{key}"), &problem)
        };
        if !devices.is_multiple_of(inside) || (i > 0 && devices <= inside) {
            return Err(of_inside("devices", devices, inside));
        }
        // The outermost level has all ranks, however many they are.
        let is_outermost = i > 0 && i + 1 == levels.len();
        if !is_outermost && !ranks.is_multiple_of(ranks_inside) {
            return Err(of_inside("used", ranks, ranks_inside));
        }
        (inside, ranks_inside) = (devices, ranks);
    }
    match cluster.missing_figure() {
        Some((word, key)) => Err(impossible("runtime", &format!("has `{word}`, which needs `{key}`"))),
        None => Ok(()),
    }
}

fn check_accelerator(accelerator: &Accelerator) -> Result<(), Diagnostic> {
    let Accelerator {
        name: _,
        memory_bytes,
        reserve_fraction,
        memory_bandwidth,
        host_bandwidth,
        launch_seconds,
        graph_launch_seconds,
        price_per_hour,
        peak: Peak { bf16, f16, f32, f64 },
        efficiency: Efficiency { matmul, matmul_terms, matmul_results, matmul_limit, memory },
        attention_kernel,
        attention,
        shared_cores,
        measured,
    } = accelerator;
    let key = |k: &str| format!("accelerator.{k}");
    self::memory_bytes(&key("memory_bytes"), memory_bytes)?;
    sourced(&key("reserve_fraction"), reserve_fraction)?;
    if !(0.0..1.0).contains(&reserve_fraction.value) {
        let problem = format!("is {}: it must be at least 0 and below 1", reserve_fraction.value);
        return Err(impossible(&key("reserve_fraction"), &problem));
    }
    rate(&key("memory_bandwidth"), memory_bandwidth)?;
    positive(&key("launch_seconds"), launch_seconds)?;
    optional(&key("host_bandwidth"), host_bandwidth.as_ref())?;
    optional(&key("graph_launch_seconds"), graph_launch_seconds.as_ref())?;
    optional(&key("price_per_hour"), price_per_hour.as_ref())?;
    for (k, peak) in [("bf16", bf16), ("f16", f16), ("f32", f32), ("f64", f64)] {
        rate(&key(&format!("peak.{k}")), peak)?;
    }
    let parts = [("matmul", Some(matmul)), ("matmul_limit", matmul_limit.as_ref()), ("memory", Some(memory))];
    for (k, part) in parts.into_iter().filter_map(|(k, part)| Some((k, part?))) {
        fraction(&key(&format!("efficiency.{k}")), part)?;
    }
    for (k, number) in [("matmul_terms", matmul_terms), ("matmul_results", matmul_results)] {
        optional(&key(&format!("efficiency.{k}")), number.as_ref())?;
    }
    sourced(&key("attention_kernel"), attention_kernel)?;
    if accelerator.attention_called(&attention_kernel.value).is_none() {
        let names: Vec<String> = attention.iter().map(|kernel| format!("`{}`", kernel.name)).collect();
        let problem = format!("is `{}`, and the kernels are {}", attention_kernel.value, names.join(", "));
        return Err(impossible(&key("attention_kernel"), &problem));
    }
    for (i, kernel) in attention.iter().enumerate() {
        if attention[..i].iter().any(|other| other.name == kernel.name) {
            let problem = format!("is `{}`, as that of another kernel", kernel.name);
            return Err(impossible(&key(&format!("attention[{i}].name")), &problem));
        }
        check_attention(&key(&format!("attention[{i}]")), kernel)?;
    }
    check_shared(key, shared_cores.as_ref(), measured.as_ref())
}

fn memory_bytes(key: &str, bytes: &Sourced<u64>) -> Result<(), Diagnostic> {
    sourced(key, bytes)?;
    if (1..=MAX_BYTES).contains(&bytes.value) {
        return Ok(());
    }
    Err(impossible(key, &format!("is {}: it must be from 1 to {MAX_BYTES}", bytes.value)))
}

fn check_shared(
    key: impl Fn(&str) -> String,
    shared_cores: Option<&SharedCores>,
    measured: Option<&MeasuredKernels>,
) -> Result<(), Diagnostic> {
    if let Some(SharedCores { cores, flops }) = shared_cores {
        count(&key("shared_cores.cores"), cores)?;
        rate(&key("shared_cores.flops"), flops)?;
    }
    measured.map_or(Ok(()), |measured| has_source(&key("measured"), &measured.source))
}

fn check_attention(path: &str, kernel: &AttentionKernel) -> Result<(), Diagnostic> {
    let AttentionKernel { name: _, forward, backward, cached, scores } = kernel;
    for (direction, rate) in [("forward", forward), ("backward", backward)] {
        let AttentionRate { efficiency, columns, keys } = rate;
        fraction(&format!("{path}.{direction}.efficiency"), efficiency)?;
        optional(&format!("{path}.{direction}.columns"), columns.as_ref())?;
        optional(&format!("{path}.{direction}.keys"), keys.as_ref())?;
    }
    if let Some(CachedRate { efficiency, memory }) = cached {
        fraction(&format!("{path}.cached.efficiency"), efficiency)?;
        fraction(&format!("{path}.cached.memory"), memory)?;
    }
    let Some(ScoreBytes { forward, backward, saved, dropout_forward, dropout_backward, dropout_saved }) =
        scores
    else {
        return Ok(());
    };
    let numbers = [
        ("forward", forward),
        ("backward", backward),
        ("saved", saved),
        ("dropout_forward", dropout_forward),
        ("dropout_backward", dropout_backward),
        ("dropout_saved", dropout_saved),
    ];
    numbers.into_iter().try_for_each(|(k, number)| positive(&format!("{path}.scores.{k}"), number))
}

fn check_level(path: &str, level: &Level) -> Result<(), Diagnostic> {
    let Level {
        name: _,
        devices,
        used,
        bandwidth,
        links,
        contention,
        latency,
        message_latency,
        ring_start,
        exchange_start,
        direct_latency,
        ring_efficiency,
        exchange_efficiency,
        scale_loss,
        measured,
    } = level;
    let key = |k: &str| format!("{path}.{k}");
    count(&key("devices"), devices)?;
    if let Some(used) = used {
        count(&key("used"), used)?;
        if used.value > devices.value {
            let problem = format!("is {}, and the level joins {} devices", used.value, devices.value);
            return Err(impossible(&key("used"), &problem));
        }
    }
    rate(&key("bandwidth"), bandwidth)?;
    if let Some(links) = links {
        count(&key("links"), links)?;
    }
    positive(&key("contention"), contention)?;
    if contention.value < 1.0 {
        let problem = format!("is {}: at least 1 device uses a link", contention.value);
        return Err(impossible(&key("contention"), &problem));
    }
    positive(&key("latency"), latency)?;
    positive(&key("message_latency"), message_latency)?;
    optional(&key("ring_start"), ring_start.as_ref())?;
    optional(&key("exchange_start"), exchange_start.as_ref())?;
    optional(&key("direct_latency"), direct_latency.as_ref())?;
    fraction(&key("ring_efficiency"), ring_efficiency)?;
    fraction(&key("exchange_efficiency"), exchange_efficiency)?;
    optional(&key("scale_loss"), scale_loss.as_ref())?;
    let Some(Measured { source, curves }) = measured else { return Ok(()) };
    has_source(&key("measured"), source)?;
    match curves.iter().find(|curve| curve.ranks() > devices.value) {
        Some(curve) => {
            let problem =
                format!("has {} ranks, and the level joins {} devices", curve.ranks(), devices.value);
            Err(impossible(&key("measured.curves"), &problem))
        }
        None => Ok(()),
    }
}

fn count(key: &str, n: &Sourced<u64>) -> Result<(), Diagnostic> {
    sourced(key, n)?;
    match n.value {
        1..=MAX_DEVICES => Ok(()),
        n => Err(impossible(key, &format!("is {n}: it must be from 1 to {MAX_DEVICES}"))),
    }
}

/// A positive number, not so small or large that times and sums of it are no numbers.
fn positive(key: &str, number: &Sourced<f64>) -> Result<(), Diagnostic> {
    within(key, number, 1e-12..=1e12)
}

/// Bytes or FLOPs per second.
fn rate(key: &str, number: &Sourced<f64>) -> Result<(), Diagnostic> {
    within(key, number, 1.0..=1e24)
}

fn within(key: &str, number: &Sourced<f64>, possible: RangeInclusive<f64>) -> Result<(), Diagnostic> {
    sourced(key, number)?;
    if possible.contains(&number.value) {
        return Ok(());
    }
    let (least, most) = possible.into_inner();
    let value = if number.value == 0.0 { "0".to_owned() } else { format!("{:e}", number.value) };
    Err(impossible(key, &format!("is {value}: it must be from {least:e} to {most:e}")))
}

/// A number that may be left out.
fn optional(key: &str, number: Option<&Sourced<f64>>) -> Result<(), Diagnostic> {
    let Some(number) = number else { return Ok(()) };
    positive(key, number).map_err(|refusal| {
        if number.value != 0.0 {
            return refusal;
        }
        let name = key.rsplit('.').next().unwrap_or(key);
        refusal.help(format!("leave `{name}` out: it is optional, and cannot be zero"))
    })
}

fn fraction(key: &str, number: &Sourced<f64>) -> Result<(), Diagnostic> {
    positive(key, number)?;
    if number.value <= 1.0 {
        return Ok(());
    }
    Err(impossible(key, &format!("is {}: a part of a peak is at most 1", number.value)))
}

fn sourced<T>(key: &str, number: &Sourced<T>) -> Result<(), Diagnostic> {
    has_source(key, &number.source)
}

fn has_source(key: &str, source: &str) -> Result<(), Diagnostic> {
    if !source.trim().is_empty() {
        return Ok(());
    }
    Err(impossible(key, "has an empty source").help("name the datasheet or measurement of the number"))
}

fn impossible(key: &str, problem: &str) -> Diagnostic {
    Diagnostic::new("M21", format!("cluster key `{key}` {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const H100: &str = include_str!("../../clusters/dgx-h100.toml");

    /// The diagnostic for the H100 profile with one text replaced.
    fn refusal(from: &str, to: &str) -> Diagnostic {
        assert!(H100.contains(from), "the profile has `{from}`");
        Cluster::parse("mine.toml", &H100.replacen(from, to, 1)).unwrap_err()
    }

    #[test]
    fn a_number_without_source_is_refused_by_key() {
        let d = refusal(
            "launch_seconds = { value = 5e-6, source = \"estimate",
            "launch_seconds = { value = 5e-6 } # \"",
        );
        assert_eq!(d.code, "M20");
        assert!(d.message.contains("accelerator.launch_seconds"), "{d}");
        assert!(d.message.contains("source"), "{d}");
    }

    #[test]
    fn a_bare_number_is_refused_by_key() {
        let text = H100.replacen("{ value = 3.35e12", "3.35e12 # { value = 3.35e12", 1);
        let d = Cluster::parse("mine.toml", &text).unwrap_err();
        assert!(d.message.contains("accelerator.memory_bandwidth"), "{d}");
    }

    #[test]
    fn a_number_that_may_be_absent_is_left_out_and_not_zero() {
        let d = refusal("ring_start = { value = 10.7e-6", "ring_start = { value = 0");
        assert!(d.message.contains("levels[0].ring_start"), "{d}");
        assert_eq!(d.helps, ["leave `ring_start` out: it is optional, and cannot be zero"]);
        assert!(refusal("3.35e12", "0").helps.is_empty());
    }

    #[test]
    fn impossible_numbers_are_refused_by_key() {
        for (to, code) in [
            ("-3.35e12", "M21"),
            ("0", "M21"),
            ("1e-320", "M21"),
            ("1e300", "M21"),
            ("nan", "M21"),
            ("inf", "M21"),
            ("\"fast\"", "M20"),
        ] {
            let d = refusal("3.35e12", to);
            assert_eq!(d.code, code, "{d}");
            assert!(d.message.contains("accelerator.memory_bandwidth"), "{d}");
        }
    }

    #[test]
    fn text_that_is_no_toml_is_refused_wherever_it_is_cut() {
        assert_eq!(Cluster::parse("x", "= 3").unwrap_err().code, "M20");
        assert_eq!(Cluster::parse("x", "").unwrap_err().code, "M20");
        let cuts = (0..H100.len()).filter(|&i| H100.is_char_boundary(i)).step_by(37);
        let complete = cuts.filter(|&cut| Cluster::parse("x", &H100[..cut]).is_ok()).count();
        assert!(complete <= 1 + H100.len() / 37 / 3, "most cuts lose a key: {complete}");
    }
}
