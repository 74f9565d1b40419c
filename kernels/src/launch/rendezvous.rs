//! Processes find each other: everyone meets rank 0, which tells all where all are, and every pair is connected.
//!
//! Nobody waits for one process alone: each looks all the while at the connections that it has. One that is closed, or on
//! which somebody says that the meeting has failed, ends it, and who ends tells all whom it is connected with. So that a
//! connection which says nothing is one of a process that is still there, nothing else is sent before all have met.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::bytes::{Reader, Writer};
use super::door::{Attempt, Came, Door, GLANCE, Hello, INTRODUCTION, attempt, canonical};
use super::error::LaunchError;
use super::frame::{self, FrameError, Kind, Limits};
use super::mesh::{Mesh, Peers};
use super::process::Process;
use super::seat::Seat;

/// How long processes that have met rank 0 may take to meet each other: all listen by then.
const AMONG_EACH_OTHER: Duration = Duration::from_secs(30);

/// How long rank 0 stays to tell those who come late that the meeting has failed.
const AFTERWARDS: Duration = Duration::from_secs(2);

/// Pauses between attempts: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// Connects this process with all the others, which have to come within `timeout`; later none is waited for longer than
/// that for one message either.
///
/// # Errors
/// [`LaunchError::Taken`], [`LaunchError::Absent`], [`LaunchError::Unreached`], and [`LaunchError::Refused`] when
/// processes contradict each other or one of them leaves.
pub fn join(seat: &Seat, timeout: Duration) -> Result<Process, LaunchError> {
    let start = Instant::now();
    let meeting = Meeting { seat, start, deadline: start + timeout };
    let mut peers = Peers::new();
    let met = match seat.rank {
        0 if seat.world == 1 => Ok(()),
        0 => meeting.receive_all(&mut peers),
        _ => meeting.visit_all(&mut peers),
    };
    if let Err(error) = met {
        tell(&peers, &error);
        return Err(error);
    }
    let mesh = Mesh::new(seat.rank, seat.world, timeout, peers)?;
    Ok(Process::new(mesh, seat.local_rank))
}

/// The meeting, as one process takes part in it.
struct Meeting<'a> {
    seat: &'a Seat,
    start: Instant,
    /// For all to come.
    deadline: Instant,
}

