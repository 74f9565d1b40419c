//! What an emitted program measures of itself: tasks by name, collectives with the bytes that the plan promises.

use std::process::Command;

use ithaca_ir::traffic;
use ithaca_kernels::store::{SafeTensorsFile, TensorSource};
use ithaca_passes::compile::compile;
use ithaca_passes::import::Workload;
use ithaca_passes::pass::Volume;
use serde_json::Value;

use super::{found, module, options, root, write_program};

#[test]
#[expect(clippy::print_stderr, reason = "a test that needs a compiler says why it did nothing")]
fn measured_tasks_are_those_of_the_schedule_and_send_what_was_promised() {
    if !found("g++") || !found("bash") {
        eprintln!("skipped: g++ and bash are needed");
        return;
    }
    let directory = root().join("tests/goldens/llama-gqa");
    let shape = SafeTensorsFile::open(directory.join("io.safetensors")).unwrap().shape("input_ids").unwrap();
    let module = module(&directory, &Workload::prefill(shape[0], shape[1]));
    let options = options("ring+megatron-tp-sp", &[("ring", "2"), ("tp", "2")]);
    let compiled = compile(&module, &options, &Volume).unwrap();
    let out = tempfile::tempdir().unwrap();
    write_program(&compiled.schedule, None, out.path());
    let run = Command::new("bash")
        .arg(root().join("tests/cuda/host/run.sh"))
        .arg(out.path())
        .args(["4", "--random-weights", "3", "--steps", "2", "--profile", "--trace"])
        .arg(out.path().join("trace"))
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{stdout}{}", String::from_utf8_lossy(&run.stderr));
    assert!(stdout.contains("step 1: ") && stdout.contains("GB/s  collective"), "{stdout}");

    let promised = traffic::of_module(&compiled.per_rank);
    for rank in 0..4 {
        let text = std::fs::read_to_string(out.path().join(format!("trace.{rank}.json"))).unwrap();
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events: Vec<&Value> =
            trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").collect();
        assert!(events.iter().all(|e| e["pid"] == rank && e["dur"].as_f64().unwrap() >= 0.0));
        let layers = |name: &str| events.iter().filter(|e| e["args"]["frame"] == name).count();
        assert_eq!(
            layers("block"),
            2 * compiled.schedule.frames.values().find(|f| f.name == "block").unwrap().tasks.len()
        );
        for kind in ["permute", "all_gather", "reduce_scatter"] {
            let of_kind = events.iter().filter(|e| e["cat"] == kind);
            let sent: u64 = of_kind.map(|e| e["args"]["bytes_sent"].as_u64().unwrap()).sum();
            let expected: u64 =
                promised.iter().filter(|t| t.kind == kind).map(|t| t.bytes_sent_per_rank).sum();
            assert!(expected > 0 && sent == expected, "{kind}: sent {sent}, promised {expected}");
        }
    }
}
