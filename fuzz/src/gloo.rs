//! Gloo: the greeting, control frames and headers that come off a connection, and the address card from the store.

#[allow(dead_code, unused_imports, reason = "included for its decoders")]
#[path = "../../crates/backend-gloo/src/rendezvous/card.rs"]
mod card;
#[allow(dead_code, unused_imports, reason = "included for its decoders")]
#[path = "../../crates/backend-gloo/src/wire.rs"]
mod wire;

use card::Card;
use ftcore::Epoch;
use wire::{Control, ControlKind, DataHeader, Hello, PieceHeader};

/// What is accepted means the same after it was written and read again.
macro_rules! stable {
    ($t:ty, $data:expr) => {
        if let Some(bytes) = $data.first_chunk::<{ <$t>::BYTES }>()
            && let Some(frame) = <$t>::decode(bytes)
        {
            assert_eq!(<$t>::decode(&frame.encode()), Some(frame), "{}", stringify!($t));
        }
    };
}

/// Decodes `data` as everything that it could be.
pub fn frames(data: &[u8]) {
    stable!(Hello, data);
    stable!(Control, data);
    stable!(DataHeader, data);
    stable!(PieceHeader, data);
    if let Some(frame) = data.first_chunk().and_then(Control::decode) {
        let most = match frame.kind {
            // The number of elements of an offer, which is compared with what the receiver expects.
            ControlKind::Offer => u64::MAX,
            ControlKind::Data => wire::SEGMENT as u64,
            // The number of elements of an offer whose bytes follow; these are compared with the limit, too.
            ControlKind::Inline => wire::EAGER.max(wire::INLINE) as u64,
            _ => wire::MAX_TEXT as u64,
        };
        assert!(
            frame.length <= most,
            "a payload of {} bytes would be read",
            frame.length
        );
    }
    if let Some(card) = Card::decode(data) {
        assert_eq!(Card::decode(card.encode().as_bytes()), Some(card));
    }
    if let Ok(text) = std::str::from_utf8(data) {
        let cut = wire::cut(text);
        assert!(cut.len() <= wire::MAX_TEXT && text.starts_with(cut));
        // A character has at most 4 bytes: no more than 3 are lost.
        assert!(cut.len() + 3 >= text.len().min(wire::MAX_TEXT));
    }
    for &code in data.iter().take(4) {
        // Unknown codes of a later version become some kind.
        let _ = wire::kind_of(code);
    }
}

/// Valid bytes.
pub fn seeds() -> Vec<Vec<u8>> {
    let collective = ftcore::Collective::Barrier;
    let header = DataHeader {
        epoch: Epoch(3),
        seq: 41,
        round: 2,
        algorithm: 1,
        contributors: 2,
        length: 4096,
        fingerprint: collective.fingerprint(),
        lent: false,
    };
    let hello = Hello {
        version: wire::VERSION,
        purpose: wire::Purpose::Data,
        rank: 1,
        world: 4,
        connections: 1,
        links: 1,
        epoch: Epoch(3),
        constants: 7,
        nonce: 0x0123_4567_89AB_CDEF,
        process: 0xFEDC_BA98_7654_3210,
        line: 5,
    };
    let piece = PieceHeader {
        epoch: Epoch(3),
        seq: 41,
        round: 2,
        offset: 1 << 18,
        length: 1 << 18,
    };
    let control = Control {
        kind: ControlKind::Abort,
        code: 0,
        epoch: Epoch(3),
        id: 9,
        a: 1,
        b: 2,
        length: 64,
    };
    let card = Card {
        nonce: 0x0123_4567_89AB_CDEF,
        host: "boot+net:[4026531840]".to_string(),
        remote: std::net::SocketAddr::from(([10, 0, 0, 4], 4103)),
        local: None,
        memory: Some("oxccl-gloo-12-ab".to_string()),
        process: 0xFEDC_BA98_7654_3210,
    };
    // Not one byte off, or a run that begins from them begins from noise.
    assert_eq!(DataHeader::decode(&header.encode()), Some(header));
    assert_eq!(Hello::decode(&hello.encode()), Some(hello));
    assert_eq!(PieceHeader::decode(&piece.encode()), Some(piece));
    assert_eq!(Control::decode(&control.encode()), Some(control));
    assert_eq!(Card::decode(card.encode().as_bytes()), Some(card.clone()));
    vec![
        header.encode().to_vec(),
        hello.encode().to_vec(),
        control.encode().to_vec(),
        piece.encode().to_vec(),
        card.encode().into_bytes(),
        // A text that is cut in the middle of a character, if one is not careful.
        format!("a{}", "é".repeat(wire::MAX_TEXT / 2 + 9)).into_bytes(),
    ]
}
