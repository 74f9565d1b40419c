//! Ranks in processes of their own: the binary, started once for each rank as a launcher would, prints and writes what it
//! does with a thread per rank, and nobody is left waiting when one does not come, contradicts the others, or dies.

mod stops;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use crate::port::free_port;
use crate::tier;

const GOLDENS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens");

/// What launchers set; a test may itself be run under one.
const VARIABLES: [&str; 13] = [
    "ITHACA_JOB_SECRET",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ITHACA_PORT",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
];

fn ithaca(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ithaca"));
    command.current_dir(GOLDENS).arg("run").args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in VARIABLES {
        command.env_remove(name);
    }
    command
}

/// Starts one rank, which finds the others at `port`.
fn start(rank: u64, world: u64, port: (&str, u16), args: &[&str]) -> Child {
    started(rank, world, port, args).spawn().unwrap()
}

fn started(rank: u64, world: u64, port: (&str, u16), args: &[&str]) -> Command {
    let mut command = ithaca(args);
    command.arg("--launch").env("MASTER_ADDR", "127.0.0.1").env(port.0, port.1.to_string());
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
    command
}

/// Starts all ranks and waits for them.
fn launch(world: u64, args: &[&str]) -> Vec<Output> {
    let port = ("MASTER_PORT", free_port());
    let children: Vec<Child> = (0..world).map(|rank| start(rank, world, port, args)).collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// That processes print what threads do: the same bytes sent, the same distances from the whole program, bit for bit.
fn same_as_threads(world: u64, args: &[&str]) {
    let expected = ithaca(args).output().unwrap();
    let (code, said) = (expected.status.code(), text(&expected.stdout));
    assert_eq!(code, Some(0), "{args:?}: {said}{}", text(&expected.stderr));
    for (rank, output) in launch(world, args).iter().enumerate() {
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), code, "{args:?}, rank {rank}: {errors}");
        assert_eq!(text(&output.stdout), if rank == 0 { said.as_str() } else { "" }, "{args:?}, rank {rank}");
        assert_eq!(errors, "", "{args:?}, rank {rank}");
    }
}

const STRATEGIES: [(&str, &str, &str); 20] = [
    ("llama-gqa", "data-parallel", "dp=4"),
    ("llama-gqa", "ulysses", "ulysses=4"),
    ("llama-gqa", "megatron-tp", "tp=4"),
    ("llama-gqa", "megatron-tp-sp", "tp=4"),
    ("llama-gqa", "ring", "ring=4"),
    ("llama-gqa", "megatron-cp-allgather", "cp=4"),
    ("llama-gqa", "megatron-cp-p2p", "cp=4"),
    ("llama-gqa", "megatron-cp-a2a", "cp=4"),
    ("llama-gqa", "megatron-cp-a2a-p2p", "cp=2,ulysses=2"),
    ("llama-gqa", "rsa", "ring=4"),
    ("llama-gqa", "dist-flash", "ring=4"),
    ("llama-gqa", "usp", "ring=2,ulysses=2"),
    ("llama-gqa", "loongtrain", "outer=2,ring=2,ulysses=1"),
    ("llama-gqa", "gspmd-2d", "cp=2,tp=2"),
    ("llama-gqa", "sparse-fetch", "ring=4"),
    ("llama-gqa", "pass-q", "ring=4"),
    ("llama-gqa", "ulysses+megatron-tp-sp", "ulysses=2,tp=2"),
    ("mistral-swa", "window-halo", "ring=4"),
    ("mixtral", "ep", "ep=4"),
    ("mixtral", "ulysses+ep", "ulysses=2,ep=2"),
];

/// A run of a strategy on four ranks.
fn under(golden: &str, strategy: &str, mesh: &str, rest: &[&str]) {
    let layout = [golden, "--seq", "16", "--batch", "4", "--strategy", strategy, "--mesh", mesh];
    same_as_threads(4, &[&layout[..], rest].concat());
}

#[test]
fn every_strategy_forward() {
    for (golden, strategy, mesh) in tier::one_in(3, STRATEGIES) {
        under(golden, strategy, mesh, &[]);
    }
}

#[test]
fn every_strategy_in_a_training_step() {
    for (golden, strategy, mesh) in tier::one_in(12, STRATEGIES) {
        under(golden, strategy, mesh, &["--mode", "train"]);
    }
    let pipeline = ["--mode", "train", "--micro-batches", "2"];
    under("llama-gqa", "pipeline+ulysses", "pp=2,ulysses=2", &pipeline);
    under("t5", "ulysses", "ulysses=4", &["--mode", "train"]);
}

