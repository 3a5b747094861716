//! Rank 0's record in the store, as text: where it can be met, or why it cannot. Written by another process, so nothing is believed (INV-10).

use std::net::IpAddr;

use crate::Error;

use super::wire::{Frame, Kind, MAX_TEXT, TOKEN};

/// The most bytes of a gift.
pub(crate) const MAX_GIFT: usize = 4096;

/// Where rank 0 is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Published {
    pub(crate) token: [u8; TOKEN],
    pub(crate) port: u16,
    pub(crate) host: String,
    pub(crate) address: IpAddr,
    /// What rank 0 gives out: a library's unique id.
    pub(crate) gift: Option<Vec<u8>>,
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// `None` for a text that is none, or of more than [`MAX_GIFT`] bytes.
pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() || pairs.len() > MAX_GIFT {
        return None;
    }
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    pairs.iter().map(byte).collect()
}

impl Published {
    pub(crate) fn encode(&self) -> String {
        let gift = self
            .gift
            .as_ref()
            .map_or_else(|| "-".to_string(), |gift| hex(gift));
        format!(
            "1 {} {} {} {} {gift}",
            hex(&self.token),
            self.port,
            self.host,
            self.address
        )
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut parts = text.split(' ');
        if parts.next() != Some("1") {
            return None;
        }
        let token = unhex(parts.next()?)?.try_into().ok()?;
        let port = parts.next()?.parse().ok()?;
        let host = parts.next()?.to_string();
        let address = parts.next()?.parse().ok()?;
        let gift = match parts.next()? {
            "-" => None,
            hex => Some(unhex(hex)?),
        };
        Some(Self {
            token,
            port,
            host,
            address,
            gift,
        })
    }
}

/// The record of a rank 0 that cannot be met.
pub(crate) fn refused(error: &Error) -> String {
    let frame = Frame::of_error(Kind::Refused, 0, error, error.context().peer);
    format!("0 {} {}", frame.number, frame.text)
}

/// Why rank 0 cannot be met, if that is what its record says.
pub(crate) fn refusal(record: &[u8]) -> Option<Error> {
    let text = std::str::from_utf8(record)
        .ok()
        .filter(|t| t.len() <= 2 * MAX_TEXT)?;
    let (number, reason) = text.strip_prefix("0 ")?.split_once(' ')?;
    Some(Frame::new(Kind::Refused, 0, number.parse().ok()?, reason).error())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use crate::ErrorKind;

    use super::*;

    #[test]
    fn a_record_survives_the_store_and_garbage_does_not() {
        let p = Published {
            token: [7; TOKEN],
            port: 4103,
            host: "boot-1".into(),
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            gift: Some(vec![9; 128]),
        };
        let back = Published::decode(p.encode().as_bytes()).unwrap();
        assert_eq!(
            (back.token, back.port, back.host, back.gift),
            (p.token, p.port, p.host, p.gift)
        );
        for garbage in ["", "1", "1 00 1 h 127.0.0.1 -", "2 x", "1 zz"] {
            assert!(Published::decode(garbage.as_bytes()).is_none(), "{garbage}");
            assert!(refusal(garbage.as_bytes()).is_none(), "{garbage}");
        }
    }

    #[test]
    fn a_record_may_say_why_rank_0_cannot_be_met() {
        let e = Error::new(ErrorKind::Unsupported, "no sockets here");
        let back = refusal(refused(&e).as_bytes()).unwrap();
        assert_eq!(back.kind(), ErrorKind::Unsupported);
        assert!(
            back.to_string().contains("rank 0 reports: no sockets here"),
            "{back}"
        );
        for garbage in ["0", "0 ", "0 x y", "0 1", "0 -1 y"] {
            assert!(refusal(garbage.as_bytes()).is_none(), "{garbage}");
        }
    }
}
