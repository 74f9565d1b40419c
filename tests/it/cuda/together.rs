//! Programs that are compiled as one: each in a namespace of its own and otherwise as it is emitted, so that what they
//! share, which is nearly all, is compiled once.
//!
//! nvcc reads a source once for the host and once for the device, where nothing but kernels is made. So the device's turn is
//! given as few programs as call all that any calls, which brings in the same kernels.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ithaca_ir::DType;
use ithaca_ir::schedule::{Buffer, Content, Place, Schedule};
use ithaca_kernels::store::{self, SafeTensorsFile, Stored, TensorSource};
use ithaca_kernels::tensor::Tensor;

use super::{Steps, device, emitted_steps, root};

/// A program to be run on the host, a process for each rank.
pub(super) struct Case {
    /// The name in messages.
    pub(super) name: String,
    pub(super) schedule: Schedule,
    /// The whole program; the emitted one compares itself with it.
    pub(super) reference: Option<Schedule>,
    pub(super) sources: Sources,
    pub(super) steps: usize,
}

/// Where a program reads weights and inputs.
pub(super) enum Sources {
    /// From `model.safetensors` and `io.safetensors` of a golden.
    Golden(PathBuf),
    /// From a file, in single precision.
    Tensors(Vec<(String, Tensor<f64>)>),
}

impl Sources {
    /// All tensors of a source.
    pub(super) fn of(tensors: &dyn TensorSource) -> Sources {
        let all = tensors.names().into_iter().map(|name| (name.clone(), tensors.read(&name).unwrap()));
        Sources::Tensors(all.collect())
    }

    /// Files of weights and of inputs; missing files are written to `to`.
    pub(super) fn files(&self, schedule: &Schedule, to: PathBuf) -> [PathBuf; 2] {
        match self {
            Sources::Golden(golden) => ["model.safetensors", "io.safetensors"].map(|file| golden.join(file)),
            Sources::Tensors(tensors) => {
                let stored: Vec<(&str, Stored, &Tensor<f64>)> =
                    tensors.iter().map(|(name, t)| (name.as_str(), stored_as(schedule, name), t)).collect();
                store::write(&to, &stored).unwrap();
                [to.clone(), to]
            }
        }
    }
}

/// Integers where the schedule reads them.
fn stored_as(schedule: &Schedule, name: &str) -> Stored {
    let integers = |buffer: &Buffer| {
        matches!(&buffer.place, Place::Input(binding) if binding.name == name)
            && matches!(&buffer.content, Content::Tensor(ty) if ty.dtype == DType::I32)
    };
    if schedule.frames.values().flat_map(|f| f.buffers.values()).any(integers) {
        Stored::I32
    } else {
        Stored::F32
    }
}

/// Runs all programs on the host, and on host devices: returns the output of each, and its folder.
///
/// The runtime runs the same schedules: it must give the same numbers and send the same bytes as the plan says.
pub(super) fn run(cases: &[Case]) -> (tempfile::TempDir, Vec<SafeTensorsFile>) {
    let out = tempfile::tempdir().unwrap();
    let programs: Vec<Program<'_>> = cases
        .iter()
        .map(|case| Program {
            name: &case.name,
            ranks: [&case.schedule].into(),
            reference: case.reference.as_ref().map(|reference| [reference].into()),
        })
        .collect();
    write(&programs, out.path());
    let kernels = device::kernels_for(cases.iter().map(|case| &case.schedule));
    let outputs = cases.iter().enumerate().map(|(i, case)| {
        let Case { name, schedule, reference, sources, steps } = case;
        let [weights, inputs] = sources.files(schedule, out.path().join(format!("in_{i}.safetensors")));
        let output = out.path().join(format!("out_{i}.safetensors"));
        let body = fs::read_to_string(out.path().join(format!("main_{i}.cuh"))).unwrap();
        // The host has to read counts of filled rows.
        let is_graph = *steps > 1 && !body.contains("s.filled_rows(");
        let run = Command::new("bash")
            .arg(root().join("tests/cuda/host/run.sh"))
            .arg(out.path())
            .arg(schedule.space.mesh.ranks().to_string())
            .args(["--weights".as_ref(), weights.as_os_str(), "--inputs".as_ref(), inputs.as_os_str()])
            .args(["--output".as_ref(), output.as_os_str()])
            .args(["--steps", &steps.to_string()])
            .args(reference.as_ref().map(|_| "--self-check"))
            .args(is_graph.then_some("--graph"))
            .env(WHICH, i.to_string())
            .output()
            .unwrap();
        let (stdout, stderr) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(run.status.success(), "{name}: {stdout}{stderr}");
        assert!(reference.is_none() || stdout.contains("self-check "), "{name}: {stdout}");
        let outputs = SafeTensorsFile::open(output).unwrap();
        let [weights, inputs] = [weights, inputs].map(|file| SafeTensorsFile::open(file).unwrap());
        let (found, traffic) = device::steps_on_device(name, schedule, &kernels, &weights, &inputs, *steps);
        device::assert_same(name, schedule, &found, &outputs);
        device::assert_traffic(name, schedule, (&weights, &inputs), &traffic);
        outputs
    });
    let outputs = outputs.collect();
    (out, outputs)
}

