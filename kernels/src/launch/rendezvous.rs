//! The rendezvous: every process connects to rank 0, which sends the addresses of all, and every pair connects.
//!
//! A process that waits polls all of its connections. A closed connection, or a [`Kind::Refuse`] on one, ends the
//! rendezvous, and the process that ends sends the error to all its peers. A silent connection means a live peer, so no
//! other data is sent before all are connected.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::bytes::{Reader, Writer};
use super::connections::{Connections, Peers};
use super::environment::LaunchEnv;
use super::error::LaunchError;
use super::frame::{self, FrameError, Kind, Limits};
use super::listener::{Arrival, ConnectError, HANDSHAKE, Hello, Listener, POLL, canonical, connect};
use super::process::Process;

/// The time limit for the connections among the other ranks, all of which listen by then.
const CONNECT_ALL: Duration = Duration::from_secs(30);

/// The time for which rank 0 stays to refuse late processes after a failure.
const REJECT_TIME: Duration = Duration::from_secs(2);

/// Pauses between attempts: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// Connects this process to all others, which must arrive within `timeout`; that is the timeout of each later message
/// too.
///
/// # Errors
/// [`LaunchError::Taken`], [`LaunchError::Absent`], [`LaunchError::Unreached`], and [`LaunchError::Refused`] when
/// processes contradict each other or one of them ends.
pub fn join(env: &LaunchEnv, timeout: Duration) -> Result<Process, LaunchError> {
    let start = Instant::now();
    let rendezvous = Rendezvous { env, start, deadline: start + timeout };
    let mut peers = Peers::new();
    let connected = match env.rank {
        0 if env.world == 1 => Ok(()),
        0 => rendezvous.host(&mut peers),
        _ => rendezvous.visit(&mut peers),
    };
    if let Err(error) = connected {
        refuse_all(&peers, &error);
        return Err(error);
    }
    let connections = Connections::new(env.rank, env.world, timeout, peers)?;
    Ok(Process::new(connections, env.local_rank))
}

/// The rendezvous as seen from one process.
struct Rendezvous<'a> {
    env: &'a LaunchEnv,
    start: Instant,
    /// When all must have arrived.
    deadline: Instant,
}

