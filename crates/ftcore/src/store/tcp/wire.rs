//! Requests and replies of PyTorch's TCPStore protocol as bytes; no sockets, no state.
//!
//! Little endian; a string is u64 length + bytes, a list u64 count + items (MULTI_SET: i64); a request is one opcode byte
//! and its arguments, without frame, id or checksum. Reading checks each length against its limit first and then grows as
//! bytes arrive, never by what a length claims; bytes that are not the protocol are `io::ErrorKind::InvalidData`.

use std::io::{self, Read};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::ErrorKind;
use crate::store::keys::{MAX_KEY, MAX_KEYS, MAX_VALUE};

/// What a client says first, so that a stranger's bytes are not taken for requests.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;
/// Most bytes of one request; an honest one (a list of 131072 keys of usual length) is far below.
pub(super) const MAX_REQUEST: usize = 64 << 20;
/// Most keys a client takes in the reply to LIST_KEYS.
const MAX_LISTED: i64 = 1 << 24;
/// How much is read at once into a growing value.
const CHUNK: usize = 64 * 1024;
/// What a string costs besides its bytes.
const STRING_BYTES: usize = 40;

/// The one-byte reply to CHECK when all keys exist.
pub(super) const READY: u8 = 0;
/// The one-byte reply to CHECK when a key is absent.
pub(super) const NOT_READY: u8 = 1;
/// The one-byte reply to WAIT and BARRIER when what was waited for is there.
pub(super) const STOP_WAITING: u8 = 0;
/// The one-byte reply to WAIT and BARRIER when what was waited for will never be there: its key is of an epoch that is over. PyTorch's client
/// takes anything but [`STOP_WAITING`] for an error; ours reads the reason behind it (see [`put_refusal`]).
pub(super) const NEVER: u8 = 2;
/// In front of the reply to ADD and COMPARE_SET between a client and a server of ours: done, and the reply follows …
pub(super) const DONE: u8 = 0;
/// … or refused, and the reason follows.
pub(super) const REFUSED: u8 = 1;
/// The one-byte reply to CANCEL_WAIT.
pub(super) const WAIT_CANCELED: u8 = 1;

/// The opcode of [`Request::CancelWait`], which the server looks for while a wait is pending.
pub(super) const CANCEL_WAIT: u8 = 12;

/// The upper 24 bits of the first PING of a client of ours; the others are random. A server of ours answers it with all bits inverted, and from
/// then on both know that refusals are told instead of closing the connection: a confirming PING is answered inverted, with the reason
/// behind it. A server of PyTorch's answers as always, and is spoken to as always.
pub(super) const OURS: u32 = 0x6F78_6300;
const OURS_MASK: u32 = 0xFFFF_FF00;
/// Longest reason that a client takes, in bytes.
const MAX_REASON: usize = 4096;

/// True for the first PING of a client of ours.
pub(super) fn is_ours(nonce: u32) -> bool {
    nonce & OURS_MASK == OURS
}

/// The first PING of a client of ours.
pub(super) fn our_ping(random: u32) -> u32 {
    OURS | random & !OURS_MASK
}

/// Why something was refused, as it stands behind [`REFUSED`], [`NEVER`] or an inverted PING: one byte for the kind, then the text.
pub(super) fn put_refusal(out: &mut Vec<u8>, kind: ErrorKind, why: &str) {
    out.push(match kind {
        ErrorKind::Unavailable => 1,
        ErrorKind::Aborted => 2,
        _ => 0,
    });
    put_bytes(out, why.as_bytes());
}

/// Reads what [`put_refusal`] wrote.
pub(super) fn read_refusal(from: &mut impl Read) -> io::Result<(ErrorKind, String)> {
    let kind = match read_u8(from)? {
        0 => ErrorKind::InvalidArgument,
        1 => ErrorKind::Unavailable,
        2 => ErrorKind::Aborted,
        other => return Err(bad(format!("a refusal of kind {other}"))),
    };
    let text = read_grown(from, "reason", MAX_REASON, |_| Ok(()))?;
    Ok((kind, String::from_utf8_lossy(&text).into_owned()))
}

type Bytes = Vec<u8>;

