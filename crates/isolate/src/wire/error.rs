//! Errors cross with kind, text, context, code and their causes, so that the caller sees what the backend said.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use ftcore::{Error, ErrorKind, OpKind, Result};

use super::{Reader, Wire, Writer, odd};

/// The kinds by their code here.
const KINDS: [ErrorKind; 16] = [
    ErrorKind::InvalidArgument,
    ErrorKind::Unsupported,
    ErrorKind::InvalidState,
    ErrorKind::Timeout,
    ErrorKind::PeerLost,
    ErrorKind::Protocol,
    ErrorKind::Mismatch,
    ErrorKind::Aborted,
    ErrorKind::Poisoned,
    ErrorKind::NotFound,
    ErrorKind::Conflict,
    ErrorKind::Unavailable,
    ErrorKind::Io,
    ErrorKind::Corrupt,
    ErrorKind::Backend,
    ErrorKind::Internal,
];
/// The longest text.
const LONGEST: usize = 64 << 10;
/// How many causes deep an error crosses.
const DEPTH: u8 = 4;
/// Names of operations that are not known beforehand: this many are kept, each for ever, and no longer than this.
const NAMES: usize = 256;
const NAME_LENGTH: usize = 64;

/// A cause that was not ftcore's: its text. By hand: `fuzz` and `tests` include this file by its path and know no thiserror.
#[derive(Debug)]
struct Cause(String);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Cause {}

impl Wire for Error {
    fn put(&self, w: &mut Writer) {
        put_deep(w, self, DEPTH);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        get_deep(r, DEPTH)
    }
}

/// A text for people; what is beyond the limit is cut off.
fn put_text(w: &mut Writer, text: &str) {
    let mut end = text.len().min(LONGEST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    w.bytes(text.as_bytes().get(..end).unwrap_or_default());
}

fn get_text(r: &mut Reader<'_>) -> Result<String> {
    let bytes = r.bytes()?;
    if bytes.len() > LONGEST {
        return Err(odd(format_args!("a text of {} bytes", bytes.len())));
    }
    Ok(String::from_utf8_lossy(bytes).into_owned())
}

fn put_deep(w: &mut Writer, error: &Error, depth: u8) {
    let kind = KINDS.iter().position(|&k| k == error.kind());
    // A kind that is newer than this list is a defect here; the text says what happened all the same.
    let kind = kind.unwrap_or(KINDS.len() - 1);
    w.u8(u8::try_from(kind).unwrap_or(u8::MAX));
    put_text(w, error.message());
    let c = error.context();
    c.op.map(Cow::from).put(w);
    c.rank.put(w);
    c.peer.put(w);
    c.peer_address.put(w);
    c.epoch.put(w);
    c.seq.put(w);
    c.dtype.zip(c.count).put(w);
    error.code().put(w);
    match std::error::Error::source(error) {
        None => w.u8(0),
        Some(_) if depth == 0 => w.u8(0),
        Some(source) => match source.downcast_ref::<Error>() {
            Some(source) => {
                w.u8(1);
                put_deep(w, source, depth - 1);
            }
            None => {
                w.u8(2);
                put_text(w, &source.to_string());
            }
        },
    }
}

fn get_deep(r: &mut Reader<'_>, depth: u8) -> Result<Error> {
    let code = r.u8()?;
    let kind = *KINDS
        .get(usize::from(code))
        .ok_or_else(|| odd(format_args!("an error of the unknown kind {code}")))?;
    let mut error = Error::new(kind, get_text(r)?);
    if let Some(op) = Option::<String>::get(r)?.and_then(|op| name(&op)) {
        error = error.with_op(op);
    }
    if let Some(rank) = Wire::get(r)? {
        error = error.with_rank(rank);
    }
    if let Some(peer) = Wire::get(r)? {
        error = error.with_peer(peer);
    }
    if let Some(address) = Option::<String>::get(r)? {
        error = error.with_peer_address(address);
    }
    if let Some(epoch) = Wire::get(r)? {
        error = error.with_epoch(epoch);
    }
    if let Some(seq) = Wire::get(r)? {
        error = error.with_seq(seq);
    }
    if let Some((dtype, count)) = Wire::get(r)? {
        error = error.with_data(dtype, count);
    }
    if let Some(code) = Wire::get(r)? {
        error = error.with_code(code);
    }
    match r.u8()? {
        0 => Ok(error),
        1 if depth > 0 => Ok(error.with_source(get_deep(r, depth - 1)?)),
        2 => Ok(error.with_source(Cause(get_text(r)?))),
        other => Err(odd(format_args!("a cause of the unknown form {other}"))),
    }
}

/// The operation's name as ftcore's errors keep it. Names that are not known are kept, up to a limit; beyond it the error
/// goes without (another process must not make this one grow).
fn name(op: &str) -> Option<&'static str> {
    static MORE: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    name_from(op, &MORE)
}

