//! Messages over connections: their bytes are read off the socket into the tensor where they belong, or let go.

use ftcore::{DType, Error, ErrorKind, Result};

use super::{Arriving, Messages, Way, lost};
use crate::wire::Control;

impl Messages {
    /// The header of a piece of an accepted message came in from `rank`: how many bytes follow.
    pub(crate) fn piece(&self, rank: u32, frame: &Control) -> Result<usize> {
        let protocol = |text: String| Err(Error::new(ErrorKind::Protocol, text));
        let length = usize::try_from(frame.length).unwrap_or(usize::MAX);
        let arriving = self.arriving.get(&(rank, frame.id)).filter(|a| !a.inline);
        let room = arriving.and_then(|a| {
            let tensor = self.batches.get(&a.batch)?.tensors.get(a.index)?;
            tensor.byte_len().checked_sub(a.done)
        });
        match room {
            Some(room) if length <= room && (length > 0 || room == 0) => Ok(length),
            Some(room) => protocol(format!(
                "sends {length} bytes of a message of which {room} are missing"
            )),
            None => protocol(format!(
                "sends bytes of message {}, which was not accepted",
                frame.id
            )),
        }
    }

    /// An offer came in from `rank`, and its bytes follow. True if they belong into a tensor; if no receive is posted, it is an
    /// offer like any other, and the bytes are let go.
    pub(crate) fn comes_inline<W: Way>(
        &mut self,
        rank: u32,
        frame: &Control,
        ways: &mut [Option<W>],
    ) -> Result<bool> {
        let Some(posted) = self.met_inline(rank, frame, ways)? else {
            return Ok(false);
        };
        let arriving = Arriving {
            batch: posted.batch,
            index: posted.index,
            done: 0,
            inline: true,
        };
        if self.arriving.insert((rank, frame.id), arriving).is_some() {
            let text = format!("offers message {} while its bytes are coming", frame.id);
            return Err(Error::new(ErrorKind::Protocol, text));
        }
        Ok(true)
    }

    /// Where the next bytes of message `id` of `rank` belong.
    pub(crate) fn room(&mut self, rank: u32, id: u64) -> Result<&mut [u8]> {
        let arriving = self.arriving.get(&(rank, id)).ok_or_else(lost)?;
        let batch = self.batches.get_mut(&arriving.batch).ok_or_else(lost)?;
        let tensor = batch.tensors.get_mut(arriving.index).ok_or_else(lost)?;
        tensor.bytes_mut().get_mut(arriving.done..).ok_or_else(lost)
    }

    /// `length` more bytes of message `id` of `rank` are where they belong.
    pub(crate) fn landed<W: Way>(
        &mut self,
        rank: u32,
        id: u64,
        length: usize,
        ways: &mut [Option<W>],
    ) -> Result<()> {
        let arriving = self.arriving.get_mut(&(rank, id)).ok_or_else(lost)?;
        arriving.done += length;
        let (key, inline) = (arriving.batch, arriving.inline);
        let batch = self.batches.get_mut(&key).ok_or_else(lost)?;
        let tensor = batch.tensors.get_mut(arriving.index).ok_or_else(lost)?;
        if arriving.done < tensor.byte_len() {
            return Ok(());
        }
        if tensor.dtype() == DType::Bool {
            crate::kernels::canonical_bools(tensor.bytes_mut());
        }
        self.arriving.remove(&(rank, id));
        if inline {
            let taken = Control::taken(self.place.epoch, self.place.rank, id);
            let way = ways.get_mut(rank as usize).and_then(Option::as_mut);
            way.ok_or_else(lost)?.push(taken);
        }
        self.one_done(key);
        Ok(())
    }

    /// `length` bytes of message `id` from `offset` on; `None` once the message is done with.
    pub(crate) fn bytes_of(&self, id: u64, offset: usize, length: usize) -> Option<&[u8]> {
        let sent = self.sent.get(&id)?;
        let tensor = self.batches.get(&sent.batch)?.tensors.get(sent.index)?;
        tensor.bytes().get(offset..offset.checked_add(length)?)
    }

    /// Where the part of message `id` begins that has not gone out yet, and how long it is.
    pub(crate) fn rest_of(&self, id: u64) -> (usize, usize) {
        let offset = self.sent.get(&id).map_or(0, |sent| sent.cut);
        (offset, self.rest(id).map_or(0, <[u8]>::len))
    }
}
