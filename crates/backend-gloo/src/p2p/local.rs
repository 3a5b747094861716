//! Messages through shared memory: short ones come with their offer, and are taken at once if their receive is posted.

use std::time::Instant;

use ftcore::{Collective, Completer, DType, Error, ErrorKind, Result};

use super::{Batch, Messages, Posted, Sent, Way, lost};
use crate::transfer::{self, STREAM_FROM};
use crate::wire::Control;

/// The message behind an offer, or a piece of one: up to two runs of bytes, since a ring wraps.
pub(crate) type Runs<'a> = [&'a [u8]; 2];

/// What of an operation has happened without the books.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Begun {
    /// The number under which its message went out.
    pub(crate) sent: Option<u64>,
    /// It was taken.
    pub(crate) taken: bool,
    /// Its receive is complete.
    pub(crate) received: bool,
}

/// Both runs, to the beginning of `into`, which is long enough; past the caches if it is part of something large.
pub(crate) fn copy(large: bool, into: &mut [u8], from: Runs<'_>) -> Result<()> {
    let [first, second] = from;
    let (head, tail) = into.split_at_mut_checked(first.len()).ok_or_else(lost)?;
    transfer::copy(large, head, first);
    transfer::copy(large, tail.get_mut(..second.len()).ok_or_else(lost)?, second);
    Ok(())
}

impl Messages {
    /// A number for a message that is sent past these books, until [`adopt`](Self::adopt).
    pub(crate) fn number(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// True if no offer of another rank waits here.
    pub(crate) fn is_clear(&self) -> bool {
        self.offers.is_empty()
    }

    /// A send, a receive, or one of each, that has begun without these books and must be waited for after all.
    pub(crate) fn adopt(&mut self, op: Collective, begun: Begun, completer: Completer, deadline: Instant) {
        let kind = op.kind();
        let ops = match op {
            Collective::Batch { ops } => ops,
            one => vec![one],
        };
        let batch = self.next_batch;
        self.next_batch += 1;
        let mut tensors = Vec::with_capacity(ops.len());
        let mut left = 0;
        for (op, index) in ops.into_iter().zip(0..) {
            match op {
                Collective::Send { tensor, peer, tag } => {
                    tensors.push(tensor);
                    if let Some(id) = begun.sent.filter(|_| !begun.taken) {
                        left += 1;
                        let sent = Sent {
                            batch,
                            index,
                            peer,
                            tag,
                            cut: 0,
                            accepted: false,
                            inline: true,
                        };
                        self.sent.insert(id, sent);
                        if let Some(n) = self.open.get_mut(peer as usize) {
                            *n += 1;
                        }
                    }
                }
                Collective::Recv { tensor, peer, tag } => {
                    tensors.push(tensor);
                    if !begun.received {
                        left += 1;
                        let posted = Posted {
                            batch,
                            index,
                            peer,
                            tag,
                        };
                        self.posted.push_back(posted);
                    }
                }
                other => tensors.extend(other.into_tensors()),
            }
        }
        let batch_of = Batch {
            kind,
            completer,
            tensors,
            left,
            source: None,
            deadline,
            submitted: Instant::now(),
        };
        self.batches.insert(batch, batch_of);
    }

    /// An offer of `rank` with its bytes. If no receive is posted, it is an offer like any other and the bytes are let go.
    pub(crate) fn inline<W: Way>(
        &mut self,
        rank: u32,
        frame: &Control,
        bytes: Runs<'_>,
        ways: &mut [Option<W>],
    ) -> Result<()> {
        let Some(posted) = self.met_inline(rank, frame, ways)? else {
            return Ok(());
        };
        let tensor = self
            .batches
            .get_mut(&posted.batch)
            .and_then(|b| b.tensors.get_mut(posted.index))
            .ok_or_else(lost)?;
        copy(false, tensor.bytes_mut(), bytes)?;
        if tensor.dtype() == DType::Bool {
            crate::kernels::canonical_bools(tensor.bytes_mut());
        }
        let way = ways.get_mut(rank as usize).and_then(Option::as_mut);
        way.ok_or_else(lost)?
            .push(Control::taken(self.place.epoch, self.place.rank, frame.id));
        self.one_done(posted.batch);
        Ok(())
    }

    /// `rank` has taken the bytes that went along with an offer.
    pub(crate) fn taken<W: Way>(&mut self, rank: u32, frame: &Control, ways: &mut [Option<W>]) -> Result<()> {
        let fits = |s: &Sent| s.peer == rank && s.inline && !s.accepted;
        if !self.sent.get(&frame.id).is_some_and(fits) {
            let text = format!("takes message {}, which was not sent to it", frame.id);
            return Err(Error::new(ErrorKind::Protocol, text));
        }
        if let Some(n) = self.open.get_mut(rank as usize) {
            *n = n.saturating_sub(1);
        }
        if let Some(sent) = self.sent.remove(&frame.id) {
            self.one_done(sent.batch);
        }
        self.offer(rank, ways)
    }

    /// A piece of a message that was accepted.
    pub(crate) fn arrive(&mut self, rank: u32, frame: &Control, bytes: Runs<'_>) -> Result<()> {
        let protocol = |text: String| Err(Error::new(ErrorKind::Protocol, text));
        let length = bytes.iter().map(|b| b.len()).sum::<usize>();
        let Some(arriving) = self.arriving.get_mut(&(rank, frame.id)) else {
            return protocol(format!(
                "sends bytes of message {}, which was not accepted",
                frame.id
            ));
        };
        let key = arriving.batch;
        let batch = self.batches.get_mut(&key).ok_or_else(lost)?;
        let tensor = batch.tensors.get_mut(arriving.index).ok_or_else(lost)?;
        let room = tensor.byte_len().saturating_sub(arriving.done);
        if length > room || (length == 0 && room > 0) {
            return protocol(format!(
                "sends {length} bytes of a message of which {room} are missing"
            ));
        }
        let large = tensor.byte_len() >= STREAM_FROM;
        let into = tensor.bytes_mut().get_mut(arriving.done..).ok_or_else(lost)?;
        copy(large, into, bytes)?;
        arriving.done += length;
        if arriving.done < tensor.byte_len() {
            return Ok(());
        }
        if tensor.dtype() == DType::Bool {
            crate::kernels::canonical_bools(tensor.bytes_mut());
        }
        self.arriving.remove(&(rank, frame.id));
        self.one_done(key);
        Ok(())
    }

    /// What of message `id` has not gone out yet.
    pub(crate) fn rest(&self, id: u64) -> Option<&[u8]> {
        let sent = self.sent.get(&id)?;
        let tensor = self.batches.get(&sent.batch)?.tensors.get(sent.index)?;
        tensor.bytes().get(sent.cut..)
    }

    /// `length` more bytes of message `id` are out; true if that was all.
    pub(crate) fn gone_out(&mut self, id: u64, length: usize) -> bool {
        if let Some(sent) = self.sent.get_mut(&id) {
            sent.cut += length;
        }
        let done = self.rest(id).is_none_or(<[u8]>::is_empty);
        if done && let Some(sent) = self.sent.remove(&id) {
            self.one_done(sent.batch);
        }
        done
    }
}
