//! Tests that need a tool say so and do nothing where it is absent, unless `ITHACA_REQUIRE`, a list such as
//! `g++,nvcc,nvrtc,nccl`, names the tool: then its absence is a failure.

/// Says that a test does nothing because `tool` is absent.
///
/// # Panics
/// Where the tool is required.
#[expect(clippy::print_stderr, reason = "a test that needs a tool says why it did nothing")]
pub(crate) fn skip(tool: &str, why: &dyn std::fmt::Display) {
    let required = std::env::var("ITHACA_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name.trim() == tool), "ITHACA_REQUIRE names {tool}: {why}");
    eprintln!("skipped: {why}");
}
