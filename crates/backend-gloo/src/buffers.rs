//! The memory of one operation: the caller's tensors and private scratch, seen as the schedule's logical buffers.
//!
//! A logical buffer is a list of segments, each a range of one tensor, so a coalesced all-reduce is one run of bytes and
//! `all_gather_into` of several pairs is ordered rank by rank without a copy. The operation owns all of it until it
//! ends (INV-8). Segments hold whole elements, so element boundaries survive every split.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use ftcore::{DType, Error, ErrorKind, Result, Tensor, copy_bytes};

use crate::schedule::{Buffer, Span};

/// Local steps work in pieces of this many bytes, and look for an abort between them (INV-2).
const PIECE: usize = 256 * 1024;
/// More slices than this are not handed to one system call.
const MAX_SLICES: usize = 16;

/// A range of one tensor, at `start` in the logical buffer.
#[derive(Debug, Clone)]
struct Segment {
    start: usize,
    tensor: usize,
    range: Range<usize>,
}

/// A logical buffer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Map {
    segments: Vec<Segment>,
    len: usize,
}

impl Map {
    /// Adds `range` (bytes) of tensor `tensor` at the end.
    pub(crate) fn push(&mut self, tensor: usize, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let len = range.len();
        self.segments.push(Segment {
            start: self.len,
            tensor,
            range,
        });
        self.len += len;
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The tensor and the range of the longest piece that begins at `at` and ends before `end`.
    fn find(&self, at: usize, end: usize) -> Option<(usize, Range<usize>)> {
        let index = self.segments.partition_point(|s| s.start <= at).checked_sub(1)?;
        let s = self.segments.get(index)?;
        let offset = at - s.start;
        let len = s.range.len().checked_sub(offset)?.min(end.checked_sub(at)?);
        let start = s.range.start + offset;
        (len > 0).then_some((s.tensor, start..start + len))
    }
}

/// The tensors and the logical buffers over them.
#[derive(Debug)]
pub(crate) struct Memory {
    tensors: Vec<Tensor>,
    /// How many of them are the caller's.
    given: usize,
    input: Map,
    output: Map,
    scratch: Map,
    /// What the caller gave as input, where `input` is a private copy of it.
    original: Map,
    /// Between tensors, and from the wire to a reduction.
    piece: Vec<u8>,
}

fn gone() -> Error {
    Error::new(
        ErrorKind::Internal,
        "the schedule names bytes that the operation does not have",
    )
}

impl Memory {
    /// `input` and `output` over the caller's tensors.
    pub(crate) fn new(tensors: Vec<Tensor>, input: Map, output: Map) -> Self {
        let given = tensors.len();
        Self {
            tensors,
            given,
            input,
            output,
            scratch: Map::default(),
            original: Map::default(),
            piece: Vec::new(),
        }
    }

    /// Adds `bytes` bytes of scratch.
    pub(crate) fn add_scratch(&mut self, bytes: usize) {
        let index = self.tensors.len();
        self.tensors.push(Tensor::zeros(DType::U8, bytes));
        self.scratch.push(index, 0..bytes);
    }

    /// Makes `In` a private copy, which may be changed; the caller's input stays as it is (L18).
    pub(crate) fn stage_input(&mut self) {
        let bytes = self.input.len();
        let index = self.tensors.len();
        self.tensors.push(Tensor::zeros(DType::U8, bytes));
        let mut staged = Map::default();
        staged.push(index, 0..bytes);
        self.original = std::mem::replace(&mut self.input, staged);
    }

    fn map(&self, buffer: Buffer) -> &Map {
        match buffer {
            Buffer::In => &self.input,
            Buffer::Out => &self.output,
            Buffer::Scratch => &self.scratch,
        }
    }

    /// The bytes of `buffer`.
    pub(crate) fn len(&self, buffer: Buffer) -> usize {
        self.map(buffer).len()
    }

    /// The contiguous bytes that begin at `at` of `span`.
    pub(crate) fn slice(&self, span: &Span, at: usize) -> Option<&[u8]> {
        let (tensor, range) = self
            .map(span.buffer)
            .find(span.range.start + at, span.range.end)?;
        self.tensors.get(tensor)?.bytes().get(range)
    }

    /// As [`slice`](Self::slice), for writing.
    pub(crate) fn slice_mut(&mut self, span: &Span, at: usize) -> Result<&mut [u8]> {
        let (tensor, range) = self
            .map(span.buffer)
            .find(span.range.start + at, span.range.end)
            .ok_or_else(gone)?;
        self.tensors
            .get_mut(tensor)
            .and_then(|t| t.bytes_mut().get_mut(range))
            .ok_or_else(gone)
    }

