//! The bytes of an answer: a short text, or chunks of a snapshot.
//!
//! Chunks go out of the snapshot's own memory, piece by piece as the socket takes them, and the body holds no snapshot: a reader that
//! never reads keeps the one tensor of which it has a piece, until its connection is cut off for that (`pace`), and not a state that the
//! table has given up long ago (L29). One that is slow loses the snapshot with its next piece.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use super::guests::Busy;
use crate::Snapshot;
use tokio::sync::OwnedSemaphorePermit;

/// What is handed to the socket at once.
const PIECE_BYTES: usize = 256 << 10;

/// The most chunks that one request may ask for.
const MAX_CHUNKS: usize = 4096;

/// What is given back once an answer is sent, or its connection is gone.
#[derive(Debug)]
pub(super) struct Held {
    /// The permit to have chunks on their way.
    _permit: Option<OwnedSemaphorePermit>,
    /// The connection is in the middle of something.
    _busy: Busy,
}

impl Held {
    pub(super) fn new(permit: Option<OwnedSemaphorePermit>, busy: Busy) -> Self {
        Self {
            _permit: permit,
            _busy: busy,
        }
    }
}

#[derive(Debug)]
enum Content {
    Text(Option<Bytes>),
    Chunks(Chunks),
}

#[derive(Debug)]
pub(super) struct Answer {
    content: Content,
    _held: Option<Held>,
}

impl Answer {
    pub(super) fn text(bytes: impl Into<Bytes>) -> Self {
        Self {
            content: Content::Text(Some(bytes.into())),
            _held: None,
        }
    }

    pub(super) fn chunks(chunks: Chunks) -> Self {
        Self {
            content: Content::Chunks(chunks),
            _held: None,
        }
    }

    /// Keeps `held` until the answer is sent.
    pub(super) fn holding(self, held: Held) -> Self {
        Self {
            _held: Some(held),
            ..self
        }
    }
}

/// Chunks of one snapshot, one after the other.
#[derive(Debug)]
pub(super) struct Chunks {
    snapshot: Weak<Snapshot>,
    /// Those still to be sent, the last one first.
    indices: Vec<usize>,
    /// Bytes of the chunk at the end of `indices` that were sent.
    sent: usize,
    left: u64,
}

impl Chunks {
    /// `None` if the snapshot has not all of `indices`.
    pub(super) fn of(snapshot: &Arc<Snapshot>, mut indices: Vec<usize>) -> Option<Self> {
        let mut left = 0u64;
        for index in &indices {
            left = left.checked_add(snapshot.chunk(*index)?.len() as u64)?;
        }
        indices.reverse();
        Some(Self {
            snapshot: Arc::downgrade(snapshot),
            indices,
            sent: 0,
            left,
        })
    }

    fn next_piece(&mut self) -> io::Result<Option<Bytes>> {
        let Some(index) = self.indices.last() else {
            return Ok(None);
        };
        let gone = || io::Error::other("the snapshot was given up for newer ones while it was being read");
        let snapshot = self.snapshot.upgrade().ok_or_else(gone)?;
        let (part, chunk) = snapshot.place(*index).ok_or_else(gone)?;
        let from = chunk.start.saturating_add(self.sent).min(chunk.end);
        let to = from.saturating_add(PIECE_BYTES).min(chunk.end);
        let piece = part.slice(from..to);
        self.sent = self.sent.saturating_add(piece.len());
        self.left = self.left.saturating_sub(piece.len() as u64);
        if to >= chunk.end {
            self.indices.pop();
            self.sent = 0;
        }
        Ok(Some(piece))
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let next = match &mut self.content {
            Content::Text(text) => Ok(text.take()),
            Content::Chunks(chunks) => chunks.next_piece(),
        };
        Poll::Ready(next.transpose().map(|piece| piece.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Text(text) => text.is_none(),
            Content::Chunks(chunks) => chunks.indices.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(match &self.content {
            Content::Text(text) => text.as_ref().map_or(0, |t| t.len() as u64),
            Content::Chunks(chunks) => chunks.left,
        })
    }
}

/// The chunks in `3`, `3-7` or `3-7,9,12-14`, in that order.
pub(super) fn parse_chunks(list: &str) -> Result<Vec<usize>, String> {
    let number = |text: &str| {
        text.parse::<usize>()
            .map_err(|e| format!("the chunk in the path: {e}"))
    };
    let mut indices = Vec::new();
    for range in list.split(',') {
        let (first, last) = match range.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(range)?, number(range)?),
        };
        let room = MAX_CHUNKS.saturating_sub(indices.len());
        if last < first || last - first >= room {
            return Err(format!(
                "chunks {range}: from low to high, and {MAX_CHUNKS} in all"
            ));
        }
        indices.extend(first..=last);
    }
    Ok(indices)
}

/// The list that [`parse_chunks`] reads.
pub(crate) fn write_chunks(indices: impl Iterator<Item = usize>) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    let mut range: Option<(usize, usize)> = None;
    let flush = |range: Option<(usize, usize)>, text: &mut String| {
        let Some((first, last)) = range else { return };
        let comma = if text.is_empty() { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = if first == last {
            write!(text, "{comma}{first}")
        } else {
            write!(text, "{comma}{first}-{last}")
        };
    };
    for index in indices {
        range = match range {
            Some((first, last)) if last.checked_add(1) == Some(index) => Some((first, index)),
            earlier => {
                flush(earlier, &mut text);
                Some((index, index))
            }
        };
    }
    flush(range, &mut text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDict;
    use ftcore::{Epoch, Step};

    #[test]
    fn lists_of_chunks_are_read_as_they_are_written_and_bounded() {
        for (indices, text) in [
            (vec![3], "3"),
            (vec![3, 4, 5], "3-5"),
            (vec![3, 4, 7, 9, 10], "3-4,7,9-10"),
        ] {
            assert_eq!(write_chunks(indices.iter().copied()), text);
            assert_eq!(parse_chunks(text).unwrap(), indices);
        }
        for bad in [
            "",
            "-1",
            "x",
            "5-3",
            "1,",
            "0-4096",
            "0-4095,7",
            "0-18446744073709551615",
        ] {
            assert!(parse_chunks(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn l29_an_answer_that_is_not_read_keeps_no_snapshot() {
        let mut state = StateDict::new();
        state.insert_f32("w", &[1 << 18], &[1.0; 1 << 18]).unwrap();
        let snapshot = Snapshot::new(Step(5), Epoch(1), &state).unwrap();
        let mut chunks = Chunks::of(&snapshot, vec![1]).unwrap();
        assert_eq!(chunks.left, 1 << 20);
        assert_eq!(chunks.next_piece().unwrap().unwrap().len(), PIECE_BYTES);
        assert_eq!(Arc::strong_count(&snapshot), 1);
        drop(snapshot);
        assert!(chunks.next_piece().is_err());
    }
}