impl Meeting<'_> {
    /// Rank 0: waits for all the others, tells them where they are, and when all have met.
    fn receive_all(&self, peers: &mut Peers) -> Result<(), LaunchError> {
        let taken = |source| LaunchError::Taken { address: self.seat.address(), source };
        let mut door = Door::new(self.listen().map_err(taken)?, self.seat.job).map_err(taken)?;
        let ports = match self.gather(&mut door, peers) {
            Ok(ports) => ports,
            Err(error) => {
                let here = std::mem::take(peers);
                tell(&here, &error);
                let missing = self.seat.world - 1 - here.len() as u64;
                // Who comes later than that would find nobody, and would wait as long as this one is to.
                let until = (Instant::now() + AFTERWARDS).min(self.deadline);
                door.turn_away(missing, &error.to_string(), until);
                return Err(error);
            }
        };
        drop(door);
        let mut table = Writer::new();
        for (rank, port) in ports {
            let ip = peers[&rank].1.ip();
            // On the machine of rank 0; others know that by another address.
            let host = if ip.is_loopback() { String::new() } else { ip.to_string() };
            table.text(&host).number(port.into());
        }
        send_all(peers, Kind::Table, &table.into_bytes())?;

        let start = Instant::now();
        let patience = AMONG_EACH_OTHER + 2 * INTRODUCTION;
        let mut waiting: BTreeSet<u64> = peers.keys().copied().collect();
        while !waiting.is_empty() {
            news(peers, Stage::Met)?;
            for (rank, (stream, address)) in peers.iter().filter(|(_, (stream, _))| says(stream, Kind::Met)) {
                frame::read(&mut &*stream, Limits::default).map_err(|error| lost(*rank, *address, &error))?;
                waiting.remove(rank);
            }
            if let Some(rank) = waiting.first().filter(|_| start.elapsed() >= patience) {
                let (address, seconds) = (peers[rank].1, start.elapsed().as_secs());
                let wrong = format!("after {seconds} s rank {rank} ({address}) has not met all the others");
                return Err(LaunchError::Refused(wrong));
            }
            std::thread::sleep(GLANCE);
        }
        send_all(peers, Kind::Met, &[])
    }

    /// Waits for all the others, and gives the ports on which each listens.
    fn gather(&self, door: &mut Door, peers: &mut Peers) -> Result<BTreeMap<u64, u16>, LaunchError> {
        let world = self.seat.world;
        let mut ports = BTreeMap::new();
        while (peers.len() as u64) < world - 1 {
            let guest = match door.next(self.deadline, || news(peers, Stage::Come))? {
                Came::Guest(guest) => guest,
                Came::Nameless(who) => return Err(LaunchError::Refused(who)),
                Came::Nobody => return Err(self.absent(peers, door)),
            };
            let Hello { rank, world: found, port } = guest.hello;
            let wrong = if found != world {
                Some(format!(
                    "rank {rank} ({}) was started as one of {found}, rank 0 as one of {world}",
                    guest.address
                ))
            } else if rank == 0 {
                Some(format!("{} says that it is rank 0 as well", guest.address))
            } else if rank >= world {
                Some(format!("{} says that it is rank {rank} of {world}", guest.address))
            } else {
                peers.get(&rank).map(|(_, other)| {
                    format!("two processes say that they are rank {rank}: {other} and {}", guest.address)
                })
            };
            if let Some(wrong) = wrong {
                // Who has left need not be told.
                let _ = frame::write(&mut &guest.stream, Kind::Refuse, wrong.as_bytes());
                return Err(LaunchError::Refused(wrong));
            }
            peers.insert(rank, (guest.stream, guest.address));
            ports.insert(rank, port);
        }
        Ok(ports)
    }

    /// Another rank: goes to rank 0, then to those of lower number, and waits for those of higher.
    fn visit_all(&self, peers: &mut Peers) -> Result<(), LaunchError> {
        let Seat { rank, world, job, ref host, ref ports, .. } = *self.seat;
        let first = self.reach((0, host, ports), self.deadline, peers)?;
        let root = first.peer_addr().map(canonical);
        let setup = |source| LaunchError::Setup { address: self.seat.address(), source };
        let root = root.map_err(setup)?;
        let listener = TcpListener::bind((self.own_address(root.ip()), 0)).map_err(setup)?;
        let port = listener.local_addr().map_err(setup)?.port();
        let mut door = Door::new(listener, job).map_err(setup)?;
        let hello = Hello { rank, world, port };
        peers.insert(0, (first, root));
        send((0, &peers[&0]), Kind::Hello, &hello.encode())?;

        // Rank 0 says when it has waited for too long; a little later than that it has been cut off.
        let body = self.hear((Kind::Table, Stage::Come), self.deadline + INTRODUCTION, peers)?;
        let table = table(&body).filter(|table| table.len() as u64 == world - 1);
        let table =
            table.ok_or_else(|| lost(0, root, &FrameError::Malformed("its list is none".to_owned())))?;
        let deadline = Instant::now() + AMONG_EACH_OTHER;
        for (other, (host, port)) in (1..rank).zip(&table) {
            let host = if host.is_empty() { root.ip().to_string() } else { host.clone() };
            let stream = self.reach((other, &host, &[*port]), deadline, peers)?;
            let address = SocketAddr::new(stream.peer_addr().map_err(setup)?.ip().to_canonical(), *port);
            peers.insert(other, (stream, address));
            let hello = Hello { rank, world, port: 0 };
            send((other, &peers[&other]), Kind::Hello, &hello.encode())?;
        }
        // Those who come have as long for it; that they did is heard a little later.
        let deadline = deadline + INTRODUCTION;
        while (peers.len() as u64) < world - 1 {
            let guest = match door.next(deadline, || news(peers, Stage::Met))? {
                Came::Guest(guest) => guest,
                // Rank 0 knows which it was, and will say so.
                Came::Nameless(_) => continue,
                Came::Nobody => return Err(self.absent(peers, &door)),
            };
            let other = guest.hello.rank;
            if other <= rank || other >= world || peers.contains_key(&other) {
                let wrong = format!("{} says that it is rank {other}, which is here already", guest.address);
                return Err(LaunchError::Refused(wrong));
            }
            peers.insert(other, (guest.stream, guest.address));
        }
        drop(door);
        send((0, &peers[&0]), Kind::Met, &[])?;
        self.hear((Kind::Met, Stage::Met), deadline + 2 * INTRODUCTION, peers).map(|_| ())
    }

    /// Waits for what rank 0 is to say next.
    fn hear(
        &self,
        (kind, stage): (Kind, Stage),
        deadline: Instant,
        peers: &Peers,
    ) -> Result<Vec<u8>, LaunchError> {
        let (stream, address) = &peers[&0];
        loop {
            // Before the others: once rank 0 has said that all have met, they may leave.
            if says(stream, kind) {
                let said = frame::read(&mut &*stream, Limits::default);
                return said.map(|(_, body)| body).map_err(|error| lost(0, *address, &error));
            }
            news(peers, stage)?;
            if Instant::now() >= deadline {
                return Err(LaunchError::Unreached {
                    rank: self.seat.rank,
                    other: 0,
                    address: self.seat.address(),
                    seconds: self.start.elapsed().as_secs(),
                    why: "it says nothing any more".to_owned(),
                });
            }
            std::thread::sleep(GLANCE);
        }
    }

    /// Some have not come.
    fn absent(&self, peers: &Peers, door: &Door) -> LaunchError {
        let Seat { rank, world, .. } = *self.seat;
        let missing = (0..world).filter(|other| *other != rank && !peers.contains_key(other)).collect();
        LaunchError::Absent { missing, world, seconds: self.start.elapsed().as_secs(), strays: door.strays() }
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

    /// Where a rank that arena_used rank 0 at `root` listens itself.
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
        peers: &Peers,
    ) -> Result<TcpStream, LaunchError> {
        let (mut pause, longest) = PAUSES;
        let start = Instant::now();
        let mut stray = None;
        loop {
            let mut last = String::new();
            for &port in ports {
                match self.attempt(host, port, deadline, peers)? {
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

    /// One attempt to connect, in a thread of its own: names that are looked up and hosts that do not answer take
    /// seconds, and what is heard of the others meanwhile counts.
    fn attempt(
        &self,
        host: &str,
        port: u16,
        deadline: Instant,
        peers: &Peers,
    ) -> Result<Result<TcpStream, Attempt>, LaunchError> {
        let (made, result) = mpsc::channel();
        let (host, job) = (host.to_owned(), self.seat.job);
        let connect = move || {
            // Nobody may be there any more to use it.
            let _ = made.send(attempt(&host, port, job, deadline));
        };
        if let Err(error) = std::thread::Builder::new().name("reach".to_owned()).spawn(connect) {
            return Ok(Err(Attempt::Nobody(error.to_string())));
        }
        loop {
            news(peers, Stage::Met)?;
            match result.recv_timeout(GLANCE) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Ok(Err(Attempt::Nobody("the attempt was given up".to_owned())));
                }
            }
        }
    }
}

/// What one who leaves has not waited for.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// That all come to rank 0.
    Come,
    /// That every pair is connected.
    Met,
}

