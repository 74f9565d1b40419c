//! The handshake by which two processes make sure that they belong to one job.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::LaunchError;
use super::frame::{self, Kind, Limits};

/// The first bytes of both sides of a connection, followed by the number of the job.
const MAGIC: [u8; 8] = *b"ITHACA03";

/// The time limit of a handshake.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(5);

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
    /// A process of this job that did not send its rank; the message for the user.
    Unidentified(String),
    /// No connection before the deadline.
    TimedOut,
}

/// The result of a handshake; the error describes a connection that is not of this job.
type Handshake = Result<Arrival, String>;

/// Accepts the connections of other processes.
pub(super) struct Listener {
    listener: TcpListener,
    job: u64,
    sender: Sender<Handshake>,
    handshakes: Receiver<Handshake>,
    /// The connections that were not of this job.
    strays: Vec<String>,
}

impl Listener {
    pub(super) fn new(listener: TcpListener, job: u64) -> io::Result<Listener> {
        // Accepting must not block, so that deadlines hold.
        listener.set_nonblocking(true)?;
        let (sender, handshakes) = mpsc::channel();
        Ok(Listener { listener, job, sender, handshakes, strays: Vec::new() })
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
                let (job, sender) = (self.job, self.sender.clone());
                let handshake = move || {
                    // The listener may be gone by then.
                    let _ = sender.send(accept_handshake(stream, address, job));
                };
                if let Err(error) = std::thread::Builder::new().name("handshake".to_owned()).spawn(handshake)
                {
                    self.strays
                        .push(format!("{address} was dropped, as no thread could be started ({error})"));
                }
            }
            check()?;
            match self.handshakes.recv_timeout(POLL) {
                Ok(Ok(arrival)) => return Ok(arrival),
                Ok(Err(stray)) => self.strays.push(stray),
                Err(_) if Instant::now() >= deadline => return Ok(Arrival::TimedOut),
                Err(_) => {}
            }
        }
    }

    /// The connections that were not of this job, as the end of a message.
    pub(super) fn strays(&self) -> String {
        match self.strays.as_slice() {
            [] => String::new(),
            [.., last] => {
                format!("; {} connections were not of this job (the last: {last})", self.strays.len())
            }
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

/// The listening side of a handshake.
fn accept_handshake(mut stream: TcpStream, address: SocketAddr, job: u64) -> Handshake {
    let exchange = |stream: &mut TcpStream| -> io::Result<[u8; 16]> {
        stream.set_nonblocking(false)?;
        set_timeouts(stream)?;
        stream.write_all(&preamble(job))?;
        read_preamble(stream)
    };
    let address = canonical(address);
    let found = exchange(&mut stream).map_err(|_| format!("{address} closed without a handshake"))?;
    check_preamble(&found, job).map_err(|why| format!("{address} {why}"))?;
    let why = match frame::read(&mut stream, Limits::default) {
        Ok((Kind::Hello, body)) if let Ok(hello) = frame::decode(&body) => {
            return Ok(Arrival::Incoming(Incoming { hello, stream, address }));
        }
        Ok(_) => "its first frame is malformed".to_owned(),
        Err(error) => error.to_string(),
    };
    Ok(Arrival::Unidentified(format!("{address} is of this job and did not send its rank: {why}")))
}

/// The connecting side of a handshake; the caller sends its [`Hello`] next.
///
/// # Errors
/// Why the other side is not a process of this job.
pub(super) fn start_handshake(stream: &mut TcpStream, job: u64) -> Result<(), String> {
    let found = set_timeouts(stream).and_then(|()| read_preamble(stream));
    let found = found.map_err(|error| format!("sends nothing ({error})"))?;
    check_preamble(&found, job)?;
    stream.write_all(&preamble(job)).map_err(|error| format!("closed the connection ({error})"))
}

fn set_timeouts(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(HANDSHAKE))?;
    stream.set_write_timeout(Some(HANDSHAKE))
}

fn preamble(job: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&job.to_le_bytes());
    bytes
}

fn read_preamble(stream: &mut TcpStream) -> io::Result<[u8; 16]> {
    let mut found = [0; 16];
    stream.read_exact(&mut found)?;
    Ok(found)
}

fn check_preamble(found: &[u8; 16], job: u64) -> Result<(), String> {
    if *found == preamble(job) {
        Ok(())
    } else if found.starts_with(&MAGIC) {
        Err("belongs to another job".to_owned())
    } else {
        Err("is not a process of ithaca".to_owned())
    }
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

/// Tries once to connect to another process of the job.
pub(super) fn connect(host: &str, port: u16, job: u64, deadline: Instant) -> Result<TcpStream, ConnectError> {
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
        match start_handshake(&mut stream, job) {
            Ok(()) => return Ok(stream),
            Err(why) => last = ConnectError::Stray(why),
        }
    }
    Err(last)
}
