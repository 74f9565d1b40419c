//! The handshake by which both sides of a connection prove that they know the secret of the job.
//!
//! The listening side sends a nonce, the connecting side answers with its own, both ranks, and their HMAC under the key of the
//! job; the listening side answers with an HMAC of its own. Messages have fixed lengths, and a handshake has a deadline for all
//! of its bytes, so a stranger costs a thread and a few hundred bytes for a few seconds.
//!
//! Nonces are fresh, so no message can be sent again; the two HMACs begin with different words and name both ranks, so none can
//! be sent back, or to another rank.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The first bytes of both sides of a connection, followed by the number of the job.
const MAGIC: [u8; 8] = *b"ITHACA04";

/// The time limit of a handshake.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(5);

/// Bytes of a nonce, and of an HMAC.
const WORD: usize = 32;

/// Magic, number of the job, nonce.
const OPENING: usize = 16 + WORD;

/// The key of a job.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey {
    key: [u8; WORD],
    /// Whether it is made from a secret.
    is_secret: bool,
}

/// Keys are not printed.
impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobKey").field("is_secret", &self.is_secret).finish_non_exhaustive()
    }
}

impl JobKey {
    /// The key of the job with these names and this secret, if it has one.
    pub(super) fn of(secret: Option<&str>, names: &[String]) -> Self {
        let mut mac = mac(secret.unwrap_or_default().as_bytes());
        for name in names {
            // The lengths distinguish the names from their concatenation.
            mac.update(&(name.len() as u64).to_le_bytes());
            mac.update(name.as_bytes());
        }
        Self { key: mac.finalize().into_bytes().into(), is_secret: secret.is_some() }
    }

    /// Whether strangers do not know it.
    pub(super) fn is_secret(&self) -> bool {
        self.is_secret
    }

    /// A number by which jobs are told apart, which says nothing of the key.
    fn job(&self) -> [u8; 8] {
        let mut job = [0; 8];
        job.copy_from_slice(&self.mac(b"job", &[]).finalize().into_bytes()[..8]);
        job
    }

    fn mac(&self, word: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = mac(&self.key);
        mac.update(word);
        parts.iter().for_each(|part| mac.update(part));
        mac
    }
}

fn mac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("an HMAC takes keys of any length")
}

/// The two ranks of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ranks {
    pub(super) connecting: u64,
    pub(super) listening: u64,
}

impl Ranks {
    fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.connecting.to_le_bytes());
        bytes[8..].copy_from_slice(&self.listening.to_le_bytes());
        bytes
    }
}

/// The listening side, which is rank `own`; gives the rank of the other.
///
/// # Errors
/// Why the other side is not a process of this job.
pub(super) fn accept(stream: &mut TcpStream, key: &JobKey, own: u64) -> Result<u64, String> {
    let mut timed = Timed::of(stream);
    let closed = |error: io::Error| {
        if is_late(&error) { unfinished() } else { "closed without a handshake".to_owned() }
    };
    let ours = opening(key)?;
    timed.write(&ours).map_err(closed)?;
    let theirs = timed.read::<OPENING>().map_err(closed)?;
    check_opening(&theirs, key)?;
    let rank = u64::from_le_bytes(timed.read().map_err(closed)?);
    let proof = timed.read::<WORD>().map_err(closed)?;
    let ranks = Ranks { connecting: rank, listening: own }.bytes();
    let parts = [&ours[..], &theirs, &ranks];
    key.mac(b"connect", &parts).verify_slice(&proof).map_err(|_| unproven())?;
    timed.write(&key.mac(b"accept", &parts).finalize().into_bytes()).map_err(closed)?;
    Ok(rank)
}

/// The connecting side; both are done by `deadline`, if that is before the time limit of a handshake.
///
/// # Errors
/// Why the other side is not the process of this job with that rank.
pub(super) fn connect(
    stream: &mut TcpStream,
    (key, ranks): (&JobKey, Ranks),
    deadline: Instant,
) -> Result<(), String> {
    let mut timed = Timed::of(stream);
    timed.deadline = timed.deadline.min(deadline);
    let theirs = timed.read::<OPENING>().map_err(|error| unopened(&error))?;
    check_opening(&theirs, key)?;
    let ours = opening(key)?;
    let bytes = ranks.bytes();
    let parts = [&theirs[..], &ours, &bytes];
    let proof = key.mac(b"connect", &parts).finalize().into_bytes();
    let closed = |error: io::Error| {
        if is_late(&error) {
            unfinished()
        } else {
            "closed the connection: it may have another secret".to_owned()
        }
    };
    timed.write(&[&ours[..], &bytes[..8], &proof].concat()).map_err(closed)?;
    let answer = timed.read::<WORD>().map_err(closed)?;
    key.mac(b"accept", &parts).verify_slice(&answer).map_err(|_| unproven())
}

