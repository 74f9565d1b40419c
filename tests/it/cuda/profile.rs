//! Profiles of emitted programs: tasks by name, collectives with the bytes that the plan promises.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ithaca_ir::traffic;
use ithaca_kernels::store::{SafeTensorsFile, TensorSource};
use ithaca_passes::compile::compile;
use ithaca_passes::import::Workload;
use ithaca_passes::pass::Volume;
use serde_json::Value;

use super::emitted::program_of_four;
use super::{can_run, can_run_in_full, module, options, root, write_program};

#[test]
fn measured_tasks_are_those_of_the_schedule_and_send_what_was_promised() {
    if !can_run_in_full() {
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
        let all = trace["traceEvents"].as_array().unwrap();
        let order = all.iter().find(|e| e["name"] == "process_sort_index").unwrap();
        assert_eq!(order["args"]["sort_index"], rank);
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

/// An emitted program that is stopped, and one that is told nonsense.
#[test]
fn emitted_programs_say_what_failed_and_what_they_do_not_know() {
    if !can_run() {
        return;
    }
    let out = program_of_four();
    let run = |arguments: &[&str], environment: &[(&str, &str)]| {
        let mut command = Command::new("bash");
        command.arg(root().join("tests/cuda/host/run.sh")).arg(out.path()).arg("4").args(arguments);
        let run = command.envs(environment.iter().copied()).output().unwrap();
        (run.status.code(), String::from_utf8_lossy(&run.stderr).into_owned())
    };
    let begun = Instant::now();
    let (code, said) = run(&["--random-weights", "3"], &[]);
    assert_eq!(code, Some(0), "{said}");
    for (arguments, says) in [
        (&["--steps", "1.5"][..], "--steps takes a whole number from 1 on, not `1.5`"),
        (&["--steps", "0"], "--steps takes a whole number from 1 on"),
        (&["--steps", "-1"], "not `-1`"),
        (&["--steps"], "--steps takes a value"),
        (&["--random-weights", "0x10"], "--random-weights takes a whole number"),
        (&["--timeout", "soon"], "--timeout takes a whole number"),
        (&["--tolerance", "-1", "--self-check"], "--tolerance takes a number that is not negative"),
        (&["--tolerance", "1"], "--self-check, which is not given"),
        (&["--steps", "2", "--steps", "3"], "--steps is given twice"),
        (&["--setps", "2"], "unknown option `--setps`; there are --weights, --inputs, "),
        (&["2"], "unknown option `2`"),
    ] {
        let (code, text) = run(arguments, &[]);
        assert_eq!(code, Some(2), "{arguments:?}: {text}");
        assert!(text.contains(says), "{arguments:?}: {text}");
    }
    strangers_are_no_ranks(&out.path().join("program-host"));
    // All ranks stop in the middle, and nothing goes on, or a communicator fails meanwhile.
    let stopped = ("CUDA_ON_HOST_STOPS", "60");
    let arguments = ["--random-weights", "3", "--timeout", "1"];
    let (code, text) = run(&arguments, &[stopped]);
    assert_eq!(code, Some(1), "{text}");
    let says = |text: &str, what: &str| {
        text.contains("error: rank ")
            && text.contains(" failed at task ")
            && text.contains(" of `block` at layer ")
            && text.contains(what)
    };
    assert!(says(&text, "it has not ended after"), "{text}");
    let (code, text) = run(&["--random-weights", "3"], &[stopped, ("NCCL_ON_HOST_BREAKS", "100")]);
    assert_eq!(code, Some(1), "{text}");
    assert!(says(&text, "ncclCommGetAsyncError: a peer is gone"), "{text}");
    assert!(begun.elapsed() < Duration::from_secs(300), "it took {:?}", begun.elapsed());
}

/// Processes without a common secret do not meet, and ranks that anyone can reach need one.
fn strangers_are_no_ranks(program: &Path) {
    let secret = "0123456789abcdef";
    let meet = |secrets: [&str; 4]| {
        let at = tempfile::tempdir().unwrap();
        let start = |(rank, secret): (usize, &str)| {
            let mut command = Command::new(program);
            let rank = rank.to_string();
            let variables = [("RANK", &*rank), ("WORLD_SIZE", "4"), ("LOCAL_RANK", &*rank)];
            command.args(["--random-weights", "3", "--timeout", "2"]).envs(variables);
            command.env("NCCL_COMM_ID", at.path()).env("ITHACA_JOB_SECRET", secret);
            command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
        };
        let started: Vec<Child> = secrets.into_iter().enumerate().map(start).collect();
        started.into_iter().map(|child| child.wait_with_output().unwrap().status.code()).collect::<Vec<_>>()
    };
    assert_eq!(meet([secret; 4]), [Some(0); 4]);
    assert_eq!(meet([secret, secret, secret, "fedcba9876543210"]), [Some(1); 4]);
    for (variables, says) in [
        (
            [("MASTER_ADDR", "10.0.0.1"), ("ITHACA_JOB_SECRET", "")],
            "export ITHACA_JOB_SECRET=$(openssl rand -hex 32)",
        ),
        ([("MASTER_ADDR", "127.0.0.1"), ("ITHACA_JOB_SECRET", "short")], "has 5 bytes and needs at least 16"),
    ] {
        let mut command = Command::new(program);
        command.args(["--random-weights", "3"]).envs([("RANK", "1"), ("WORLD_SIZE", "4")]).envs(variables);
        let ran = command.output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.code() == Some(2) && said.contains(says), "{said}");
    }
}
