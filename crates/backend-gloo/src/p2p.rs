//! Point-to-point messages: offer, accept, data, matched by (peer, tag); short ones go with their offer. Over connections of their own or
//! through shared memory.
//!
//! No rank ever buffers a message for another (INV-10): what is sent before its receive is posted is an offer only, and the bytes go
//! from the sender's tensor to the socket or ring, and from there into the receiver's tensor. Messages of one (peer,
//! direction, tag) match in order; different messages interleave piece by piece, so two ranks that both receive first
//! and then send make progress. `local` has what goes through shared memory only, `remote` what goes over connections.

mod local;
mod remote;

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use ftcore::{Collective, Completer, Completion, DType, Error, ErrorKind, OpKind, Result, Tensor};

pub(crate) use local::{Begun, Runs, copy};

use crate::execution::Place;
use crate::wire::{Control, ControlKind};

/// Offers that one peer may have open here, and that are sent to one peer before the first is accepted. More sends wait
/// at their sender.
const MAX_OFFERS: usize = 16 * 1024;

/// The way to another rank, as messages use it.
pub(crate) trait Way {
    /// Sends a frame without payload.
    fn push(&mut self, frame: Control);
    /// Sends an offer; true if the bytes went along with it.
    fn offer(&mut self, frame: Control, bytes: &[u8]) -> bool;
    /// The bytes of that message may go out.
    fn begin(&mut self, id: u64);
    /// Names that rank in an error.
    fn blame(&self, error: Error) -> Error;
}

/// A send, a receive, or several that were submitted together.
struct Batch {
    kind: OpKind,
    completer: Completer,
    tensors: Vec<Tensor>,
    left: usize,
    source: Option<u32>,
    deadline: Instant,
    submitted: Instant,
}

/// A message of this rank.
struct Sent {
    batch: u64,
    index: usize,
    peer: u32,
    tag: u32,
    /// Bytes that have been handed out to pieces.
    cut: usize,
    /// The tensor of the batch this is; accepted by the receiver.
    accepted: bool,
    /// The bytes went along with the offer.
    inline: bool,
}

/// A receive that waits for an offer.
struct Posted {
    batch: u64,
    index: usize,
    peer: Option<u32>,
    tag: u32,
}

/// An offer that waits for a receive.
struct Offer {
    peer: u32,
    id: u64,
    tag: u32,
    dtype: u8,
    count: u64,
}

impl Offer {
    fn of(rank: u32, frame: &Control) -> Self {
        Self {
            peer: rank,
            id: frame.id,
            tag: frame.a,
            dtype: frame.code,
            count: frame.length,
        }
    }
}

/// A receive whose bytes are coming.
struct Arriving {
    batch: u64,
    index: usize,
    done: usize,
    /// They came with their offer: the sender is told when they are here.
    inline: bool,
}

/// All point-to-point state of one engine.
pub(crate) struct Messages {
    place: Place,
    next_batch: u64,
    next_id: u64,
    batches: BTreeMap<u64, Batch>,
    sent: BTreeMap<u64, Sent>,
    /// Sends that wait for room in their peer's window.
    held: Vec<VecDeque<u64>>,
    /// Offers sent to each peer and not accepted yet.
    open: Vec<usize>,
    posted: VecDeque<Posted>,
    offers: VecDeque<Offer>,
    /// How many of them are of each peer.
    offered: Vec<usize>,
    arriving: BTreeMap<(u32, u64), Arriving>,
}

pub(crate) fn lost() -> Error {
    Error::new(ErrorKind::Internal, "a message lost its tensor")
}

impl Messages {
    pub(crate) fn new(place: Place) -> Self {
        Self {
            place,
            next_batch: 0,
            next_id: 0,
            batches: BTreeMap::new(),
            sent: BTreeMap::new(),
            held: (0..place.world).map(|_| VecDeque::new()).collect(),
            open: vec![0; place.world as usize],
            posted: VecDeque::new(),
            offers: VecDeque::new(),
            offered: vec![0; place.world as usize],
            arriving: BTreeMap::new(),
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.batches.is_empty()
    }

    /// The nearest deadline of a pending message.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.batches.values().map(|b| b.deadline).min()
    }

