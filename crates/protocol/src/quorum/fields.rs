//! What a replica says of itself, checked when it asks: one that is refused here never gets into a quorum, where the others would have
//! to live with it. And how much is kept of any text of a peer.

use std::net::Ipv6Addr;

use ftcore::{Error, Result};

use crate::member::{MAX_ID_BYTES, Member};

/// Texts of peers that are kept or passed on are cut to this many bytes.
pub(super) const MAX_REASON_BYTES: usize = 1024;
/// The longest host name, lineage and incarnation, in bytes.
const MAX_TEXT: usize = 256;
/// The longest `data` of a member, in bytes: quorums repeat it for every member.
const MAX_DATA: usize = 16 * 1024;

/// At most 1 KiB of a peer's text.
pub fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_REASON_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Whether this may be a replica's id. It stands on a line of its own where ranks agree on a source. Errors: `InvalidArgument`.
pub fn check_id(id: &str) -> Result<()> {
    if id.is_empty() || id.len() > MAX_ID_BYTES {
        return Err(Error::invalid(format!(
            "a replica_id has 1 to {MAX_ID_BYTES} bytes, this one has {}",
            id.len()
        )));
    }
    if id.chars().any(char::is_control) {
        let shown: String = id.chars().take(80).collect();
        return Err(Error::invalid(format!(
            "replica_id is '{}', and should be without line breaks and other control characters",
            shown.escape_debug()
        )));
    }
    Ok(())
}

/// Errors: `InvalidArgument`, naming the field, its value and what it should be.
pub(super) fn check(member: &Member) -> Result<()> {
    let id = &member.replica_id;
    check_id(id)?;
    let wrong = |field: &str, value: &str, wanted: &str| {
        let shown: String = cut(value).chars().take(80).collect();
        Err(Error::invalid(format!(
            "replica {id}: {field} is '{shown}', and should be {wanted}"
        )))
    };
    let address = &member.address;
    let place = address
        .strip_prefix("http://")
        .or_else(|| address.strip_prefix("https://"));
    if !place.is_some_and(is_host_and_port) {
        return wrong(
            "address",
            address,
            "the URL of its manager server, http://host:port",
        );
    }
    if !is_host_and_port(&member.store_address) {
        return wrong("store_address", &member.store_address, "host:port of its store");
    }
    for (field, value, least) in [
        ("step", member.step.0, 0),
        ("commit_failures", member.commit_failures, 0),
        ("batches_committed", member.batches_committed, 0),
        (
            "world_size",
            i64::try_from(member.world_size).unwrap_or(i64::MAX),
            1,
        ),
    ] {
        if value < least || (field == "world_size" && value > i64::from(u32::MAX)) {
            return wrong(
                field,
                &value.to_string(),
                &format!("at least {least}, and a count"),
            );
        }
    }
    for (field, text, most) in [
        ("lineage", &member.lineage, MAX_TEXT),
        ("incarnation", &member.incarnation, MAX_TEXT),
        ("data", &member.data, MAX_DATA),
    ] {
        if text.len() > most {
            return wrong(field, text, &format!("at most {most} bytes, not {}", text.len()));
        }
    }
    Ok(())
}

/// `host:port` with a port that can be connected to; an IPv6 literal stands in brackets.
fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let is_port = port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|p| p > 0);
    let is_host = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        // A link-local address may name its interface.
        Some(literal) => literal
            .split('%')
            .next()
            .is_some_and(|a| a.parse::<Ipv6Addr>().is_ok()),
        None => {
            let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
            !host.is_empty() && host.bytes().all(is_allowed)
        }
    };
    is_port && is_host && host.len() <= MAX_TEXT
}