#[test]
fn prompts_are_continued() {
    let decode =
        ["llama-gqa", "--mode", "decode", "--prompt", "1,2,3,4,5;6,7", "--steps", "4", "--chunk", "3"];
    for mesh in ["tp=2,dcp=2", "dp=2,tp=2"] {
        same_as_threads(4, &[&decode[..], &["--mesh", mesh]].concat());
    }
    // Ranks of prompts, and then those of tokens.
    same_as_threads(3, &[&decode[..], &["--mesh", "tp=2", "--prompt-mesh", "dcp=1"]].concat());
}

#[test]
fn steps_are_saved_and_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let [threads, processes] = ["threads", "processes"].map(|name| {
        let [first, last] =
            ["first", "last"].map(|step| folder.path().join(format!("{name}-{step}.safetensors")));
        (first.display().to_string(), last.display().to_string())
    });
    let model = ["llama-gqa", "--mode", "train", "--seq", "16", "--batch", "4"];
    let zero = ["--strategy", "data-parallel", "--mesh", "dp=4", "--zero", "3", "--steps", "3"];
    let ring = ["--strategy", "ring", "--mesh", "ring=4", "--steps", "2"];
    let read = |path: &str| std::fs::read(path).unwrap();
    for (world, (first, last)) in [(None, &threads), (Some(4), &processes)] {
        for args in [
            [&model[..], &zero, &["--save", first]].concat(),
            [&model[..], &ring, &["--resume", first, "--save", last]].concat(),
        ] {
            let outputs = match world {
                None => vec![ithaca(&args).output().unwrap()],
                Some(world) => launch(world, &args),
            };
            for output in outputs {
                assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
            }
        }
    }
    assert!(read(&threads.0) == read(&processes.0), "three steps are the same bit for bit");
    assert!(read(&threads.1) == read(&processes.1), "two steps more are, too");
}

#[test]
fn all_exit_as_the_first_judges_and_only_it_prints() {
    let folder = tempfile::tempdir().unwrap();
    let others = folder.path().join("others.safetensors").display().to_string();
    let model = ["llama-gqa", "--seq", "16"];
    let made = ithaca(&[&model[..], &["--seed", "1", "-o", &others]].concat()).output().unwrap();
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let layout = ["--strategy", "ulysses", "--mesh", "ulysses=2", "--expect", &others];
    let args = [&model[..], &layout].concat();
    for (rank, output) in launch(2, &args).iter().enumerate() {
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout).contains("FAILED"), rank == 0);
    }
}

/// What every process says that does not end well.
fn refusals(outputs: Vec<Output>) -> Vec<String> {
    let refusal = |output: Output| {
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stdout));
        assert_eq!(text(&output.stdout), "");
        text(&output.stderr)
    };
    outputs.into_iter().map(refusal).collect()
}

const TWO: [&str; 7] = ["llama-gqa", "--seq", "16", "--strategy", "ulysses", "--mesh", "ulysses=2"];

