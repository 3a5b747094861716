//! What a rank publishes in the store: where it listens, on which host it is, its secret, the name of its Unix socket, and its process.

use std::net::SocketAddr;

/// What a rank publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Card {
    pub(super) nonce: u64,
    pub(super) host: String,
    pub(super) remote: SocketAddr,
    pub(super) local: Option<SocketAddr>,
    /// The abstract name at which ranks of this host are given shared memory.
    pub(super) memory: Option<String>,
    /// The number of its process.
    pub(super) process: u64,
}

impl Card {
    /// One line of text.
    pub(super) fn encode(&self) -> String {
        let local = self.local.map_or("-".to_string(), |a| a.to_string());
        let memory = self.memory.as_deref().unwrap_or("-");
        format!(
            "oxccl-gloo {:016x} {} {} {local} {memory} {:016x}",
            self.nonce, self.host, self.remote, self.process
        )
    }

    /// `None` if it is not what `encode` writes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut fields = text.split(' ');
        if fields.next()? != "oxccl-gloo" {
            return None;
        }
        let nonce = u64::from_str_radix(fields.next()?, 16).ok()?;
        let host = fields.next()?.to_string();
        let remote = fields.next()?.parse().ok()?;
        let local = match fields.next()? {
            "-" => None,
            address => Some(address.parse().ok()?),
        };
        let memory = match fields.next()? {
            "-" => None,
            name => Some(name.to_string()),
        };
        let process = u64::from_str_radix(fields.next()?, 16).ok()?;
        fields.next().is_none().then_some(Self {
            nonce,
            host,
            remote,
            local,
            memory,
            process,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_round_trips_and_anything_else_is_refused() {
        let card = Card {
            nonce: 0x0123_4567_89AB_CDEF,
            host: "boot+net:[4026531840]".into(),
            remote: "10.0.0.4:4103".parse().unwrap(),
            local: Some("127.0.0.1:4103".parse().unwrap()),
            memory: Some("oxccl-gloo-12-ab".into()),
            process: 0xFEDC_BA98,
        };
        let text = card.encode();
        assert_eq!(Card::decode(text.as_bytes()), Some(card.clone()));
        let remote_only = Card {
            local: None,
            memory: None,
            ..card
        };
        assert_eq!(
            Card::decode(remote_only.encode().as_bytes()),
            Some(remote_only.clone())
        );
        for bad in [
            "",
            "oxccl-gloo",
            "hello there",
            &format!("{text} more"),
            &text.replace("4103", "x"),
        ] {
            assert_eq!(Card::decode(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(Card::decode(&[0xFF, 0xFE]), None);
    }
}
