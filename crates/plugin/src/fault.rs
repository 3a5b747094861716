//! Errors across the boundary: kind, code, rank, peer and text, and the typed reason of an unusable backend.

use std::error::Error as _;
use std::time::{Duration, Instant};

use ftcore::registry::Unavailable;
use ftcore::{DType, Epoch, Error, ErrorKind, printable};

use crate::abi::{self, FAILED, Fault, Growing, OK};

/// Error kinds with their stable codes; the names in C are `abi::ERROR_KINDS`.
const KINDS: [(u32, ErrorKind); 16] = [
    (1, ErrorKind::InvalidArgument),
    (2, ErrorKind::Unsupported),
    (3, ErrorKind::InvalidState),
    (4, ErrorKind::Timeout),
    (5, ErrorKind::PeerLost),
    (6, ErrorKind::Protocol),
    (7, ErrorKind::Mismatch),
    (8, ErrorKind::Aborted),
    (9, ErrorKind::Poisoned),
    (10, ErrorKind::NotFound),
    (11, ErrorKind::Conflict),
    (12, ErrorKind::Unavailable),
    (13, ErrorKind::Io),
    (14, ErrorKind::Corrupt),
    (15, ErrorKind::Backend),
    (16, ErrorKind::Internal),
];

/// Ends each part of `Fault::detail`.
const END: char = '\u{1f}';

