//! Writes the seeds of every target to `corpus/TARGET` in the folder of this package.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    for target in ithaca_fuzz::TARGETS {
        let folder = here.join("corpus").join(target.name);
        std::fs::create_dir_all(&folder)?;
        for (i, seed) in (target.seeds)(&here.join("..")).iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{i}")), seed)?;
        }
    }
    Ok(())
}
