//! Lines of bounded length out of a byte stream: what is too long is skipped, never stored.

use std::io::{self, BufRead};

/// A line was longer than allowed; its bytes were skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLong {
    /// How long it was, in bytes without the newline.
    pub length: u64,
}

/// Reads newline-separated lines of at most `max` bytes. Holds at most `max` bytes, whatever arrives.
#[derive(Debug)]
pub struct LineReader<R> {
    inner: R,
    max: usize,
    line: Vec<u8>,
}

impl<R: BufRead> LineReader<R> {
    /// Reads lines of at most `max` bytes (without the newline) from `inner`.
    pub fn new(inner: R, max: usize) -> Self {
        Self {
            inner,
            max,
            line: Vec::new(),
        }
    }

    /// The next line without its newline, `Err(TooLong)` for one that was skipped, `None` at the end of the stream.
    /// A last line without a newline is dropped: its writer died in the middle of it.
    pub fn next_line(&mut self) -> io::Result<Option<Result<&[u8], TooLong>>> {
        self.line.clear();
        let mut length: u64 = 0;
        loop {
            let chunk = match self.inner.fill_buf() {
                Ok(chunk) => chunk,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            if chunk.is_empty() {
                return Ok(None);
            }
            let (part, used, ended) = match chunk.iter().position(|&b| b == b'\n') {
                Some(at) => (chunk.get(..at).unwrap_or_default(), at + 1, true),
                None => (chunk, chunk.len(), false),
            };
            length += part.len() as u64;
            if length <= self.max as u64 {
                self.line.extend_from_slice(part);
            } else {
                self.line.clear();
            }
            self.inner.consume(used);
            if ended {
                return Ok(Some(if length <= self.max as u64 {
                    Ok(&self.line)
                } else {
                    Err(TooLong { length })
                }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    fn lines(bytes: &[u8], max: usize, buffer: usize) -> Vec<Result<Vec<u8>, u64>> {
        let mut reader = LineReader::new(BufReader::with_capacity(buffer, bytes), max);
        let mut all = Vec::new();
        while let Some(line) = reader.next_line().unwrap() {
            all.push(line.map(<[u8]>::to_vec).map_err(|e| e.length));
        }
        all
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped_and_the_next_one_is_read() {
        for buffer in [1, 2, 3, 7, 64] {
            assert_eq!(
                lines(b"ab\n0123456789\n\nabcd\nabcde\nrest without end", 4, buffer),
                [
                    Ok(b"ab".to_vec()),
                    Err(10),
                    Ok(vec![]),
                    Ok(b"abcd".to_vec()),
                    Err(5)
                ],
                "buffer {buffer}"
            );
        }
    }

    #[test]
    fn an_endless_line_is_never_stored() {
        let mut reader = LineReader::new(BufReader::new(io::Read::take(io::repeat(b'x'), 10_000_000)), 100);
        assert!(reader.next_line().unwrap().is_none());
        assert!(reader.line.capacity() <= 20_000, "{}", reader.line.capacity());
    }
}
