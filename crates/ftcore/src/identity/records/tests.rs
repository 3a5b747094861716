//! Records between two ends, and what a party between them may do to their bytes.

use proptest::prelude::*;

use super::*;
use crate::Epoch;
use crate::identity::Credentials;
use crate::identity::hello::{Handshake, Topic};

/// The two ends of a connection: caller and listener.
type Ends = [(Sealer, Opener); 2];

fn ends_of(topic: Topic) -> Ends {
    let credentials = Credentials::in_memory("job-7", 1).with_encryption(true);
    let mut caller = Handshake::call(credentials.clone(), topic).unwrap();
    let mut listener = Handshake::listen(credentials, topic).unwrap();
    while !(caller.is_done() && listener.is_done()) {
        for (from, to) in [(true, false), (false, true)] {
            let (from, to) = match (from, to) {
                (true, _) => (&mut caller, &mut listener),
                _ => (&mut listener, &mut caller),
            };
            let n = from.outgoing().len().min(to.room().len());
            to.room()[..n].copy_from_slice(&from.outgoing()[..n]);
            from.sent(n);
            to.received(n).unwrap();
        }
    }
    [caller, listener].map(|end| end.into_records().unwrap().unwrap())
}

fn ends() -> Ends {
    ends_of(Topic::new("gloo", Epoch(7), 3, 1))
}

/// The record of `text`.
fn record(sealer: &mut Sealer, text: &[u8]) -> Vec<u8> {
    sealer.seal(&[IoSlice::new(text)], 0).unwrap();
    let record = sealer.pending().to_vec();
    assert_eq!(sealer.sent(record.len()), text.len());
    record
}