/// One request. Keys are as on the wire: a client's begin with `/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    Validate(u32),
    Set(Bytes, Bytes),
    CompareSet {
        key: Bytes,
        expected: Bytes,
        desired: Bytes,
    },
    Get(Bytes),
    Add(Bytes, i64),
    Check(Vec<Bytes>),
    Wait(Vec<Bytes>),
    NumKeys,
    Delete(Bytes),
    Append(Bytes, Bytes),
    MultiGet(Vec<Bytes>),
    MultiSet(Vec<(Bytes, Bytes)>),
    CancelWait,
    Ping(u32),
    QueuePush(Bytes, Bytes),
    QueuePop(Bytes),
    QueueLen(Bytes),
    ListKeys,
    Barrier {
        key: Bytes,
        world_size: i64,
    },
}

impl Request {
    /// Appends the request's bytes to `out`.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.opcode());
        match self {
            Self::Validate(n) | Self::Ping(n) => out.extend_from_slice(&n.to_le_bytes()),
            Self::NumKeys | Self::CancelWait | Self::ListKeys => {}
            Self::Get(key) | Self::Delete(key) | Self::QueuePop(key) | Self::QueueLen(key) => {
                put_bytes(out, key)
            }
            Self::Set(key, value) | Self::Append(key, value) | Self::QueuePush(key, value) => {
                put_bytes(out, key);
                put_bytes(out, value);
            }
            Self::CompareSet {
                key,
                expected,
                desired,
            } => {
                put_bytes(out, key);
                put_bytes(out, expected);
                put_bytes(out, desired);
            }
            Self::Add(key, n) | Self::Barrier { key, world_size: n } => {
                put_bytes(out, key);
                out.extend_from_slice(&n.to_le_bytes());
            }
            Self::Check(keys) | Self::Wait(keys) | Self::MultiGet(keys) => {
                put_len(out, keys.len());
                keys.iter().for_each(|key| put_bytes(out, key));
            }
            Self::MultiSet(pairs) => {
                put_len(out, pairs.len());
                for (key, value) in pairs {
                    put_bytes(out, key);
                    put_bytes(out, value);
                }
            }
        }
    }

    fn opcode(&self) -> u8 {
        match self {
            Self::Validate(_) => 0,
            Self::Set(..) => 1,
            Self::CompareSet { .. } => 2,
            Self::Get(_) => 3,
            Self::Add(..) => 4,
            Self::Check(_) => 5,
            Self::Wait(_) => 6,
            Self::NumKeys => 7,
            Self::Delete(_) => 8,
            Self::Append(..) => 9,
            Self::MultiGet(_) => 10,
            Self::MultiSet(_) => 11,
            Self::CancelWait => CANCEL_WAIT,
            Self::Ping(_) => 13,
            Self::QueuePush(..) => 14,
            Self::QueuePop(_) => 15,
            Self::QueueLen(_) => 16,
            Self::ListKeys => 17,
            Self::Barrier { .. } => 18,
        }
    }

    /// Reads one request, of [`MAX_REQUEST`] bytes at most. `budget` is what all connections of a server may make it hold together; what this
    /// request takes of it is given back when the second result is dropped.
    pub(super) fn read<'a>(from: &mut impl Read, budget: &'a Budget) -> io::Result<(Self, Held<'a>)> {
        let mut from = Metered {
            from,
            held: budget.held(),
        };
        let f = &mut from;
        let request = match read_u8(f.from)? {
            0 => Self::Validate(f.u32()?),
            1 => Self::Set(f.key()?, f.value()?),
            2 => Self::CompareSet {
                key: f.key()?,
                expected: f.value()?,
                desired: f.value()?,
            },
            3 => Self::Get(f.key()?),
            4 => Self::Add(f.key()?, f.i64()?),
            5 => Self::Check(f.keys()?),
            6 => Self::Wait(f.keys()?),
            7 => Self::NumKeys,
            8 => Self::Delete(f.key()?),
            9 => Self::Append(f.key()?, f.value()?),
            10 => Self::MultiGet(f.keys()?),
            11 => {
                let n = f.count()?;
                let mut pairs = Vec::new();
                for _ in 0..n {
                    pairs.push((f.key()?, f.value()?));
                }
                Self::MultiSet(pairs)
            }
            CANCEL_WAIT => Self::CancelWait,
            13 => Self::Ping(f.u32()?),
            14 => Self::QueuePush(f.key()?, f.value()?),
            15 => Self::QueuePop(f.key()?),
            16 => Self::QueueLen(f.key()?),
            17 => Self::ListKeys,
            18 => Self::Barrier {
                key: f.key()?,
                world_size: f.i64()?,
            },
            other => return Err(bad(format!("unknown opcode {other}"))),
        };
        Ok((request, from.held))
    }
}

