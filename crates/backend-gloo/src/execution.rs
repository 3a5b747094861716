//! Carries out one collective: one round at a time, all sends and receives of the round progressing together as their
//! sockets and rings allow, receives reduced piece by piece as the bytes arrive (out of shared memory without a copy).
//!
//! Every frame's header is compared with what this rank expects before a byte of payload is read; a difference is a
//! `Mismatch` that names both sides (L15). Nothing here blocks.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use ftcore::{Completer, Completion, Epoch, Error, ErrorKind, OpKind, ReduceOp, Result};

use crate::buffers::go_on;
use crate::expected::{Expected, check_header, mismatch};
use crate::kernels;
use crate::plan::{Plan, Prepare};
use crate::port::{Port, Wire};
use crate::rail;
use crate::schedule::{
    Algorithm, Buffer, Count, Landing, Local, Send, Span, may_begin_early, ready_early, swap_in_place,
};
use crate::stripes;
use crate::transfer::{PIECE, Receiving, STREAM_FROM, Sending, collect, copy, land, no_reduction, put};
use crate::transport::shm::place_of;
use crate::transport::tcp::Moved;
use crate::wire::{DataHeader, Frame, STRIPE};

/// Two ranks that swap less do not ask each other whether to read in place.
const SWAP_IN_PLACE_FROM: usize = 128 * 1024;

/// Passes over all sockets before the engine looks at control frames and aborts again.
const PASSES: usize = 16;

/// Who and when: what every operation of an engine has in common.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) epoch: Epoch,
    /// All ranks share memory.
    pub(crate) one_host: bool,
}

/// Where an operation stands after some progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// All rounds are done.
    Finished,
    /// Its turn is over, but it can go on at once.
    Busy,
    /// It waits for other ranks.
    Waiting,
    /// It needs this rank, whose data connection is closed.
    Blocked(u32),
}

