//! Carries out one collective: one round at a time, all sends and receives of the round progressing together as their
//! sockets are ready, receives reduced piece by piece as the bytes arrive.
//!
//! Every frame's header is compared with what this rank expects before a byte of payload is read; a difference is a
//! `Mismatch` that names both sides (L15). Nothing here blocks.

use std::io::IoSlice;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use ftcore::{Completer, Completion, Error, ErrorKind, OpKind, ReduceOp, Result};

use crate::buffers::go_on;
use crate::kernels;
use crate::peer::Peer;
use crate::plan::{Plan, Prepare};
use crate::schedule::{Buffer, Count, Landing, Local, Recv, Send, Span};
use crate::transport::tcp::Moved;
use crate::wire::DataHeader;

/// Receives that reduce collect this many bytes before they run the kernel.
pub(crate) const PIECE: usize = 128 * 1024;
/// Passes over all sockets before the engine looks at control frames and aborts again.
const PASSES: usize = 16;

/// Who and when: what every operation of an engine has in common.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) epoch: u64,
}

/// Where an operation stands after some progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// All rounds are done.
    Finished,
    /// Its turn is over, but it can go on at once.
    Busy,
    /// It waits for sockets.
    Waiting,
    /// It needs this rank, whose data connection is closed.
    Blocked(u32),
}

struct Sending {
    send: Send,
    header: [u8; DataHeader::BYTES],
    /// Of header and payload.
    done: usize,
}

impl Sending {
    fn is_finished(&self) -> bool {
        self.done >= DataHeader::BYTES + self.send.from.len()
    }
}

struct Receiving {
    recv: Recv,
    /// The header is here and fits.
    open: bool,
    /// Bytes of payload that have landed.
    done: usize,
    /// Bytes that wait for the kernel.
    piece: Vec<u8>,
    filled: usize,
}

impl Receiving {
    fn is_finished(&self) -> bool {
        self.open && self.done >= self.recv.into.len()
    }
}

/// A collective in progress.
pub(crate) struct Exec {
    pub(crate) kind: OpKind,
    pub(crate) seq: u64,
    pub(crate) deadline: Instant,
    pub(crate) submitted: Instant,
    pub(crate) wait_all: bool,
    place: Place,
    plan: Plan,
    counts: Vec<u32>,
    completer: Completer,
    elements: usize,
    started: bool,
    round: usize,
    sends: Vec<Sending>,
    recvs: Vec<Receiving>,
}

/// What identifies a submitted collective.
pub(crate) struct Label {
    pub(crate) kind: OpKind,
    pub(crate) seq: u64,
    pub(crate) deadline: Instant,
    pub(crate) submitted: Instant,
    pub(crate) elements: usize,
    pub(crate) wait_all: bool,
}

impl Exec {
    pub(crate) fn new(label: Label, place: Place, plan: Plan, completer: Completer) -> Self {
        let counts = vec![u32::from(plan.contribute); plan.schedule.slots];
        Self {
            kind: label.kind,
            seq: label.seq,
            deadline: label.deadline,
            submitted: label.submitted,
            wait_all: label.wait_all,
            elements: label.elements,
            place,
            plan,
            counts,
            completer,
            started: false,
            round: 0,
            sends: Vec::new(),
            recvs: Vec::new(),
        }
    }

    /// Moves on as far as the sockets allow. `stop` ends long local work early.
    pub(crate) fn progress(&mut self, peers: &mut [Option<Peer>], stop: &AtomicBool) -> Result<Step> {
        if !self.started {
            self.started = true;
            self.prepare(stop)?;
            let before = std::mem::take(&mut self.plan.schedule.before);
            self.local(&before, stop)?;
            self.begin_round();
        }
        for _ in 0..PASSES {
            go_on(stop)?;
            if self.round >= self.plan.schedule.rounds.len() {
                self.finish_memory(stop)?;
                return Ok(Step::Finished);
            }
            let mut moved = false;
            let mut blocked = None;
            for index in 0..self.sends.len() {
                moved |= self.push(index, peers, &mut blocked)?;
            }
            for index in 0..self.recvs.len() {
                moved |= self.pull(index, peers, &mut blocked)?;
            }
            if self.sends.iter().all(Sending::is_finished) && self.recvs.iter().all(Receiving::is_finished) {
                let after = self
                    .plan
                    .schedule
                    .rounds
                    .get_mut(self.round)
                    .map(|r| std::mem::take(&mut r.after))
                    .unwrap_or_default();
                self.local(&after, stop)?;
                self.round += 1;
                self.begin_round();
                continue;
            }
            if !moved {
                return Ok(blocked.map_or(Step::Waiting, Step::Blocked));
            }
        }
        // The last pass moved something, perhaps the very last piece: nothing may be left that would end a sleep.
        Ok(Step::Busy)
    }

