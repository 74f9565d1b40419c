//! Processes find each other: everyone meets rank 0, which tells all where all are, and every pair is connected.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use super::bytes::{Reader, Writer};
use super::frame::{self, FrameError, Kind, Limits};
use super::mesh::Mesh;
use super::process::Process;
use super::{LaunchError, Seat};

/// What both sides of a connection say first, with the number of the job.
const MAGIC: [u8; 8] = *b"ITHACA01";

/// How long a stranger is given to say who it is.
const INTRODUCTION: Duration = Duration::from_secs(5);

/// How long one attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(3);

/// How long processes that have met rank 0 may take to meet each other: all listen by then.
const AMONG_EACH_OTHER: Duration = Duration::from_secs(30);

/// Pauses between attempts: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// How often somebody at the door is looked for.
const GLANCE: Duration = Duration::from_millis(4);

/// Connects this process with all the others, which have to come within `timeout`; later none is waited for longer than
/// that for one message either.
///
/// # Errors
/// [`LaunchError::Taken`], [`LaunchError::Absent`], [`LaunchError::Unreached`], and [`LaunchError::Refused`] when
/// processes contradict each other.
pub fn join(seat: &Seat, timeout: Duration) -> Result<Process, LaunchError> {
    let deadline = Instant::now() + timeout;
    let meeting = Meeting { seat, timeout, deadline };
    let peers = match seat.rank {
        0 => meeting.receive_all()?,
        _ => meeting.visit_all()?,
    };
    let mesh = Mesh::new(seat.rank, seat.world, timeout, peers)?;
    Ok(Process::new(mesh))
}

/// Connections to other ranks.
pub(super) type Peers = BTreeMap<u64, (TcpStream, SocketAddr)>;

/// What one who connects says of itself.
#[derive(Clone, Copy, Debug)]
struct Hello {
    rank: u64,
    world: u64,
    /// Where it listens for others.
    port: u16,
}

impl Hello {
    fn encode(self) -> Vec<u8> {
        let mut out = Writer::new();
        out.number(self.rank).number(self.world).number(self.port.into());
        out.into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Hello> {
        let mut input = Reader::new(bytes);
        let (rank, world, port) = (input.number().ok()?, input.number().ok()?, input.number().ok()?);
        input.end().ok()?;
        Some(Hello { rank, world, port: u16::try_from(port).ok()? })
    }
}

/// One who connected.
struct Guest {
    hello: Hello,
    stream: TcpStream,
    address: SocketAddr,
}

/// Where others come in.
struct Door {
    listener: TcpListener,
    job: u64,
    let_in: Sender<Result<Guest, String>>,
    guests: Receiver<Result<Guest, String>>,
    /// What came that is no part of this job.
    strays: Vec<String>,
}

impl Door {
    fn new(listener: TcpListener, job: u64) -> io::Result<Door> {
        // Accepting does not wait, so that a deadline can be kept.
        listener.set_nonblocking(true)?;
        let (let_in, guests) = mpsc::channel();
        Ok(Door { listener, job, let_in, guests, strays: Vec::new() })
    }

    /// The next who belongs to this job; `None` after the deadline, or when `in_vain` says that there is no use in waiting.
    fn next(&mut self, deadline: Instant, in_vain: impl Fn() -> bool) -> Option<Guest> {
        loop {
            // Each introduces itself in a thread of its own: one who says nothing keeps nobody waiting.
            while let Ok((stream, address)) = self.listener.accept() {
                let (job, let_in) = (self.job, self.let_in.clone());
                let introduce = move || {
                    let guest = introduced(stream, address, job).map_err(|why| format!("{address} {why}"));
                    // Nobody may be there any more to hear of it.
                    let _ = let_in.send(guest);
                };
                if let Err(error) = std::thread::Builder::new().name("door".to_owned()).spawn(introduce) {
                    self.strays.push(format!("{address} could not be listened to ({error})"));
                }
            }
            match self.guests.recv_timeout(GLANCE) {
                Ok(Ok(guest)) => return Some(guest),
                Ok(Err(stray)) => self.strays.push(stray),
                Err(_) if Instant::now() >= deadline || in_vain() => return None,
                Err(_) => {}
            }
        }
    }
}

/// The listening side of an introduction.
fn introduced(mut stream: TcpStream, address: SocketAddr, job: u64) -> Result<Guest, String> {
    let card = |stream: &mut TcpStream| -> io::Result<[u8; 16]> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(INTRODUCTION))?;
        stream.set_write_timeout(Some(INTRODUCTION))?;
        stream.write_all(&own_card(job))?;
        let mut card = [0; 16];
        stream.read_exact(&mut card)?;
        Ok(card)
    };
    let card = card(&mut stream).map_err(|_| "left without a word".to_owned())?;
    is_ours(&card, job)?;
    let said = frame::read(&mut stream, Limits::default).map_err(|error| error.to_string())?;
    let hello = match said {
        (Kind::Hello, body) => Hello::decode(&body),
        _ => None,
    };
    let hello = hello.ok_or("does not say which rank it is")?;
    Ok(Guest { hello, stream, address: canonical(address) })
}

