//! The handshake by which two processes make sure that they belong to one job.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use super::bytes::{Reader, Writer};
use super::error::LaunchError;
use super::frame::{self, Kind, Limits};

/// The first bytes of both sides of a connection, followed by the number of the job.
const MAGIC: [u8; 8] = *b"ITHACA02";

/// The time limit of a handshake.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(5);

/// The time limit of one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(3);

/// The interval at which new connections and the state of existing ones are polled.
pub(super) const POLL: Duration = Duration::from_millis(4);

/// The introduction of the connecting side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hello {
    pub(super) rank: u64,
    pub(super) world: u64,
    /// The port on which it listens itself.
    pub(super) port: u16,
}

impl Hello {
    pub(super) fn encode(self) -> Vec<u8> {
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
    /// A process of this job that closed its connection before it sent its rank; the message for the user.
    Unidentified(String),
    /// None before the deadline.
    TimedOut,
}

/// Why an incoming connection is rejected.
enum Rejected {
    /// It is not of this job.
    Stray(String),
    /// It is of this job and did not send its rank.
    Unidentified(String),
}

/// Accepts the connections of other processes.
pub(super) struct Listener {
    listener: TcpListener,
    job: u64,
    sender: Sender<Result<Incoming, Rejected>>,
    handshakes: Receiver<Result<Incoming, Rejected>>,
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
                Ok(Ok(incoming)) => return Ok(Arrival::Incoming(incoming)),
                Ok(Err(Rejected::Unidentified(message))) => return Ok(Arrival::Unidentified(message)),
                Ok(Err(Rejected::Stray(message))) => self.strays.push(message),
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
                    let _ = frame::write(&mut incoming.stream, Kind::Refuse, reason.as_bytes());
                    missing -= 1;
                }
                Ok(Arrival::Unidentified(_)) => missing -= 1,
                Ok(Arrival::TimedOut) | Err(_) => return,
            }
        }
    }
}

/// The listening side of a handshake.
fn accept_handshake(mut stream: TcpStream, address: SocketAddr, job: u64) -> Result<Incoming, Rejected> {
    let exchange = |stream: &mut TcpStream| -> io::Result<[u8; 16]> {
        stream.set_nonblocking(false)?;
        set_timeouts(stream)?;
        stream.write_all(&preamble(job))?;
        let mut found = [0; 16];
        stream.read_exact(&mut found)?;
        Ok(found)
    };
    let address = canonical(address);
    let found = exchange(&mut stream)
        .map_err(|_| Rejected::Stray(format!("{address} closed without a handshake")))?;
    check_preamble(&found, job).map_err(|why| Rejected::Stray(format!("{address} {why}")))?;
    let unidentified = |why: &str| {
        Rejected::Unidentified(format!("{address} is of this job and did not send its rank: {why}"))
    };
    let first =
        frame::read(&mut stream, Limits::default).map_err(|error| unidentified(&error.to_string()))?;
    let hello = match first {
        (Kind::Hello, body) => Hello::decode(&body),
        _ => None,
    };
    let hello = hello.ok_or_else(|| unidentified("its first frame is malformed"))?;
    Ok(Incoming { hello, stream, address })
}

/// The connecting side of a handshake; the caller sends its [`Hello`] next.
///
/// # Errors
/// Why the other side is not a process of this job.
pub(super) fn start_handshake(stream: &mut TcpStream, job: u64) -> Result<(), String> {
    let receive = |stream: &mut TcpStream| -> io::Result<[u8; 16]> {
        set_timeouts(stream)?;
        let mut found = [0; 16];
        stream.read_exact(&mut found)?;
        Ok(found)
    };
    let found = receive(stream).map_err(|error| format!("sends nothing ({error})"))?;
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
