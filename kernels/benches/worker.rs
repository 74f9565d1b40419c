//! Times kernels on request, so that `kernels/benches/against.py` can take turns with another library.
//!
//! A line on standard input names a workload; the answer is the seconds that one run of it took. The empty line is
//! answered by the machine's instructions.

mod workloads;

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::time::Instant;

use workloads::Workload;

fn main() -> std::io::Result<()> {
    let mut known: BTreeMap<String, Workload> = BTreeMap::new();
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line.is_empty() {
            writeln!(out, "{}", ithaca_kernels::cpu::dense::instructions())?;
        } else if line == "names" {
            writeln!(out, "{}", workloads::NAMES.join(","))?;
        } else {
            if !known.contains_key(&line) {
                let Some(workload) = Workload::named(&line) else {
                    writeln!(out, "no workload `{line}`")?;
                    out.flush()?;
                    continue;
                };
                known.insert(line.clone(), workload);
            }
            if let Some(workload) = known.get_mut(&line) {
                let start = Instant::now();
                workload.run();
                writeln!(out, "{}", start.elapsed().as_secs_f64())?;
            }
        }
        out.flush()?;
    }
    Ok(())
}