/// The other side of it, as far as this is another process of the job; what is to be said follows.
fn introduce(stream: &mut TcpStream, job: u64) -> Result<(), String> {
    let card = |stream: &mut TcpStream| -> io::Result<[u8; 16]> {
        stream.set_read_timeout(Some(INTRODUCTION))?;
        let mut card = [0; 16];
        stream.read_exact(&mut card)?;
        Ok(card)
    };
    let card = card(stream).map_err(|error| format!("something that says nothing answers ({error})"))?;
    is_ours(&card, job)?;
    stream.write_all(&own_card(job)).map_err(|error| error.to_string())
}

fn own_card(job: u64) -> [u8; 16] {
    let mut card = [0; 16];
    card[..8].copy_from_slice(&MAGIC);
    card[8..].copy_from_slice(&job.to_le_bytes());
    card
}

fn is_ours(card: &[u8; 16], job: u64) -> Result<(), String> {
    match card {
        card if *card == own_card(job) => Ok(()),
        [magic @ .., _, _, _, _, _, _, _, _] if *magic == MAGIC => Err("is of another job".to_owned()),
        _ => Err("is no process of ithaca".to_owned()),
    }
}

/// An address of version 4 as such.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The meeting, as one process takes part in it.
struct Meeting<'a> {
    seat: &'a Seat,
    timeout: Duration,
    deadline: Instant,
}

