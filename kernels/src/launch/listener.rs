//! Connections to and from other processes of the job: those of strangers are dropped.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::LaunchError;
use super::frame::{self, Kind, Limits};
use super::handshake::{self, HANDSHAKE, JobKey, Ranks};

/// The most connections at a time that have not proven to be of this job; further ones are dropped.
const MAX_UNAUTHENTICATED: usize = 64;

/// The time limit of one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(3);

/// The interval at which new connections and the state of existing ones are polled.
pub(super) const POLL: Duration = Duration::from_millis(4);

/// The introduction of the connecting side.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: u64,
    pub(super) world: u64,
    /// The port on which it listens itself.
    pub(super) port: u16,
}

/// An incoming connection after its handshake.
pub(super) struct Incoming {
    pub(super) hello: Hello,
    pub(super) stream: TcpStream,
    pub(super) address: SocketAddr,
}

/// The result of waiting for a connection.
pub(super) enum Arrival {
    /// A process of this job.
    Incoming(Incoming),
    /// A process of this job that did not send its `Hello`; the message for the user.
    Unidentified(String),
    /// No connection before the deadline.
    TimedOut,
}

/// The result of a handshake; the error describes a connection that is not of this job.
type Handshake = Result<Arrival, String>;

/// Accepts the connections of other processes.
pub(super) struct Listener {
    listener: TcpListener,
    key: JobKey,
    /// The rank of this process.
    own: u64,
    /// Connections that have not proven to be of this job.
    unauthenticated: Arc<AtomicUsize>,
    sender: Sender<Handshake>,
    handshakes: Receiver<Handshake>,
    /// The number of connections that were not of this job, and the last of them.
    rejected_connections: (u64, String),
}

impl Listener {
    pub(super) fn new(listener: TcpListener, key: &JobKey, own: u64) -> io::Result<Listener> {
        // Accepting must not block, so that deadlines hold.
        listener.set_nonblocking(true)?;
        let (sender, handshakes) = mpsc::channel();
        let (key, unauthenticated) = (key.clone(), Arc::default());
        Ok(Listener {
            listener,
            key,
            own,
            unauthenticated,
            sender,
            handshakes,
            rejected_connections: (0, String::new()),
        })
    }

    /// The next connection before the deadline.
    ///
    /// # Errors
    /// The error of `check`, which is called at every poll.
    pub(super) fn next(
        &mut self,
        deadline: Instant,
        check: impl Fn() -> Result<(), LaunchError>,
    ) -> Result<Arrival, LaunchError> {
        loop {
            // Each handshake has a thread of its own, so a silent peer delays no other.
            while let Ok((stream, address)) = self.listener.accept() {
                if self.unauthenticated.fetch_add(1, Ordering::Relaxed) >= MAX_UNAUTHENTICATED {
                    self.unauthenticated.fetch_sub(1, Ordering::Relaxed);
                    self.count_rejected(format!(
                        "{address} was dropped: {MAX_UNAUTHENTICATED} others had not said who they are"
                    ));
                    continue;
                }
                let (key, own, sender) = (self.key.clone(), self.own, self.sender.clone());
                let unauthenticated = Arc::clone(&self.unauthenticated);
                let handshake = move || {
                    let result = accept_handshake(stream, address, &unauthenticated, (&key, own));
                    // The listener may be gone by then.
                    let _ = sender.send(result);
                };
                if let Err(error) = std::thread::Builder::new().name("handshake".to_owned()).spawn(handshake)
                {
                    self.unauthenticated.fetch_sub(1, Ordering::Relaxed);
                    self.count_rejected(format!(
                        "{address} was dropped, as no thread could be started ({error})"
                    ));
                }
            }
            check()?;
            match self.handshakes.recv_timeout(POLL) {
                Ok(Ok(arrival)) => return Ok(arrival),
                Ok(Err(reason)) => self.count_rejected(reason),
                Err(_) if Instant::now() >= deadline => return Ok(Arrival::TimedOut),
                Err(_) => {}
            }
        }
    }