    fn prepare(&mut self, stop: &AtomicBool) -> Result<()> {
        let Some(op) = self.plan.op else { return Ok(()) };
        let (dtype, memory) = (self.plan.dtype, &mut self.plan.memory);
        let span = Span::new(self.plan.prepared, 0..memory.len(self.plan.prepared));
        match self.plan.prepare {
            Prepare::Nothing => Ok(()),
            Prepare::Identity => memory.each(&span, stop, |data| kernels::fill_identity(dtype, op, data)),
            Prepare::Scale(factor) => {
                if self.plan.prepared == Buffer::In {
                    memory.copy_original(stop)?;
                }
                memory.each(&span, stop, |data| kernels::scale(dtype, data, factor))
            }
        }
    }

    fn local(&mut self, steps: &[Local], stop: &AtomicBool) -> Result<()> {
        let dtype = self.plan.dtype;
        for step in steps {
            match step {
                Local::Copy { from, into } => self.plan.memory.both(from, into, stop, |a, b| {
                    a.copy_from_slice(b);
                    Ok(())
                })?,
                Local::Reduce { from, into } => {
                    let op = self.op()?;
                    self.plan
                        .memory
                        .both(from, into, stop, |a, b| kernels::reduce(dtype, op, a, b))?;
                }
                Local::Finish { span, slot } => {
                    if matches!(self.plan.op, Some(ReduceOp::Avg)) {
                        let count = self.counts.get(*slot).copied().unwrap_or(0);
                        self.plan
                            .memory
                            .each(span, stop, |data| kernels::divide(dtype, data, count))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn op(&self) -> Result<ReduceOp> {
        self.plan
            .op
            .ok_or_else(|| Error::new(ErrorKind::Internal, "a schedule without a reduction asks for one"))
    }

    fn finish_memory(&mut self, stop: &AtomicBool) -> Result<()> {
        if self.plan.canonical {
            let span = Span::new(Buffer::Out, 0..self.plan.memory.len(Buffer::Out));
            self.plan.memory.each(&span, stop, |data| {
                kernels::canonical_bools(data);
                Ok(())
            })?;
        }
        Ok(())
    }

    fn begin_round(&mut self) {
        let Some(round) = self.plan.schedule.rounds.get_mut(self.round) else {
            self.sends.clear();
            self.recvs.clear();
            return;
        };
        let (epoch, seq) = (self.place.epoch, self.seq);
        let algorithm = self.plan.schedule.algorithm as u32;
        let fingerprint = self.plan.fingerprint;
        let counts = &self.counts;
        let number = u32::try_from(self.round).unwrap_or(u32::MAX);
        self.sends = std::mem::take(&mut round.sends)
            .into_iter()
            .map(|send| {
                let contributors = send.slot.and_then(|s| counts.get(s)).copied().unwrap_or(0);
                let header = DataHeader {
                    epoch,
                    seq,
                    round: number,
                    algorithm,
                    contributors,
                    length: send.from.len() as u64,
                    fingerprint,
                };
                Sending {
                    send,
                    header: header.encode(),
                    done: 0,
                }
            })
            .collect();
        self.recvs = std::mem::take(&mut round.recvs)
            .into_iter()
            .map(|recv| Receiving {
                recv,
                open: false,
                done: 0,
                piece: Vec::new(),
                filled: 0,
            })
            .collect();
    }

    /// Writes some of a send; true if bytes moved.
    fn push(&mut self, index: usize, peers: &mut [Option<Peer>], blocked: &mut Option<u32>) -> Result<bool> {
        let Some(sending) = self.sends.get_mut(index).filter(|s| !s.is_finished()) else {
            return Ok(false);
        };
        let rank = sending.send.peer;
        let peer = at(peers, rank)?;
        let link = &mut peer.data.link;
        if link.write_closed.is_some() {
            *blocked = Some(rank);
            return Ok(false);
        }
        if !link.writable {
            return Ok(false);
        }
        let mut slices = Vec::with_capacity(4);
        let header = sending.header.get(sending.done..).unwrap_or(&[]);
        if !header.is_empty() {
            slices.push(IoSlice::new(header));
        }
        self.plan.memory.slices(
            &sending.send.from,
            sending.done.saturating_sub(DataHeader::BYTES),
            &mut slices,
        );
        match link.write(&slices) {
            Moved::Bytes(n) => {
                sending.done += n;
                Ok(true)
            }
            Moved::Nothing => Ok(false),
            Moved::Closed => {
                *blocked = Some(rank);
                Ok(false)
            }
        }
    }

    /// Reads some of a receive; true if bytes moved.
    fn pull(&mut self, index: usize, peers: &mut [Option<Peer>], blocked: &mut Option<u32>) -> Result<bool> {
        let (dtype, op, round) = (self.plan.dtype, self.plan.op, self.round);
        let Some(receiving) = self.recvs.get_mut(index).filter(|r| !r.is_finished()) else {
            return Ok(false);
        };
        let rank = receiving.recv.peer;
        let peer = at(peers, rank)?;
        if !receiving.open {
            peer.data
                .fill()
                .map_err(|e| peer_context(e, rank, &peer.address))?;
            let Some(header) = peer.data.header else {
                if peer.data.link.read_closed.is_some() {
                    *blocked = Some(rank);
                }
                return Ok(false);
            };
            if header.seq == self.seq && header.round as usize > round {
                return Ok(false);
            }
            let expected = receiving.recv.into.len() as u64;
            check_header(&header, &self.plan, self.place, self.seq, round, expected, peer)?;
            peer.data.header = None;
            receiving.open = true;
            peer.data.in_payload = expected > 0;
            match receiving.recv.count {
                Count::Ignore => {}
                Count::Add(slot) | Count::Set(slot) => {
                    if header.contributors > self.place.world {
                        return Err(peer.error(
                            ErrorKind::Protocol,
                            format!(
                                "claims {} contributors in a world of {}",
                                header.contributors, self.place.world
                            ),
                        ));
                    }
                    if let Some(c) = self.counts.get_mut(slot) {
                        *c = match receiving.recv.count {
                            Count::Add(_) => c.saturating_add(header.contributors),
                            _ => header.contributors,
                        };
                    }
                }
            }
            if expected == 0 {
                return Ok(true);
            }
        }
        if !peer.data.link.readable {
            return Ok(false);
        }
        let total = receiving.recv.into.len();
        let moved = match &receiving.recv.landing {
            Landing::Copy => {
                let target = self.plan.memory.slice_mut(&receiving.recv.into, receiving.done)?;
                match peer.data.link.read(target) {
                    Moved::Bytes(n) => {
                        receiving.done += n;
                        true
                    }
                    other => closed(other, rank, blocked),
                }
            }
            landing => {
                let want = (total - receiving.done).min(PIECE);
                receiving.piece.resize(want, 0);
                let rest = receiving.piece.get_mut(receiving.filled..).unwrap_or(&mut []);
                match peer.data.link.read(rest) {
                    Moved::Bytes(n) => {
                        receiving.filled += n;
                        if receiving.filled >= want {
                            let op = op.ok_or_else(|| {
                                Error::new(ErrorKind::Internal, "a schedule without a reduction asks for one")
                            })?;
                            let with = match landing {
                                Landing::ReduceWith(with) => Some(with),
                                _ => None,
                            };
                            self.plan.memory.land(
                                &receiving.recv.into,
                                receiving.done,
                                with,
                                &mut receiving.piece,
                                |a, b| kernels::reduce(dtype, op, a, b),
                            )?;
                            receiving.done += want;
                            receiving.filled = 0;
                        }
                        true
                    }
                    other => closed(other, rank, blocked),
                }
            }
        };
        if receiving.is_finished() {
            peer.data.in_payload = false;
        }
        Ok(moved)
    }

    /// Compares a header that waits from *any* peer with this operation, so that ranks which never exchange data in
    /// their different schedules still find out about each other.
    pub(crate) fn inspect(&self, peer: &Peer) -> Result<()> {
        match &peer.data.header {
            Some(h) if h.seq == self.seq && h.fingerprint != self.plan.fingerprint => {
                Err(mismatch(peer, h, &self.plan))
            }
            _ => Ok(()),
        }
    }

    /// True if it waits for the data connection of `rank` to take bytes.
    pub(crate) fn wants_write(&self, rank: u32) -> bool {
        self.sends.iter().any(|s| s.send.peer == rank && !s.is_finished())
    }

    /// "after 3 of 7 rounds".
    pub(crate) fn progress_text(&self, total: usize) -> String {
        format!("after {} of {total} rounds", self.round.min(total))
    }

    /// The number of rounds.
    pub(crate) fn rounds(&self) -> usize {
        self.plan.schedule.rounds.len()
    }

    /// Whom this rank waits for right now.
    pub(crate) fn waiting_for(&self) -> (Vec<u32>, Vec<u32>) {
        let mut senders: Vec<u32> = self
            .recvs
            .iter()
            .filter(|r| !r.is_finished())
            .map(|r| r.recv.peer)
            .collect();
        let mut takers: Vec<u32> = self
            .sends
            .iter()
            .filter(|s| !s.is_finished())
            .map(|s| s.send.peer)
            .collect();
        senders.sort_unstable();
        takers.sort_unstable();
        (senders, takers)
    }

    /// Adds what identifies this operation.
    pub(crate) fn context(&self, error: Error) -> Error {
        let error = error
            .with_op(self.kind.name())
            .with_seq(self.seq)
            .with_epoch(self.place.epoch)
            .with_rank(self.place.rank);
        if self.elements > 0 || self.plan.fingerprint.dtype != u8::MAX {
            error.with_data(self.plan.dtype, self.elements)
        } else {
            error
        }
    }

    /// Ends it well.
    pub(crate) fn succeed(self) {
        let contributors = self
            .plan
            .schedule
            .result
            .filter(|_| self.plan.op.is_some())
            .and_then(|slot| self.counts.get(slot))
            .copied()
            .unwrap_or(0);
        self.completer.succeed(Completion {
            tensors: self.plan.memory.into_given(),
            source: None,
            contributors,
        });
    }

    /// Ends it with `error`; the tensors go back, since nobody else ever touches them.
    pub(crate) fn fail(self, error: Error) {
        let error = self.context(error);
        self.completer.fail(error, self.plan.memory.into_given());
    }

    /// For a world of one: runs it here and now, to its end.
    pub(crate) fn run_alone(mut self) {
        match self.progress(&mut [], &AtomicBool::new(false)) {
            Ok(Step::Finished) => self.succeed(),
            Ok(_) => self.fail(Error::new(
                ErrorKind::Internal,
                "a world of one waits for somebody",
            )),
            Err(error) => self.fail(error),
        }
    }
}

fn closed(moved: Moved, rank: u32, blocked: &mut Option<u32>) -> bool {
    if moved == Moved::Closed {
        *blocked = Some(rank);
    }
    false
}

fn at(peers: &mut [Option<Peer>], rank: u32) -> Result<&mut Peer> {
    peers
        .get_mut(rank as usize)
        .and_then(Option::as_mut)
        .ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("the schedule names rank {rank}, to which there is no connection"),
            )
        })
}

fn peer_context(error: Error, rank: u32, address: &str) -> Error {
    error.with_peer(rank).with_peer_address(address)
}

fn mismatch(peer: &Peer, header: &DataHeader, plan: &Plan) -> Error {
    peer.error(
        ErrorKind::Mismatch,
        format!(
            "the ranks called different collectives: rank {} called {}, this rank {}",
            peer.rank, header.fingerprint, plan.fingerprint
        ),
    )
}

fn check_header(
    header: &DataHeader,
    plan: &Plan,
    place: Place,
    seq: u64,
    round: usize,
    expected: u64,
    peer: &Peer,
) -> Result<()> {
    if header.epoch != place.epoch {
        return Err(peer.error(
            ErrorKind::Protocol,
            format!(
                "sent a frame of epoch {}; this is epoch {}",
                header.epoch, place.epoch
            ),
        ));
    }
    if header.seq != seq {
        return Err(peer.error(
            ErrorKind::Protocol,
            format!("sent a frame of operation #{}; expected #{seq}", header.seq),
        ));
    }
    if header.fingerprint != plan.fingerprint || header.algorithm != plan.schedule.algorithm as u32 {
        return Err(mismatch(peer, header, plan));
    }
    if header.round as usize != round {
        return Err(peer.error(
            ErrorKind::Protocol,
            format!("sent a frame of round {}; expected round {round}", header.round),
        ));
    }
    if header.length != expected {
        return Err(peer.error(
            ErrorKind::Mismatch,
            format!(
                "the ranks disagree about sizes: rank {} called {} and sends {} bytes to this rank, which called {} and \
                 expects {expected} bytes from it",
                peer.rank, header.fingerprint, header.length, plan.fingerprint
            ),
        ));
    }
    Ok(())
}
