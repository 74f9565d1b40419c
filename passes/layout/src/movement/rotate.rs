//! `rotate` and `rotate-q`: blocks of keys, or of queries, pass from rank to rank until all pairs have met.

use super::{Movement, Seat, Site, Step, Visits};

/// Keys and values rotate; with several axes the innermost ring rotates fastest.
pub(super) struct Rotate;

impl Movement for Rotate {
    fn name(&self) -> &'static str {
        "rotate"
    }
    fn summary(&self) -> &'static str {
        "blocks of keys and values pass around a ring, results merge by online softmax (Ring Attention, arXiv 2310.01889); over two axes an inner ring turns inside an outer one (LoongTrain, arXiv 2406.18485)"
    }
    fn legality(&self) -> &'static str {
        "tokens % P = 0; zigzag: tokens % 2P = 0"
    }
    fn prunes(&self) -> bool {
        true
    }
    fn visits(&self, site: &Site<'_>) -> Visits {
        Visits::Steps(rounds(site).into_iter().map(Step::keys).collect())
    }
}

/// Queries rotate and their partial results return; keys stay.
pub(super) struct RotateQueries;

impl Movement for RotateQueries {
    fn name(&self) -> &'static str {
        "rotate-q"
    }
    fn summary(&self) -> &'static str {
        "queries and their partial results pass around a ring, keys stay: cheaper where many query heads share few keys, or queries are few (pass-Q: Context Parallelism for Scalable Million-Token Inference, arXiv 2411.01783)"
    }
    fn legality(&self) -> &'static str {
        "tokens % P = 0; zigzag: tokens % 2P = 0"
    }
    fn prunes(&self) -> bool {
        true
    }
    fn visits(&self, site: &Site<'_>) -> Visits {
        Visits::Steps(rounds(site).into_iter().map(Step::queries).collect())
    }
}

/// Every seat once: home first, then backwards, so a rank receives the previous rank's block first.
pub(super) fn rounds(site: &Site<'_>) -> Vec<Seat> {
    let sizes: Vec<u64> = site.axes.iter().map(|&a| site.space.mesh.size(a)).collect();
    let mut seats = Vec::new();
    for i in 0..site.blocks() {
        let mut rest = i;
        let mut by: Vec<u64> = sizes
            .iter()
            .rev()
            .map(|&n| {
                let turns = rest % n;
                rest /= n;
                (n - turns) % n
            })
            .collect();
        by.reverse();
        seats.push(site.seat(&by));
    }
    seats
}
