//! Whoever goes while processes meet, and whenever: all the others end, with its name.

use std::sync::mpsc::Receiver;

use super::super::door::introduce;
use super::*;

const JOB: u64 = 7;

/// More than anyone of these tests should wait, and less than what the processes would.
const AGES: Duration = Duration::from_secs(20);

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A process that takes part; what it says when it fails.
fn process(rank: u64, world: u64, port: u16) -> Receiver<String> {
    let (say, said) = mpsc::channel();
    let seat =
        Seat { rank, world, job: JOB, host: "127.0.0.1".to_owned(), ports: vec![port], local_rank: None };
    std::thread::spawn(move || {
        let error = join(&seat, Duration::from_secs(120)).unwrap_err();
        assert!(matches!(error, LaunchError::Refused(_)), "{error:?}");
        say.send(error.to_string()).unwrap();
    });
    said
}

fn all_say(processes: impl IntoIterator<Item = Receiver<String>>, words: [&str; 2]) {
    for said in processes {
        let said = said.recv_timeout(AGES).expect("it ends before long");
        assert!(words.iter().all(|words| said.contains(words)), "{said}");
    }
}

/// One that is connected with rank 0, and has said nothing yet.
fn nameless(port: u16) -> TcpStream {
    let mut stream = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(GLANCE),
        }
    };
    introduce(&mut stream, JOB).unwrap();
    stream
}

/// One that has said which rank it is, and where it listens.
fn guest(hello: Hello, port: u16) -> TcpStream {
    let mut stream = nameless(port);
    frame::write(&mut stream, Kind::Hello, &hello.encode()).unwrap();
    stream
}

#[test]
fn who_leaves_before_all_have_come_is_named() {
    let port = free_port();
    // Rank 1 comes before or after that: it hears of it all the same.
    let processes = [0, 1].map(|rank| process(rank, 4, port));
    drop(guest(Hello { rank: 3, world: 4, port: 1 }, port));
    all_say(processes, ["rank 3 (127.0.0.1:", "left before all had come"]);
}

#[test]
fn who_leaves_before_it_said_its_rank_ends_the_meeting_too() {
    let port = free_port();
    let processes = [0, 1].map(|rank| process(rank, 3, port));
    drop(nameless(port));
    all_say(processes, ["127.0.0.1:", "is of this job and did not say which rank it is"]);
}

#[test]
fn who_leaves_before_all_have_met_is_named() {
    for gone in [1, 2, 3] {
        let port = free_port();
        let others = [0, 1, 2, 3].into_iter().filter(|rank| *rank != gone);
        let processes: Vec<_> = others.map(|rank| process(rank, 4, port)).collect();
        // Others that connect there hear nothing.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let hello = Hello { rank: gone, world: 4, port: silent.local_addr().unwrap().port() };
        let mut stream = guest(hello, port);
        stream.set_read_timeout(Some(AGES)).unwrap();
        assert_eq!(frame::read(&mut stream, Limits::default).unwrap().0, Kind::Table);
        drop(stream);
        all_say(processes, [&format!("rank {gone} (127.0.0.1:"), "left before all had met"]);
    }
}

#[test]
fn rank_0_is_named_when_it_leaves() {
    for stage in [Stage::Come, Stage::Met] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let processes = [1, 2].map(|rank| process(rank, 4, port));
        let mut door = Door::new(listener, JOB).unwrap();
        let mut guests = BTreeMap::new();
        while guests.len() < 2 {
            match door.next(Instant::now() + AGES, || Ok(())) {
                Ok(Came::Guest(guest)) => guests.insert(guest.hello.rank, guest),
                _ => panic!("both come"),
            };
        }
        drop(door);
        let words = match stage {
            Stage::Come => "left before all had come",
            Stage::Met => {
                let mut table = Writer::new();
                // Rank 3 is nowhere.
                for port in [guests[&1].hello.port, guests[&2].hello.port, 1] {
                    table.text("").number(port.into());
                }
                let table = table.into_bytes();
                for guest in guests.values() {
                    frame::write(&mut &guest.stream, Kind::Table, &table).unwrap();
                }
                "left before all had met"
            }
        };
        drop(guests);
        all_say(processes, ["rank 0 (127.0.0.1:", words]);
    }
}

#[test]
fn all_meet() {
    let port = free_port();
    let seat = move |rank| Seat {
        rank,
        world: 5,
        job: JOB,
        host: "127.0.0.1".to_owned(),
        ports: vec![port],
        local_rank: None,
    };
    let processes: Vec<_> = (0..5)
        .map(|rank| {
            std::thread::spawn(move || join(&seat(rank), Duration::from_secs(120)).map(|p| p.rank().0))
        })
        .collect();
    for (rank, process) in (0..).zip(processes) {
        assert_eq!(process.join().unwrap().unwrap(), rank);
    }
}