impl Rendezvous<'_> {
    /// Rank 0: waits for all others, sends their addresses, and reports when all are connected.
    fn host(&self, peers: &mut Peers) -> Result<(), LaunchError> {
        let taken = |source| LaunchError::Taken { address: self.env.address(), source };
        let mut listener = Listener::new(self.listen().map_err(taken)?, self.env.job).map_err(taken)?;
        let ports = match self.gather(&mut listener, peers) {
            Ok(ports) => ports,
            Err(error) => {
                let here = std::mem::take(peers);
                refuse_all(&here, &error);
                let missing = self.env.world - 1 - here.len() as u64;
                // A later process would wait for its whole timeout.
                let until = (Instant::now() + REJECT_TIME).min(self.deadline);
                listener.reject(missing, &error.to_string(), until);
                return Err(error);
            }
        };
        drop(listener);
        let mut table = Writer::new();
        for (rank, port) in ports {
            let ip = peers[&rank].1.ip();
            // The machine of rank 0, which other machines know by another address.
            let host = if ip.is_loopback() { String::new() } else { ip.to_string() };
            table.text(&host).number(port.into());
        }
        send_all(peers, Kind::Addresses, &table.into_bytes())?;

        let start = Instant::now();
        let wait = CONNECT_ALL + 2 * HANDSHAKE;
        let mut waiting: BTreeSet<u64> = peers.keys().copied().collect();
        while !waiting.is_empty() {
            check_peers(peers, Stage::Connecting)?;
            for (rank, (stream, address)) in
                peers.iter().filter(|(_, (stream, _))| has_frame(stream, Kind::Connected))
            {
                frame::read(&mut &*stream, Limits::default)
                    .map_err(|error| lost_peer(*rank, *address, &error))?;
                waiting.remove(rank);
            }
            if let Some(rank) = waiting.first().filter(|_| start.elapsed() >= wait) {
                let (address, seconds) = (peers[rank].1, start.elapsed().as_secs());
                let wrong =
                    format!("after {seconds} s rank {rank} ({address}) is not connected to all others");
                return Err(LaunchError::Refused(wrong));
            }
            std::thread::sleep(POLL);
        }
        send_all(peers, Kind::Connected, &[])
    }

    /// Waits for all others; returns the port on which each listens.
    fn gather(&self, listener: &mut Listener, peers: &mut Peers) -> Result<BTreeMap<u64, u16>, LaunchError> {
        let world = self.env.world;
        let mut ports = BTreeMap::new();
        while (peers.len() as u64) < world - 1 {
            let incoming = match listener.next(self.deadline, || check_peers(peers, Stage::Gathering))? {
                Arrival::Incoming(incoming) => incoming,
                Arrival::Unidentified(message) => return Err(LaunchError::Refused(message)),
                Arrival::TimedOut => return Err(self.absent(peers, listener)),
            };
            let Hello { rank, world: found, port } = incoming.hello;
            let wrong = if found != world {
                Some(format!(
                    "rank {rank} ({}) was started as one of {found}, rank 0 as one of {world}",
                    incoming.address
                ))
            } else if rank == 0 {
                Some(format!("{} is rank 0 as well", incoming.address))
            } else if rank >= world {
                Some(format!("{} is rank {rank} of {world}", incoming.address))
            } else {
                peers.get(&rank).map(|(_, other)| {
                    format!("two processes are rank {rank}: {other} and {}", incoming.address)
                })
            };
            if let Some(wrong) = wrong {
                // The peer may have closed its connection.
                let _ = frame::write(&mut &incoming.stream, Kind::Refuse, wrong.as_bytes());
                return Err(LaunchError::Refused(wrong));
            }
            peers.insert(rank, (incoming.stream, incoming.address));
            ports.insert(rank, port);
        }
        Ok(ports)
    }

    /// Another rank: connects to rank 0 and to the lower ranks, and waits for the higher ranks.
    fn visit(&self, peers: &mut Peers) -> Result<(), LaunchError> {
        let LaunchEnv { rank, world, job, ref host, ref ports, .. } = *self.env;
        let first = self.connect_to((0, host, ports), self.deadline, peers)?;
        let root = first.peer_addr().map(canonical);
        let setup = |source| LaunchError::Setup { address: self.env.address(), source };
        let root = root.map_err(setup)?;
        let listener = TcpListener::bind((self.own_address(root.ip()), 0)).map_err(setup)?;
        let port = listener.local_addr().map_err(setup)?.port();
        let mut listener = Listener::new(listener, job).map_err(setup)?;
        let hello = Hello { rank, world, port };
        peers.insert(0, (first, root));
        send((0, &peers[&0]), Kind::Hello, &hello.encode())?;

        // Rank 0 reports a timeout itself; after a little longer it must have been cut off.
        let body =
            self.recv_from_root((Kind::Addresses, Stage::Gathering), self.deadline + HANDSHAKE, peers)?;
        let table = parse_addresses(&body).filter(|table| table.len() as u64 == world - 1);
        let table = table.ok_or_else(|| {
            lost_peer(0, root, &FrameError::Malformed("its addresses are malformed".to_owned()))
        })?;
        let deadline = Instant::now() + CONNECT_ALL;
        for (other, (host, port)) in (1..rank).zip(&table) {
            let host = if host.is_empty() { root.ip().to_string() } else { host.clone() };
            let stream = self.connect_to((other, &host, &[*port]), deadline, peers)?;
            let address = SocketAddr::new(stream.peer_addr().map_err(setup)?.ip().to_canonical(), *port);
            peers.insert(other, (stream, address));
            let hello = Hello { rank, world, port: 0 };
            send((other, &peers[&other]), Kind::Hello, &hello.encode())?;
        }
        // The higher ranks have the same time, plus that of the handshake.
        let deadline = deadline + HANDSHAKE;
        while (peers.len() as u64) < world - 1 {
            let incoming = match listener.next(deadline, || check_peers(peers, Stage::Connecting))? {
                Arrival::Incoming(incoming) => incoming,
                // Rank 0 knows the rank and reports it.
                Arrival::Unidentified(_) => continue,
                Arrival::TimedOut => return Err(self.absent(peers, &listener)),
            };
            let other = incoming.hello.rank;
            if other <= rank || other >= world || peers.contains_key(&other) {
                let wrong = format!("{} is rank {other}, which is connected already", incoming.address);
                return Err(LaunchError::Refused(wrong));
            }
            peers.insert(other, (incoming.stream, incoming.address));
        }
        drop(listener);
        send((0, &peers[&0]), Kind::Connected, &[])?;
        self.recv_from_root((Kind::Connected, Stage::Connecting), deadline + 2 * HANDSHAKE, peers).map(|_| ())
    }

    /// Waits for the next frame of rank 0.
    fn recv_from_root(
        &self,
        (kind, stage): (Kind, Stage),
        deadline: Instant,
        peers: &Peers,
    ) -> Result<Vec<u8>, LaunchError> {
        let (stream, address) = &peers[&0];
        loop {
            // Before the other peers: they may finish once rank 0 has reported that all are connected.
            if has_frame(stream, kind) {
                let said = frame::read(&mut &*stream, Limits::default);
                return said.map(|(_, body)| body).map_err(|error| lost_peer(0, *address, &error));
            }
            check_peers(peers, stage)?;
            if Instant::now() >= deadline {
                return Err(LaunchError::Unreached {
                    rank: self.env.rank,
                    other: 0,
                    address: self.env.address(),
                    seconds: self.start.elapsed().as_secs(),
                    why: "it sends nothing any more".to_owned(),
                });
            }
            std::thread::sleep(POLL);
        }
    }

    /// The error of ranks that did not arrive.
    fn absent(&self, peers: &Peers, listener: &Listener) -> LaunchError {
        let LaunchEnv { rank, world, .. } = *self.env;
        let missing = (0..world).filter(|other| *other != rank && !peers.contains_key(other)).collect();
        LaunchError::Absent {
            missing,
            world,
            seconds: self.start.elapsed().as_secs(),
            strays: listener.strays(),
        }
    }

    /// Listens on the first port that is free; on the loopback interface where the host is named so.
    fn listen(&self) -> io::Result<TcpListener> {
        let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
        for &port in &self.env.ports {
            let hosts: Vec<SocketAddr> = if is_local(&self.env.host) {
                (self.env.host.as_str(), port).to_socket_addrs()?.collect()
            } else {
                // IPv6 accepts IPv4 as well where the system has it.
                vec![(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]
            };
            for host in hosts {
                match TcpListener::bind(host) {
                    Ok(listener) => return Ok(listener),
                    Err(error) => last = error,
                }
                // The IPv4 port may be free where the IPv6 port is taken, but not every process would find it.
                if last.kind() == ErrorKind::AddrInUse {
                    break;
                }
            }
        }
        Err(last)
    }

    /// The address on which a rank listens that reached rank 0 at `root`.
    fn own_address(&self, root: IpAddr) -> IpAddr {
        match root {
            root if is_local(&self.env.host) && root.is_loopback() => root,
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        }
    }

    /// Connects to another process of this job by rank, host and ports; retries while it is not there yet.
    fn connect_to(
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
                    Err(ConnectError::Unreachable(why)) => last = why,
                    Err(ConnectError::Stray(why)) => {
                        stray = Some(format!("the process at {host}:{port} {why}"))
                    }
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let address = match ports {
                    [port] => format!("{host}:{port}"),
                    _ => self.env.address(),
                };
                let why = stray.unwrap_or(last);
                let (rank, seconds) = (self.env.rank, start.elapsed().as_secs());
                return Err(LaunchError::Unreached { rank, other, address, seconds, why });
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(longest);
        }
    }

    /// One attempt to connect, in a thread of its own: name lookups and silent hosts take seconds, and the peers are
    /// polled meanwhile.
    fn attempt(
        &self,
        host: &str,
        port: u16,
        deadline: Instant,
        peers: &Peers,
    ) -> Result<Result<TcpStream, ConnectError>, LaunchError> {
        let (sender, result) = mpsc::channel();
        let (host, job) = (host.to_owned(), self.env.job);
        let attempt = move || {
            // The caller may have given up.
            let _ = sender.send(connect(&host, port, job, deadline));
        };
        if let Err(error) = std::thread::Builder::new().name("connect".to_owned()).spawn(attempt) {
            return Ok(Err(ConnectError::Unreachable(error.to_string())));
        }
        loop {
            check_peers(peers, Stage::Connecting)?;
            match result.recv_timeout(POLL) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Ok(Err(ConnectError::Unreachable("the attempt was given up".to_owned())));
                }
            }
        }
    }
}

