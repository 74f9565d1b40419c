//! The threads of connections: they write queued frames, and share the frames that they read from other processes.

use std::collections::VecDeque;
use std::io::{BufReader, BufWriter, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ithaca_ir::schedule::Stream;

use super::frame::{self, FrameError, Kind, Limits};
use crate::tensor::index;

/// The size of read and write buffers, bytes.
const BUFFER: usize = 1 << 17;

#[derive(Debug)]
pub(super) enum Outgoing {
    Block(Stream, Vec<f32>),
    Frame(Kind, Vec<u8>),
}

/// The state that the threads of a process share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    pub(super) wake: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    /// By rank; that of this rank stays empty.
    pub(super) inboxes: Vec<Inbox>,
    /// The first failure that was noticed.
    pub(super) failure: Option<Failure>,
    /// Whether this process has sent a failure to the others.
    pub(super) has_aborted: bool,
    pub(super) limits: Limits,
    /// The number of running threads.
    pub(super) open: usize,
}

#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// By stream.
    pub(super) streams: [FromStream; Stream::COUNT],
    pub(super) messages: VecDeque<(Kind, Vec<u8>)>,
    /// Whether the sender may close the connection.
    pub(super) is_finalized: bool,
    /// When its last frame arrived; `None` before the first.
    pub(super) heard: Option<Instant>,
}

/// The blocks that a stream of a sender has sent.
#[derive(Debug, Default)]
pub(super) struct FromStream {
    /// Blocks, and the ends of steps.
    pub(super) blocks: VecDeque<Item>,
    /// Steps that have ended here while blocks of this sender may be left over.
    pub(super) ended: usize,
}

#[derive(Debug)]
pub(super) enum Item {
    Block(Vec<f32>),
    End,
}

#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// A connection closed unexpectedly.
    Lost { rank: u64, address: SocketAddr, why: String },
    /// A rank reported its failure.
    Reported { rank: u64, message: String },
}

impl Shared {
    /// A thread that panicked while it held the lock left nothing half done: every change is one insertion.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a failure, if it is the first.
    pub(super) fn fail(&self, failure: Failure) {
        self.state().failure.get_or_insert(failure);
        self.wake.notify_all();
    }
}

/// Writes queued frames until the queue is closed, then closes the writing side.
pub(super) fn send_loop(outgoing: &Receiver<Outgoing>, stream: TcpStream) {
    let mut out = BufWriter::with_capacity(BUFFER, stream);
    let mut send = || -> std::io::Result<()> {
        loop {
            let next = match outgoing.try_recv() {
                Ok(next) => next,
                Err(TryRecvError::Disconnected) => return out.flush(),
                Err(TryRecvError::Empty) => {
                    out.flush()?;
                    match outgoing.recv() {
                        Ok(next) => next,
                        Err(_) => return Ok(()),
                    }
                }
            };
            match next {
                Outgoing::Block(stream, data) => frame::write_block(&mut out, stream, &data)?,
                Outgoing::Frame(kind, body) => frame::write(&mut out, kind, &body)?,
            }
        }
    };
    // The reading thread notices a closed connection.
    let _ = send();
    let (stream, _) = out.into_parts();
    let _ = stream.shutdown(Shutdown::Write);
}

/// Reads the frames of a rank until its connection ends.
pub(super) fn recv_loop(shared: &Shared, (rank, address): (u64, SocketAddr), stream: TcpStream) {
    let mut input = BufReader::with_capacity(BUFFER, stream);
    let lost = |why: String| shared.fail(Failure::Lost { rank, address, why });
    loop {
        let frame = frame::read(&mut input, || shared.state().limits);
        let (kind, body) = match frame {
            Ok(frame) => frame,
            Err(error) => {
                let is_finalized = shared.state().inboxes[index(rank)].is_finalized;
                match error {
                    FrameError::Closed if is_finalized => {}
                    FrameError::Closed => lost("closed its connection".to_owned()),
                    FrameError::Io(error) => lost(format!("cannot be read from ({error})")),
                    FrameError::Malformed(message) => lost(format!("sent a malformed frame: {message}")),
                }
                return;
            }
        };
        let mut state = shared.state();
        let inbox = &mut state.inboxes[index(rank)];
        inbox.heard = Some(Instant::now());
        match kind {
            Kind::Alive => continue,
            Kind::Block => match frame::block(&body) {
                Some((stream, block)) => inbox.streams[stream as usize].blocks.push_back(Item::Block(block)),
                None => {
                    drop(state);
                    return lost("sent a malformed block".to_owned());
                }
            },
            Kind::End => inbox.streams.iter_mut().for_each(|from| from.blocks.push_back(Item::End)),
            Kind::Finalize => inbox.is_finalized = true,
            Kind::Abort => {
                // It closes next, and its message is the failure.
                inbox.is_finalized = true;
                let (rank, message) =
                    frame::decode(&body).unwrap_or((rank, "for no stated reason".to_owned()));
                state.failure.get_or_insert(Failure::Reported { rank, message });
            }
            Kind::Agree | Kind::Shared | Kind::Result | Kind::Update | Kind::ExitCode => {
                inbox.messages.push_back((kind, body));
            }
            Kind::Hello | Kind::Addresses | Kind::Connected => {
                drop(state);
                return lost("sent a frame of the rendezvous".to_owned());
            }
        }
        drop(state);
        shared.wake.notify_all();
    }
}
