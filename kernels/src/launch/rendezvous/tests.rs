//! A process that ends during the rendezvous: all others end too, and name it.

#[path = "../../../../tests/common/port.rs"]
mod port;

use std::sync::mpsc::Receiver;

use super::super::frame::{self, Limits};
use super::super::handshake::{self, JobKey};
use super::*;
use port::free_port;

fn key() -> JobKey {
    JobKey::of(None, &["test".to_owned()])
}

/// Longer than a test should wait, shorter than the timeout of the processes.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Starts a process of the rendezvous; receives its error.
fn process(rank: u64, world: u64, port: u16) -> Receiver<String> {
    let (sender, error) = mpsc::channel();
    let env = LaunchEnv {
        rank,
        world,
        key: key(),
        host: "127.0.0.1".to_owned(),
        ports: vec![port],
        local_rank: None,
    };
    std::thread::spawn(move || {
        let error = join(&env, Duration::from_secs(120)).unwrap_err();
        assert!(matches!(error, LaunchError::Refused(_)), "{error:?}");
        sender.send(error.to_string()).unwrap();
    });
    error
}

fn all_fail_with(processes: impl IntoIterator<Item = Receiver<String>>, message: [&str; 2]) {
    for error in processes {
        let error = error.recv_timeout(TIME_LIMIT).expect("it ends in time");
        assert!(message.iter().all(|message| error.contains(message)), "{error}");
    }
}

/// A process that is connected to rank 0 and has not sent its rank.
fn unidentified(rank: u64, port: u16) -> TcpStream {
    let mut stream = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(POLL),
        }
    };
    let deadline = Instant::now() + Duration::from_secs(30);
    handshake::connect(&mut stream, (&key(), Ranks { connecting: rank, listening: 0 }), deadline).unwrap();
    stream
}

/// A process that has sent its rank and port.
fn identified(hello: Hello, port: u16) -> TcpStream {
    let mut stream = unidentified(hello.rank, port);
    frame::write(&mut stream, Kind::Hello, &frame::encode(&hello)).unwrap();
    stream
}

#[test]
fn a_process_that_ends_before_all_have_arrived_is_named() {
    let port = free_port();
    // Rank 1 is told whether it arrives before or after.
    let processes = [0, 1].map(|rank| process(rank, 4, port));
    drop(identified(Hello { rank: 3, world: 4, port: 1 }, port));
    all_fail_with(processes, ["rank 3 (127.0.0.1:", "closed its connection before all ranks had arrived"]);
}

#[test]
fn a_process_that_ends_before_it_sends_its_port_is_named() {
    let port = free_port();
    let processes = [0, 1].map(|rank| process(rank, 3, port));
    drop(unidentified(2, port));
    all_fail_with(processes, ["rank 2 (127.0.0.1:", "did not say on which port it listens"]);
}

#[test]
fn a_process_that_ends_before_all_are_connected_is_named() {
    for gone in [1, 2, 3] {
        let port = free_port();
        let others = [0, 1, 2, 3].into_iter().filter(|rank| *rank != gone);
        let processes: Vec<_> = others.map(|rank| process(rank, 4, port)).collect();
        // Peers that connect there get no answer.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let hello = Hello { rank: gone, world: 4, port: silent.local_addr().unwrap().port() };
        let mut stream = identified(hello, port);
        stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        assert_eq!(frame::read(&mut stream, Limits::default).unwrap().0, Kind::Addresses);
        drop(stream);
        all_fail_with(
            processes,
            [&format!("rank {gone} (127.0.0.1:"), "closed its connection before all ranks were connected"],
        );
    }
}

#[test]
fn rank_0_is_named_when_it_ends() {
    for stage in [Stage::Gathering, Stage::Connecting] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let processes = [1, 2].map(|rank| process(rank, 4, port));
        let mut listener = Listener::new(listener, &key(), 0).unwrap();
        let mut arrived = BTreeMap::new();
        while arrived.len() < 2 {
            match listener.next(Instant::now() + TIME_LIMIT, || Ok(())) {
                Ok(Arrival::Incoming(incoming)) => arrived.insert(incoming.hello.rank, incoming),
                _ => panic!("both arrive"),
            };
        }
        drop(listener);
        let message = match stage {
            Stage::Gathering => "closed its connection before all ranks had arrived",
            Stage::Connecting => {
                // Rank 3 does not exist.
                let ports = [arrived[&1].hello.port, arrived[&2].hello.port, 1];
                let table = frame::encode(&ports.map(|port| ("", port)).to_vec());
                for incoming in arrived.values() {
                    frame::write(&mut &incoming.stream, Kind::Addresses, &table).unwrap();
                }
                "closed its connection before all ranks were connected"
            }
        };
        drop(arrived);
        all_fail_with(processes, ["rank 0 (127.0.0.1:", message]);
    }
}

#[test]
fn all_processes_connect() {
    let port = free_port();
    let env = move |rank| LaunchEnv {
        rank,
        world: 5,
        key: key(),
        host: "127.0.0.1".to_owned(),
        ports: vec![port],
        local_rank: None,
    };
    let processes: Vec<_> = (0..5)
        .map(|rank| {
            std::thread::spawn(move || join(&env(rank), Duration::from_secs(120)).map(|p| p.rank().0))
        })
        .collect();
    for (rank, process) in (0..).zip(processes) {
        assert_eq!(process.join().unwrap().unwrap(), rank);
    }
}
