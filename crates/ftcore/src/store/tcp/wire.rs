//! Requests and replies of PyTorch's TCPStore protocol as bytes; no sockets, no state.
//!
//! Little endian; a string is u64 length + bytes, a list u64 count + items (MULTI_SET: i64); a request is one opcode byte
//! + arguments, without frame, id or checksum. Reading checks each length against its limit first and then grows as
//! bytes arrive, never by what a length claims; bytes that are not the protocol are `io::ErrorKind::InvalidData`.

use std::io::{self, Read};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::store::keys::{MAX_KEY, MAX_KEYS, MAX_VALUE};

/// What a client says first, so that a stranger's bytes are not taken for requests.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;
/// Most bytes of one request; the largest honest one (a list of 131072 keys of usual length) is far below.
pub(super) const MAX_REQUEST: usize = 64 << 20;
/// Most keys a client takes in the reply to LIST_KEYS.
const MAX_LISTED: u64 = 1 << 24;
/// How much is read at once into a growing value.
const CHUNK: usize = 64 * 1024;

/// Replies of one byte.
pub(super) const READY: u8 = 0;
pub(super) const NOT_READY: u8 = 1;
pub(super) const STOP_WAITING: u8 = 0;
pub(super) const WAIT_CANCELED: u8 = 1;

/// The opcode of [`Request::CancelWait`], which the server looks for while a wait is pending.
pub(super) const CANCEL_WAIT: u8 = 12;

type Bytes = Vec<u8>;

/// One request. Keys are as on the wire: a client's begin with `/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    Validate(u32),
    Set(Bytes, Bytes),
    CompareSet { key: Bytes, expected: Bytes, desired: Bytes },
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
    Barrier { key: Bytes, world_size: i64 },
}

impl Request {
    /// Appends the request to `out`.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Validate(magic) => op(out, 0).extend_from_slice(&magic.to_le_bytes()),
            Self::Set(key, value) => put(put(op(out, 1), key), value).truncate(usize::MAX),
            Self::CompareSet { key, expected, desired } => {
                put(put(put(op(out, 2), key), expected), desired);
            }
            Self::Get(key) => drop_ref(put(op(out, 3), key)),
            Self::Add(key, amount) => put(op(out, 4), key).extend_from_slice(&amount.to_le_bytes()),
            Self::Check(keys) => put_keys(op(out, 5), keys),
            Self::Wait(keys) => put_keys(op(out, 6), keys),
            Self::NumKeys => drop_ref(op(out, 7)),
            Self::Delete(key) => drop_ref(put(op(out, 8), key)),
            Self::Append(key, value) => drop_ref(put(put(op(out, 9), key), value)),
            Self::MultiGet(keys) => put_keys(op(out, 10), keys),
            Self::MultiSet(pairs) => {
                put_len(op(out, 11), pairs.len());
                for (key, value) in pairs {
                    put(put(out, key), value);
                }
            }
            Self::CancelWait => drop_ref(op(out, CANCEL_WAIT)),
            Self::Ping(nonce) => op(out, 13).extend_from_slice(&nonce.to_le_bytes()),
            Self::QueuePush(key, value) => drop_ref(put(put(op(out, 14), key), value)),
            Self::QueuePop(key) => drop_ref(put(op(out, 15), key)),
            Self::QueueLen(key) => drop_ref(put(op(out, 16), key)),
            Self::ListKeys => drop_ref(op(out, 17)),
            Self::Barrier { key, world_size } => put(op(out, 18), key).extend_from_slice(&world_size.to_le_bytes()),
        }
    }
}