/// Fails when one of those who are here has left, or says that the meeting has failed; then in its words.
fn news(peers: &Peers, stage: Stage) -> Result<(), LaunchError> {
    for (rank, (stream, address)) in peers {
        let wrong = match look(stream) {
            Sight::Quiet => continue,
            Sight::Says(kind) if kind == Kind::Refuse as u8 => return Err(told(*rank, *address, stream)),
            // For those who wait for it.
            Sight::Says(_) => continue,
            Sight::Left => {
                let what = match stage {
                    Stage::Come => "come",
                    Stage::Met => "met",
                };
                format!("rank {rank} ({address}) left before all had {what}")
            }
        };
        return Err(LaunchError::Refused(wrong));
    }
    Ok(())
}

/// What one says whose meeting has failed.
fn told(rank: u64, address: SocketAddr, stream: &TcpStream) -> LaunchError {
    match frame::read(&mut &*stream, Limits::default) {
        Ok((_, words)) => LaunchError::Refused(String::from_utf8_lossy(&words).into_owned()),
        Err(error) => lost(rank, address, &error),
    }
}

/// A connection is of no use any more.
fn lost(rank: u64, address: SocketAddr, error: &FrameError) -> LaunchError {
    LaunchError::Refused(format!("rank {rank} ({address}) was lost before all had met: {error}"))
}

/// Says why the meeting has failed.
fn tell(peers: &Peers, error: &LaunchError) {
    for (stream, _) in peers.values() {
        // Who has left need not be told.
        let _ = frame::write(&mut &*stream, Kind::Refuse, error.to_string().as_bytes());
    }
}

fn send_all(peers: &Peers, kind: Kind, body: &[u8]) -> Result<(), LaunchError> {
    peers.iter().try_for_each(|(rank, peer)| send((*rank, peer), kind, body))
}

fn send(
    (rank, (stream, address)): (u64, &(TcpStream, SocketAddr)),
    kind: Kind,
    body: &[u8],
) -> Result<(), LaunchError> {
    frame::write(&mut &*stream, kind, body).map_err(|error| {
        // It may have said why before it left.
        match look(stream) {
            Sight::Says(kind) if kind == Kind::Refuse as u8 => told(rank, *address, stream),
            Sight::Says(_) | Sight::Quiet | Sight::Left => lost(rank, *address, &error.into()),
        }
    })
}

/// What is seen of a connection; nothing is taken from it.
enum Sight {
    Quiet,
    /// A frame of this kind comes next.
    Says(u8),
    /// The other side has closed it.
    Left,
}

fn look(stream: &TcpStream) -> Sight {
    let mut kind = [0];
    let mut peek = || -> io::Result<usize> {
        stream.set_nonblocking(true)?;
        let seen = stream.peek(&mut kind);
        stream.set_nonblocking(false)?;
        seen
    };
    match peek() {
        Ok(0) => Sight::Left,
        Ok(_) => Sight::Says(kind[0]),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Sight::Quiet,
        Err(_) => Sight::Left,
    }
}

/// Whether a frame of this kind comes next.
fn says(stream: &TcpStream, kind: Kind) -> bool {
    matches!(look(stream), Sight::Says(seen) if seen == kind as u8)
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

#[cfg(test)]
mod tests;