#[test]
fn an_environment_that_says_too_little_is_refused() {
    let output = ithaca(&TWO).arg("--launch").output().unwrap();
    let said = refusals(vec![output]).remove(0);
    for expected in
        ["C17", "RANK is not set", "WORLD_SIZE is not set", "MASTER_ADDR", "MASTER_PORT", "torchrun"]
    {
        assert!(said.contains(expected), "{said}");
    }
    for said in refusals(launch(3, &TWO)) {
        assert!(said.contains("the plan has 2 ranks, and the run has 3 processes"), "{said}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let port = ("ITHACA_PORT", free_port());
    let args = ["llama-gqa", "--seq", "16", "--strategy", "ulysses", "--mesh", "ulysses=4", "--timeout", "5"];
    let children = [0, 2].map(|rank| start(rank, 4, port, &args));
    for said in refusals(children.map(|child| child.wait_with_output().unwrap()).into()) {
        assert!(said.contains("ranks 1, 3 are missing of 4"), "{said}");
    }
    let alone = start(1, 4, port, &[&args[..8], &["1"]].concat()).wait_with_output().unwrap();
    let said = refusals(vec![alone]).remove(0);
    assert!(said.contains("rank 1 cannot reach rank 0 at 127.0.0.1:"), "{said}");
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let output = start(0, 2, ("ITHACA_PORT", port), &TWO).wait_with_output().unwrap();
    let said = refusals(vec![output]).remove(0);
    assert!(said.contains(&format!("cannot listen on 127.0.0.1:{port}")), "{said}");
    // What listens there says nothing, or one byte, so the other rank does not take it for rank 0.
    let args = [&TWO[..], &["--timeout", "1"]].concat();
    let not_in_time = || {
        let output = start(1, 2, ("ITHACA_PORT", port), &args).wait_with_output().unwrap();
        let said = refusals(vec![output]).remove(0);
        let why = format!("the process at 127.0.0.1:{port} does not say what it is in time");
        // The time of a handshake alone is longer.
        assert!(said.contains(&why) && !said.contains("within 5 s"), "{said}");
    };
    not_in_time();
    std::thread::spawn(move || {
        let says_little = |mut stream: TcpStream| stream.write_all(b"I").map(|()| stream);
        taken.incoming().flatten().map(says_little).collect::<Vec<_>>()
    });
    not_in_time();
}

#[test]
fn processes_that_run_different_things_are_refused() {
    let port = ("ITHACA_PORT", free_port());
    let other = [&TWO[..2], &["32"], &TWO[3..]].concat();
    let children = [start(0, 2, port, &TWO), start(1, 2, port, &other)];
    for said in refusals(children.map(|child| child.wait_with_output().unwrap()).into()) {
        assert!(said.contains("rank 1") && said.contains("has another schedule than rank 0"), "{said}");
    }
    let twice = [0, 1, 1].map(|rank| {
        start(rank, 3, port, &["llama-gqa", "--seq", "48", "--strategy", "ring", "--mesh", "ring=3"])
    });
    let said = refusals(twice.map(|child| child.wait_with_output().unwrap()).into());
    assert!(said[0].contains("two processes are rank 1"), "{said:?}");
}

#[test]
fn what_one_fails_of_the_others_say_too() {
    let port = ("ITHACA_PORT", free_port());
    let nowhere = [&TWO[..], &["--weights", "nowhere.safetensors"]].concat();
    let children = [start(0, 2, port, &TWO), start(1, 2, port, &nowhere)];
    let said = refusals(children.map(|child| child.wait_with_output().unwrap()).into());
    assert!(said[0].contains("rank 1 (127.0.0.1:") && said[0].contains("nowhere.safetensors"), "{said:?}");
    assert!(said[1].contains("nowhere.safetensors") && !said[1].contains("rank 1"), "{said:?}");
}

/// Experts have as many slots as the even share, and no router is that even.
#[test]
fn a_bound_that_tokens_exceed_ends_all_processes() {
    let model = ["mixtral", "--seq", "256", "--strategy", "ulysses+ep", "--mesh", "ulysses=2"];
    let said = refusals(launch(2, &[&model[..], &["--expert-bound", "1"]].concat()));
    assert!(said.iter().all(|said| said.contains("of 128 tokens and has slots for 64")), "{said:?}");
    // A process that another one ends says so.
    assert!(said.iter().any(|said| said.contains("C18")), "{said:?}");
}

/// Waits until somebody listens on a port, or until nobody does.
fn wait_until(port: u16, is_open: bool) -> Option<TcpStream> {
    loop {
        let found = TcpStream::connect(("127.0.0.1", port)).ok();
        if found.is_some() == is_open {
            return found;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn strangers_at_the_door_are_not_let_in() {
    let port = free_port();
    let first = start(0, 2, ("ITHACA_PORT", port), &TWO);
    let silent = wait_until(port, true).unwrap();
    let mut talking = TcpStream::connect(("127.0.0.1", port)).unwrap();
    talking.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let second = start(1, 2, ("ITHACA_PORT", port), &TWO);
    for child in [first, second] {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    drop((silent, talking));
}

/// The resident memory of a process, bytes.
fn memory(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/statm", child.id())).unwrap();
    4096 * status.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
}

/// What a stranger reads first from a rank that listens: magic, the number of the job, a nonce.
const OPENING: usize = 48;

/// Strangers that send much, send back what they read, or say nothing, while the second rank is still to come.
#[test]
fn strangers_neither_end_a_run_nor_fill_its_memory() {
    let secret = ("ITHACA_JOB_SECRET", "a secret of at least sixteen bytes");
    let port = free_port();
    let rank = |rank, secret: (&str, &str)| {
        let mut command = started(rank, 2, ("ITHACA_PORT", port), &TWO);
        command.env(secret.0, secret.1).spawn().unwrap()
    };
    let first = rank(0, secret);
    let mut strangers = vec![wait_until(port, true).unwrap()];
    let before = memory(&first);
    for _ in 0..tier::count(150, 1000) {
        let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", port)) else { continue };
        stranger.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        stranger.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut opening = [0; OPENING];
        // Where too many are waiting it is dropped.
        if stranger.read_exact(&mut opening).is_ok() {
            let _ = stranger.write_all(&[&opening[..], &[0; 40], &vec![0xff; 1 << 20]].concat());
        }
        strangers.push(stranger);
    }
    let grown = memory(&first).saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes");
    // One with another secret is a stranger too, and sees nothing of the run.
    let other = [&TWO[..], &["--timeout", "1"]].concat();
    let other = started(1, 2, ("ITHACA_PORT", port), &other)
        .env(secret.0, "another secret of sixteen bytes")
        .spawn()
        .unwrap();
    let said = refusals(vec![other.wait_with_output().unwrap()]).remove(0);
    assert!(said.contains("cannot reach rank 0"), "{said}");
    drop(strangers);
    let second = rank(1, secret);
    for child in [first, second] {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
}

/// A listener at the port of rank 0 that does not know the secret: the other rank shows it nothing but its proof.
#[test]
fn a_false_rank_0_receives_no_tensors() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let thread = std::thread::spawn(move || {
        let mut seen = Vec::new();
        let mut echo = [0; OPENING];
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            stream.write_all(&[&b"ITHACA04"[..], &[0; OPENING - 8]].concat()).unwrap();
            let n = stream.read(&mut echo).unwrap_or(0);
            seen.push(n);
        }
        seen
    });
    let args = [&TWO[..], &["--mode", "train", "--timeout", "1"]].concat();
    let mut command = started(1, 2, ("ITHACA_PORT", port), &args);
    command.env("ITHACA_JOB_SECRET", "a secret of at least sixteen bytes");
    let said = refusals(vec![command.output().unwrap()]).remove(0);
    assert!(said.contains("belongs to another job, or has another secret"), "{said}");
    assert_eq!(thread.join().unwrap(), [0, 0]);
}

#[test]
fn without_a_secret_other_machines_are_not_reached() {
    let said = |secret: &[(&str, &str)]| {
        let mut command = started(1, 2, ("ITHACA_PORT", 29_500), &[&TWO[..], &["--timeout", "1"]].concat());
        // An address of documentation (RFC 5737).
        command.env("MASTER_ADDR", "192.0.2.1").envs(secret.iter().copied());
        refusals(vec![command.output().unwrap()]).remove(0)
    };
    let none = said(&[]);
    assert!(
        none.contains("C17") && none.contains("no secret") && none.contains("ITHACA_JOB_SECRET"),
        "{none}"
    );
    let short = said(&[("ITHACA_JOB_SECRET", "short")]);
    assert!(short.contains("needs at least 16"), "{short}");
    let set = said(&[("ITHACA_JOB_SECRET", "a secret of at least sixteen bytes")]);
    assert!(set.contains("cannot reach rank 0 at 192.0.2.1"), "{set}");
}

/// Rank 0 listens at the address of the host, and at no other of the machine.
#[test]
fn rank_0_listens_at_its_address_only() {
    let port = free_port();
    let mut first = start(0, 2, ("ITHACA_PORT", port), &TWO);
    drop(wait_until(port, true));
    assert!(TcpStream::connect(("127.0.0.2", port)).is_err());
    first.kill().unwrap();
    first.wait().unwrap();
}

#[test]
fn a_process_that_is_killed_ends_the_others() {
    let port = free_port();
    // More steps than anyone waits for.
    let args = ["llama-gqa", "--mode", "train", "--seq", "16", "--strategy", "ring", "--mesh", "ring=4"];
    let args = [&args[..], &["--unchecked", "--steps", "200000", "--timeout", "120"]].concat();
    let first = start(0, 4, ("ITHACA_PORT", port), &args);
    drop(wait_until(port, true));
    let mut children = vec![first];
    children.extend((1..4).map(|rank| start(rank, 4, ("ITHACA_PORT", port), &args)));
    // Rank 0 listens until all have come; a moment later they run.
    wait_until(port, false);
    std::thread::sleep(Duration::from_secs(1));
    children[2].kill().unwrap();
    let killed = children.remove(2).wait_with_output().unwrap();
    assert_eq!(killed.status.code(), None);
    for said in refusals(children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()) {
        assert!(said.contains("rank 2 (127.0.0.1:") && said.contains("closed its connection"), "{said}");
    }
}
