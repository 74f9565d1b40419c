//! The connections of a process, and how its rank exchanges blocks over them.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufReader, BufWriter, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ithaca_ir::Rank;

use super::bytes::{self, Reader, Writer};
use super::error::LaunchError;
use super::frame::{self, FrameError, Kind, Limits};
use crate::cpu::Communicator;
use crate::error::RunError;
use crate::tensor::index;

/// Connections to other ranks, each with the address of the other side.
pub(super) type Peers = BTreeMap<u64, (TcpStream, SocketAddr)>;

/// How much is read or written at a time, bytes.
const BUFFER: usize = 1 << 17;

/// The most of a failure's words that travel, bytes.
const WORDS: usize = 1 << 16;

/// The connections of one process to all the others.
#[derive(Debug)]
pub(super) struct Mesh {
    rank: u64,
    world: u64,
    timeout: Duration,
    shared: Arc<Shared>,
    /// By rank; none for its own.
    peers: Vec<Option<Peer>>,
}

#[derive(Debug)]
struct Peer {
    address: SocketAddr,
    /// To the thread that writes; none once no more is said.
    queue: Mutex<Option<Sender<Outgoing>>>,
}

#[derive(Debug)]
enum Outgoing {
    Block(Vec<f32>),
    Frame(Kind, Vec<u8>),
}

/// What the threads of a process share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug)]
struct State {
    /// By rank; the own one stays empty.
    inboxes: Vec<Inbox>,
    /// The first failure that was heard of.
    failure: Option<Failure>,
    /// Whether this process has told the others of a failure.
    has_told: bool,
    limits: Limits,
    /// Threads that write, and threads that read.
    open: usize,
}

#[derive(Debug, Default)]
struct Inbox {
    /// What was sent while a schedule runs.
    blocks: VecDeque<Item>,
    /// Steps that have ended here, and of whose blocks of this sender some may be left over.
    ended: usize,
    messages: VecDeque<(Kind, Vec<u8>)>,
    /// Whether the connection may close.
    has_left: bool,
}

#[derive(Debug)]
enum Item {
    Block(Vec<f32>),
    End,
}

#[derive(Clone, Debug)]
enum Failure {
    /// A connection that should not have closed.
    Lost { rank: u64, address: SocketAddr, why: String },
    /// A rank said that it failed.
    Told { rank: u64, words: String },
}

