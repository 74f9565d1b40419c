//! Frames: the messages between connected processes.

use std::io::{self, ErrorKind, Read, Write};

use ithaca_ir::schedule::Stream;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::RunError;

/// The number of elements of a block that are encoded at a time.
const CHUNK: usize = 1 << 14;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    /// The introduction of the connecting side: rank, world, the port on which it listens itself.
    Hello,
    /// From rank 0: the addresses of all.
    Addresses,
    /// The process is connected to all others; from rank 0, all are.
    Connected,
    /// Digests of the run that a process is about to start.
    Agree,
    /// Something that rank 0 makes for all before a step.
    Shared,
    /// Elements that a rank sends to another.
    Block,
    /// The rank has run and sends no more blocks of this step.
    End,
    /// The results of a rank after a step.
    Result,
    /// A named tensor that a step updated and the next one reads; `None` after the last.
    Update,
    /// The exit code of every process.
    ExitCode,
    /// The process runs, and has nothing else to say.
    Alive,
    /// The process will close its connections, which is not a failure.
    Finalize,
    /// The rendezvous or a rank failed: the number of the rank and the error.
    Abort,
}

impl Kind {
    /// The largest body of a frame, bytes.
    pub(super) fn limit(self, limits: &Limits) -> u64 {
        match self {
            Kind::Block => limits.block.saturating_add(STREAM),
            Kind::Result | Kind::Update => limits.tensors,
            Kind::Hello => HELLO,
            Kind::Addresses | Kind::Agree | Kind::Shared | Kind::ExitCode | Kind::Abort => SMALL,
            Kind::Connected | Kind::End | Kind::Alive | Kind::Finalize => 0,
        }
    }
}

/// The limit of an introduction, bytes.
const HELLO: u64 = 64;

/// The limit of frames without tensors, bytes.
pub(super) const SMALL: u64 = 1 << 20;

/// The largest frames, bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    /// One block of a collective.
    pub(super) block: u64,
    /// The results of one rank.
    pub(super) tensors: u64,
}

/// Why a frame could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    /// The other side closed the connection.
    #[error("the connection was closed")]
    Closed,
    /// Another error of the system.
    #[error("{0}")]
    Io(io::Error),
    /// The bytes are not a frame, or the frame is too long.
    #[error("{0}")]
    Malformed(String),
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe => FrameError::Closed,
            _ => FrameError::Io(error),
        }
    }
}

/// The body of a frame.
pub(super) fn encode(body: &(impl Serialize + ?Sized)) -> Vec<u8> {
    postcard::to_allocvec(body).expect("data of known length can be encoded")
}

/// The data of a body, all of which must be used.
///
/// # Errors
/// [`RunError::Invalid`] for a malformed body.
pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, RunError> {
    match postcard::take_from_bytes(body) {
        Ok((data, [])) => Ok(data),
        Ok(_) | Err(_) => Err(malformed()),
    }
}

/// The error of a malformed message.
pub(super) fn malformed() -> RunError {
    RunError::invalid("another process sent a malformed message")
}

/// The stream and the numbers of a block; `None` where there is no such stream, or the bytes end within a number.
pub(super) fn block(body: &[u8]) -> Option<(Stream, Vec<f32>)> {
    let (words, rest) = body.as_chunks::<4>();
    let (&stream, words) = words.split_first().filter(|_| rest.is_empty())?;
    let stream = *Stream::ALL.get(usize::try_from(u32::from_le_bytes(stream)).ok()?)?;
    Some((stream, words.iter().map(|&word| f32::from_le_bytes(word)).collect()))
}

/// Writes a frame.
pub(super) fn write(out: &mut impl Write, kind: Kind, body: &[u8]) -> io::Result<()> {
    head(out, kind, body.len() as u64)?;
    out.write_all(body)
}

/// Bytes of a block in front of its numbers.
const STREAM: u64 = 4;