    fn count_rejected(&mut self, last: String) {
        self.rejected_connections = (self.rejected_connections.0 + 1, last);
    }

    /// The connections that were not of this job, as the end of a message.
    pub(super) fn rejected_connections(&self) -> String {
        match &self.rejected_connections {
            (0, _) => String::new(),
            (n, last) => format!("; {n} connections were not of this job (the last: {last})"),
        }
    }

    /// Sends `reason` to the processes that are still `missing`, as far as they connect before `deadline`.
    pub(super) fn reject(&mut self, mut missing: u64, reason: &str, deadline: Instant) {
        while missing > 0 {
            match self.next(deadline, || Ok(())) {
                Ok(Arrival::Incoming(mut incoming)) => {
                    // The peer may have closed its connection.
                    let _ = frame::write(&mut incoming.stream, Kind::Abort, &frame::encode(&(0u64, reason)));
                    missing -= 1;
                }
                Ok(Arrival::Unidentified(_)) => missing -= 1,
                Ok(Arrival::TimedOut) | Err(_) => return,
            }
        }
    }
}

/// The listening side of a handshake, and the introduction after it.
fn accept_handshake(
    mut stream: TcpStream,
    address: SocketAddr,
    unauthenticated: &AtomicUsize,
    (key, own): (&JobKey, u64),
) -> Handshake {
    let address = canonical(address);
    let known = stream.set_nonblocking(false).map_err(|error| error.to_string());
    let known = known.and_then(|()| handshake::accept(&mut stream, key, own));
    unauthenticated.fetch_sub(1, Ordering::Relaxed);
    let rank = known.map_err(|why| format!("{address} {why}"))?;
    set_timeouts(&stream).map_err(|error| format!("{address} was lost ({error})"))?;
    let why = match frame::read(&mut stream, Limits::default) {
        Ok((Kind::Hello, body)) => match frame::decode::<Hello>(&body) {
            Ok(hello) if hello.rank == rank => {
                return Ok(Arrival::Incoming(Incoming { hello, stream, address }));
            }
            Ok(hello) => format!("it says that it is rank {}", hello.rank),
            Err(_) => "its first frame is malformed".to_owned(),
        },
        Ok(_) => "its first frame is malformed".to_owned(),
        Err(error) => error.to_string(),
    };
    Ok(Arrival::Unidentified(format!(
        "rank {rank} ({address}) connected and did not say on which port it listens: {why}"
    )))
}

fn set_timeouts(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(HANDSHAKE))?;
    stream.set_write_timeout(Some(HANDSHAKE))
}

/// The address; one of IPv4 that is mapped into IPv6 becomes IPv4.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Why an attempt to connect failed.
pub(super) enum ConnectError {
    /// No process accepted the connection.
    Unreachable(String),
    /// A process that is not of this job accepted it.
    Stray(String),
}

/// Tries once to connect to another process of the job, until `deadline` at most.
pub(super) fn connect(
    (host, port): (&str, u16),
    (key, ranks): (&JobKey, Ranks),
    deadline: Instant,
) -> Result<TcpStream, ConnectError> {
    let unreachable = |error: io::Error| ConnectError::Unreachable(error.to_string());
    let mut last = ConnectError::Unreachable("the host has no address".to_owned());
    for address in (host, port).to_socket_addrs().map_err(unreachable)? {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut stream = match TcpStream::connect_timeout(&address, left.clamp(POLL, ATTEMPT)) {
            Ok(stream) => stream,
            Err(error) => {
                last = unreachable(error);
                continue;
            }
        };
        // On one machine the system may assign a free port to the connecting socket itself.
        if stream.local_addr().is_ok_and(|own| stream.peer_addr().is_ok_and(|peer| own == peer)) {
            continue;
        }
        let proven = handshake::connect(&mut stream, (key, ranks), deadline);
        match proven.and_then(|()| set_timeouts(&stream).map_err(|error| error.to_string())) {
            Ok(()) => return Ok(stream),
            Err(why) => last = ConnectError::Stray(why),
        }
    }
    Err(last)
}