/// All text that `bytes` open to, and how it ended.
fn opened(opener: &mut Opener, bytes: &[u8], at_once: usize) -> (Vec<u8>, Result<(), NotAuthentic>) {
    let mut text = Vec::new();
    let mut bytes = bytes;
    loop {
        let mut some = [0; 1000];
        match opener.take(&mut some) {
            Ok(0) if bytes.is_empty() => return (text, Ok(())),
            Ok(0) => {
                let room = opener.room();
                let n = room.len().min(at_once).min(bytes.len());
                room[..n].copy_from_slice(&bytes[..n]);
                opener.received(n);
                bytes = &bytes[n..];
            }
            Ok(n) => text.extend_from_slice(&some[..n]),
            Err(e) => return (text, Err(e)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn what_is_sealed_opens_however_it_is_cut(lengths in prop::collection::vec(1usize..200_000, 1..6), at_once in 1usize..100_000, cut in 0usize..70_000) {
        let [(mut sealer, _), (_, mut opener)] = ends();
        let mut sent = Vec::new();
        let mut wire = Vec::new();
        for (n, length) in lengths.into_iter().enumerate() {
            let text: Vec<u8> = (0..length).map(|i| (i * 31 + n) as u8).collect();
            let (one, two) = text.split_at(cut.min(length));
            let mut done = 0;
            while done < length {
                sealer.seal(&[IoSlice::new(one), IoSlice::new(two)], done).unwrap();
                // Handed over once more while it is on its way: nothing happens.
                let record = sealer.pending().to_vec();
                sealer.seal(&[IoSlice::new(one), IoSlice::new(two)], done).unwrap();
                prop_assert!(record == sealer.pending() && record.len() <= MOST + OVERHEAD);
                prop_assert_eq!(sealer.sent(1), 0);
                wire.extend_from_slice(&record);
                done += sealer.sent(record.len() - 1);
            }
            sent.extend(text);
        }
        let (text, end) = opened(&mut opener, &wire, at_once);
        prop_assert!(end.is_ok() && text == sent && opener.is_empty());
    }

    #[test]
    fn a_record_that_was_changed_does_not_open(at in 0usize..(3 * (300 + OVERHEAD)), flip in 1u8..) {
        let [(mut sealer, _), (_, mut opener)] = ends();
        let texts: Vec<Vec<u8>> = (0..3).map(|n| vec![n; 300]).collect();
        let mut wire: Vec<u8> = texts.iter().flat_map(|text| record(&mut sealer, text)).collect();
        wire[at] ^= flip;
        // A longer length waits for more, which comes.
        wire.extend(record(&mut sealer, &[9; MOST]));
        let (text, end) = opened(&mut opener, &wire, 70_000);
        prop_assert_eq!(end, Err(NotAuthentic));
        prop_assert_eq!(text, texts[..at / (300 + OVERHEAD)].concat());
        // It stays so.
        prop_assert!(opener.open().is_err());
    }
}

#[test]
fn a_record_that_was_left_out_repeated_moved_cut_or_made_up_does_not_open() {
    type Tamper = fn(&mut Vec<Vec<u8>>);
    let cases: [(&str, usize, Tamper); 7] = [
        ("left out", 1, |r| drop(r.remove(1))),
        ("repeated", 2, |r| r.insert(2, r[1].clone())),
        ("swapped", 1, |r| r.swap(1, 2)),
        ("cut", 1, |r| r[1].truncate(100)),
        ("two as one", 0, |r| {
            let next = r.remove(1);
            r[0].extend(&next[HEADER..]);
            r[0][0] = 0xAC;
        }),
        ("empty", 1, |r| r.insert(1, vec![0; OVERHEAD])),
        ("too long", 1, |r| {
            r[1][..4].copy_from_slice(&(MOST as u32 + 1).to_le_bytes())
        }),
    ];
    for (name, whole, tamper) in cases {
        let [(mut sealer, _), (_, mut opener)] = ends();
        let mut records: Vec<_> = (0..4).map(|n| record(&mut sealer, &[n; 300])).collect();
        tamper(&mut records);
        let (text, end) = opened(&mut opener, &records.concat(), 500);
        assert_eq!(end, Err(NotAuthentic), "{name}");
        assert_eq!(text.len(), whole * 300, "{name}");
        assert!(
            text.iter().enumerate().all(|(i, b)| usize::from(*b) == i / 300),
            "{name}"
        );
    }
}

#[test]
fn a_record_opens_on_its_own_connection_and_in_its_own_direction_only() {
    let text = b"what no other party reads";
    let strangers = [
        ends().map(|end| end.1),
        ends_of(Topic::new("gloo", Epoch(8), 3, 1)).map(|end| end.1),
        ends_of(Topic::new("nccl", Epoch(7), 3, 1)).map(|end| end.1),
    ];
    let [(mut sealer, mut back), (_, mut opener)] = ends();
    let record = record(&mut sealer, text);
    assert!(!record.windows(4).any(|w| text.windows(4).any(|t| t == w)));
    for mut stranger in strangers.into_iter().flatten() {
        assert!(opened(&mut stranger, &record, 99).1.is_err());
    }
    assert!(opened(&mut back, &record, 99).1.is_err());
    assert_eq!(opened(&mut opener, &record, 99).0, text);
}

#[test]
fn both_ends_renew_their_key_after_the_same_record() {
    let [(mut sealer, _), (_, mut opener)] = ends();
    let [(mut other, _), (_, mut stuck)] = ends();
    (sealer.key.renew, opener.key.renew, other.key.renew) = (3, 3, 3);
    for n in 0..20u8 {
        let sent = record(&mut sealer, &[n; 50]);
        assert_eq!(opened(&mut opener, &sent, 99), (vec![n; 50], Ok(())));
        // One that does not renew it cannot follow.
        let ended = opened(&mut stuck, &record(&mut other, &[n; 50]), 99).1;
        assert_eq!(ended.is_ok(), n < 3, "{n}");
    }
}

#[test]
fn a_length_that_was_made_up_takes_no_memory() {
    let [(_, mut opener), _] = ends();
    opener.came(&u32::MAX.to_le_bytes());
    assert_eq!(opener.open(), Err(NotAuthentic));
    assert!(opener.buffer.len() <= SMALL);
    let [(_, mut opener), _] = ends();
    opener.came(&(MOST as u32).to_le_bytes());
    assert_eq!(opener.open(), Ok(false));
    let _ = opener.room();
    assert!(opener.buffer.len() <= LARGE);
}

#[test]
fn the_records_are_those_of_the_test_vector() {
    let secret: [u8; 32] = std::array::from_fn(|i| i as u8);
    let [caller, listener] = keys(
        &secret,
        &[&[0xAA; 32][..], &[0xBB; 32]].concat(),
        &[b"said"],
        [
            b"oxccl records of the caller 1",
            b"oxccl records of the listener 1",
        ],
    )
    .unwrap();
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let mut caller = Sealer::new(caller).unwrap();
    let mut listener = Sealer::new(listener).unwrap();
    let told = [
        hex(&record(&mut caller, b"one")),
        hex(&record(&mut caller, b"two")),
        hex(&record(&mut listener, b"one")),
    ];
    // As another library makes them (HKDF by hand, AES-GCM of OpenSSL).
    assert_eq!(
        told,
        [
            "030000000e9b13eb1ed7b33e03309b389c5bbffa7f6b57",
            "0300000044f52ad434411c6cc008fe7608bdb857a30bc9",
            "03000000e8a29fa9364bc4dbc665b82ba8fd493462aa21",
        ]
    );
}
