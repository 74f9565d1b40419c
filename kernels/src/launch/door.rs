//! How two processes that do not know each other yet make sure that they belong to one job.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use super::bytes::{Reader, Writer};
use super::error::LaunchError;
use super::frame::{self, Kind, Limits};

/// What both sides of a connection say first, with the number of the job.
const MAGIC: [u8; 8] = *b"ITHACA02";

/// How long a stranger is given to say who it is.
pub(super) const INTRODUCTION: Duration = Duration::from_secs(5);

/// How long one attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(3);

/// How often somebody at the door, and news of those who are here, are looked for.
pub(super) const GLANCE: Duration = Duration::from_millis(4);

/// What one who connects says of itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hello {
    pub(super) rank: u64,
    pub(super) world: u64,
    /// Where it listens for others.
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

/// One who connected.
pub(super) struct Guest {
    pub(super) hello: Hello,
    pub(super) stream: TcpStream,
    pub(super) address: SocketAddr,
}

/// Who came to a door.
pub(super) enum Came {
    /// One who belongs to this job.
    Guest(Guest),
    /// One who belongs to this job and was gone before it said which rank it is.
    Nameless(String),
    /// Nobody, until the deadline.
    Nobody,
}

/// Why one who connected is not let in.
enum Unmet {
    /// It is no part of this job.
    Stray(String),
    /// It is, and does not say which.
    Nameless(String),
}

/// Where others come in.
pub(super) struct Door {
    listener: TcpListener,
    job: u64,
    let_in: Sender<Result<Guest, Unmet>>,
    guests: Receiver<Result<Guest, Unmet>>,
    /// What came that is no part of this job.
    strays: Vec<String>,
}

impl Door {
    pub(super) fn new(listener: TcpListener, job: u64) -> io::Result<Door> {
        // Accepting does not wait, so that a deadline can be kept.
        listener.set_nonblocking(true)?;
        let (let_in, guests) = mpsc::channel();
        Ok(Door { listener, job, let_in, guests, strays: Vec::new() })
    }

    /// The next who comes before the deadline.
    ///
    /// # Errors
    /// What `news` says, which is asked all the while.
    pub(super) fn next(
        &mut self,
        deadline: Instant,
        news: impl Fn() -> Result<(), LaunchError>,
    ) -> Result<Came, LaunchError> {
        loop {
            // Each introduces itself in a thread of its own: one who says nothing keeps nobody waiting.
            while let Ok((stream, address)) = self.listener.accept() {
                let (job, let_in) = (self.job, self.let_in.clone());
                let introduce = move || {
                    // Nobody may be there any more to hear of it.
                    let _ = let_in.send(introduced(stream, address, job));
                };
                if let Err(error) = std::thread::Builder::new().name("door".to_owned()).spawn(introduce) {
                    self.strays.push(format!("{address} could not be listened to ({error})"));
                }
            }
            news()?;
            match self.guests.recv_timeout(GLANCE) {
                Ok(Ok(guest)) => return Ok(Came::Guest(guest)),
                Ok(Err(Unmet::Nameless(who))) => return Ok(Came::Nameless(who)),
                Ok(Err(Unmet::Stray(stray))) => self.strays.push(stray),
                Err(_) if Instant::now() >= deadline => return Ok(Came::Nobody),
                Err(_) => {}
            }
        }
    }

    /// What came that did not belong, for a message.
    pub(super) fn strays(&self) -> String {
        match self.strays.as_slice() {
            [] => String::new(),
            [.., last] => {
                format!("; {} connections were not of this job (the last: {last})", self.strays.len())
            }
        }
    }

    /// Tells as many as are still to come why it is in vain; those who come later than `deadline` are not told.
    pub(super) fn turn_away(&mut self, mut missing: u64, words: &str, deadline: Instant) {
        while missing > 0 {
            match self.next(deadline, || Ok(())) {
                Ok(Came::Guest(mut guest)) => {
                    // Who has left need not be told.
                    let _ = frame::write(&mut guest.stream, Kind::Refuse, words.as_bytes());
                    missing -= 1;
                }
                Ok(Came::Nameless(_)) => missing -= 1,
                Ok(Came::Nobody) | Err(_) => return,
            }
        }
    }
}

/// The listening side of an introduction.
fn introduced(mut stream: TcpStream, address: SocketAddr, job: u64) -> Result<Guest, Unmet> {
    let card = |stream: &mut TcpStream| -> io::Result<[u8; 16]> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(INTRODUCTION))?;
        stream.set_write_timeout(Some(INTRODUCTION))?;
        stream.write_all(&own_card(job))?;
        let mut card = [0; 16];
        stream.read_exact(&mut card)?;
        Ok(card)
    };
    let address = canonical(address);
    let card = card(&mut stream).map_err(|_| Unmet::Stray(format!("{address} left without a word")))?;
    is_ours(&card, job).map_err(|why| Unmet::Stray(format!("{address} {why}")))?;
    let nameless = |why: &str| {
        Unmet::Nameless(format!("{address} is of this job and did not say which rank it is: {why}"))
    };
    let said = frame::read(&mut stream, Limits::default).map_err(|error| nameless(&error.to_string()))?;
    let hello = match said {
        (Kind::Hello, body) => Hello::decode(&body),
        _ => None,
    };
    let hello = hello.ok_or_else(|| nameless("it sent what cannot be read"))?;
    Ok(Guest { hello, stream, address })
}

/// The other side of it, as far as this is another process of the job; what is to be said follows.
pub(super) fn introduce(stream: &mut TcpStream, job: u64) -> Result<(), String> {
    let card = |stream: &mut TcpStream| -> io::Result<[u8; 16]> {
        stream.set_read_timeout(Some(INTRODUCTION))?;
        stream.set_write_timeout(Some(INTRODUCTION))?;
        let mut card = [0; 16];
        stream.read_exact(&mut card)?;
        Ok(card)
    };
    let card = card(stream).map_err(|error| format!("says nothing ({error})"))?;
    is_ours(&card, job)?;
    stream.write_all(&own_card(job)).map_err(|error| format!("does not listen any more ({error})"))
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
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Why a connection was not made.
pub(super) enum Attempt {
    /// Nobody answers.
    Nobody(String),
    /// Somebody else does.
    Stray(String),
}

/// Connects once to where another process of the job should be.
pub(super) fn attempt(host: &str, port: u16, job: u64, deadline: Instant) -> Result<TcpStream, Attempt> {
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
        match introduce(&mut stream, job) {
            Ok(()) => return Ok(stream),
            Err(why) => last = Attempt::Stray(why),
        }
    }
    Err(last)
}