/// Whether a read or a write was not done before its deadline; systems have two names for it.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

fn unfinished() -> String {
    "does not finish the handshake".to_owned()
}

/// Why the opening of the other side was not read.
fn unopened(error: &io::Error) -> String {
    let how = if is_late(error) { "does not say what it is in time" } else { "closed the connection" };
    format!("{how}: it may be no process of ithaca")
}

fn unproven() -> String {
    "does not know the secret of this job".to_owned()
}

/// The opening of one side, with a fresh nonce.
fn opening(key: &JobKey) -> Result<[u8; OPENING], String> {
    let mut bytes = [0; OPENING];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&key.job());
    getrandom::fill(&mut bytes[16..])
        .map_err(|error| format!("meets no source of random numbers ({error})"))?;
    Ok(bytes)
}

fn check_opening(found: &[u8; OPENING], key: &JobKey) -> Result<(), String> {
    if !found.starts_with(&MAGIC) {
        Err("is not a process of ithaca".to_owned())
    } else if found[8..16] != key.job() {
        Err("belongs to another job, or has another secret".to_owned())
    } else {
        Ok(())
    }
}

/// A connection whose reads and writes share a deadline.
struct Timed<'a> {
    stream: &'a mut TcpStream,
    deadline: Instant,
}

impl<'a> Timed<'a> {
    fn of(stream: &'a mut TcpStream) -> Self {
        Self { stream, deadline: Instant::now() + HANDSHAKE }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }

    fn read<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let (mut bytes, mut n) = ([0; N], 0);
        while n < N {
            self.stream.set_read_timeout(self.left()?)?;
            match self.stream.read(&mut bytes[n..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(more) => n += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write_all(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn key(secret: &str) -> JobKey {
        JobKey::of(Some(secret), &["job".to_owned()])
    }

    /// Both ends of a connection.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connecting = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0, connecting)
    }

    const RANKS: Ranks = Ranks { connecting: 3, listening: 0 };

    fn later() -> Instant {
        Instant::now() + HANDSHAKE
    }

    #[test]
    fn both_sides_prove_the_secret() {
        for (secrets, ranks, known) in [
            (["a", "a"], RANKS, true),
            (["a", "b"], RANKS, false),
            (["a", "a"], Ranks { connecting: 3, listening: 1 }, false),
        ] {
            let (mut listening, mut connecting) = pair();
            let thread = std::thread::spawn(move || accept(&mut listening, &key(secrets[0]), 0));
            let connected = connect(&mut connecting, (&key(secrets[1]), ranks), later());
            drop(connecting);
            let accepted = thread.join().unwrap();
            assert_eq!((accepted == Ok(3), connected.is_ok()), (known, known), "{accepted:?} {connected:?}");
        }
    }

    /// A listening side that sends what it receives, as it receives it.
    #[test]
    fn an_echo_is_not_let_in() {
        let (mut listening, mut connecting) = pair();
        let thread = std::thread::spawn(move || accept(&mut listening, &key("a"), 0));
        let mut bytes = [0; OPENING];
        connecting.read_exact(&mut bytes).unwrap();
        connecting.write_all(&[&bytes[..], &[0; 8 + WORD]].concat()).unwrap();
        assert_eq!(thread.join().unwrap(), Err(unproven()));
    }

    /// What one side proved in one connection proves nothing in another.
    #[test]
    fn messages_are_not_taken_twice() {
        let record = |into: TcpStream, mut out: TcpStream| {
            let mut listening = into;
            let thread = std::thread::spawn(move || accept(&mut listening, &key("a"), 0));
            let mut theirs = [0; OPENING];
            out.read_exact(&mut theirs).unwrap();
            (theirs, out, thread)
        };
        let (mut relay, mut real) = pair();
        let (into, out) = pair();
        let (theirs, mut out, thread) = record(into, out);
        // A rank connects to the recorder, which passes its messages on.
        let rank = std::thread::spawn(move || connect(&mut real, (&key("a"), RANKS), later()));
        relay.write_all(&theirs).unwrap();
        let mut message = [0; OPENING + 8 + WORD];
        relay.read_exact(&mut message).unwrap();
        out.write_all(&message).unwrap();
        assert_eq!(thread.join().unwrap(), Ok(3));
        drop(relay);
        assert!(rank.join().unwrap().is_err());
        let (into, out) = pair();
        let (_, mut out, thread) = record(into, out);
        out.write_all(&message).unwrap();
        assert_eq!(thread.join().unwrap(), Err(unproven()));
    }

    #[test]
    fn keys_are_not_printed() {
        assert_eq!(format!("{:?}", key("a")), "JobKey { is_secret: true, .. }");
    }
}
