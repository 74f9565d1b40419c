//! The connections of a process, over which its rank exchanges blocks.

use std::net::SocketAddr;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ithaca_ir::Rank;
use ithaca_ir::schedule::Stream;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::{LaunchError, Phase};
use super::frame::{self, Kind, Limits};
use super::peers::{Peer, Peers};
use super::traffic::{Failure, Inbox, Item, Outgoing, Shared, State, recv_loop, send_loop};
use crate::cpu::Communicator;
use crate::error::RunError;
use crate::tensor::index;

/// The shortest and the longest pause after which a process tells the others that it runs.
const MIN_BEAT: Duration = Duration::from_millis(100);
const MAX_BEAT: Duration = Duration::from_secs(5);

/// The longest message of a failure that is sent, bytes.
const MAX_MESSAGE: usize = 1 << 16;

/// The connections of one process to all the others.
#[derive(Debug)]
pub(super) struct Connections {
    rank: u64,
    world: u64,
    timeout: Duration,
    /// When all were connected.
    start: Instant,
    shared: Arc<Shared>,
    /// By rank; `None` for this one.
    channels: Vec<Option<Channel>>,
    /// Dropped to end the thread that tells the others that this process runs.
    alive: Mutex<Option<Sender<()>>>,
}

/// A connection whose threads run.
#[derive(Debug)]
struct Channel {
    address: SocketAddr,
    /// To the writing thread; `None` once closed.
    queue: Mutex<Option<Sender<Outgoing>>>,
}

