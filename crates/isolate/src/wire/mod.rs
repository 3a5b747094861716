//! The bytes between parent and child: length-checked frames, validated on both sides (INV-10).
//!
//! A frame is a length (u32, of what follows), a tag and its fields, little-endian. What has a place in one is [`Wire`]; types of several
//! fields name them once, in the order in which they are written ([`record!`], and [`messages!`] for the frames themselves). `frames` has the
//! messages, `op` the collectives, `settings` options and capabilities, `error` the one error type.

pub(crate) mod error;
pub(crate) mod frames;
pub(crate) mod op;
pub(crate) mod settings;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Result, deadline_in, time_left};
use rustix::time::{ClockId, clock_gettime};

/// The longest body of a frame. Store values (8 MiB each) are the largest things that cross here.
pub(crate) const MAX_FRAME: usize = 64 << 20;
/// The longest list.
const MAX_LIST: usize = 1 << 20;

/// Something that has a place in a frame.
pub(crate) trait Wire: Sized {
    /// Writes it behind what is there.
    fn put(&self, w: &mut Writer);
    /// Reads it. `Protocol` for anything that `put` does not write.
    fn get(r: &mut Reader<'_>) -> Result<Self>;
}

/// [`Wire`] for a struct of these fields: all of it, or it does not compile. Where it is used, `Reader`, `Wire` and `Writer` are in scope.
macro_rules! record {
    ($name:ty { $($field:ident),* $(,)? }) => {
        impl Wire for $name {
            fn put(&self, w: &mut Writer) {
                let Self { $($field),* } = self;
                $(Wire::put($field, w);)*
            }
            fn get(r: &mut Reader<'_>) -> ftcore::Result<Self> {
                Ok(Self { $($field: Wire::get(r)?),* })
            }
        }
    };
}

/// An enum of messages: each has the tag that its frame begins with, and its fields in the order in which they are written. As above, and `odd`.
macro_rules! messages {
    ($(#[$doc:meta])* $name:ident, $what:literal {
        $($(#[$about:meta])* $tag:literal $message:ident $({ $($(#[$of:meta])* $field:ident: $type:ty,)* })?,)*
    }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) enum $name {
            $($(#[$about])* $message $({ $($(#[$of])* $field: $type,)* })?,)*
        }

        impl $name {
            pub(crate) fn encode(&self) -> ftcore::Result<Vec<u8>> {
                match self {
                    $(Self::$message { $($($field,)*)? } => {
                        #[allow(unused_mut, reason = "some have no fields")]
                        let mut w = Writer::new($tag);
                        $($(Wire::put($field, &mut w);)*)?
                        w.finish()
                    })*
                }
            }

            /// The message behind `tag`.
            fn read(tag: u8, r: &mut Reader<'_>) -> ftcore::Result<Self> {
                let message = match tag {
                    $($tag => Self::$message { $($($field: Wire::get(r)?,)*)? },)*
                    other => return Err(odd(format_args!("the unknown {} {other}", $what))),
                };
                r.end()?;
                Ok(message)
            }
        }
    };
}

pub(crate) use {messages, record};

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

    /// The length of a list or of bytes; a list too long for the format shows when the frame is finished.
    fn len(&mut self, n: usize) {
        u32::try_from(n).unwrap_or(u32::MAX).put(self);
    }

    pub(crate) fn bytes(&mut self, v: &[u8]) {
        self.len(v.len());
        self.0.extend_from_slice(v);
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

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or_else(short)?;
        self.0 = rest;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    /// The length of a list, checked against what is left: every entry has at least one byte.
    fn len(&mut self) -> Result<usize> {
        let n = u32::get(self)? as usize;
        if n > MAX_LIST || n > self.0.len() {
            return Err(odd(format_args!(
                "a list of {n} entries in {} bytes",
                self.0.len()
            )));
        }
        Ok(n)
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let n = u32::get(self)? as usize;
        let (head, rest) = self.0.split_at_checked(n).ok_or_else(short)?;
        self.0 = rest;
        Ok(head)
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

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Wire for $type {
            fn put(&self, w: &mut Writer) {
                w.0.extend_from_slice(&self.to_le_bytes());
            }
            fn get(r: &mut Reader<'_>) -> Result<Self> {
                Ok(Self::from_le_bytes(r.array()?))
            }
        }
    )*};
}

integers!(u32, u64, i64, f64);

impl Wire for Epoch {
    fn put(&self, w: &mut Writer) {
        self.0.put(w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        u64::get(r).map(Self)
    }
}

impl Wire for usize {
    fn put(&self, w: &mut Writer) {
        (*self as u64).put(w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        Self::try_from(u64::get(r)?).map_err(|_| odd("a size beyond this machine's memory"))
    }
}

impl Wire for bool {
    fn put(&self, w: &mut Writer) {
        w.u8(u8::from(*self));
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        match r.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(odd(format_args!("a truth value of {other}"))),
        }
    }
}

impl Wire for String {
    fn put(&self, w: &mut Writer) {
        w.bytes(self.as_bytes());
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        let text = std::str::from_utf8(r.bytes()?);
        text.map(str::to_string)
            .map_err(|_| odd("a text that is not UTF-8"))
    }
}

impl Wire for Cow<'static, str> {
    fn put(&self, w: &mut Writer) {
        w.bytes(self.as_bytes());
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        String::get(r).map(Self::from)
    }
}

/// Not a list of single bytes, which would cross one by one.
impl Wire for Vec<u8> {
    fn put(&self, w: &mut Writer) {
        w.bytes(self);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        r.bytes().map(<[u8]>::to_vec)
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, w: &mut Writer) {
        w.len(self.len());
        self.iter().for_each(|one| one.put(w));
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        (0..r.len()?).map(|_| T::get(r)).collect()
    }
}

impl Wire for BTreeMap<String, String> {
    fn put(&self, w: &mut Writer) {
        w.len(self.len());
        for (name, value) in self {
            name.put(w);
            value.put(w);
        }
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        (0..r.len()?).map(|_| <(String, String)>::get(r)).collect()
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, w: &mut Writer) {
        self.0.put(w);
        self.1.put(w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        Ok((A::get(r)?, B::get(r)?))
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, w: &mut Writer) {
        self.is_some().put(w);
        if let Some(there) = self {
            there.put(w);
        }
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        bool::get(r)?.then(|| T::get(r)).transpose()
    }
}

impl<T: Wire> Wire for Result<T> {
    fn put(&self, w: &mut Writer) {
        self.is_ok().put(w);
        match self {
            Ok(value) => value.put(w),
            Err(error) => error.put(w),
        }
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        match bool::get(r)? {
            true => T::get(r).map(Ok),
            false => Error::get(r).map(Err),
        }
    }
}

impl Wire for Duration {
    fn put(&self, w: &mut Writer) {
        u64::try_from(self.as_nanos()).unwrap_or(u64::MAX).put(w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        u64::get(r).map(Self::from_nanos)
    }
}

/// On Linux's monotonic clock, which all processes of a host share. The past is now, and what is too far to represent a year from now.
impl Wire for Instant {
    fn put(&self, w: &mut Writer) {
        monotonic().saturating_add(time_left(*self)).put(w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        Ok(deadline_in(Duration::get(r)?.saturating_sub(monotonic())))
    }
}

fn monotonic() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_every_shorter_piece_is_refused() {
        type All = (((bool, u32), (i64, f64)), (String, (Option<u64>, Option<u64>)));
        let all: All = (
            ((true, 70_000), (-5, f64::NEG_INFINITY)),
            ("grüße".into(), (Some(9), None)),
        );
        let mut w = Writer::new(7);
        w.u8(200);
        all.put(&mut w);
        let frame = w.finish().unwrap();
        let read = |body: &[u8]| -> Result<All> {
            let mut r = Reader::new(body);
            assert_eq!(r.u8()?, 7);
            assert_eq!(r.u8()?, 200);
            let read = All::get(&mut r)?;
            r.end()?;
            Ok(read)
        };
        let body = &frame[4..];
        assert_eq!(
            u32::from_le_bytes(frame[..4].try_into().unwrap()) as usize,
            body.len()
        );
        assert_eq!(read(body).unwrap(), all);
        for n in 0..body.len() {
            assert_eq!(read(&body[..n]).unwrap_err().kind(), ErrorKind::Protocol, "{n}");
        }
        assert!(read(&[body, &[0]].concat()).is_err(), "a byte too many");
    }

    #[test]
    fn lengths_are_checked_before_anything_is_allocated() {
        let mut w = Writer::new(0);
        u32::MAX.put(&mut w);
        let frame = w.finish().unwrap();
        assert!(Reader::new(&frame[5..]).len().is_err());
        assert!(Reader::new(&frame[5..]).bytes().is_err());
        assert!(bool::get(&mut Reader::new(&[2])).is_err());
        assert!(String::get(&mut Reader::new(&[1, 0, 0, 0, 0xff])).is_err());
    }

    #[test]
    fn an_instant_keeps_its_place_on_the_way_through_another_process() {
        let back = |bytes: &[u8]| Instant::get(&mut Reader::new(bytes)).unwrap();
        let at = Instant::now() + Duration::from_secs(1000);
        let mut w = Writer::new(0);
        at.put(&mut w);
        let crossed = back(&w.finish().unwrap()[5..]);
        let off = at.max(crossed) - at.min(crossed);
        assert!(off < Duration::from_millis(500), "{off:?}");
        assert!(time_left(back(&[0; 8])).is_zero());
        assert!(time_left(back(&[0xff; 8])) > Duration::from_secs(1 << 20));
    }
}