    /// Some of the bytes of `span` from `at` on, for a vectored write.
    pub(crate) fn slices<'a>(&'a self, span: &Span, mut at: usize, out: &mut Vec<IoSlice<'a>>) {
        while at < span.len() && out.len() < MAX_SLICES {
            let Some(slice) = self.slice(span, at) else { return };
            at += slice.len();
            out.push(IoSlice::new(slice));
        }
    }

    /// Runs `f` over `span` in pieces of whole elements; stops early with `Aborted` when `stop` rises.
    pub(crate) fn each(
        &mut self,
        span: &Span,
        stop: &AtomicBool,
        mut f: impl FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut at = 0;
        while at < span.len() {
            go_on(stop)?;
            let slice = self.slice_mut(span, at)?;
            let len = slice.len().min(PIECE);
            f(slice.get_mut(..len).ok_or_else(gone)?)?;
            at += len;
        }
        Ok(())
    }

    /// Runs `f(into, from)` over two spans of equal length, in pieces of whole elements.
    pub(crate) fn both(
        &mut self,
        from: &Span,
        into: &Span,
        stop: &AtomicBool,
        mut f: impl FnMut(&mut [u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        if from.len() != into.len() {
            return Err(gone());
        }
        let mut piece = std::mem::take(&mut self.piece);
        let mut at = 0;
        while at < into.len() {
            go_on(stop)?;
            let find = |span: &Span| {
                let map = self.map(span.buffer);
                map.find(span.range.start + at, span.range.end)
            };
            let ((to, target), (source, range)) = find(into).zip(find(from)).ok_or_else(gone)?;
            let len = target.len().min(range.len()).min(PIECE);
            let (target, range) = (target.start..target.start + len, range.start..range.start + len);
            match self.tensors.get_disjoint_mut([to, source]) {
                Ok([to, source]) => {
                    let (to, source) = (to.bytes_mut().get_mut(target), source.bytes().get(range));
                    let (to, source) = to.zip(source).ok_or_else(gone)?;
                    f(to, source)?;
                }
                // Both ends are ranges of one tensor: through a small private piece.
                Err(_) => {
                    let tensor = self.tensors.get_mut(to).ok_or_else(gone)?;
                    piece.clear();
                    piece.extend_from_slice(tensor.bytes().get(range).ok_or_else(gone)?);
                    f(tensor.bytes_mut().get_mut(target).ok_or_else(gone)?, &piece)?;
                }
            }
            at += len;
        }
        self.piece = piece;
        Ok(())
    }

    /// Copies the caller's input into the private one made by [`stage_input`](Self::stage_input).
    pub(crate) fn copy_original(&mut self, stop: &AtomicBool) -> Result<()> {
        let len = self.original.len();
        // `In` stands for the original while the copy runs, `Out` for the private one.
        let staged = std::mem::replace(&mut self.input, std::mem::take(&mut self.original));
        let output = std::mem::replace(&mut self.output, staged);
        let done = self.both(
            &Span::new(Buffer::In, 0..len),
            &Span::new(Buffer::Out, 0..len),
            stop,
            |into, from| {
                copy_bytes(into, from);
                Ok(())
            },
        );
        let staged = std::mem::replace(&mut self.output, output);
        self.original = std::mem::replace(&mut self.input, staged);
        done
    }

    /// Folds `data` (whole elements) into `into`, or into the sum of `with` and the wire that `into` becomes.
    pub(crate) fn land(
        &mut self,
        into: &Span,
        at: usize,
        with: Option<&Span>,
        data: &mut [u8],
        f: impl Fn(&mut [u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        if let Some(with) = with {
            let mut done = 0;
            while let Some(part) = data.get_mut(done..).filter(|p| !p.is_empty()) {
                let own = self.slice(with, at + done).ok_or_else(gone)?;
                let len = own.len().min(part.len());
                let (Some(part), Some(own)) = (part.get_mut(..len), own.get(..len)) else {
                    return Err(gone());
                };
                f(part, own)?;
                done += len;
            }
        }
        let mut done = 0;
        while let Some(part) = data.get(done..).filter(|p| !p.is_empty()) {
            let target = self.slice_mut(into, at + done)?;
            let len = target.len().min(part.len());
            let (Some(target), Some(part)) = (target.get_mut(..len), part.get(..len)) else {
                return Err(gone());
            };
            if with.is_some() {
                copy_bytes(target, part);
            } else {
                f(target, part)?;
            }
            done += len;
        }
        Ok(())
    }

    /// Runs `f(into, data)` over `into` from `at` on; `data` is whole elements.
    pub(crate) fn fold(
        &mut self,
        into: &Span,
        mut at: usize,
        mut data: &[u8],
        f: impl Fn(&mut [u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        while !data.is_empty() {
            let target = self.slice_mut(into, at)?;
            let len = target.len().min(data.len());
            let (Some(target), Some((part, rest))) = (target.get_mut(..len), data.split_at_checked(len))
            else {
                return Err(gone());
            };
            f(target, part)?;
            at += len;
            data = rest;
        }
        Ok(())
    }

    /// Runs `f(into, data, with)`, which writes its first argument, over `into` and `with` (equally long) from `at` on. False
    /// if both lie in one tensor somewhere: nothing was done then.
    pub(crate) fn fold_with(
        &mut self,
        into: &Span,
        with: &Span,
        mut at: usize,
        mut data: &[u8],
        f: impl Fn(&mut [u8], &[u8], &[u8]) -> Result<()>,
    ) -> Result<bool> {
        let mut done = false;
        while !data.is_empty() {
            let find = |span: &Span| {
                let map = self.map(span.buffer);
                map.find(span.range.start + at, span.range.end)
            };
            let ((to, into), (from, with)) = find(into).zip(find(with)).ok_or_else(gone)?;
            let Ok([to, from]) = self.tensors.get_disjoint_mut([to, from]) else {
                // Only whole calls can be done another way.
                return if done { Err(gone()) } else { Ok(false) };
            };
            let (to, from) = (to.bytes_mut().get_mut(into), from.bytes().get(with));
            let (to, from) = to.zip(from).ok_or_else(gone)?;
            let len = to.len().min(from.len()).min(data.len());
            let (Some(to), Some(from), Some((part, rest))) =
                (to.get_mut(..len), from.get(..len), data.split_at_checked(len))
            else {
                return Err(gone());
            };
            f(to, part, from)?;
            done = true;
            at += len;
            data = rest;
        }
        Ok(true)
    }

    /// The caller's tensors, in the order in which they came.
    pub(crate) fn into_given(mut self) -> Vec<Tensor> {
        self.tensors.truncate(self.given);
        self.tensors
    }
}

/// `Aborted` once `stop` is raised; the engine replaces the text by the reason.
pub(crate) fn go_on(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Acquire) {
        return Err(Error::new(ErrorKind::Aborted, "interrupted"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Memory {
        // Out is 3 bytes of tensor 0, then 2 of tensor 1, then the rest of tensor 0.
        let mut output = Map::default();
        output.push(0, 0..3);
        output.push(1, 0..0);
        output.push(1, 0..2);
        output.push(0, 3..5);
        let mut input = Map::default();
        input.push(2, 0..4);
        let tensors = vec![
            Tensor::from_vec(vec![1u8, 2, 3, 6, 7]),
            Tensor::from_vec(vec![4u8, 5]),
            Tensor::from_vec(vec![10u8, 20, 30, 40]),
        ];
        Memory::new(tensors, input, output)
    }

    #[test]
    fn a_span_runs_across_tensors_in_the_order_of_the_map() {
        let mut m = memory();
        let stop = AtomicBool::new(false);
        let span = Span::new(Buffer::Out, 1..6);
        let mut slices = Vec::new();
        m.slices(&span, 1, &mut slices);
        let seen: Vec<u8> = slices.iter().flat_map(|s| s.to_vec()).collect();
        assert_eq!(seen, [3, 4, 5, 6]);
        m.both(
            &Span::new(Buffer::In, 0..4),
            &Span::new(Buffer::Out, 2..6),
            &stop,
            |a, b| {
                a.copy_from_slice(b);
                Ok(())
            },
        )
        .unwrap();
        let tensors = m.into_given();
        assert_eq!(tensors[0].bytes(), [1, 2, 10, 40, 7]);
        assert_eq!(tensors[1].bytes(), [20, 30]);
    }

    #[test]
    fn a_staged_input_leaves_the_callers_alone() {
        let mut m = memory();
        let stop = AtomicBool::new(false);
        m.stage_input();
        m.copy_original(&stop).unwrap();
        m.each(&Span::new(Buffer::In, 0..4), &stop, |s| {
            s.iter_mut().for_each(|b| *b += 1);
            Ok(())
        })
        .unwrap();
        let mut slices = Vec::new();
        m.slices(&Span::new(Buffer::In, 0..4), 0, &mut slices);
        assert_eq!(&*slices[0], [11, 21, 31, 41]);
        assert_eq!(m.into_given()[2].bytes(), [10, 20, 30, 40]);
    }

    #[test]
    fn a_raised_stop_ends_local_work_and_a_bad_span_is_an_error() {
        let mut m = memory();
        let span = Span::new(Buffer::In, 0..4);
        assert_eq!(
            m.each(&span, &AtomicBool::new(true), |_| Ok(()))
                .unwrap_err()
                .kind(),
            ErrorKind::Aborted
        );
        let span = Span::new(Buffer::In, 2..9);
        assert_eq!(
            m.each(&span, &AtomicBool::new(false), |_| Ok(()))
                .unwrap_err()
                .kind(),
            ErrorKind::Internal
        );
    }
}