/// What all connections of a server may make it hold besides the store itself: requests, waits, replies.
#[derive(Debug)]
pub(super) struct Budget {
    used: AtomicUsize,
    limit: usize,
}

impl Budget {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            used: AtomicUsize::new(0),
            limit,
        }
    }

    /// Nothing of it yet.
    pub(super) fn held(&self) -> Held<'_> {
        Held { budget: self, n: 0 }
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

/// A part of a [`Budget`], given back when it is dropped.
#[derive(Debug)]
pub(super) struct Held<'a> {
    budget: &'a Budget,
    n: usize,
}

impl Held<'_> {
    /// Takes `n` bytes more.
    pub(super) fn take(&mut self, n: usize) -> io::Result<()> {
        let limit = self.budget.limit;
        let before = self.budget.used.fetch_add(n, Ordering::Relaxed);
        self.n += n;
        let too_much = |whose: &str, limit: usize| {
            let text = format!("what {whose} the server hold exceeds {limit} bytes");
            Err(io::Error::new(io::ErrorKind::OutOfMemory, text))
        };
        if before.saturating_add(n) > limit {
            return too_much("all connections make", limit);
        }
        if self.n > MAX_REQUEST {
            return too_much("this connection makes", MAX_REQUEST);
        }
        Ok(())
    }

    /// Holds `n` bytes instead.
    pub(super) fn set(&mut self, n: usize) -> io::Result<()> {
        self.budget.used.fetch_sub(self.n, Ordering::Relaxed);
        self.n = 0;
        self.take(n)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.n, Ordering::Relaxed);
    }
}

/// A reader that counts what one request holds.
struct Metered<'r, 'b, R: Read> {
    from: &'r mut R,
    held: Held<'b>,
}

impl<R: Read> Metered<'_, '_, R> {
    fn u32(&mut self) -> io::Result<u32> {
        read_u32(self.from)
    }

    fn i64(&mut self) -> io::Result<i64> {
        read_i64(self.from)
    }

    fn count(&mut self) -> io::Result<usize> {
        let n = read_u64(self.from)?;
        usize::try_from(n)
            .ok()
            .filter(|n| *n <= MAX_KEYS)
            .ok_or_else(|| bad(format!("{n} keys in one request; at most {MAX_KEYS} are allowed")))
    }

    fn key(&mut self) -> io::Result<Bytes> {
        self.bytes("key", MAX_KEY)
    }

    fn value(&mut self) -> io::Result<Bytes> {
        self.bytes("value", MAX_VALUE)
    }

    fn keys(&mut self) -> io::Result<Vec<Bytes>> {
        (0..self.count()?).map(|_| self.key()).collect()
    }

    fn bytes(&mut self, what: &str, limit: usize) -> io::Result<Bytes> {
        // An empty string costs something as well: its place in the list, and what the allocator adds.
        self.held.take(STRING_BYTES)?;
        let held = &mut self.held;
        read_grown(self.from, what, limit, |n| held.take(n))
    }
}

/// Reads u64 length + bytes, of at most `limit` bytes, calling `meter` with each number of bytes before it is held.
fn read_grown(
    from: &mut impl Read,
    what: &str,
    limit: usize,
    mut meter: impl FnMut(usize) -> io::Result<()>,
) -> io::Result<Bytes> {
    let len = read_u64(from)?;
    let len = usize::try_from(len)
        .ok()
        .filter(|len| *len <= limit)
        .ok_or_else(|| bad(format!("a {what} of {len} bytes; at most {limit} are allowed")))?;
    let mut out = Vec::new();
    while out.len() < len {
        let start = out.len();
        let n = (len - start).min(CHUNK);
        meter(n)?;
        out.resize(start + n, 0);
        if let Some(tail) = out.get_mut(start..) {
            from.read_exact(tail)?;
        }
    }
    Ok(out)
}

