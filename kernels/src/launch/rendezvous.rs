//! The rendezvous: every process connects to rank 0, which sends the addresses of all, and every pair connects.
//!
//! A process that waits polls all of its connections. A closed connection, or a [`Kind::Abort`] on one, ends the
//! rendezvous, and the process that ends sends the error to all its peers. A silent connection means a live peer, so no
//! other data is sent before all are connected.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::connections::Connections;
use super::environment::LaunchEnv;
use super::error::LaunchError;
use super::frame::{FrameError, Kind};
use super::handshake::{HANDSHAKE, Ranks};
use super::listener::{Arrival, ConnectError, Hello, Incoming, Listener, POLL, canonical, connect};
use super::peers::{self, Peer, Peers, Stage, refuse_all};
use super::process::Process;

/// The longest that connections among the other ranks may take, all of which listen by then.
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
    let rendezvous = Rendezvous { env, start, timeout, deadline: start + timeout };
    let mut peers = Peers::new();
    if env.world > 1 && !env.key.is_secret() && !rendezvous.is_local() {
        return Err(LaunchError::NoSecret { host: env.host.clone() });
    }
    let connected = match env.rank {
        0 if env.world == 1 => Ok(()),
        0 => rendezvous.run_root(&mut peers),
        _ => rendezvous.run_member(&mut peers),
    };
    if let Err(error) = connected {
        refuse_all(&peers, env.rank, &error);
        return Err(error);
    }
    let connections = Connections::new(env.rank, env.world, timeout, peers)?;
    Ok(Process::new(connections, env.local_rank))
}

/// The rendezvous as seen from one process.
struct Rendezvous<'a> {
    env: &'a LaunchEnv,
    start: Instant,
    timeout: Duration,
    /// When all must have arrived.
    deadline: Instant,
}