impl Meeting<'_> {
    /// Rank 0: waits for all the others and tells them where they are.
    fn receive_all(&self) -> Result<Peers, LaunchError> {
        let Seat { world, job, .. } = *self.seat;
        let mut guests: BTreeMap<u64, Guest> = BTreeMap::new();
        if world == 1 {
            return Ok(Peers::new());
        }
        let taken = |source| LaunchError::Taken { address: self.seat.address(), source };
        let mut door = Door::new(self.listen().map_err(taken)?, job).map_err(taken)?;
        let refuse = |guests: BTreeMap<u64, Guest>, error: LaunchError| {
            for mut guest in guests.into_values() {
                // Who has left need not be told.
                let _ = frame::write(&mut guest.stream, Kind::Refuse, error.to_string().as_bytes());
            }
            error
        };
        while (guests.len() as u64) < world - 1 {
            let left = || guests.values().find(|guest| has_left(&guest.stream));
            let Some(mut guest) = door.next(self.deadline, || left().is_some()) else {
                if let Some(Guest { hello, address, .. }) = left() {
                    let wrong = format!("rank {} ({address}) left before all had come", hello.rank);
                    return Err(refuse(guests, LaunchError::Refused(wrong)));
                }
                let missing = (1..world).filter(|rank| !guests.contains_key(rank)).collect();
                let seconds = self.timeout.as_secs();
                let strays = strays(&door.strays);
                return Err(refuse(guests, LaunchError::Absent { missing, world, seconds, strays }));
            };
            let Hello { rank, world: found, .. } = guest.hello;
            let wrong = if found != world {
                Some(format!(
                    "rank {rank} ({}) was started as one of {found}, rank 0 as one of {world}",
                    guest.address
                ))
            } else if rank == 0 {
                Some(format!("{} says that it is rank 0 as well", guest.address))
            } else {
                guests.get(&rank).map(|other| {
                    format!(
                        "two processes say that they are rank {rank}: {} and {}",
                        other.address, guest.address
                    )
                })
            };
            if let Some(wrong) = wrong {
                // Who has left need not be told.
                let _ = frame::write(&mut guest.stream, Kind::Refuse, wrong.as_bytes());
                return Err(refuse(guests, LaunchError::Refused(wrong)));
            }
            guests.insert(rank, guest);
        }
        let mut table = Writer::new();
        for Guest { hello, address, .. } in guests.values() {
            // On the machine of rank 0; others know that by another address.
            let host = if address.ip().is_loopback() { String::new() } else { address.ip().to_string() };
            table.text(&host).number(hello.port.into());
        }
        let table = table.into_bytes();
        for guest in guests.values_mut() {
            let address = guest.address.to_string();
            frame::write(&mut guest.stream, Kind::Table, &table)
                .map_err(|source| LaunchError::Setup { address, source })?;
        }
        Ok(guests.into_iter().map(|(rank, guest)| (rank, (guest.stream, guest.address))).collect())
    }

    /// Another rank: goes to rank 0, then to those of lower number, and waits for those of higher.
    fn visit_all(&self) -> Result<Peers, LaunchError> {
        let Seat { rank, world, job, ref host, ref ports } = *self.seat;
        let mut first = self.reach((0, host, ports), self.deadline)?;
        let root = first.peer_addr().map(canonical);
        let setup = |source| LaunchError::Setup { address: self.seat.address(), source };
        let root = root.map_err(setup)?;
        let listener = TcpListener::bind((self.own_address(root.ip()), 0)).map_err(setup)?;
        let port = listener.local_addr().map_err(setup)?.port();
        let mut door = Door::new(listener, job).map_err(setup)?;
        let hello = Hello { rank, world, port };
        frame::write(&mut first, Kind::Hello, &hello.encode()).map_err(setup)?;

        // Rank 0 says when it has waited for too long; a little later than that it has been killed or cut off.
        let left = self.deadline.saturating_duration_since(Instant::now()) + INTRODUCTION;
        first.set_read_timeout(Some(left)).map_err(setup)?;
        let unreached = |other: u64, why: String| LaunchError::Unreached {
            rank,
            other,
            address: self.seat.address(),
            seconds: self.timeout.as_secs(),
            why,
        };
        let table = match frame::read(&mut first, Limits::default) {
            Ok((Kind::Table, body)) => table(&body).filter(|table| table.len() as u64 == world - 1),
            Ok((Kind::Refuse, body)) => {
                return Err(LaunchError::Refused(String::from_utf8_lossy(&body).into_owned()));
            }
            Ok(_) => None,
            Err(FrameError::Closed) => {
                return Err(unreached(0, "it closed the connection before all had come".to_owned()));
            }
            Err(error) => return Err(unreached(0, error.to_string())),
        };
        let table = table.ok_or_else(|| unreached(0, "it sent what cannot be read".to_owned()))?;
        let mut peers: Peers = [(0, (first, root))].into();
        let deadline = Instant::now() + AMONG_EACH_OTHER;
        for (other, (host, port)) in (1..rank).zip(&table) {
            let host = if host.is_empty() { root.ip().to_string() } else { host.clone() };
            let mut stream = self.reach((other, &host, &[*port]), deadline)?;
            let address = SocketAddr::new(stream.peer_addr().map_err(setup)?.ip().to_canonical(), *port);
            let hello = Hello { rank, world, port: 0 };
            frame::write(&mut stream, Kind::Hello, &hello.encode()).map_err(setup)?;
            peers.insert(other, (stream, address));
        }
        while (peers.len() as u64) < world - 1 {
            let left = || peers.iter().find(|(_, (stream, _))| has_left(stream));
            let Some(guest) = door.next(self.deadline, || left().is_some()) else {
                if let Some((other, (_, address))) = left() {
                    let wrong = format!("rank {other} ({address}) left before all had met");
                    return Err(LaunchError::Refused(wrong));
                }
                let missing =
                    (0..world).filter(|other| *other != rank && !peers.contains_key(other)).collect();
                let strays = strays(&door.strays);
                return Err(LaunchError::Absent { missing, world, seconds: self.timeout.as_secs(), strays });
            };
            let other = guest.hello.rank;
            if other > rank && other < world && !peers.contains_key(&other) {
                peers.insert(other, (guest.stream, guest.address));
            } else {
                let wrong = format!("{} says that it is rank {other}, which is here already", guest.address);
                return Err(LaunchError::Refused(wrong));
            }
        }
        Ok(peers)
    }

    /// Listens for the others, on the first port that is free; on this machine only where its name says so.
    fn listen(&self) -> io::Result<TcpListener> {
        let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
        for &port in &self.seat.ports {
            let hosts: Vec<SocketAddr> = match is_local(&self.seat.host) {
                true => (self.seat.host.as_str(), port).to_socket_addrs()?.collect(),
                // Both versions where the system has the newer one.
                false => {
                    vec![(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]
                }
            };
            for host in hosts {
                match TcpListener::bind(host) {
                    Ok(listener) => return Ok(listener),
                    Err(error) => last = error,
                }
                // The older version of a port that is taken may be free, and would not be found by everyone.
                if last.kind() == ErrorKind::AddrInUse {
                    break;
                }
            }
        }
        Err(last)
    }

    /// Where a rank that reached rank 0 at `root` listens itself.
    fn own_address(&self, root: IpAddr) -> IpAddr {
        match root {
            root if is_local(&self.seat.host) && root.is_loopback() => root,
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        }
    }

    /// Connects to another process of this job by its rank, host and ports; it may not be there yet.
    fn reach(
        &self,
        (other, host, ports): (u64, &str, &[u16]),
        deadline: Instant,
    ) -> Result<TcpStream, LaunchError> {
        let (mut pause, longest) = PAUSES;
        let start = Instant::now();
        let mut stray = None;
        loop {
            let mut last = String::new();
            for &port in ports {
                match self.attempt(host, port, deadline) {
                    Ok(stream) => return Ok(stream),
                    Err(Attempt::Nobody(why)) => last = why,
                    Err(Attempt::Stray(why)) => stray = Some(format!("what listens at {host}:{port} {why}")),
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let address = match ports {
                    [port] => format!("{host}:{port}"),
                    _ => self.seat.address(),
                };
                let why = stray.unwrap_or(last);
                let (rank, seconds) = (self.seat.rank, start.elapsed().as_secs());
                return Err(LaunchError::Unreached { rank, other, address, seconds, why });
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(longest);
        }
    }

    fn attempt(&self, host: &str, port: u16, deadline: Instant) -> Result<TcpStream, Attempt> {
        let nobody = |error: io::Error| Attempt::Nobody(error.to_string());
        let mut last = Attempt::Nobody("the host has no address".to_owned());
        for address in (host, port).to_socket_addrs().map_err(nobody)? {
            let left = deadline.saturating_duration_since(Instant::now());
            let result = TcpStream::connect_timeout(&address, left.clamp(GLANCE, ATTEMPT));
            let mut stream = match result {
                Ok(stream) => stream,
                Err(error) => {
                    last = nobody(error);
                    continue;
                }
            };
            // On one machine a port that nobody listens on may be given to the one who looks for it.
            if stream.local_addr().is_ok_and(|own| stream.peer_addr().is_ok_and(|peer| own == peer)) {
                continue;
            }
            match introduce(&mut stream, self.seat.job) {
                Ok(()) => return Ok(stream),
                Err(why) => last = Attempt::Stray(why),
            }
        }
        Err(last)
    }
}

/// Whether the other side has closed its connection; nothing is taken from what it may have said.
fn has_left(stream: &TcpStream) -> bool {
    let look = || -> io::Result<bool> {
        stream.set_nonblocking(true)?;
        let seen = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        match seen {
            Ok(n) => Ok(n == 0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    };
    look().unwrap_or(true)
}

/// Why a connection was not made.
enum Attempt {
    /// Nobody answers.
    Nobody(String),
    /// Somebody else does.
    Stray(String),
}

/// Whether a host is named as the machine itself, so that nobody else need reach it.
fn is_local(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Where ranks from 1 on listen; no host means that of rank 0.
fn table(body: &[u8]) -> Option<Vec<(String, u16)>> {
    let mut input = Reader::new(body);
    let mut rows = Vec::new();
    while !input.is_empty() {
        rows.push((input.text().ok()?, u16::try_from(input.number().ok()?).ok()?));
    }
    Some(rows)
}

/// What came that did not belong, for a message.
fn strays(all: &[String]) -> String {
    match all {
        [] => String::new(),
        [.., last] => format!("; {} connections were not of this job (the last: {last})", all.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_leaves_before_all_have_come_is_named() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let seat = Seat { rank: 0, world: 3, job: 7, host: "127.0.0.1".to_owned(), ports: vec![port] };
        let first =
            std::thread::spawn(move || join(&seat, Duration::from_secs(120)).unwrap_err().to_string());
        let mut stream = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(GLANCE),
            }
        };
        introduce(&mut stream, 7).unwrap();
        frame::write(&mut stream, Kind::Hello, &Hello { rank: 1, world: 3, port: 1 }.encode()).unwrap();
        drop(stream);
        let said = first.join().unwrap();
        assert!(said.contains("rank 1 (127.0.0.1:") && said.contains("left before all had come"), "{said}");
    }
}