fn name_from(op: &str, more: &Mutex<BTreeSet<&'static str>>) -> Option<&'static str> {
    const KNOWN: [&str; 8] = [
        "configure",
        "split",
        "shutdown",
        "abort",
        "rendezvous",
        "create",
        "probe",
        "quorum",
    ];
    let known = OpKind::ALL
        .iter()
        .map(|k| k.name())
        .chain(KNOWN)
        .find(|&k| k == op);
    if known.is_some() {
        return known;
    }
    let mut more = more.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&name) = more.get(op) {
        return Some(name);
    }
    if more.len() >= NAMES || op.len() > NAME_LENGTH {
        return None;
    }
    let name: &'static str = Box::leak(op.to_string().into_boxed_str());
    more.insert(name);
    Some(name)
}

#[cfg(test)]
mod tests {
    use ftcore::DType;

    use ftcore::Epoch;

    use super::*;

    fn crossed(e: &Error) -> Error {
        let mut w = Writer::new(0);
        e.put(&mut w);
        let frame = w.finish().unwrap();
        let mut r = Reader::new(&frame[5..]);
        let back = Error::get(&mut r).unwrap();
        r.end().unwrap();
        back
    }

    #[test]
    fn every_kind_crosses_with_all_its_context_and_causes() {
        for kind in KINDS {
            let cause =
                Error::new(ErrorKind::PeerLost, "reset")
                    .with_peer(3)
                    .with_source(std::io::Error::new(
                        std::io::ErrorKind::ConnectionReset,
                        "by the kernel",
                    ));
            let full = Error::new(kind, "what happened")
                .with_op("all_reduce")
                .with_rank(1)
                .with_peer(2)
                .with_peer_address("10.0.0.4:4103")
                .with_epoch(Epoch(7))
                .with_seq(41)
                .with_data(DType::BF16, 1 << 40)
                .with_code(-11)
                .with_source(cause.clone());
            for e in [
                full,
                Error::new(kind, ""),
                Error::new(kind, "x").with_op("my_own.op"),
            ] {
                let back = crossed(&e);
                assert_eq!(back.kind(), e.kind());
                assert_eq!(back.message(), e.message());
                assert_eq!(back.context(), e.context());
                assert_eq!(back.code(), e.code());
                assert_eq!(back.to_string(), e.to_string());
                let sources = |e: &Error| {
                    let mut texts = Vec::new();
                    let mut next = std::error::Error::source(e);
                    while let Some(source) = next {
                        texts.push(source.to_string());
                        next = source.source();
                    }
                    texts
                };
                assert_eq!(sources(&back), sources(&e));
            }
        }
    }

    #[test]
    fn causes_are_cut_off_at_a_depth_and_foreign_names_at_a_number() {
        let mut e = Error::timeout("the first");
        for i in 0..20 {
            e = Error::timeout(format!("level {i}")).with_source(e);
        }
        let back = crossed(&e);
        let mut depth = 0;
        let mut next = std::error::Error::source(&back);
        while let Some(source) = next {
            depth += 1;
            next = source.source();
        }
        assert_eq!(depth, usize::from(DEPTH));
        let long = "x".repeat(NAME_LENGTH + 1);
        let more = Mutex::default();
        assert_eq!(name_from(&long, &more), None);
        let given = (0..2 * NAMES)
            .filter(|i| name_from(&format!("flood {i}"), &more).is_some())
            .count();
        assert!(given <= NAMES, "{given}");
        assert_eq!(name_from("all_reduce", &more), Some("all_reduce"));
    }

    #[test]
    fn damaged_bytes_are_refused() {
        let mut w = Writer::new(0);
        Error::timeout("x").with_data(DType::F32, 1).put(&mut w);
        let frame = w.finish().unwrap();
        let body = &frame[5..];
        for i in 0..body.len() {
            for v in [0u8, 1, 2, 99, 255] {
                let mut b = body.to_vec();
                b[i] = v;
                // Whatever comes out, it comes out: no panic, no endless list.
                drop(Error::get(&mut Reader::new(&b)));
            }
            assert!(Error::get(&mut Reader::new(&body[..i])).is_err());
        }
    }
}