/// The stage of the rendezvous.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// All processes connect to rank 0.
    Gathering,
    /// The other pairs connect.
    Connecting,
}

/// Fails when a peer has closed its connection or has sent the error of the rendezvous.
fn check_peers(peers: &Peers, stage: Stage) -> Result<(), LaunchError> {
    for (rank, (stream, address)) in peers {
        let wrong = match peek(stream) {
            Peeked::Nothing => continue,
            Peeked::Frame(kind) if kind == Kind::Refuse as u8 => {
                return Err(received_refusal(*rank, *address, stream));
            }
            // A frame for a later read.
            Peeked::Frame(_) => continue,
            Peeked::Closed => {
                let stage = match stage {
                    Stage::Gathering => "all ranks had arrived",
                    Stage::Connecting => "all ranks were connected",
                };
                format!("rank {rank} ({address}) closed its connection before {stage}")
            }
        };
        return Err(LaunchError::Refused(wrong));
    }
    Ok(())
}

/// The error that a peer has sent.
fn received_refusal(rank: u64, address: SocketAddr, stream: &TcpStream) -> LaunchError {
    match frame::read(&mut &*stream, Limits::default) {
        Ok((_, message)) => LaunchError::Refused(String::from_utf8_lossy(&message).into_owned()),
        Err(error) => lost_peer(rank, address, &error),
    }
}

