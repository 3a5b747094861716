//! The bytes between parent and child: length-checked frames with a hand-written codec, validated on both sides (INV-10).
//!
//! A frame is a length (u32, of what follows), a tag and its fields, little-endian. `frames` has the messages, `op` the
//! collectives, `settings` options and capabilities, `error` the one error type.

pub(crate) mod error;
pub(crate) mod frames;
pub(crate) mod op;
pub(crate) mod settings;

use ftcore::{Error, ErrorKind, Result};

/// The longest body of a frame. Store values (8 MiB each) are the largest things that cross here.
pub(crate) const MAX_FRAME: usize = 64 << 20;
/// The longest text and the longest list.
pub(crate) const MAX_TEXT: usize = 64 << 10;
pub(crate) const MAX_LIST: usize = 1 << 20;

/// Builds one frame.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn new(tag: u8) -> Self {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend_from_slice(&[0; 4]);
        bytes.push(tag);
        Self(bytes)
    }

    pub(crate) fn u8(&mut self, v: u8) {
        self.0.push(v);
    }

    pub(crate) fn bool(&mut self, v: bool) {
        self.0.push(u8::from(v));
    }

    pub(crate) fn u32(&mut self, v: u32) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, v: u64) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }

    pub(crate) fn i64(&mut self, v: i64) {
        self.u64(v.cast_unsigned());
    }

    pub(crate) fn f64(&mut self, v: f64) {
        self.u64(v.to_bits());
    }

    /// The length of a list or of bytes; a list too long for the format shows when the frame is finished.
    pub(crate) fn len(&mut self, n: usize) {
        self.u32(u32::try_from(n).unwrap_or(u32::MAX));
    }

    pub(crate) fn bytes(&mut self, v: &[u8]) {
        self.len(v.len());
        self.0.extend_from_slice(v);
    }

    /// A text; what is beyond the limit is cut off (texts are for people).
    pub(crate) fn text(&mut self, v: &str) {
        let mut end = v.len().min(MAX_TEXT);
        while !v.is_char_boundary(end) {
            end -= 1;
        }
        self.bytes(v.as_bytes().get(..end).unwrap_or_default());
    }

    pub(crate) fn option<T>(&mut self, v: Option<T>, put: impl FnOnce(&mut Self, T)) {
        self.bool(v.is_some());
        if let Some(v) = v {
            put(self, v);
        }
    }

    /// Puts the number of an operation to where [`frames::submit`] left room for it: right after the tag.
    pub(crate) fn numbered(mut self, id: u64) -> Self {
        if let Some(field) = self.0.get_mut(5..13) {
            field.copy_from_slice(&id.to_le_bytes());
        }
        self
    }

    /// The frame with its length; `InvalidArgument` if it is too long to be sent.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>> {
        let body = self.0.len() - 4;
        if body > MAX_FRAME {
            return Err(Error::invalid(format!(
                "{body} bytes are too much for one message to a child process; the limit is {MAX_FRAME}"
            )));
        }
        let length = u32::try_from(body).unwrap_or(0).to_le_bytes();
        if let Some(head) = self.0.first_chunk_mut::<4>() {
            *head = length;
        }
        Ok(self.0)
    }
}

/// Reads the body of one frame.
pub(crate) struct Reader<'a>(&'a [u8]);

fn short() -> Error {
    Error::new(
        ErrorKind::Protocol,
        "a message between parent and child ends too early",
    )
}

/// Something that is not the protocol.
pub(crate) fn odd(what: impl std::fmt::Display) -> Error {
    Error::new(
        ErrorKind::Protocol,
        format!("a message between parent and child has {what}"),
    )
}

impl<'a> Reader<'a> {
    pub(crate) fn new(body: &'a [u8]) -> Self {
        Self(body)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n).ok_or_else(short)?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or_else(short)?;
        self.0 = rest;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn bool(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(odd(format_args!("a truth value of {other}"))),
        }
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn i64(&mut self) -> Result<i64> {
        Ok(self.u64()?.cast_signed())
    }

    pub(crate) fn f64(&mut self) -> Result<f64> {
        Ok(f64::from_bits(self.u64()?))
    }

    pub(crate) fn usize(&mut self) -> Result<usize> {
        usize::try_from(self.u64()?).map_err(|_| odd("a size beyond this machine's memory"))
    }

    /// The length of a list, checked against what is left: every entry has at least one byte.
    pub(crate) fn len(&mut self) -> Result<usize> {
        let n = self.u32()? as usize;
        if n > MAX_LIST || n > self.0.len() {
            return Err(odd(format_args!(
                "a list of {n} entries in {} bytes",
                self.0.len()
            )));
        }
        Ok(n)
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let n = self.u32()? as usize;
        self.take(n)
    }

    pub(crate) fn text(&mut self) -> Result<String> {
        let bytes = self.bytes()?;
        if bytes.len() > MAX_TEXT {
            return Err(odd(format_args!("a text of {} bytes", bytes.len())));
        }
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    pub(crate) fn option<T>(&mut self, get: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if self.bool()? {
            get(self).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Nothing may be left over.
    pub(crate) fn end(&self) -> Result<()> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(odd(format_args!("{} bytes too many", self.0.len())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_every_shorter_piece_is_refused() {
        let mut w = Writer::new(7);
        w.u8(200);
        w.bool(true);
        w.u32(70_000);
        w.i64(-5);
        w.f64(f64::NEG_INFINITY);
        w.text("grüße");
        w.option(Some(9u64), Writer::u64);
        w.option(None::<u64>, Writer::u64);
        let frame = w.finish().unwrap();
        let read = |body: &[u8]| -> Result<()> {
            let mut r = Reader::new(body);
            assert_eq!(r.u8()?, 7);
            assert_eq!(r.u8()?, 200);
            assert!(r.bool()?);
            assert_eq!(r.u32()?, 70_000);
            assert_eq!(r.i64()?, -5);
            assert_eq!(r.f64()?, f64::NEG_INFINITY);
            assert_eq!(r.text()?, "grüße");
            assert_eq!(r.option(Reader::u64)?, Some(9));
            assert_eq!(r.option(Reader::u64)?, None);
            r.end()
        };
        let body = &frame[4..];
        assert_eq!(
            u32::from_le_bytes(frame[..4].try_into().unwrap()) as usize,
            body.len()
        );
        read(body).unwrap();
        for n in 0..body.len() {
            assert_eq!(read(&body[..n]).unwrap_err().kind(), ErrorKind::Protocol, "{n}");
        }
        assert!(read(&[body, &[0]].concat()).is_err(), "a byte too many");
    }

    #[test]
    fn lengths_are_checked_before_anything_is_allocated() {
        let mut w = Writer::new(0);
        w.u32(u32::MAX);
        let frame = w.finish().unwrap();
        assert!(Reader::new(&frame[5..]).len().is_err());
        assert!(Reader::new(&frame[5..]).bytes().is_err());
        assert!(Reader::new(&[2]).bool().is_err());
    }
}