    /// Takes a send, a receive or a batch.
    pub(crate) fn submit<W: Way>(
        &mut self,
        op: Collective,
        completer: Completer,
        deadline: Instant,
        submitted: Instant,
        peers: &mut [Option<W>],
    ) -> Result<()> {
        completer.started();
        let kind = op.kind();
        let ops = match op {
            Collective::Batch { ops } => ops,
            one => vec![one],
        };
        let batch = self.next_batch;
        self.next_batch += 1;
        let mut tensors = Vec::with_capacity(ops.len());
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for op in ops {
            let index = tensors.len();
            match op {
                Collective::Send { tensor, peer, tag } => {
                    tensors.push(tensor);
                    sends.push((index, peer, tag));
                }
                Collective::Recv { tensor, peer, tag } => {
                    tensors.push(tensor);
                    receives.push(Posted {
                        batch,
                        index,
                        peer,
                        tag,
                    });
                }
                other => tensors.extend(other.into_tensors()),
            }
        }
        self.batches.insert(
            batch,
            Batch {
                kind,
                completer,
                left: sends.len() + receives.len(),
                tensors,
                source: None,
                deadline,
                submitted,
            },
        );
        for (index, peer, tag) in sends {
            let id = self.next_id;
            self.next_id += 1;
            self.sent.insert(
                id,
                Sent {
                    batch,
                    index,
                    peer,
                    tag,
                    cut: 0,
                    accepted: false,
                    inline: false,
                },
            );
            if let Some(held) = self.held.get_mut(peer as usize) {
                held.push_back(id);
            }
            self.offer(peer, peers)?;
        }
        for posted in receives {
            let found = self
                .offers
                .iter()
                .position(|o| o.tag == posted.tag && posted.peer.is_none_or(|p| p == o.peer));
            match found.and_then(|i| self.offers.remove(i)) {
                Some(offer) => {
                    if let Some(n) = self.offered.get_mut(offer.peer as usize) {
                        *n = n.saturating_sub(1);
                    }
                    self.meet(offer, posted, peers)?;
                }
                None => self.posted.push_back(posted),
            }
        }
        Ok(())
    }

    /// Sends offers to `rank` as far as its window allows.
    fn offer<W: Way>(&mut self, rank: u32, peers: &mut [Option<W>]) -> Result<()> {
        let at = rank as usize;
        let peer = peers.get_mut(at).and_then(Option::as_mut).ok_or_else(lost)?;
        while self.open.get(at).is_some_and(|&n| n < MAX_OFFERS) {
            let Some(id) = self.held.get_mut(at).and_then(VecDeque::pop_front) else {
                break;
            };
            let sent = self.sent.get_mut(&id).ok_or_else(lost)?;
            let tensor = self
                .batches
                .get(&sent.batch)
                .and_then(|b| b.tensors.get(sent.index))
                .ok_or_else(lost)?;
            let header = Control {
                kind: ControlKind::Offer,
                code: tensor.dtype().code(),
                epoch: self.place.epoch,
                id,
                a: sent.tag,
                b: self.place.rank,
                length: tensor.count() as u64,
            };
            sent.inline = peer.offer(header, tensor.bytes());
            if let Some(n) = self.open.get_mut(at) {
                *n += 1;
            }
        }
        Ok(())
    }

    /// An offer and a receive have found each other.
    fn meet<W: Way>(&mut self, offer: Offer, posted: Posted, peers: &mut [Option<W>]) -> Result<()> {
        let peer = peers
            .get_mut(offer.peer as usize)
            .and_then(Option::as_mut)
            .ok_or_else(lost)?;
        self.check(&offer, &posted).map_err(|e| peer.blame(e))?;
        let header = Control {
            kind: ControlKind::Accept,
            code: 0,
            epoch: self.place.epoch,
            id: offer.id,
            a: 0,
            b: self.place.rank,
            length: 0,
        };
        peer.push(header);
        self.arriving.insert(
            (offer.peer, offer.id),
            Arriving {
                batch: posted.batch,
                index: posted.index,
                done: 0,
                inline: false,
            },
        );
        Ok(())
    }