/// The error of a broken connection.
fn lost_peer(rank: u64, address: SocketAddr, error: &FrameError) -> LaunchError {
    LaunchError::Refused(format!("rank {rank} ({address}) was lost before all ranks were connected: {error}"))
}

/// Sends the error of the rendezvous to all peers.
fn refuse_all(peers: &Peers, error: &LaunchError) {
    for (stream, _) in peers.values() {
        // The peer may have closed its connection.
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
        // The peer may have sent its error before it closed.
        match peek(stream) {
            Peeked::Frame(kind) if kind == Kind::Refuse as u8 => received_refusal(rank, *address, stream),
            Peeked::Frame(_) | Peeked::Nothing | Peeked::Closed => lost_peer(rank, *address, &error.into()),
        }
    })
}

/// The next input of a connection, which is not consumed.
enum Peeked {
    Nothing,
    /// A frame of this kind comes next.
    Frame(u8),
    /// The other side has closed it.
    Closed,
}

fn peek(stream: &TcpStream) -> Peeked {
    let mut kind = [0];
    let mut peek = || -> io::Result<usize> {
        stream.set_nonblocking(true)?;
        let seen = stream.peek(&mut kind);
        stream.set_nonblocking(false)?;
        seen
    };
    match peek() {
        Ok(0) => Peeked::Closed,
        Ok(_) => Peeked::Frame(kind[0]),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Peeked::Nothing
        }
        Err(_) => Peeked::Closed,
    }
}

/// Whether a frame of this kind comes next.
fn has_frame(stream: &TcpStream, kind: Kind) -> bool {
    matches!(peek(stream), Peeked::Frame(seen) if seen == kind as u8)
}

/// Whether a host names this machine itself, so that no other machine needs to reach it.
fn is_local(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The addresses of ranks 1 and up; an empty host is that of rank 0.
fn parse_addresses(body: &[u8]) -> Option<Vec<(String, u16)>> {
    let mut input = Reader::new(body);
    let mut rows = Vec::new();
    while !input.is_empty() {
        rows.push((input.text().ok()?, u16::try_from(input.number().ok()?).ok()?));
    }
    Some(rows)
}

#[cfg(test)]
mod tests;
