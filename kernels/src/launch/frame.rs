//! Frames: what travels between processes once they are connected.

use std::io::{self, ErrorKind, Read, Write};

use super::bytes::each_chunk;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Who connects: rank, world, the port it listens on itself.
    Hello,
    /// Rank 0's addresses of all.
    Table,
    /// Why the meeting has failed.
    Refuse,
    /// A process has met all the others; from rank 0, all have.
    Met,
    /// What a process is about to run, as digests.
    Agree,
    /// Something that rank 0 makes for all before a step.
    Shared,
    /// Elements that a rank sends to another.
    Block,
    /// The rank has run and sends no more blocks of this step.
    End,
    /// What a rank has after a step.
    Part,
    /// A tensor that a step kept and the next one reads.
    Kept,
    /// No more of those.
    KeptEnd,
    /// The code that every process exits with.
    Verdict,
    /// The process will close its connections, and that is no failure.
    Bye,
    /// A rank failed: which, and why.
    Abort,
}

impl Kind {
    const ALL: [Kind; 14] = [
        Kind::Hello,
        Kind::Table,
        Kind::Refuse,
        Kind::Met,
        Kind::Agree,
        Kind::Shared,
        Kind::Block,
        Kind::End,
        Kind::Part,
        Kind::Kept,
        Kind::KeptEnd,
        Kind::Verdict,
        Kind::Bye,
        Kind::Abort,
    ];

    /// How large a frame may be, bytes.
    pub(super) fn limit(self, limits: &Limits) -> u64 {
        match self {
            Kind::Block => limits.block,
            Kind::Part | Kind::Kept => limits.tensors,
            Kind::Hello
            | Kind::Refuse
            | Kind::Agree
            | Kind::Shared
            | Kind::Verdict
            | Kind::Abort
            | Kind::Table => SMALL,
            Kind::Met | Kind::End | Kind::KeptEnd | Kind::Bye => 0,
        }
    }
}

/// The limit of frames that hold no tensors, bytes.
pub(super) const SMALL: u64 = 1 << 20;

/// How large frames may be, bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    /// One block of a collective.
    pub(super) block: u64,
    /// All that a rank has of outputs and of what is kept.
    pub(super) tensors: u64,
}

/// Why no frame was read.
#[derive(Debug)]
pub(super) enum FrameError {
    /// The other side closed the connection, orderly or not.
    Closed,
    /// The system reports something else.
    Io(io::Error),
    /// What came is no frame, or one that is too long.
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
            FrameError::Malformed(what) => f.write_str(what),
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

/// Reads a frame that is no longer than `limits` allow when its head has come.
pub(super) fn read(
    input: &mut impl Read,
    limits: impl FnOnce() -> Limits,
) -> Result<(Kind, Vec<u8>), FrameError> {
    let mut head = [0; 9];
    input.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let kind = Kind::ALL.iter().copied().find(|k| *k as u8 == kind);
    let kind = kind.ok_or_else(|| FrameError::Malformed("it sent what is no frame".to_owned()))?;
    let (length, limit) = (u64::from_le_bytes(length), kind.limit(&limits()));
    if length > limit {
        let what = format!("it sent a frame of {length} bytes, where {limit} are the most ({kind:?})");
        return Err(FrameError::Malformed(what));
    }
    // Memory is taken as bytes arrive, not as they are announced.
    let mut body = Vec::with_capacity(length.min(SMALL) as usize);
    input.take(length).read_to_end(&mut body)?;
    match body.len() as u64 == length {
        true => Ok((kind, body)),
        false => Err(FrameError::Closed),
    }
}

#[cfg(test)]
mod tests {
    use super::super::bytes::floats;
    use super::*;

    const LIMITS: Limits = Limits { block: 8, tensors: 100 };

    #[test]
    fn frames_are_read_as_they_were_written() {
        let mut wire = Vec::new();
        write(&mut wire, Kind::Part, b"abc").unwrap();
        write_block(&mut wire, &[1.5, -2.0]).unwrap();
        let mut input = wire.as_slice();
        assert_eq!(read(&mut input, || LIMITS).unwrap(), (Kind::Part, b"abc".to_vec()));
        let (kind, body) = read(&mut input, || LIMITS).unwrap();
        assert_eq!((kind, floats(&body).unwrap()), (Kind::Block, vec![1.5, -2.0]));
        assert!(matches!(read(&mut input, || LIMITS), Err(FrameError::Closed)));
        for (i, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, i, "every kind is listed, in order");
        }
    }

    #[test]
    fn what_is_too_long_cut_off_or_unknown_is_refused() {
        let mut wire = Vec::new();
        write_block(&mut wire, &[0.0; 3]).unwrap();
        assert!(matches!(read(&mut wire.as_slice(), || LIMITS), Err(FrameError::Malformed(_))));
        wire.clear();
        write_block(&mut wire, &[0.0; 2]).unwrap();
        assert!(matches!(read(&mut &wire[..12], || LIMITS), Err(FrameError::Closed)));
        assert!(matches!(read(&mut &[77; 20][..], || LIMITS), Err(FrameError::Malformed(_))));
    }
}