/// Bytes that are not the protocol.
pub(super) fn bad(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

fn put_len(out: &mut Vec<u8>, n: usize) {
    out.extend_from_slice(&(n as u64).to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

pub(super) fn read_u8(from: &mut impl Read) -> io::Result<u8> {
    let mut byte = [0];
    from.read_exact(&mut byte)?;
    let [byte] = byte;
    Ok(byte)
}

pub(super) fn read_u32(from: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn read_u64(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

pub(super) fn read_i64(from: &mut impl Read) -> io::Result<i64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(i64::from_le_bytes(bytes))
}

/// A value in a reply.
pub(super) fn read_value(from: &mut impl Read) -> io::Result<Bytes> {
    read_grown(from, "value", MAX_VALUE, |_| Ok(()))
}

/// The reply to LIST_KEYS.
pub(super) fn read_listing(from: &mut impl Read) -> io::Result<Vec<Bytes>> {
    let n = read_i64(from)?;
    if !(0..=MAX_LISTED).contains(&n) {
        return Err(bad(format!(
            "a listing of {n} keys; at most {MAX_LISTED} are allowed"
        )));
    }
    let mut held = 0usize;
    (0..n)
        .map(|_| {
            read_grown(from, "key", MAX_KEY, |n| {
                held = held.saturating_add(n);
                if held > 16 * MAX_REQUEST {
                    Err(bad("a listing of more than 1 GiB"))
                } else {
                    Ok(())
                }
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text
            .bytes()
            .filter(|b| !b.is_ascii_whitespace())
            .map(|b| (b as char).to_digit(16).unwrap() as u8)
            .collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }

    fn read(mut bytes: &[u8]) -> io::Result<Request> {
        let budget = Budget::new(usize::MAX);
        let request = Request::read(&mut bytes, &budget).map(|(request, _)| request);
        assert_eq!(budget.used(), 0);
        if request.is_ok() {
            assert!(bytes.is_empty(), "left over: {bytes:?}");
        }
        request
    }

    #[test]
    fn golden_requests_encode_and_decode_exactly_as_pytorch_writes_them() {
        let k = || b"/k".to_vec();
        let table = [
            (Request::Validate(MAGIC), "00 cef7853c"),
            (Request::Ping(0x0403_0201), "0d 01020304"),
            (
                Request::Set(k(), b"v1".to_vec()),
                "01 0200000000000000 2f6b 0200000000000000 7631",
            ),
            (
                Request::CompareSet {
                    key: k(),
                    expected: b"v1".to_vec(),
                    desired: b"v2".to_vec(),
                },
                "02 0200000000000000 2f6b 0200000000000000 7631 0200000000000000 7632",
            ),
            (Request::Get(k()), "03 0200000000000000 2f6b"),
            (
                Request::Add(b"/n".to_vec(), 5),
                "04 0200000000000000 2f6e 0500000000000000",
            ),
            (
                Request::Add(b"/n".to_vec(), -1),
                "04 0200000000000000 2f6e ffffffffffffffff",
            ),
            (
                Request::Check(vec![k(), b"/zz".to_vec()]),
                "05 0200000000000000 0200000000000000 2f6b 0300000000000000 2f7a7a",
            ),
            (
                Request::Wait(vec![k()]),
                "06 0100000000000000 0200000000000000 2f6b",
            ),
            (Request::NumKeys, "07"),
            (Request::Delete(b"/a".to_vec()), "08 0200000000000000 2f61"),
            (
                Request::Append(k(), b"+z".to_vec()),
                "09 0200000000000000 2f6b 0200000000000000 2b7a",
            ),
            (
                Request::MultiGet(vec![k(), b"/n".to_vec()]),
                "0a 0200000000000000 0200000000000000 2f6b 0200000000000000 2f6e",
            ),
            (
                Request::MultiSet(vec![(k(), b"1".to_vec()), (b"/n".to_vec(), Vec::new())]),
                "0b 0200000000000000 0200000000000000 2f6b 0100000000000000 31 \
                 0200000000000000 2f6e 0000000000000000",
            ),
            (Request::CancelWait, "0c"),
            (
                Request::QueuePush(k(), b"i".to_vec()),
                "0e 0200000000000000 2f6b 0100000000000000 69",
            ),
            (Request::QueuePop(k()), "0f 0200000000000000 2f6b"),
            (Request::QueueLen(k()), "10 0200000000000000 2f6b"),
            (Request::ListKeys, "11"),
            (
                Request::Barrier {
                    key: k(),
                    world_size: 1,
                },
                "12 0200000000000000 2f6b 0100000000000000",
            ),
        ];
        for (request, golden) in table {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            assert_eq!(bytes, hex(golden), "{request:?}");
            assert_eq!(read(&bytes).unwrap(), request);
        }
    }

    #[test]
    fn lengths_beyond_the_limits_are_refused_before_a_byte_is_held() {
        let huge = "ffffffffffffffff";
        for (what, bytes) in [
            ("key", format!("03 {huge}")),
            ("key", "03 0120000000000000".to_owned()),
            ("value", "01 0100000000000000 6b 0100800000000000".to_owned()),
            ("keys", format!("06 {huge}")),
            ("keys", "0a 0100020000000000".to_owned()),
            ("keys", "0b ffffffffffffff7f".to_owned()),
            ("opcode 19", "13".to_owned()),
            ("opcode 255", "ff".to_owned()),
        ] {
            let e = read(&hex(&bytes)).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::InvalidData, "{bytes}");
            assert!(e.to_string().contains(what), "{bytes}: {e}");
        }
    }

    #[test]
    fn a_request_cut_off_anywhere_is_the_end_of_the_stream_and_gives_its_budget_back() {
        let mut whole = Vec::new();
        Request::MultiSet(vec![
            (b"/k".to_vec(), vec![7; 200_000]),
            (b"/l".to_vec(), vec![1]),
        ])
        .encode(&mut whole);
        for cut in [0, 1, 5, 9, 17, 20, 70_000, whole.len() - 1] {
            assert_eq!(
                read(&whole[..cut]).unwrap_err().kind(),
                io::ErrorKind::UnexpectedEof,
                "{cut}"
            );
        }
    }

    #[test]
    fn unfinished_requests_beyond_the_budget_are_refused() {
        let mut whole = Vec::new();
        Request::Set(b"/k".to_vec(), vec![7; 200_000]).encode(&mut whole);
        let budget = Budget::new(150_000);
        let e = Request::read(&mut whole.as_slice(), &budget).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::OutOfMemory);
        assert_eq!(budget.used(), 0);
    }

    fn request() -> impl Strategy<Value = Request> {
        let b = || proptest::collection::vec(any::<u8>(), 0..40);
        let keys = || proptest::collection::vec(b(), 0..5);
        prop_oneof![
            (b(), b()).prop_map(|(k, v)| Request::Set(k, v)),
            (b(), b(), b()).prop_map(|(key, expected, desired)| Request::CompareSet {
                key,
                expected,
                desired
            }),
            (b(), any::<i64>()).prop_map(|(k, n)| Request::Add(k, n)),
            keys().prop_map(Request::Wait),
            keys().prop_map(Request::MultiGet),
            proptest::collection::vec((b(), b()), 0..5).prop_map(Request::MultiSet),
            (b(), any::<i64>()).prop_map(|(key, world_size)| Request::Barrier { key, world_size }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 300,
            rng_seed: proptest::test_runner::RngSeed::Fixed(1),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn any_request_round_trips(request in request()) {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            prop_assert_eq!(read(&bytes).unwrap(), request);
        }

        #[test]
        fn random_bytes_are_a_request_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let budget = Budget::new(usize::MAX);
            let mut rest = bytes.as_slice();
            while Request::read(&mut rest, &budget).is_ok() {}
            prop_assert_eq!(budget.used(), 0);
        }
    }
}
