//! `calibrate`: makes a cluster file that meets measurements.

mod measure;
mod probes;

use std::path::Path;

use ithaca_ir::{Diagnostic, Diagnostics};
use ithaca_passes::calibrate::{self, Point};

use super::session::{CommandOutput, Session};
use crate::cli::{CalibrateArgs, DEFAULT_CLUSTER, DeviceArg};
use crate::error::{Failure, Result};
use crate::files::{self, TextFile};
use crate::subject;

/// The attention kernel that profiles list of the runtime on GPUs and of emitted programs.
const OUR_ATTENTION: &str = "ithaca";

/// The file of points: each point with the number of its file.
#[derive(Default)]
struct Measurements {
    points: Vec<Point>,
    files: Vec<TextFile>,
    /// For each point its file.
    of: Vec<usize>,
}

impl Measurements {
    /// Reads a file with `parse`, which takes its name and its text.
    fn read(
        &mut self,
        path: &Path,
        parse: impl Fn(&str, &str) -> std::result::Result<Vec<Point>, Diagnostics>,
    ) -> Result<()> {
        let file = TextFile::read(path)?;
        let points =
            parse(&path.display().to_string(), &file.text).map_err(|mistakes| file.refuse(mistakes))?;
        self.of.extend(points.iter().map(|_| self.files.len()));
        self.points.extend(points);
        self.files.push(file);
        Ok(())
    }
}

pub(super) fn calibrate(args: &CalibrateArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    files::check_file(&args.output)?;
    let name = args.output.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let default = if args.device == Some(DeviceArg::Cpu) { "cpu" } else { DEFAULT_CLUSTER };
    let mut base = subject::cluster(args.base.as_deref().unwrap_or(default))?;
    if args.device == Some(DeviceArg::Cuda) {
        // Figures of these kernels are no figures of another library's.
        base = base.with_attention_kernel(OUR_ATTENTION)?;
        base.accelerator.attention_kernel.source = "the kernel that was measured".to_owned();
    }
    let mut measured = Measurements::default();
    for log in &args.nccl_tests {
        // A path with `=` in its name is one that exists.
        let (test, path) = match log.split_once('=').filter(|_| !Path::new(log).exists()) {
            Some((test, path)) => (Some(test), Path::new(path)),
            None => (None, Path::new(log)),
        };
        measured.read(path, |name, text| calibrate::nccl_tests(name, test, text))?;
    }
    for path in &args.kernels {
        measured.read(path, calibrate::kernels)?;
    }
    if let Some(device) = args.device {
        let points = measure::measure(device, &base, session.progress)?;
        if device == DeviceArg::Cpu {
            base = calibrate::on_cores(&base, measure::cores(), &points)?;
        }
        measured.points.extend(points);
    }
    if measured.points.is_empty() {
        let refusal = Diagnostic::new("C00", "there is nothing to calibrate by");
        return Err(refusal
            .help("name logs with `--nccl-tests FILE`, or tables with `--kernels FILE`")
            .into());
    }
    let found = calibrate::calibrate(&base, name, &measured.points).map_err(|(point, refusal)| {
        let file = measured.of.get(point).map(|&file| &measured.files[file]);
        file.map_or_else(|| Failure::from(refusal.clone()), |file| file.refuse(vec![refusal.clone()]))
    })?;
    files::write(&args.output, found.cluster.to_toml().as_bytes())?;
    Ok(CommandOutput::success(format!("{}wrote {}\n", calibrate::report(&found.rows), args.output.display())))
}
