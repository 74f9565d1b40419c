//! Which numbers of GPUs are tried for a replica.

/// By this factor at least a replica of more GPUs decodes a sequence faster, or no larger ones are tried.
const FASTER: f64 = 0.97;

/// Replicas of more and more GPUs, as long as these gain.
pub(super) struct Sizes {
    /// Whether larger ones are tried.
    pub(super) is_open: bool,
    /// Whether the last ones were faster than all before.
    pub(super) is_faster: bool,
    /// The time of the fastest.
    pub(super) fastest: f64,
    /// GPUs that do all the work if they are busy at all times.
    fewest: f64,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { is_open: true, is_faster: true, fastest: f64::INFINITY, fewest: f64::INFINITY }
    }
}

impl Sizes {
    /// Adds replicas of so many GPUs: the times of a step, and how many of these replicas are busy with each. Larger ones may be faster,
    /// or do more on each GPU, which is of use where more GPUs than this are needed.
    pub(super) fn add(
        &mut self,
        seconds: impl Iterator<Item = f64>,
        busy: impl Iterator<Item = f64>,
        gpus: u64,
    ) {
        let of_size = seconds.fold(f64::INFINITY, f64::min);
        self.is_faster = of_size <= FASTER * self.fastest;
        self.fastest = self.fastest.min(of_size);
        self.fewest = self.fewest.min(busy.fold(f64::INFINITY, f64::min) * gpus as f64);
        self.is_open &= self.is_faster || self.fewest > gpus as f64;
    }
}