/// A program among others.
pub(super) struct Program<'a> {
    pub(super) name: &'a str,
    pub(super) ranks: Steps<'a>,
    pub(super) reference: Option<Steps<'a>>,
}

/// Which of the programs runs, by number.
pub(super) const WHICH: &str = "ITHACA_TEST_PROGRAM";

/// Writes programs as one, which runs the one that the environment says.
pub(super) fn write(programs: &[Program<'_>], out: &Path) {
    let (mut includes, mut bodies, mut kernels) = (Vec::new(), Vec::new(), Vec::new());
    for (i, Program { name, ranks, reference }) in programs.iter().enumerate() {
        for file in emitted_steps(*ranks, *reference) {
            if file.path != "main.cu" {
                let path = out.join(&file.path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, &file.contents).unwrap();
                continue;
            }
            // Headers come first: a name that is replaced in a program may occur in one.
            let (headers, body): (Vec<&str>, Vec<&str>) =
                file.contents.lines().partition(|line| line.starts_with("#include"));
            includes.extend(headers.into_iter().map(str::to_owned));
            fs::write(out.join(format!("main_{i}.cuh")), body.join("\n") + "\n").unwrap();
            kernels.push(launched(&body));
        }
        let names = ["ranks", "whole", "ranks_prompts", "whole_prompts", "main"];
        let [define, undefine]: [String; 2] = [
            names.map(|name| format!("#define {name} {name}_{i}\n")).concat(),
            names.map(|name| format!("#undef {name}\n")).concat(),
        ];
        bodies.push(format!("// {name}\n{define}#include \"main_{i}.cuh\"\n{undefine}\n"));
    }
    includes.push("#include <cstdlib>".to_owned());
    includes.sort();
    includes.dedup();
    let for_device = covering(&kernels);
    let (both, host): (Vec<usize>, Vec<usize>) = (0..bodies.len()).partition(|i| for_device.contains(i));
    let [both, host] =
        [both, host].map(|programs| -> String { programs.iter().map(|&i| bodies[i].as_str()).collect() });
    let mut main = format!("{}\n\n{both}#ifndef __CUDA_ARCH__\n{host}", includes.join("\n"));
    writeln!(main, "int main(int argc, char** argv) {{\n    const char* which = std::getenv(\"{WHICH}\");")
        .unwrap();
    writeln!(main, "    switch (which != nullptr ? std::atoi(which) : 0) {{").unwrap();
    for i in 0..programs.len() {
        writeln!(main, "        case {i}: return main_{i}(argc, argv);").unwrap();
    }
    writeln!(main, "        default: return 2;\n    }}\n}}\n#endif").unwrap();
    fs::write(out.join("main.cu"), main).unwrap();
}

/// The kernels that a program launches, with the template's arguments.
fn launched(lines: &[&str]) -> BTreeSet<String> {
    let kernel = |line: &&str| {
        let launch = line.split_once("(kernel::")?.1;
        let end = launch.find(['>', ';']).or_else(|| launch.find(','))?;
        Some(launch[..end].to_owned())
    };
    lines.iter().filter_map(kernel).collect()
}

/// The numbers of programs that together launch all that any of them launches: those with the most new kernels come first.
fn covering(kernels: &[BTreeSet<String>]) -> BTreeSet<usize> {
    let (mut chosen, mut left) = (BTreeSet::new(), kernels.iter().flatten().collect::<BTreeSet<_>>());
    assert!(!left.is_empty(), "programs launch kernels");
    while !left.is_empty() {
        let new = |i: &usize| kernels[*i].iter().filter(|kernel| left.contains(kernel)).count();
        let most = (0..kernels.len()).max_by_key(new).expect("there are programs");
        left.retain(|kernel| !kernels[most].contains(*kernel));
        chosen.insert(most);
    }
    chosen
}