impl Mesh {
    /// Takes connections to all other ranks.
    ///
    /// # Errors
    /// [`LaunchError::Setup`].
    pub(super) fn new(rank: u64, world: u64, timeout: Duration, peers: Peers) -> Result<Self, LaunchError> {
        let state = State {
            inboxes: (0..world).map(|_| Inbox::default()).collect(),
            failure: None,
            has_told: false,
            limits: Limits::default(),
            open: 0,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), wake: Condvar::new() });
        let mut mesh = Mesh { rank, world, timeout, shared, peers: (0..world).map(|_| None).collect() };
        for (other, (stream, address)) in peers {
            let peer = mesh.connect(other, stream, address);
            let peer = peer.map_err(|source| LaunchError::Setup { address: address.to_string(), source })?;
            mesh.peers[index(other)] = Some(peer);
        }
        Ok(mesh)
    }

    fn connect(&self, rank: u64, stream: TcpStream, address: SocketAddr) -> std::io::Result<Peer> {
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        stream.set_nodelay(true)?;
        let reading = stream.try_clone()?;
        let (queue, outgoing) = mpsc::channel();
        type Work = Box<dyn FnOnce(&Shared) + Send>;
        let threads: [(&str, Work); 2] = [
            ("from", Box::new(move |shared| listen(shared, (rank, address), reading))),
            ("to", Box::new(move |_| speak(&outgoing, stream))),
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
        Ok(Peer { address, queue: Mutex::new(Some(queue)) })
    }

    pub(super) fn rank(&self) -> Rank {
        Rank(self.rank)
    }

    pub(super) fn world(&self) -> u64 {
        self.world
    }

    /// Allows frames of these sizes.
    pub(super) fn allow(&self, limits: Limits) {
        self.shared.state().limits = limits;
    }

    /// All other ranks.
    pub(super) fn others(&self) -> impl Iterator<Item = u64> {
        let own = self.rank;
        (0..self.world).filter(move |&other| other != own)
    }

    /// A rank with its address, for a message.
    pub(super) fn named(&self, rank: u64) -> String {
        let peer = usize::try_from(rank).ok().and_then(|i| self.peers.get(i)).and_then(Option::as_ref);
        match peer {
            Some(peer) => format!("rank {rank} ({})", peer.address),
            None => format!("rank {rank}"),
        }
    }

    /// Queues a frame; what cannot be sent any more is noticed by the thread that reads.
    pub(super) fn tell(&self, to: u64, kind: Kind, body: Vec<u8>) {
        self.queue(to, Outgoing::Frame(kind, body));
    }

    fn queue(&self, to: u64, what: Outgoing) {
        if let Some(peer) = &self.peers[index(to)]
            && let Some(queue) = &*peer.queue.lock().unwrap_or_else(PoisonError::into_inner)
        {
            // The thread that writes ends when the connection does.
            let _ = queue.send(what);
        }
    }

    /// Waits for the next message of `from`, which must be of one of these kinds, for as long as `patience` says.
    ///
    /// # Errors
    /// [`RunError::Told`] when a rank has failed, [`RunError::Lost`], [`RunError::Deadlock`] after the time.
    pub(super) fn message(
        &self,
        from: u64,
        kinds: &[Kind],
        patience: Patience,
    ) -> Result<(Kind, Vec<u8>), RunError> {
        let deadline = match patience {
            Patience::Limited => Some(Instant::now() + self.timeout),
            Patience::Unlimited => None,
        };
        let found = self.wait(from, deadline, |inbox| inbox.messages.pop_front().map(Ok));
        let (kind, body) = found.map_err(|error| self.explained(error))?;
        match kinds.contains(&kind) {
            true => Ok((kind, body)),
            false => Err(bytes::malformed()),
        }
    }

    /// Waits for what `find` finds in what came from a rank.
    fn wait<T>(
        &self,
        from: u64,
        deadline: Option<Instant>,
        mut find: impl FnMut(&mut Inbox) -> Option<Result<T, RunError>>,
    ) -> Result<T, RunError> {
        let mut state = self.shared.state();
        loop {
            if let Some(found) = find(&mut state.inboxes[index(from)]) {
                return found;
            }
            if let Some(failure) = &state.failure {
                return Err(self.failed(failure, Some(from)));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let in_vain = match (left, state.inboxes[index(from)].has_left) {
                (_, true) => Some("which has ended without sending"),
                (Some(Duration::ZERO), false) => Some("longer than was allowed"),
                (Some(_) | None, false) => None,
            };
            if let Some(why) = in_vain {
                return Err(RunError::Deadlock { rank: self.rank, from, why });
            }
            let wake = &self.shared.wake;
            state = match left {
                None => wake.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// A failure as it shows to a task of this rank, which may wait for another.
    fn failed(&self, failure: &Failure, waits_for: Option<u64>) -> RunError {
        match failure {
            Failure::Told { .. } => RunError::Stopped,
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

    /// In place of an error that says only that another rank failed, what that rank said.
    pub(super) fn explained(&self, error: RunError) -> RunError {
        match &self.shared.state().failure {
            Some(Failure::Told { rank, words }) if error.is_stopped() => {
                RunError::Told { rank: self.named(*rank), words: words.clone() }
            }
            Some(_) | None => error,
        }
    }

    /// Whether another rank is known to have failed.
    pub(super) fn has_failed(&self) -> bool {
        self.shared.state().failure.is_some()
    }

    /// What a rank that failed said, in place of an error that may follow from it.
    pub(super) fn cause_of(&self, error: RunError) -> RunError {
        match &self.shared.state().failure {
            Some(Failure::Told { rank, words }) => {
                RunError::Told { rank: self.named(*rank), words: words.clone() }
            }
            Some(failure @ Failure::Lost { .. }) => self.failed(failure, None),
            None => error,
        }
    }

    /// Tells all others that this rank has failed, or what it was told itself; the first time only.
    pub(super) fn abort(&self, words: &str) {
        let mut state = self.shared.state();
        if std::mem::replace(&mut state.has_told, true) {
            return;
        }
        let (rank, words) = match &state.failure {
            Some(Failure::Told { rank, words }) => (*rank, words.clone()),
            Some(Failure::Lost { .. }) | None => (self.rank, words.to_owned()),
        };
        drop(state);
        let mut body = Writer::new();
        body.number(rank).text(&words[..words.floor_char_boundary(WORDS)]);
        let body = body.into_bytes();
        self.others().for_each(|other| self.tell(other, Kind::Abort, body.clone()));
    }

    /// Says nothing more, and waits a while until all was sent and the others have closed as well.
    pub(super) fn close(&self, patience: Duration) {
        for peer in self.peers.iter().flatten() {
            peer.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
        let deadline = Instant::now() + patience;
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

/// How long a message is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// As long as was allowed.
    Limited,
    /// As long as the connection stands: the other computes something of its own.
    Unlimited,
}

impl Communicator for Mesh {
    fn send(&self, _from: Rank, to: Rank, block: Vec<f32>) -> Result<(), RunError> {
        self.check()?;
        self.queue(to.0, Outgoing::Block(block));
        Ok(())
    }

    fn receive(&self, to: Rank, from: Rank) -> Result<Vec<f32>, RunError> {
        let deadline = Instant::now() + self.timeout;
        self.wait(from.0, Some(deadline), |inbox| {
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
                    // Left over from a step before.
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
        state.inboxes.iter_mut().for_each(|inbox| inbox.ended += 1);
        drop(state);
        self.others().for_each(|other| self.tell(other, Kind::End, Vec::new()));
    }

    fn fail(&self, _rank: Rank, error: &RunError) {
        self.abort(&error.to_string());
    }
}

impl Shared {
    /// A thread that panicked while it held the lock left nothing half done: every change is one insertion.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a failure, if it is the first.
    fn fail(&self, failure: Failure) {
        self.state().failure.get_or_insert(failure);
        self.wake.notify_all();
    }
}

/// Writes what is queued until the queue ends, then says that no more will come.
fn speak(outgoing: &Receiver<Outgoing>, stream: TcpStream) {
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
                Outgoing::Block(data) => frame::write_block(&mut out, &data)?,
                Outgoing::Frame(kind, body) => frame::write(&mut out, kind, &body)?,
            }
        }
    };
    // A connection that does not take it any more is noticed by the thread that reads.
    let _ = send();
    let (stream, _) = out.into_parts();
    let _ = stream.shutdown(Shutdown::Write);
}

/// Reads what comes from a rank until its connection ends.
fn listen(shared: &Shared, (rank, address): (u64, SocketAddr), stream: TcpStream) {
    let mut input = BufReader::with_capacity(BUFFER, stream);
    let lost = |why: String| shared.fail(Failure::Lost { rank, address, why });
    loop {
        let frame = frame::read(&mut input, || shared.state().limits);
        let (kind, body) = match frame {
            Ok(frame) => frame,
            Err(error) => {
                let has_left = shared.state().inboxes[index(rank)].has_left;
                match error {
                    FrameError::Closed if has_left => {}
                    FrameError::Closed => lost("closed its connection".to_owned()),
                    FrameError::Io(error) => lost(format!("cannot be heard any more ({error})")),
                    FrameError::Malformed(what) => lost(format!("cannot be understood: {what}")),
                }
                return;
            }
        };
        let mut state = shared.state();
        let inbox = &mut state.inboxes[index(rank)];
        match kind {
            Kind::Block => match bytes::floats(&body) {
                Some(block) => inbox.blocks.push_back(Item::Block(block)),
                None => {
                    drop(state);
                    return lost("cannot be understood: it sent half a number".to_owned());
                }
            },
            Kind::End => inbox.blocks.push_back(Item::End),
            Kind::Bye => inbox.has_left = true,
            Kind::Abort => {
                // It will close next, and the failure is what it says.
                inbox.has_left = true;
                let (rank, words) = told(&body).unwrap_or((rank, "it does not say why".to_owned()));
                state.failure.get_or_insert(Failure::Told { rank, words });
            }
            // It saw another leave when rank 0 had already seen them all.
            Kind::Refuse => {
                inbox.has_left = true;
                let words = String::from_utf8_lossy(&body).into_owned();
                state.failure.get_or_insert(Failure::Told { rank, words });
            }
            Kind::Agree | Kind::Part | Kind::Kept | Kind::KeptEnd | Kind::Verdict => {
                inbox.messages.push_back((kind, body));
            }
            Kind::Hello | Kind::Table | Kind::Met => {
                drop(state);
                return lost("cannot be understood: it introduces itself again".to_owned());
            }
        }
        drop(state);
        shared.wake.notify_all();
    }
}

/// Who failed, and why.
fn told(body: &[u8]) -> Option<(u64, String)> {
    let mut input = Reader::new(body);
    Some((input.number().ok()?, input.text().ok()?))
}
