//! `--offload cache`: how many pages of caches are in host memory.

use std::collections::BTreeSet;

use ithaca_passes::import::{Pages, Workload};
use ithaca_passes::plan::{MeshAxis, Search, mesh_axes};
use ithaca_passes::planner::Priced;
use ithaca_passes::registry::Registry;

use crate::error::Result;
use crate::request::PlanRequest;

/// Numbers of pages, beside the least with which any layout fits, with which the fastest layouts are looked for.
const SAMPLES: u64 = 6;

/// The fastest layouts of each number that are tried with as few pages as they need.
const FASTEST: usize = 2;

/// Requests for the same layouts with more or fewer pages in host memory.
struct HostPages<'a> {
    registry: &'a Registry,
    request: &'a PlanRequest,
    pages: Pages,
    /// Numbers of pages are multiples of this, which any number of ranks that have sequences of their own divides.
    unit: u64,
    /// The most such multiples.
    most: u64,
}

/// A layout by its strategy and its mesh; single layers with strategies of their own take the same pages.
type Layout = (String, Vec<MeshAxis>);

impl PlanRequest {
    /// The request with as many pages of caches in host memory as the fastest layout needs to fit, of those that are fastest with some
    /// numbers of pages. Where none fits, with the largest multiple of the number of GPUs below all pages.
    ///
    /// # Errors
    /// Those of the model's configuration and the search.
    pub(crate) fn with_host_pages(self, registry: &Registry) -> Result<Self> {
        let (Some(pages), Some(tokens)) = (self.workload.pages, self.workload.cache) else { return Ok(self) };
        let all = pages.count.unwrap_or_else(|| tokens.div_ceil(pages.tokens) * self.workload.batch);
        let unit = if all > self.gpus { self.gpus } else { 1 };
        let of_all = HostPages { registry, request: &self, pages, unit, most: (all - 1) / unit };
        let Some(least) = of_all.least()? else { return Ok(of_all.with(of_all.most)) };
        if least == 0 {
            return Ok(of_all.with(0));
        }
        // Another layout may need more pages and be faster.
        let samples: BTreeSet<u64> =
            (0..=SAMPLES).map(|i| least + (of_all.most - least) * i / SAMPLES).collect();
        let mut layouts: Vec<Layout> = Vec::new();
        for n in samples {
            for Priced { options, .. } in of_all.fitting(n)?.into_iter().take(FASTEST) {
                let layout = (options.strategy, mesh_axes(&options.mesh));
                if !layouts.contains(&layout) {
                    layouts.push(layout);
                }
            }
        }
        let mut best: Option<(f64, u64)> = None;
        for (strategy, mesh) in layouts {
            let search = Search { strategy: Some(strategy), mesh: Some(mesh), ..self.search.clone() };
            let request = Self { search, ..self.clone() };
            let of_one = HostPages { request: &request, ..of_all };
            let Some(n) = of_one.least()? else { continue };
            let fitting = of_one.with(n).fitting(registry)?;
            let seconds = fitting.first().map(|one| one.simulation.seconds);
            if let Some(seconds) = seconds.filter(|&seconds| best.is_none_or(|(best, _)| seconds < best)) {
                best = Some((seconds, n));
            }
        }
        Ok(of_all.with(best.map_or(least, |(_, n)| n)))
    }
}

impl HostPages<'_> {
    /// The request with so many multiples of pages in host memory.
    fn with(&self, n: u64) -> PlanRequest {
        let pages = Pages { host: (n > 0).then_some(n * self.unit), ..self.pages };
        let workload = Workload { pages: Some(pages), ..self.request.workload.clone() };
        PlanRequest { workload, ..self.request.clone() }
    }

    /// The layouts that fit on the devices, the fastest first. The limit of the host is left out, and is checked for chosen layouts:
    /// with more pages than a layout needs it says nothing.
    fn fitting(&self, n: u64) -> Result<Vec<Priced>> {
        let mut request = self.with(n);
        request.cluster.host_memory_bytes = None;
        request.fitting(self.registry)
    }

    /// The least number with which a layout fits on the devices, if one does.
    fn least(&self) -> Result<Option<u64>> {
        let fits = |n: u64| Ok::<_, crate::error::Failure>(!self.fitting(n)?.is_empty());
        if fits(0)? {
            return Ok(Some(0));
        }
        if self.most == 0 || !fits(self.most)? {
            return Ok(None);
        }
        let (mut over, mut enough) = (0, self.most);
        while enough - over > 1 {
            let middle = u64::midpoint(over, enough);
            *(if fits(middle)? { &mut enough } else { &mut over }) = middle;
        }
        Ok(Some(enough))
    }
}
