//! Rank 0's record in the store, as text: where it can be met, or why it cannot. Written by another process, so nothing is believed (INV-10).

use std::net::IpAddr;

use crate::Error;

use super::wire::{Frame, Kind, MAX_TEXT, TOKEN};

/// Where rank 0 is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Published {
    pub(crate) token: [u8; TOKEN],
    pub(crate) port: u16,
    pub(crate) host: String,
    pub(crate) address: IpAddr,
}

/// A token as text.
pub(crate) fn hex(token: [u8; TOKEN]) -> String {
    format!("{:032x}", u128::from_be_bytes(token))
}

fn unhex(text: &str) -> Option<[u8; TOKEN]> {
    let is_one = text.len() == 2 * TOKEN && text.bytes().all(|b| b.is_ascii_hexdigit());
    let number = u128::from_str_radix(text, 16).ok().filter(|_| is_one);
    number.map(u128::to_be_bytes)
}

impl Published {
    pub(crate) fn encode(&self) -> String {
        let token = hex(self.token);
        format!("2 {token} {} {} {}", self.port, self.host, self.address)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut parts = text.split(' ');
        if parts.next() != Some("2") {
            return None;
        }
        let token = unhex(parts.next()?)?;
        let port = parts.next()?.parse().ok()?;
        let host = parts.next()?.to_string();
        let address = parts.next()?.parse().ok()?;
        Some(Self {
            token,
            port,
            host,
            address,
        })
    }
}

/// The record of a rank 0 that cannot be met.
pub(crate) fn refused(error: &Error) -> String {
    let frame = Frame::of_error(Kind::Refused, 0, error, error.context().peer);
    format!("0 {} {}", frame.number, frame.text)
}

/// Why rank 0 cannot be met, if that is what its record says, as rank `own` tells it.
pub(crate) fn refusal(record: &[u8], own: u32) -> Option<Error> {
    let text = std::str::from_utf8(record)
        .ok()
        .filter(|t| t.len() <= 2 * MAX_TEXT)?;
    let (number, reason) = text.strip_prefix("0 ")?.split_once(' ')?;
    Some(Frame::new(Kind::Refused, 0, number.parse().ok()?, reason).error(own))
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
        };
        let back = Published::decode(p.encode().as_bytes()).unwrap();
        assert_eq!(back, p);
        let long = format!("2 {} 1 h 127.0.0.1", "07".repeat(TOKEN + 1));
        let other = format!("1 {} 1 h 127.0.0.1", "07".repeat(TOKEN));
        for garbage in ["", "2", "2 00 1 h 127.0.0.1", "1 x", "2 zz", &long, &other] {
            assert!(Published::decode(garbage.as_bytes()).is_none(), "{garbage}");
            assert!(refusal(garbage.as_bytes(), 1).is_none(), "{garbage}");
        }
    }

    #[test]
    fn a_record_may_say_why_rank_0_cannot_be_met() {
        let e = Error::new(ErrorKind::Backend, "no sockets here");
        let back = refusal(refused(&e).as_bytes(), 1).unwrap();
        assert_eq!(back.kind(), ErrorKind::Backend);
        assert!(
            back.to_string().contains("rank 0 reports: no sockets here"),
            "{back}"
        );
        for garbage in ["0", "0 ", "0 x y", "0 1", "0 -1 y"] {
            assert!(refusal(garbage.as_bytes(), 1).is_none(), "{garbage}");
        }
    }
}
