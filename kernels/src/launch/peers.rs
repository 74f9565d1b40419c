//! The peers of a process during the rendezvous, over plain connections that are polled.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::LaunchError;
use super::frame::{self, FrameError, Kind, Limits};

/// Other ranks, by rank.
pub(super) type Peers = BTreeMap<u64, Peer>;

/// A connection to another rank.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) rank: u64,
    pub(super) stream: TcpStream,
    /// The address of the other side.
    pub(super) address: SocketAddr,
}

/// The stage of the rendezvous.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// All processes connect to rank 0.
    Gathering,
    /// The other pairs connect.
    Connecting,
}

impl Peer {
    /// Sends a frame.
    ///
    /// # Errors
    /// [`LaunchError::Refused`] with the error that the peer has sent before it closed, if it did.
    pub(super) fn send(&self, kind: Kind, body: &(impl Serialize + ?Sized)) -> Result<(), LaunchError> {
        frame::write(&mut &self.stream, kind, &frame::encode(body))
            .map_err(|error| if self.has(Kind::Abort) { self.refusal() } else { self.lost(&error.into()) })
    }

    /// Reads the frame that comes next, which is known to be of the expected kind.
    pub(super) fn receive<T: DeserializeOwned>(&self) -> Result<T, LaunchError> {
        let (_, body) = frame::read(&mut &self.stream, Limits::default).map_err(|error| self.lost(&error))?;
        frame::decode(&body).map_err(|error| self.lost(&FrameError::Malformed(error.to_string())))
    }

    /// Whether a frame of this kind comes next.
    pub(super) fn has(&self, kind: Kind) -> bool {
        matches!(self.peek(), Ok(Some(seen)) if seen == kind as u8)
    }

    /// Fails when the peer has closed its connection or has sent the error of the rendezvous.
    fn check(&self, stage: Stage) -> Result<(), LaunchError> {
        match self.peek() {
            Ok(Some(kind)) if kind == Kind::Abort as u8 => Err(self.refusal()),
            // A frame is for a later read.
            Ok(_) => Ok(()),
            Err(_) => {
                let stage = match stage {
                    Stage::Gathering => "all ranks had arrived",
                    Stage::Connecting => "all ranks were connected",
                };
                let Peer { rank, address, .. } = self;
                Err(LaunchError::Refused(format!(
                    "rank {rank} ({address}) closed its connection before {stage}"
                )))
            }
        }
    }

    /// The kind of the frame that comes next, which is not consumed; `None` where nothing has arrived.
    ///
    /// # Errors
    /// Where the other side has closed the connection.
    fn peek(&self) -> io::Result<Option<u8>> {
        let mut kind = [0];
        self.stream.set_nonblocking(true)?;
        let seen = self.stream.peek(&mut kind);
        self.stream.set_nonblocking(false)?;
        match seen {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(Some(kind[0])),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The error that the peer has sent.
    fn refusal(&self) -> LaunchError {
        self.receive().map_or_else(|error| error, |(_, why): (u64, String)| LaunchError::Refused(why))
    }

    /// The error of a broken connection.
    pub(super) fn lost(&self, error: &FrameError) -> LaunchError {
        let Peer { rank, address, .. } = self;
        LaunchError::Refused(format!(
            "rank {rank} ({address}) was lost before all ranks were connected: {error}"
        ))
    }
}

/// Fails when one of `peers` has closed its connection or has sent the error of the rendezvous.
pub(super) fn check(peers: &Peers, stage: Stage) -> Result<(), LaunchError> {
    peers.values().try_for_each(|peer| peer.check(stage))
}

/// Sends the error of the rendezvous on `rank` to all peers.
pub(super) fn refuse_all(peers: &Peers, rank: u64, error: &LaunchError) {
    for peer in peers.values() {
        // The peer may have closed its connection.
        let _ = peer.send(Kind::Abort, &(rank, error.to_string()));
    }
}
