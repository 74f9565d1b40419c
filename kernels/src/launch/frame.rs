//! Frames: the messages between connected processes.

use std::io::{self, ErrorKind, Read, Write};

use super::bytes::each_chunk;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The introduction of the connecting side: rank, world, the port on which it listens itself.
    Hello,
    /// From rank 0: the addresses of all.
    Addresses,
    /// Why the rendezvous has failed.
    Refuse,
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
    /// A tensor that a step updated and the next one reads.
    Update,
    /// The end of the updates.
    UpdatesEnd,
    /// The exit code of every process.
    ExitCode,
    /// The process will close its connections, which is not a failure.
    Finalize,
    /// A rank failed: its number and its error.
    Abort,
}

impl Kind {
    const ALL: [Kind; 14] = [
        Kind::Hello,
        Kind::Addresses,
        Kind::Refuse,
        Kind::Connected,
        Kind::Agree,
        Kind::Shared,
        Kind::Block,
        Kind::End,
        Kind::Result,
        Kind::Update,
        Kind::UpdatesEnd,
        Kind::ExitCode,
        Kind::Finalize,
        Kind::Abort,
    ];

    /// The largest body of a frame, bytes.
    pub(super) fn limit(self, limits: &Limits) -> u64 {
        match self {
            Kind::Block => limits.block,
            Kind::Result | Kind::Update => limits.tensors,
            Kind::Hello
            | Kind::Refuse
            | Kind::Agree
            | Kind::Shared
            | Kind::ExitCode
            | Kind::Abort
            | Kind::Addresses => SMALL,
            Kind::Connected | Kind::End | Kind::UpdatesEnd | Kind::Finalize => 0,
        }
    }
}

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
#[derive(Debug)]
pub(super) enum FrameError {
    /// The other side closed the connection.
    Closed,
    /// Another error of the system.
    Io(io::Error),
    /// The bytes are not a frame, or the frame is too long.
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

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FrameError::Closed => f.write_str("the connection was closed"),
            FrameError::Io(error) => write!(f, "{error}"),
            FrameError::Malformed(message) => f.write_str(message),
        }
    }
}

/// Writes a frame.
pub(super) fn write(out: &mut impl Write, kind: Kind, body: &[u8]) -> io::Result<()> {
    head(out, kind, body.len() as u64)?;
    out.write_all(body)
}

/// Writes a block.
pub(super) fn write_block(out: &mut impl Write, data: &[f32]) -> io::Result<()> {
    head(out, Kind::Block, data.len() as u64 * 4)?;
    let mut result = Ok(());
    each_chunk(data, |bytes| {
        if result.is_ok() {
            result = out.write_all(bytes);
        }
    });
    result
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
    let kind = Kind::ALL.iter().copied().find(|k| *k as u8 == kind);
    let kind = kind.ok_or_else(|| FrameError::Malformed("it sent bytes that are not a frame".to_owned()))?;
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
    use super::super::bytes::floats;
    use super::*;

    const LIMITS: Limits = Limits { block: 8, tensors: 100 };

    #[test]
    fn frames_are_read_as_they_were_written() {
        let mut wire = Vec::new();
        write(&mut wire, Kind::Result, b"abc").unwrap();
        write_block(&mut wire, &[1.5, -2.0]).unwrap();
        let mut input = wire.as_slice();
        assert_eq!(read(&mut input, || LIMITS).unwrap(), (Kind::Result, b"abc".to_vec()));
        let (kind, body) = read(&mut input, || LIMITS).unwrap();
        assert_eq!((kind, floats(&body).unwrap()), (Kind::Block, vec![1.5, -2.0]));
        assert!(matches!(read(&mut input, || LIMITS), Err(FrameError::Closed)));
        for (i, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, i, "every kind is listed, in order");
        }
    }

    #[test]
    fn long_truncated_and_unknown_frames_are_refused() {
        let mut wire = Vec::new();
        write_block(&mut wire, &[0.0; 3]).unwrap();
        assert!(matches!(read(&mut wire.as_slice(), || LIMITS), Err(FrameError::Malformed(_))));
        wire.clear();
        write_block(&mut wire, &[0.0; 2]).unwrap();
        assert!(matches!(read(&mut &wire[..12], || LIMITS), Err(FrameError::Closed)));
        assert!(matches!(read(&mut &[77; 20][..], || LIMITS), Err(FrameError::Malformed(_))));
    }
}