/// Copies as much of `text` as fits, up to a whole character; the number of bytes.
fn put(into: &mut [u8], text: &str) -> u32 {
    let mut end = text.len().min(into.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    for (to, from) in into.iter_mut().zip(text.bytes().take(end)) {
        *to = from;
    }
    u32::try_from(end).unwrap_or(0)
}

fn get(from: &[u8], len: u32) -> String {
    let bytes = from.get(..len as usize).unwrap_or(from);
    String::from_utf8_lossy(bytes).into_owned()
}

/// The other side's text, for an error that is shown and logged without a look at where its text is from.
fn said(from: &[u8], len: u32) -> String {
    printable::one_line(&get(from, len), from.len()).into_owned()
}

/// An error as it crosses. Its operation stays behind: the caller knows which one it called.
pub(crate) fn encode(error: &Error) -> Fault {
    let mut fault = Fault::empty();
    fault.kind = KINDS
        .iter()
        .find(|(_, k)| *k == error.kind())
        .map_or(15, |(code, _)| *code);
    let context = error.context();
    let mut flag = |bit: u32, set: bool| {
        if set {
            fault.flags |= bit;
        }
    };
    flag(abi::FAULT_CODE, error.code().is_some());
    flag(abi::FAULT_RANK, context.rank.is_some());
    flag(abi::FAULT_PEER, context.peer.is_some());
    flag(abi::FAULT_EPOCH, context.epoch.is_some());
    flag(abi::FAULT_SEQ, context.seq.is_some());
    flag(
        abi::FAULT_DATA,
        context.dtype.is_some() && context.count.is_some(),
    );
    flag(abi::FAULT_RETRYABLE, error.is_retryable());
    fault.code = error.code().unwrap_or(0);
    fault.rank = context.rank.unwrap_or(0);
    fault.peer = context.peer.unwrap_or(0);
    fault.epoch = context.epoch.map_or(0, |epoch| epoch.0);
    fault.seq = context.seq.unwrap_or(0);
    fault.count = context.count.unwrap_or(0) as u64;
    fault.dtype = context.dtype.map_or(abi::NONE, |d| u32::from(d.code()));
    let mut text = match &context.peer_address {
        Some(address) => format!("({address}) {}", error.message()),
        None => error.message().to_string(),
    };
    if let Some(reason) = Unavailable::of(error) {
        let (code, parts) = reason.encode();
        fault.reason = code;
        let parts: String = parts.into_iter().flat_map(|p| [p, END.to_string()]).collect();
        fault.detail_len = put(&mut fault.detail, &parts);
    } else if let Some(cause) = error.source().map(ToString::to_string) {
        // The cause of a poisoned group is what one needs to read first.
        if !text.contains(&cause) {
            text = format!("{text}; cause: {cause}");
        }
    }
    fault.text_len = put(&mut fault.text, &text);
    fault
}

/// The error in a fault that the other side filled in. `who` is said where it filled in nothing that makes sense.
pub(crate) fn decode(fault: &Fault, who: &str) -> Error {
    let kind = KINDS.iter().find(|(code, _)| *code == fault.kind);
    let text = said(&fault.text, fault.text_len);
    let mut error = match kind {
        None => Error::new(
            ErrorKind::Backend,
            format!("{who} failed with the unknown error kind {}: {text}", fault.kind),
        ),
        Some((_, kind)) if text.is_empty() => Error::new(*kind, format!("{who} failed without a text")),
        Some((_, kind)) => Error::new(*kind, text),
    };
    let has = |bit: u32| fault.flags & bit != 0;
    if has(abi::FAULT_CODE) {
        error = error.with_code(fault.code);
    }
    if has(abi::FAULT_RANK) {
        error = error.with_rank(fault.rank);
    }
    if has(abi::FAULT_PEER) {
        error = error.with_peer(fault.peer);
    }
    if has(abi::FAULT_EPOCH) {
        error = error.with_epoch(Epoch(fault.epoch));
    }
    if has(abi::FAULT_SEQ) {
        error = error.with_seq(fault.seq);
    }
    if has(abi::FAULT_DATA)
        && let Some(dtype) = u8::try_from(fault.dtype).ok().and_then(DType::from_code)
    {
        error = error.with_data(dtype, usize::try_from(fault.count).unwrap_or(usize::MAX));
    }
    if fault.reason != 0 {
        let detail = get(&fault.detail, fault.detail_len);
        let parts: Vec<String> = detail.split_terminator(END).map(str::to_string).collect();
        if let Some(reason) = Unavailable::decode(fault.reason, &parts) {
            error = error.with_source(reason);
        }
    }
    error
}

/// What a callee returns: fills in the caller's fault if there is one to tell.
///
/// # Safety
/// `fault` is null or the fault of the call that is running.
pub(crate) unsafe fn answer(result: Result<(), Error>, fault: *mut Fault) -> i32 {
    match result {
        Ok(()) => OK,
        Err(error) => {
            // A caller without a (sound) fault is told by the return value alone.
            // SAFETY: by the contract; `write` checks null, alignment and size.
            drop(unsafe { abi::write(fault, &encode(&error)) });
            FAILED
        }
    }
}

/// What a caller makes of an answer. `who` is for messages.
pub(crate) fn check(status: i32, fault: &Fault, who: &str) -> Result<(), Error> {
    if status == OK {
        return Ok(());
    }
    // SAFETY: our own struct: `read` only takes what its size says, which the callee may have changed.
    match unsafe { abi::read(&raw const *fault) } {
        Ok(fault) => Err(decode(&fault, who)),
        Err(text) => Err(Error::new(
            ErrorKind::Protocol,
            format!("{who} failed and damaged the fault: {text}"),
        )),
    }
}

/// The longest time-out that crosses, in seconds, a hundred years: the other side adds it to its clock, be that one of nanoseconds.
const LONGEST: u64 = 100 * 365 * 24 * 3600;

/// What is left until `deadline`, rounded up so that the other side never gives up early.
pub(crate) fn milliseconds(deadline: Instant) -> i64 {
    whole(ftcore::time_left(deadline))
}

/// A time-out, rounded up, as it crosses: never negative, at most [`LONGEST`].
pub(crate) fn whole(timeout: Duration) -> i64 {
    // Not through a 128-bit number: this is in the way of every call.
    let millis =
        timeout.as_secs().min(LONGEST) * 1000 + u64::from(timeout.subsec_nanos().div_ceil(1_000_000));
    millis.cast_signed()
}

/// The instant that a time-out names.
pub(crate) fn deadline(milliseconds: i64) -> Instant {
    ftcore::deadline_in(Duration::from_millis(u64::try_from(milliseconds).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_out_crosses_rounded_up_and_can_be_added_to_a_clock_of_nanoseconds() {
        assert_eq!(whole(Duration::from_nanos(1)), 1);
        assert_eq!(whole(Duration::from_millis(1500)), 1500);
        assert_eq!(milliseconds(Instant::now()), 0);
        let longest = whole(Duration::MAX).checked_mul(1_000_000).unwrap();
        // A clock that has run for a hundred years too.
        assert!(longest.checked_add(longest).is_some());
    }

    #[test]
    fn an_error_crosses_with_everything_that_one_acts_on() {
        let error = Error::new(ErrorKind::PeerLost, "closed")
            .with_op("all_reduce")
            .with_rank(2)
            .with_peer(1)
            .with_epoch(Epoch(7))
            .with_seq(41)
            .with_data(DType::BF16, 12)
            .with_code(-9);
        let back = decode(&encode(&error), "p").with_op("all_reduce");
        assert_eq!(back.to_string(), error.to_string());
        assert_eq!(back.kind(), error.kind());
        for (_, kind) in KINDS {
            assert_eq!(decode(&encode(&Error::new(kind, "x")), "p").kind(), kind);
        }
    }

    #[test]
    fn a_typed_reason_and_the_first_cause_cross() {
        let reason = Unavailable::LibraryNotFound {
            library: "l".into(),
            searched: vec!["/a".into(), String::new(), "/b".into()],
        };
        let back = decode(&encode(&reason.clone().into()), "p");
        assert_eq!(Unavailable::of(&back), Some(&reason));
        let poisoned = Error::new(ErrorKind::Poisoned, "failed before").with_source(Error::timeout("rank 3"));
        let back = decode(&encode(&poisoned), "p");
        assert!(
            back.to_string().contains("failed before; cause: rank 3"),
            "{back}"
        );
    }

    #[test]
    fn the_text_of_a_plugin_s_error_neither_breaks_a_log_line_nor_acts_on_a_terminal() {
        let reason = Unavailable::InitFailed {
            code: None,
            text: "\u{1b}[2J\u{202e}no".into(),
        };
        for error in [Error::invalid("a\r\nb \u{1b}[31m\u{2066}c"), reason.into()] {
            let back = decode(&encode(&error), "p");
            let shown = format!("{back} {back:?}");
            assert!(
                !shown.contains(printable::is_active) && !back.to_string().contains('\n'),
                "{shown:?}"
            );
        }
    }

    #[test]
    fn a_long_text_is_cut_at_a_character_and_garbage_stays_an_error() {
        let long = "ä".repeat(2000);
        let back = decode(&encode(&Error::invalid(long.clone())), "p");
        assert!(long.starts_with(back.message()) && back.message().len() > 1000);
        let mut fault = Fault::empty();
        fault.kind = 99;
        fault.text_len = u32::MAX;
        assert_eq!(decode(&fault, "p").kind(), ErrorKind::Backend);
        fault.size = 3;
        assert_eq!(check(1, &fault, "p").unwrap_err().kind(), ErrorKind::Protocol);
        assert!(check(OK, &fault, "p").is_ok());
    }
}