impl Rendezvous<'_> {
    /// Rank 0: waits for all others, sends their addresses, and reports when all are connected.
    fn run_root(&self, peers: &mut Peers) -> Result<(), LaunchError> {
        let taken = |source| LaunchError::Taken { address: self.env.address(), source };
        let mut listener = Listener::new(self.listen().map_err(taken)?, &self.env.key, 0).map_err(taken)?;
        let ports = match self.gather(&mut listener, peers) {
            Ok(ports) => ports,
            Err(error) => {
                let here = std::mem::take(peers);
                refuse_all(&here, 0, &error);
                let missing = self.env.world - 1 - here.len() as u64;
                // A later process would wait for its whole timeout.
                let until = (Instant::now() + REJECT_TIME).min(self.deadline);
                listener.reject(missing, &error.to_string(), until);
                return Err(error);
            }
        };
        drop(listener);
        let address = |(rank, port): (u64, u16)| {
            let ip = peers[&rank].address.ip();
            // The machine of rank 0, which other machines know by another address.
            (if ip.is_loopback() { String::new() } else { ip.to_string() }, port)
        };
        let table: Vec<(String, u16)> = ports.into_iter().map(address).collect();
        peers.values().try_for_each(|peer| peer.send(Kind::Addresses, &table))?;

        let start = Instant::now();
        let wait = self.connect_all() + 2 * self.slack();
        let mut waiting: BTreeSet<u64> = peers.keys().copied().collect();
        poll(peers, Stage::Connecting, || {
            for peer in peers.values().filter(|peer| peer.has(Kind::Connected)) {
                peer.receive::<()>()?;
                waiting.remove(&peer.rank);
            }
            match waiting.first() {
                None => Ok(Some(())),
                Some(rank) if start.elapsed() >= wait => {
                    let (address, seconds) = (peers[rank].address, start.elapsed().as_secs());
                    Err(LaunchError::Refused(format!(
                        "after {seconds} s rank {rank} ({address}) is not connected to all others"
                    )))
                }
                Some(_) => Ok(None),
            }
        })?;
        peers.values().try_for_each(|peer| peer.send(Kind::Connected, &()))
    }

    /// Waits for all others; returns the port on which each listens.
    fn gather(&self, listener: &mut Listener, peers: &mut Peers) -> Result<BTreeMap<u64, u16>, LaunchError> {
        let world = self.env.world;
        let mut ports = BTreeMap::new();
        while (peers.len() as u64) < world - 1 {
            let incoming = match listener.next(self.deadline, || peers::check(peers, Stage::Gathering))? {
                Arrival::Incoming(incoming) => incoming,
                Arrival::Unidentified(message) => return Err(LaunchError::Refused(message)),
                Arrival::TimedOut => return Err(self.absent(peers, listener)),
            };
            let Incoming { hello: Hello { rank, world: found, port }, stream, address } = incoming;
            let peer = Peer { rank, stream, address };
            let wrong = if found != world {
                Some(format!(
                    "rank {rank} ({address}) was started as one of {found}, rank 0 as one of {world}"
                ))
            } else if rank == 0 {
                Some(format!("{address} is rank 0 as well"))
            } else if rank >= world {
                Some(format!("{address} is rank {rank} of {world}"))
            } else {
                let other = peers.get(&rank).map(|other| other.address);
                other.map(|other| format!("two processes are rank {rank}: {other} and {address}"))
            };
            if let Some(wrong) = wrong {
                let error = LaunchError::Refused(wrong);
                refuse_all(&Peers::from([(rank, peer)]), 0, &error);
                return Err(error);
            }
            peers.insert(rank, peer);
            ports.insert(rank, port);
        }
        Ok(ports)
    }

    /// Another rank: connects to rank 0 and to the lower ranks, and waits for the higher ranks.
    fn run_member(&self, peers: &mut Peers) -> Result<(), LaunchError> {
        let LaunchEnv { rank, world, ref key, ref host, ref ports, .. } = *self.env;
        let first = self.connect_to((0, host, ports), self.deadline, peers)?;
        let root = first.peer_addr().map(canonical);
        let setup = |source| LaunchError::Setup { address: self.env.address(), source };
        let root = root.map_err(setup)?;
        // The interface that reaches rank 0; the other ranks reach this one by the same.
        let own = first.local_addr().map_err(setup)?.ip();
        let listener = TcpListener::bind((own, 0)).map_err(setup)?;
        let port = listener.local_addr().map_err(setup)?.port();
        let mut listener = Listener::new(listener, key, rank).map_err(setup)?;
        let connected = |peers: &mut Peers, peer: Peer, hello: Hello| {
            let rank = peer.rank;
            peers.entry(rank).insert_entry(peer).get().send(Kind::Hello, &hello)
        };
        connected(peers, Peer { rank: 0, stream: first, address: root }, Hello { rank, world, port })?;

        // Rank 0 reports a timeout itself; after a little longer it must have been cut off.
        let addresses = (Kind::Addresses, Stage::Gathering);
        let table: Vec<(String, u16)> =
            self.recv_from_root(addresses, self.deadline + self.slack(), peers)?;
        if table.len() as u64 != world - 1 {
            return Err(peers[&0].lost(&FrameError::Malformed("its addresses are malformed".to_owned())));
        }
        let deadline = Instant::now() + self.connect_all();
        for (other, (host, port)) in (1..rank).zip(table) {
            let host = if host.is_empty() { root.ip().to_string() } else { host };
            let stream = self.connect_to((other, &host, &[port]), deadline, peers)?;
            let address = SocketAddr::new(stream.peer_addr().map_err(setup)?.ip().to_canonical(), port);
            connected(peers, Peer { rank: other, stream, address }, Hello { rank, world, port: 0 })?;
        }
        // The higher ranks have the same time, plus that of the handshake.
        let deadline = deadline + self.slack();
        while (peers.len() as u64) < world - 1 {
            let incoming = match listener.next(deadline, || peers::check(peers, Stage::Connecting))? {
                Arrival::Incoming(incoming) => incoming,
                // Rank 0 knows the rank and reports it.
                Arrival::Unidentified(_) => continue,
                Arrival::TimedOut => return Err(self.absent(peers, &listener)),
            };
            let Incoming { hello: Hello { rank: other, .. }, stream, address } = incoming;
            if other <= rank || other >= world || peers.contains_key(&other) {
                let wrong = format!("{address} is rank {other}, which is connected already");
                return Err(LaunchError::Refused(wrong));
            }
            peers.insert(other, Peer { rank: other, stream, address });
        }
        drop(listener);
        peers[&0].send(Kind::Connected, &())?;
        self.recv_from_root((Kind::Connected, Stage::Connecting), deadline + 2 * self.slack(), peers)
    }

    /// Waits for the next frame of rank 0. It is read before the other peers are checked: they may finish once rank 0 has
    /// reported that all are connected.
    fn recv_from_root<T: DeserializeOwned>(
        &self,
        (kind, stage): (Kind, Stage),
        deadline: Instant,
        peers: &Peers,
    ) -> Result<T, LaunchError> {
        poll(peers, stage, || {
            if peers[&0].has(kind) {
                return peers[&0].receive().map(Some);
            }
            if Instant::now() < deadline {
                return Ok(None);
            }
            Err(LaunchError::Unreached {
                rank: self.env.rank,
                other: 0,
                address: self.env.address(),
                seconds: self.start.elapsed().as_secs(),
                why: "it sends nothing any more".to_owned(),
            })
        })
    }

    /// The time limit for the connections among the other ranks.
    fn connect_all(&self) -> Duration {
        CONNECT_ALL.min(self.timeout)
    }

    /// How much longer one process waits than the one that reports the failure.
    fn slack(&self) -> Duration {
        HANDSHAKE.min(self.timeout)
    }

    /// The error of ranks that did not arrive.
    fn absent(&self, peers: &Peers, listener: &Listener) -> LaunchError {
        let LaunchEnv { rank, world, .. } = *self.env;
        let missing = (0..world).filter(|other| *other != rank && !peers.contains_key(other)).collect();
        LaunchError::Absent {
            missing,
            world,
            seconds: self.start.elapsed().as_secs(),
            rejected_connections: self.only_local() + &listener.rejected_connections(),
        }
    }

    /// Whether rank 0 is reached on the loopback interface only. A host that is not known is reached nowhere.
    fn is_local(&self) -> bool {
        let LaunchEnv { host, ports, .. } = self.env;
        let port = ports.first().copied().unwrap_or_default();
        let addresses = (host.as_str(), port).to_socket_addrs().into_iter().flatten();
        addresses.into_iter().all(|address| canonical(address).ip().is_loopback())
    }

    /// As the end of a message: rank 0 listens where no other machine reaches it, though its host has a name.
    fn only_local(&self) -> String {
        let LaunchEnv { rank, host, .. } = self.env;
        if *rank > 0 || !self.is_local() || host == "localhost" || host.parse::<IpAddr>().is_ok() {
            return String::new();
        }
        format!(
            "; `{host}` is a loopback address on the machine of rank 0: other machines need another MASTER_ADDR"
        )
    }

    /// Listens at the address of the host, on the first port that is free.
    fn listen(&self) -> io::Result<TcpListener> {
        let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
        for &port in &self.env.ports {
            let hosts: Vec<SocketAddr> = (self.env.host.as_str(), port).to_socket_addrs()?.collect();
            for host in hosts {
                match TcpListener::bind(host) {
                    Ok(listener) => return Ok(listener),
                    Err(error) => last = error,
                }
                // Another address may be free where this one is taken, but not every process would find it.
                if last.kind() == ErrorKind::AddrInUse {
                    break;
                }
            }
        }
        Err(last)
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
                match self.attempt((other, host, port), deadline, peers)? {
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
        (other, host, port): (u64, &str, u16),
        deadline: Instant,
        peers: &Peers,
    ) -> Result<Result<TcpStream, ConnectError>, LaunchError> {
        let (sender, result) = mpsc::channel();
        let (host, key) = (host.to_owned(), self.env.key.clone());
        let ranks = Ranks { connecting: self.env.rank, listening: other };
        let attempt = move || {
            // The caller may have given up.
            let _ = sender.send(connect((&host, port), (&key, ranks), deadline));
        };
        if let Err(error) = std::thread::Builder::new().name("connect".to_owned()).spawn(attempt) {
            return Ok(Err(ConnectError::Unreachable(error.to_string())));
        }
        loop {
            peers::check(peers, Stage::Connecting)?;
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

/// Calls `ready` until it has a result, and checks the peers meanwhile.
fn poll<T>(
    peers: &Peers,
    stage: Stage,
    mut ready: impl FnMut() -> Result<Option<T>, LaunchError>,
) -> Result<T, LaunchError> {
    loop {
        if let Some(found) = ready()? {
            return Ok(found);
        }
        peers::check(peers, stage)?;
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests;