    /// An offer and the receive that it met must speak of the same.
    fn check(&mut self, offer: &Offer, posted: &Posted) -> Result<()> {
        let batch = self.batches.get_mut(&posted.batch).ok_or_else(lost)?;
        let tensor = batch.tensors.get(posted.index).ok_or_else(lost)?;
        if tensor.dtype().code() != offer.dtype || tensor.count() as u64 != offer.count {
            let theirs = DType::from_code(offer.dtype).map_or("an unknown dtype", DType::name);
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "rank {} sends {} elements of {theirs} with tag {}; rank {} receives {} elements of {}",
                    offer.peer,
                    offer.count,
                    offer.tag,
                    self.place.rank,
                    tensor.count(),
                    tensor.dtype()
                ),
            ));
        }
        if batch.kind == OpKind::Recv {
            batch.source = Some(offer.peer);
        }
        Ok(())
    }

    /// Takes an offer or an accept that came in from `rank`.
    pub(crate) fn frame<W: Way>(
        &mut self,
        rank: u32,
        frame: &Control,
        peers: &mut [Option<W>],
    ) -> Result<()> {
        let protocol = |text: String| Error::new(ErrorKind::Protocol, text);
        match frame.kind {
            ControlKind::Offer => {
                let open = self.offered.get_mut(rank as usize).ok_or_else(lost)?;
                if *open >= MAX_OFFERS {
                    return Err(protocol(format!(
                        "offers more than {MAX_OFFERS} messages at once"
                    )));
                }
                let offer = Offer::of(rank, frame);
                let found = self
                    .posted
                    .iter()
                    .position(|p| p.tag == offer.tag && p.peer.is_none_or(|p| p == rank));
                match found.and_then(|i| self.posted.remove(i)) {
                    Some(posted) => self.meet(offer, posted, peers),
                    None => {
                        *open += 1;
                        self.offers.push_back(offer);
                        Ok(())
                    }
                }
            }
            ControlKind::Accept => {
                let sent = self
                    .sent
                    .get_mut(&frame.id)
                    .filter(|s| s.peer == rank && !s.accepted);
                let Some(sent) = sent else {
                    return Err(protocol(format!(
                        "accepts message {}, which was not offered to it",
                        frame.id
                    )));
                };
                sent.accepted = true;
                if let Some(n) = self.open.get_mut(rank as usize) {
                    *n = n.saturating_sub(1);
                }
                if let Some(peer) = peers.get_mut(rank as usize).and_then(Option::as_mut) {
                    peer.begin(frame.id);
                }
                self.offer(rank, peers)
            }
            _ => Ok(()),
        }
    }

    /// The receive that an offer of `rank` meets whose bytes come along. `None` if none is posted: then it is an offer like any other, and the
    /// bytes are let go.
    fn met_inline<W: Way>(
        &mut self,
        rank: u32,
        frame: &Control,
        ways: &mut [Option<W>],
    ) -> Result<Option<Posted>> {
        let found = self
            .posted
            .iter()
            .position(|p| p.tag == frame.a && p.peer.is_none_or(|p| p == rank));
        let Some(posted) = found.and_then(|i| self.posted.remove(i)) else {
            self.frame(rank, &frame.as_offer(), ways)?;
            return Ok(None);
        };
        self.check(&Offer::of(rank, frame), &posted)?;
        Ok(Some(posted))
    }

    fn one_done(&mut self, key: u64) {
        let Some(batch) = self.batches.get_mut(&key) else {
            return;
        };
        batch.left = batch.left.saturating_sub(1);
        if batch.left == 0
            && let Some(batch) = self.batches.remove(&key)
        {
            batch.completer.succeed(Completion {
                tensors: batch.tensors,
                source: batch.source,
                contributors: 0,
            });
        }
    }

    /// The error for the batch whose deadline has passed, if there is one.
    pub(crate) fn overdue(&self, now: Instant) -> Option<Error> {
        let (key, batch) = self.batches.iter().find(|(_, b)| b.deadline <= now)?;
        let mut waits = Vec::new();
        for p in self.posted.iter().filter(|p| p.batch == *key) {
            waits.push(match p.peer {
                Some(peer) => format!("rank {peer} has not sent with tag {}", p.tag),
                None => format!("no rank has sent with tag {}", p.tag),
            });
        }
        for s in self.sent.values().filter(|s| s.batch == *key) {
            waits.push(if s.accepted {
                format!("rank {} takes the message with tag {} too slowly", s.peer, s.tag)
            } else {
                format!("rank {} has posted no receive with tag {}", s.peer, s.tag)
            });
        }
        for ((peer, _), _) in self.arriving.iter().filter(|(_, a)| a.batch == *key) {
            waits.push(format!("the message of rank {peer} is incomplete"));
        }
        Some(
            Error::timeout(format!(
                "timed out after {:.1} s: {}",
                batch.submitted.elapsed().as_secs_f64(),
                waits.join("; ")
            ))
            .with_op(batch.kind.name())
            .with_rank(self.place.rank)
            .with_epoch(self.place.epoch),
        )
    }

    /// True if something pending can only end with the help of `rank`.
    pub(crate) fn needs(&self, rank: u32) -> bool {
        self.sent.values().any(|s| s.peer == rank)
            || self.posted.iter().any(|p| p.peer == Some(rank))
            || self.arriving.keys().any(|(peer, _)| *peer == rank)
    }

    /// True if a receive waits for a message of any rank.
    pub(crate) fn needs_any(&self) -> bool {
        self.posted.iter().any(|p| p.peer.is_none())
    }

    /// Fails everything; the tensors go back, since nothing touches them any more.
    pub(crate) fn fail_all(&mut self, error: &Error) {
        self.sent.clear();
        self.posted.clear();
        self.offers.clear();
        self.arriving.clear();
        for (_, batch) in std::mem::take(&mut self.batches) {
            let error = error
                .clone()
                .with_op(batch.kind.name())
                .with_rank(self.place.rank)
                .with_epoch(self.place.epoch);
            batch.completer.fail(error, batch.tensors);
        }
    }
}
