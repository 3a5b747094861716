//! Rank 0's record in the store, as text: where it can be met, or why it cannot. Written by another process, so nothing is believed (INV-10).

use std::net::IpAddr;

use ftcore::Error;

use super::wire::{Frame, Kind, MAX_TEXT, TOKEN};

/// Bytes of a unique id of NCCL.
pub(crate) const ID: usize = 128;
/// One.
pub(crate) type Id = [u8; ID];

/// Where rank 0 is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Published {
    pub(crate) token: [u8; TOKEN],
    pub(crate) port: u16,
    pub(crate) host: String,
    pub(crate) address: IpAddr,
    pub(crate) id: Option<Id>,
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub(crate) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut out = [0u8; N];
    if text.len() != 2 * N {
        return None;
    }
    for (i, slot) in out.iter_mut().enumerate() {
        *slot = u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok()?;
    }
    Some(out)
}

impl Published {
    pub(crate) fn encode(&self) -> String {
        let id = self.id.as_ref().map_or_else(|| "-".to_string(), |id| hex(id));
        format!(
            "1 {} {} {} {} {id}",
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
        let token = unhex(parts.next()?)?;
        let port = parts.next()?.parse().ok()?;
        let host = parts.next()?.to_string();
        let address = parts.next()?.parse().ok()?;
        let id = match parts.next()? {
            "-" => None,
            hex => Some(unhex(hex)?),
        };
        Some(Self {
            token,
            port,
            host,
            address,
            id,
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

    use ftcore::ErrorKind;

    use super::*;

    #[test]
    fn a_record_survives_the_store_and_garbage_does_not() {
        let p = Published {
            token: [7; TOKEN],
            port: 4103,
            host: "boot-1".into(),
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            id: Some([9; ID]),
        };
        let back = Published::decode(p.encode().as_bytes()).unwrap();
        assert_eq!(
            (back.token, back.port, back.host, back.id),
            (p.token, p.port, p.host, p.id)
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