/// Writes a block of a stream.
pub(super) fn write_block(out: &mut impl Write, stream: Stream, data: &[f32]) -> io::Result<()> {
    head(out, Kind::Block, data.len() as u64 * 4 + STREAM)?;
    out.write_all(&(stream as u32).to_le_bytes())?;
    let mut bytes = Vec::with_capacity(CHUNK.min(data.len()) * 4);
    for chunk in data.chunks(CHUNK) {
        bytes.clear();
        bytes.extend(chunk.iter().flat_map(|x| x.to_le_bytes()));
        out.write_all(&bytes)?;
    }
    Ok(())
}

fn head(out: &mut impl Write, kind: Kind, length: u64) -> io::Result<()> {
    out.write_all(&[kind as u8])?;
    out.write_all(&length.to_le_bytes())
}

/// Reads a frame within `limits`, which are taken when its head has arrived.
pub(super) fn read(
    input: &mut impl Read,
    limits: impl FnOnce() -> Limits,
) -> Result<(Kind, Vec<u8>), FrameError> {
    let mut head = [0; 9];
    input.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let kind = decode::<Kind>(&[kind])
        .map_err(|_| FrameError::Malformed("it sent bytes that are not a frame".to_owned()))?;
    let (length, limit) = (u64::from_le_bytes(length), kind.limit(&limits()));
    if length > limit {
        let message = format!("it sent a frame of {length} bytes ({kind:?}), above the limit of {limit}");
        return Err(FrameError::Malformed(message));
    }
    // Memory is allocated as bytes arrive, not by the announced length.
    let mut body = Vec::with_capacity(length.min(SMALL) as usize);
    input.take(length).read_to_end(&mut body)?;
    if body.len() as u64 == length { Ok((kind, body)) } else { Err(FrameError::Closed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { block: 8, tensors: 100 };

    #[test]
    fn frames_are_read_as_they_were_written() {
        let mut wire = Vec::new();
        write(&mut wire, Kind::Result, b"abc").unwrap();
        write_block(&mut wire, Stream::Comm, &[1.5, -2.0]).unwrap();
        let mut input = wire.as_slice();
        assert_eq!(read(&mut input, || LIMITS).unwrap(), (Kind::Result, b"abc".to_vec()));
        let (kind, body) = read(&mut input, || LIMITS).unwrap();
        assert_eq!((kind, block(&body).unwrap()), (Kind::Block, (Stream::Comm, vec![1.5, -2.0])));
        assert!(matches!(read(&mut input, || LIMITS), Err(FrameError::Closed)));
        for kind in [Kind::Hello, Kind::Abort] {
            assert_eq!(encode(&kind), [kind as u8], "the head of a frame is its encoded kind");
        }
    }

    #[test]
    fn long_truncated_and_unknown_frames_are_refused() {
        let mut wire = Vec::new();
        write_block(&mut wire, Stream::Comm, &[0.0; 3]).unwrap();
        assert!(matches!(read(&mut wire.as_slice(), || LIMITS), Err(FrameError::Malformed(_))));
        wire.clear();
        write_block(&mut wire, Stream::Comm, &[0.0; 2]).unwrap();
        assert!(matches!(read(&mut &wire[..12], || LIMITS), Err(FrameError::Closed)));
        assert!(matches!(read(&mut &[77; 20][..], || LIMITS), Err(FrameError::Malformed(_))));
    }

    #[test]
    fn data_is_encoded_bit_for_bit_and_wrong_lengths_are_refused() {
        let data = ("Ithaka".to_owned(), vec![1.0, -0.0, f32::from_bits(0x7fc0_1234)]);
        let mut bytes = encode(&data);
        let found: (String, Vec<f32>) = decode(&bytes).unwrap();
        assert_eq!(found.1.iter().map(|x| x.to_bits()).collect::<Vec<_>>()[1..], [1 << 31, 0x7fc0_1234]);
        for n in 0..bytes.len() {
            assert!(decode::<(String, Vec<f32>)>(&bytes[..n]).is_err(), "cut off after {n} bytes");
        }
        bytes.push(0);
        assert!(decode::<(String, Vec<f32>)>(&bytes).is_err());
        assert!(decode::<Vec<f32>>(&encode(&u64::MAX)).is_err());
        assert_eq!(block(&[0; 5]), None);
    }
}