impl Connections {
    /// Takes connections to all other ranks.
    ///
    /// # Errors
    /// [`LaunchError::Setup`].
    pub(super) fn new(rank: u64, world: u64, timeout: Duration, peers: Peers) -> Result<Self, LaunchError> {
        let state = State {
            inboxes: (0..world).map(|_| Inbox::default()).collect(),
            failure: None,
            has_aborted: false,
            limits: Limits::default(),
            open: 0,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), wake: Condvar::new() });
        let mut connections = Connections {
            rank,
            world,
            timeout,
            start: Instant::now(),
            shared,
            alive: Mutex::new(None),
            channels: (0..world).map(|_| None).collect(),
        };
        for (other, peer) in peers {
            let address = peer.address.to_string();
            let channel = connections.connect(peer);
            let channel = channel.map_err(|source| LaunchError::Setup { address, source })?;
            connections.channels[index(other)] = Some(channel);
        }
        connections
            .beat()
            .map_err(|source| LaunchError::Setup { address: "all ranks".to_owned(), source })?;
        Ok(connections)
    }

    /// Starts the thread that tells the others that this process runs, so that a rank that is waited for too long is told from
    /// one that itself waits.
    fn beat(&self) -> std::io::Result<()> {
        let queues: Vec<Sender<Outgoing>> =
            self.channels.iter().flatten().filter_map(|channel| channel.queue().clone()).collect();
        let (alive, ended) = mpsc::channel();
        let pause = (self.timeout / 4).clamp(MIN_BEAT, MAX_BEAT);
        let beat = move || {
            while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                for queue in &queues {
                    // The writing thread ends with the connection.
                    let _ = queue.send(Outgoing::Frame(Kind::Alive, Vec::new()));
                }
            }
        };
        std::thread::Builder::new().name("alive".to_owned()).spawn(beat)?;
        *self.alive.lock().unwrap_or_else(PoisonError::into_inner) = Some(alive);
        Ok(())
    }

    fn connect(&self, Peer { rank, stream, address }: Peer) -> std::io::Result<Channel> {
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        stream.set_nodelay(true)?;
        let reading = stream.try_clone()?;
        let (queue, outgoing) = mpsc::channel();
        type Work = Box<dyn FnOnce(&Shared) + Send>;
        let threads: [(&str, Work); 2] = [
            ("from", Box::new(move |shared| recv_loop(shared, (rank, address), reading))),
            ("to", Box::new(move |_| send_loop(&outgoing, stream))),
        ];
        for (name, work) in threads {
            self.shared.state().open += 1;
            let shared = Arc::clone(&self.shared);
            let counted = move || {
                work(&shared);
                shared.state().open -= 1;
                shared.wake.notify_all();
            };
            std::thread::Builder::new().name(format!("{name} rank {rank}")).spawn(counted)?;
        }
        Ok(Channel { address, queue: Mutex::new(Some(queue)) })
    }

    pub(super) fn rank(&self) -> Rank {
        Rank(self.rank)
    }

    pub(super) fn world(&self) -> u64 {
        self.world
    }

    /// Accepts frames that are as large.
    pub(super) fn raise_limits(&self, to: Limits) {
        let limits = &mut self.shared.state().limits;
        *limits = Limits { block: limits.block.max(to.block), tensors: limits.tensors.max(to.tensors) };
    }

    /// All other ranks.
    pub(super) fn others(&self) -> impl Iterator<Item = u64> {
        let own = self.rank;
        (0..self.world).filter(move |&other| other != own)
    }

    /// A rank with its address, for messages.
    pub(super) fn describe(&self, rank: u64) -> String {
        let channel = usize::try_from(rank).ok().and_then(|i| self.channels.get(i)).and_then(Option::as_ref);
        match channel {
            Some(channel) => format!("rank {rank} ({})", channel.address),
            None => format!("rank {rank}"),
        }
    }

    /// Queues a frame. The reading thread notices a closed connection.
    pub(super) fn send_frame(&self, to: u64, kind: Kind, body: &(impl Serialize + ?Sized)) {
        self.queue(to, Outgoing::Frame(kind, frame::encode(body)));
    }

    /// Queues a frame for every other rank.
    pub(super) fn send_to_all(&self, kind: Kind, body: &(impl Serialize + ?Sized)) {
        self.others().for_each(|other| self.send_frame(other, kind, body));
    }

    fn queue(&self, to: u64, outgoing: Outgoing) {
        if let Some(channel) = &self.channels[index(to)]
            && let Some(queue) = &*channel.queue()
        {
            // The writing thread ends with the connection.
            let _ = queue.send(outgoing);
        }
    }

    /// Waits for the next message of `from`, which must be of this kind.
    ///
    /// # Errors
    /// [`RunError::RemoteFailure`] when a rank has failed, [`RunError::Lost`], [`RunError::TimedOut`] after the timeout.
    pub(super) fn message<T: DeserializeOwned>(
        &self,
        from: u64,
        expected: Kind,
        phase: Phase,
    ) -> Result<T, RunError> {
        let found = self.wait(from, phase, |inbox| inbox.messages.pop_front().map(Ok));
        let (kind, body) = found.map_err(|error| self.with_cause(error))?;
        if kind == expected { frame::decode(&body) } else { Err(frame::malformed()) }
    }

    /// Waits until `find` finds its result in the inbox of a rank, up to the timeout.
    fn wait<T>(
        &self,
        from: u64,
        phase: Phase,
        mut find: impl FnMut(&mut Inbox) -> Option<Result<T, RunError>>,
    ) -> Result<T, RunError> {
        let start = Instant::now();
        let mut state = self.shared.state();
        loop {
            if let Some(found) = find(&mut state.inboxes[index(from)]) {
                return found;
            }
            if let Some(failure) = &state.failure {
                return Err(self.failed(failure, Some(from)));
            }
            if state.inboxes[index(from)].is_finalized {
                let why = "which has ended without sending";
                return Err(RunError::Deadlock { rank: self.rank, from, why });
            }
            let left = self.timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let silent = self.silent(&state);
                let (from, seconds) = (self.describe(from), start.elapsed().as_secs());
                return Err(RunError::TimedOut { rank: self.rank, from, phase, seconds, silent });
            }
            state = self.shared.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The rank that has been silent for longest, if for longer than ranks that run, as the end of a message.
    fn silent(&self, state: &State) -> String {
        let quiet = |other: u64| state.inboxes[index(other)].heard.unwrap_or(self.start).elapsed();
        let found = self
            .others()
            .map(|other| (quiet(other), other))
            .max()
            .filter(|(quiet, _)| *quiet * 2 > self.timeout);
        found.map_or_else(String::new, |(quiet, other)| {
            format!("; {} has sent nothing for {} s", self.describe(other), quiet.as_secs())
        })
    }

    /// The error of a task of this rank, which may wait for another rank.
    fn failed(&self, failure: &Failure, waits_for: Option<u64>) -> RunError {
        match failure {
            Failure::Reported { .. } => RunError::Stopped,
            Failure::Lost { rank, address, why } => {
                let meanwhile = match waits_for {
                    None => String::new(),
                    Some(from) if from == *rank => format!(" while rank {} waited for it", self.rank),
                    Some(from) => format!(" while rank {} waited for rank {from}", self.rank),
                };
                RunError::Lost { rank: *rank, address: address.to_string(), why: why.clone(), meanwhile }
            }
        }
    }

    /// Replaces [`RunError::Stopped`] by the failure that another rank reported.
    pub(super) fn with_cause(&self, error: RunError) -> RunError {
        match &self.shared.state().failure {
            Some(Failure::Reported { rank, message }) if error.is_stopped() => {
                RunError::RemoteFailure { rank: self.describe(*rank), message: message.clone() }
            }
            Some(_) | None => error,
        }
    }

    /// The failure of another rank, in place of an error that may follow from it.
    pub(super) fn with_first_cause(&self, error: RunError) -> RunError {
        self.with_cause(self.check().err().unwrap_or(error))
    }

    /// Sends a failure to all others, once: the one that was reported to this rank, else `message`.
    pub(super) fn abort(&self, message: &str) {
        let mut state = self.shared.state();
        if std::mem::replace(&mut state.has_aborted, true) {
            return;
        }
        let (rank, message) = match &state.failure {
            Some(Failure::Reported { rank, message }) => (*rank, message.clone()),
            Some(Failure::Lost { .. }) | None => (self.rank, message.to_owned()),
        };
        drop(state);
        self.send_to_all(Kind::Abort, &(rank, &message[..message.floor_char_boundary(MAX_MESSAGE)]));
    }

    /// Closes all connections; waits until all frames are sent and the others have closed theirs, up to `timeout`.
    pub(super) fn close(&self, timeout: Duration) {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner).take();
        for channel in self.channels.iter().flatten() {
            channel.queue().take();
        }
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.state();
        while state.open > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.shared.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Channel {
    fn queue(&self) -> MutexGuard<'_, Option<Sender<Outgoing>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Communicator for Connections {
    fn send(&self, stream: Stream, _from: Rank, to: Rank, block: Vec<f32>) -> Result<(), RunError> {
        self.check()?;
        self.queue(to.0, Outgoing::Block(stream, block));
        Ok(())
    }

    fn receive(&self, stream: Stream, to: Rank, from: Rank) -> Result<Vec<f32>, RunError> {
        self.wait(from.0, Phase::Running, |inbox| {
            let inbox = &mut inbox.streams[stream as usize];
            loop {
                match inbox.blocks.front()? {
                    Item::End if inbox.ended == 0 => {
                        let why = "which has ended without sending";
                        return Some(Err(RunError::Deadlock { rank: to.0, from: from.0, why }));
                    }
                    Item::End | Item::Block(_) => {}
                }
                match inbox.blocks.pop_front()? {
                    Item::Block(block) if inbox.ended == 0 => return Some(Ok(block)),
                    // Left over from an earlier step.
                    Item::Block(_) => {}
                    Item::End => inbox.ended -= 1,
                }
            }
        })
    }

    fn check(&self) -> Result<(), RunError> {
        match &self.shared.state().failure {
            Some(failure) => Err(self.failed(failure, None)),
            None => Ok(()),
        }
    }

    fn finish(&self, _rank: Rank) {
        let mut state = self.shared.state();
        state.inboxes.iter_mut().flat_map(|inbox| &mut inbox.streams).for_each(|from| from.ended += 1);
        drop(state);
        self.send_to_all(Kind::End, &());
    }

    fn fail(&self, _rank: Rank, error: &RunError) {
        self.abort(&error.to_string());
    }
}