/// A collective in progress.
pub(crate) struct Execution {
    pub(crate) kind: OpKind,
    pub(crate) seq: u64,
    pub(crate) deadline: Instant,
    pub(crate) submitted: Instant,
    pub(crate) wait_all: bool,
    place: Place,
    /// The offer to read each other's memory in place, until the peer has said whether it does so, too.
    offer: Option<Sending>,
    // Before the memory: what is lent is taken back before it goes.
    sends: Vec<Sending>,
    /// The sends of the next round, once those of this one are out.
    early: Vec<Sending>,
    plan: Plan,
    counts: Vec<u32>,
    completer: Completer,
    elements: usize,
    started: bool,
    round: usize,
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

impl Execution {
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
            offer: None,
            plan,
            counts,
            completer,
            started: false,
            round: 0,
            sends: Vec::new(),
            recvs: Vec::new(),
            early: Vec::new(),
        }
    }

    /// Moves on as far as the sockets allow. `stop` ends long local work early.
    pub(crate) fn progress(&mut self, ports: &mut [Option<Port>], stop: &AtomicBool) -> Result<Step> {
        self.start(stop)?;
        for _ in 0..PASSES {
            go_on(stop)?;
            if self.offer.is_some() {
                match self.agree(ports)? {
                    Step::Finished => {}
                    step => return Ok(step),
                }
            }
            if self.round >= self.plan.schedule.rounds.len() {
                self.finish_memory(stop)?;
                return Ok(Step::Finished);
            }
            let mut moved = false;
            let mut blocked = None;
            for index in 0..self.sends.len() {
                moved |= self.push(index, ports, &mut blocked)?;
            }
            for index in 0..self.recvs.len() {
                moved |= self.pull(index, ports, &mut blocked)?;
            }
            moved |= self.push_early(ports)?;
            if moved {
                ports.iter_mut().flatten().for_each(Port::ring);
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

    fn start(&mut self, stop: &AtomicBool) -> Result<()> {
        if !self.started {
            self.started = true;
            self.prepare(stop)?;
            let before = std::mem::take(&mut self.plan.schedule.before);
            self.local(&before, stop)?;
            if self.swaps_in_place() {
                self.offer = self.outgoing(vec![offer_to(self.other())], 0).pop();
                let headers = self.offer.iter_mut().map(|offer| &mut offer.header);
                headers.for_each(DataHeader::lend);
            } else {
                self.begin_round();
            }
        }
        Ok(())
    }

    /// The other one of two ranks.
    fn other(&self) -> u32 {
        1 - self.place.rank.min(1)
    }

    /// True if this is a swap of memory that the peer can read in place.
    fn swaps_in_place(&self) -> bool {
        let memory = &self.plan.memory;
        let out = Span::new(Buffer::Out, 0..memory.len(Buffer::Out));
        self.plan.schedule.algorithm == Algorithm::Exchange
            && self.place.one_host
            && memory
                .slice(&out, 0)
                .is_some_and(|bytes| bytes.len() == out.len() && may_swap_in_place(bytes))
    }

    /// Two ranks that both offer to read in place reduce a half each and fetch the other (`Cross`); if one does not, they swap. `Finished` once that
    /// is decided.
    fn agree(&mut self, ports: &mut [Option<Port>]) -> Result<Step> {
        let peer = self.other();
        let wanted = self.wanted(0, 0);
        let port = at(ports, peer)?;
        if let (Some(offer), Wire::Memory(memory)) = (&mut self.offer, &mut port.wire)
            && !offer.is_finished()
        {
            put(memory, offer, &self.plan.memory).map_err(|e| port.blame(e))?;
            port.ring();
        }
        let port = at(ports, peer)?;
        port.fill().map_err(|e| port.blame(e))?;
        let Some(header) = port
            .header
            .filter(|_| self.offer.as_ref().is_some_and(Sending::is_finished))
        else {
            return Ok(match port.read_closed() {
                true => Step::Blocked(peer),
                false => Step::Waiting,
            });
        };
        if header.lent {
            check_header(&header, &wanted, port)?;
            take_offer(port);
            let bytes = self.plan.memory.len(Buffer::Out);
            self.plan.schedule = swap_in_place(self.place.rank, bytes, self.plan.dtype.size());
        }
        self.offer = None;
        self.begin_round();
        Ok(Step::Finished)
    }

    /// What the header of round `round` from a peer must be, before `length` bytes.
    fn wanted(&self, round: usize, length: usize) -> Expected {
        Expected {
            epoch: self.place.epoch,
            seq: self.seq,
            round,
            algorithm: self.plan.schedule.algorithm,
            fingerprint: self.plan.fingerprint,
            length: length as u64,
        }
    }

    /// While an operation before it waits for others: sends of its first round what goes. True if bytes moved.
    pub(crate) fn send_ahead(&mut self, ports: &mut [Option<Port>], stop: &AtomicBool) -> Result<bool> {
        self.start(stop)?;
        let mut moved = false;
        // A rank that is gone is missed when it is this operation's turn.
        let mut blocked = None;
        if let Some(offer) = self.offer.as_mut().filter(|offer| !offer.is_finished()) {
            let port = at(ports, offer.send.peer)?;
            if let Wire::Memory(memory) = &mut port.wire {
                moved = put(memory, offer, &self.plan.memory).map_err(|e| port.blame(e))?;
            }
        }
        for index in 0..self.sends.len() {
            moved |= self.push(index, ports, &mut blocked)?;
        }
        if moved {
            ports.iter_mut().flatten().for_each(Port::ring);
        }
        Ok(moved)
    }

    /// True if all that it has to send is out: what is sent from now on belongs to later operations.
    pub(crate) fn has_sent(&self) -> bool {
        let mut now = self.sends.iter().chain(&self.early);
        let mut later = self.plan.schedule.rounds.iter().skip(self.round + 1);
        self.started
            && self.offer.is_none()
            && now.all(Sending::is_finished)
            && later.all(|round| round.sends.is_empty())
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
                Local::Copy { from, into } => {
                    // A piece of something large goes past the caches as the whole would.
                    let large = into.len().max(self.plan.memory.len(into.buffer) / 2) >= STREAM_FROM;
                    self.plan.memory.both(from, into, stop, |a, b| {
                        copy(large, a, b);
                        Ok(())
                    })?;
                }
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
                Local::Count { from, into } => {
                    let count = self.counts.get(*from).copied().unwrap_or(0);
                    let into = self.counts.get_mut(into.clone()).unwrap_or_default();
                    into.fill(count);
                }
            }
        }
        Ok(())
    }

    fn op(&self) -> Result<ReduceOp> {
        self.plan.op.ok_or_else(no_reduction)
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
        self.sends = std::mem::take(&mut self.early);
        let sends = std::mem::take(&mut round.sends);
        if !sends.is_empty() {
            self.sends = self.outgoing(sends, self.round);
        }
        let Some(round) = self.plan.schedule.rounds.get_mut(self.round) else {
            return;
        };
        self.recvs = std::mem::take(&mut round.recvs)
            .into_iter()
            .map(Receiving::new)
            .collect();
    }

    /// The sends of a round, with their headers.
    fn outgoing(&self, sends: Vec<Send>, round: usize) -> Vec<Sending> {
        let with_header = |send: Send| {
            let contributors = send.slot.and_then(|s| self.counts.get(s)).copied().unwrap_or(0);
            let header = DataHeader {
                epoch: self.place.epoch,
                seq: self.seq,
                round: u32::try_from(round).unwrap_or(u32::MAX),
                algorithm: self.plan.schedule.algorithm as u32,
                contributors,
                length: send.from.len() as u64,
                fingerprint: self.plan.fingerprint,
                lent: false,
            };
            let mut sending = Sending::new(send, header.encode());
            sending.may_lend = may_lend(self.plan.schedule.algorithm);
            sending
        };
        sends.into_iter().map(with_header).collect()
    }

    /// Once the sends of this round are out: the next round's, over sockets, as far as their bytes are there.
    fn push_early(&mut self, ports: &mut [Option<Port>]) -> Result<bool> {
        if !self.sends.iter().all(Sending::is_finished) {
            return Ok(false);
        }
        if self.early.is_empty() {
            let mut rounds = self.plan.schedule.rounds.iter_mut().skip(self.round);
            let (Some(round), Some(next)) = (rounds.next(), rounds.next()) else {
                return Ok(false);
            };
            let averages = matches!(self.plan.op, Some(ReduceOp::Avg));
            // With every header here the contributors are counted, and a message that says who has entered is true. Uneven shares say both in
            // the first round, which no rank ends without all others: what is behind it need not wait for headers.
            let counted = self.recvs.iter().all(|r| r.open);
            let uneven = self.plan.schedule.algorithm == Algorithm::Uneven;
            let ready = counted || (uneven && next.sends.iter().all(|send| send.slot.is_none()));
            if !ready || !may_begin_early(&round.after, &next.sends, averages) {
                return Ok(false);
            }
            let sends = std::mem::take(&mut next.sends);
            self.early = self.outgoing(sends, self.round + 1);
        }
        let mut moved = false;
        for sending in &mut self.early {
            let receives = self.recvs.iter().map(|r| (&r.recv, r.done));
            let ready = ready_early(&sending.send, receives);
            let port = at(ports, sending.send.peer)?;
            // A closed socket is found by this round, or by the next one.
            moved |= matches!(port.wire, Wire::Socket(_))
                && sending.wants(ready)
                && matches!(
                    stripes::send(port, sending, &self.plan.memory, ready),
                    Moved::Bytes(_)
                );
        }
        Ok(moved)
    }

    /// Writes some of a send; true if bytes moved.
    fn push(&mut self, index: usize, ports: &mut [Option<Port>], blocked: &mut Option<u32>) -> Result<bool> {
        let Some(sending) = self.sends.get_mut(index).filter(|s| !s.is_finished()) else {
            return Ok(false);
        };
        let rank = sending.send.peer;
        let port = at(ports, rank)?;
        let memory = match &mut port.wire {
            Wire::Memory(memory) => memory,
            Wire::Socket(_) => {
                let all = sending.send.from.len();
                return match stripes::send(port, sending, &self.plan.memory, all) {
                    Moved::Bytes(_) => Ok(true),
                    Moved::Nothing => Ok(false),
                    Moved::Closed => {
                        *blocked = Some(rank);
                        Ok(false)
                    }
                };
            }
        };
        let moved = put(memory, sending, &self.plan.memory);
        let closed = memory.closed.is_some();
        let moved = moved.map_err(|e| port.blame(e))?;
        if !moved && closed {
            *blocked = Some(rank);
        }
        Ok(moved)
    }

    /// The bytes of payload that have gone out to `rank` in this round.
    fn gone_to(&self, rank: u32) -> usize {
        let sending = self.sends.iter().find(|s| s.send.peer == rank);
        sending.map_or(usize::MAX, |s| s.done.saturating_sub(DataHeader::BYTES))
    }

    /// How far receive `index` may go.
    fn limit(&self, index: usize) -> usize {
        match self.recvs.get(index).map(|r| (&r.recv.landing, r.recv.peer)) {
            Some((Landing::Exchange, rank)) => self.gone_to(rank),
            Some((Landing::ReduceNext, _)) => {
                let before = index.checked_sub(1).and_then(|i| self.recvs.get(i));
                before.map_or(0, |r| r.done)
            }
            _ => usize::MAX,
        }
    }

    /// Reads some of a receive; true if bytes moved.
    fn pull(&mut self, index: usize, ports: &mut [Option<Port>], blocked: &mut Option<u32>) -> Result<bool> {
        let (dtype, op, round, frame) = (self.plan.dtype, self.plan.op, self.round, self.frame());
        let swaps = self.plan.schedule.algorithm == Algorithm::Exchange;
        let (offered, wanted) = (
            self.wanted(round, 0),
            self.wanted(round, self.recvs.get(index).map_or(0, |r| r.recv.into.len())),
        );
        let limit = self.limit(index);
        let Some(receiving) = self.recvs.get_mut(index).filter(|r| !r.is_finished()) else {
            return Ok(false);
        };
        let rank = receiving.recv.peer;
        let port = at(ports, rank)?;
        if !receiving.open {
            port.fill().map_err(|e| port.blame(e))?;
            let Some(header) = port.header else {
                if port.read_closed() {
                    *blocked = Some(rank);
                }
                return Ok(false);
            };
            if header.seq == self.seq && header.round as usize > round {
                return Ok(false);
            }
            let expected = receiving.recv.into.len() as u64;
            if header.lent && swaps && matches!(port.wire, Wire::Memory(_)) {
                // It would have read this rank's memory in place; what it swaps follows.
                check_header(&header, &offered, port)?;
                take_offer(port);
                return Ok(true);
            }
            check_header(&header, &wanted, port)?;
            if header.lent
                && (expected == 0 || !may_lend(wanted.algorithm) || matches!(port.wire, Wire::Socket(_)))
            {
                return Err(port.error(ErrorKind::Protocol, "lends memory where it has to send it"));
            }
            port.header = None;
            receiving.open = true;
            receiving.lent = header.lent;
            let striped = stripes::is_striped(port, receiving.recv.into.len());
            if striped {
                receiving.pieces = vec![false; receiving.recv.into.len().div_ceil(STRIPE)];
            }
            port.in_payload = expected > 0 && !striped;
            match receiving.recv.count {
                Count::Ignore => {}
                Count::Add(slot) | Count::Set(slot) => {
                    if header.contributors > self.place.world {
                        return Err(port.error(
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
                if let Wire::Memory(memory) = &mut port.wire {
                    memory.release();
                    memory.count_received(0);
                }
                return Ok(true);
            }
        }
        let reduce = |a: &mut [u8], b: &[u8]| kernels::reduce(dtype, op.ok_or_else(no_reduction)?, a, b);
        let memory = &mut self.plan.memory;
        let moved = if let Wire::Memory(ring) = &mut port.wire {
            let moved = land(ring, receiving, memory, dtype, op, limit);
            let closed = ring.closed.is_some();
            let moved = moved.map_err(|e| port.blame(e))?;
            // Not while it waits for its turn: what it needs may lie in the ring of a rank that has done its part and left.
            if !moved && closed && receiving.done < limit {
                *blocked = Some(rank);
            }
            moved
        } else if receiving.pieces.is_empty() {
            collect(port, receiving, memory, limit, blocked, reduce)?
        } else {
            stripes::collect(port, receiving, memory, frame, limit, blocked, reduce)?
        };
        if receiving.is_finished() {
            port.in_payload = false;
        }
        Ok(moved)
    }

    /// Compares a header that waits from *any* peer with this operation, so that ranks which never exchange data in
    /// their different schedules still find out about each other.
    pub(crate) fn inspect(&self, port: &Port) -> Result<()> {
        match &port.header {
            Some(h) if h.seq == self.seq && h.fingerprint != self.plan.fingerprint => {
                Err(mismatch(port, h, self.plan.fingerprint))
            }
            _ => Ok(()),
        }
    }

    /// The frame that is received in this round.
    fn frame(&self) -> Frame {
        Frame {
            epoch: self.place.epoch,
            seq: self.seq,
            round: u32::try_from(self.round).unwrap_or(u32::MAX),
        }
    }

    /// The frame whose payload comes from `rank` over the rails now.
    pub(crate) fn on_rails(&self, rank: u32) -> Option<Frame> {
        let mut receives = self.recvs.iter().filter(|r| r.recv.peer == rank);
        let striped = receives.any(|r| r.open && !r.pieces.is_empty() && !r.is_finished());
        striped.then(|| self.frame())
    }

    /// True if what goes to `rank` now goes over the rails, and whether another piece of it can be given to one.
    pub(crate) fn to_rails(&self, rank: u32) -> Option<bool> {
        let receives = || self.recvs.iter().map(|r| (&r.recv, r.done));
        let ready = |s: &Sending| ready_early(&s.send, receives());
        let now = self.sends.iter().map(|s| (s, s.send.from.len()));
        let mut all = now.chain(self.early.iter().map(|s| (s, ready(s))));
        let (sending, ready) = all.find(|(s, ready)| s.send.peer == rank && s.wants(*ready))?;
        let striped = sending.striped && sending.done >= DataHeader::BYTES;
        striped.then(|| sending.given < rail::whole(ready, sending.send.from.len()))
    }

    /// True if it waits for `rank` to take bytes.
    pub(crate) fn wants_write(&self, rank: u32) -> bool {
        let receives = || self.recvs.iter().map(|r| (&r.recv, r.done));
        let early = |s: &Sending| s.send.peer == rank && s.wants(ready_early(&s.send, receives()));
        self.sends.iter().any(|s| s.send.peer == rank && !s.is_finished()) || self.early.iter().any(early)
    }

    /// True if what came from `rank` must wait until more has gone out: more bytes of it would not help.
    pub(crate) fn holds(&self, rank: u32) -> bool {
        let mut receives = self.recvs.iter().enumerate();
        let found = receives.find(|(_, r)| r.recv.peer == rank && r.filled > 0);
        found.is_some_and(|(index, r)| {
            let want = (r.recv.into.len() - r.done).min(PIECE);
            r.filled >= want && r.done + want > self.limit(index)
        })
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
        if self.offer.is_some() {
            senders.push(self.other());
        }
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

    /// It is its turn.
    pub(crate) fn started(&self) {
        self.completer.started();
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

    /// Ends it with `error`; the tensors go back, since nothing else ever touches them.
    pub(crate) fn fail(mut self, error: Error) {
        let error = self.context(error);
        // A peer that reads them must know first that they may change.
        self.sends.clear();
        self.early.clear();
        self.completer.fail(error, self.plan.memory.into_given());
    }

    /// For a world of one: runs it here and now, to its end.
    pub(crate) fn run_alone(mut self) {
        self.started();
        match self.progress(&mut [], &AtomicBool::new(false)) {
            Ok(Step::Finished) => self.succeed(),
            Ok(_) => self.fail(Error::new(ErrorKind::Internal, "a world of one waits for a peer")),
            Err(error) => self.fail(error),
        }
    }
}

/// An empty frame.
fn offer_to(peer: u32) -> Send {
    Send {
        peer,
        from: Span::empty(),
        slot: None,
    }
}

/// An offer was read.
pub(crate) fn take_offer(port: &mut Port) {
    port.header = None;
    if let Wire::Memory(memory) = &mut port.wire {
        memory.release();
        memory.count_received(0);
        memory.ring();
    }
}

/// True if two ranks that swap `bytes` had better read them in place.
pub(crate) fn may_swap_in_place(bytes: &[u8]) -> bool {
    bytes.len() >= SWAP_IN_PLACE_FROM && place_of(bytes).is_some()
}

/// A swap writes over what it sends, and the short way (`direct`) reads payloads only.
fn may_lend(algorithm: Algorithm) -> bool {
    !matches!(algorithm, Algorithm::Exchange | Algorithm::Direct)
}

fn at(ports: &mut [Option<Port>], rank: u32) -> Result<&mut Port> {
    ports
        .get_mut(rank as usize)
        .and_then(Option::as_mut)
        .ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("the schedule names rank {rank}, to which there is no connection"),
            )
        })
}
