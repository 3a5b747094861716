//! The control connections beside NCCL: greetings, frames, rank 0's record in the store, and what the ranks say to each other when a
//! communicator is made out of an older one.

#[allow(dead_code, unused_imports, reason = "included for its readers")]
#[path = "../../crates/backend-nccl/src/control/record.rs"]
mod record;
#[allow(dead_code, unused_imports, reason = "included for its readers")]
#[path = "../../crates/backend-nccl/src/control/wire.rs"]
mod wire;
#[allow(dead_code, unused_imports, reason = "included for its readers")]
#[path = "../../crates/backend-nccl/src/control/word.rs"]
mod word;

use ftcore::{Error, ErrorKind};
use record::{ID, Published, refusal, refused};
use wire::{Frame, Hello, Kind, MAX_TEXT, TOKEN};
use word::Word;

use crate::plan::{Holding, How, Plan, Reuse};

/// As whoever reads such a connection or the store: refused, or it means the same after it was written and read again.
pub fn control(data: &[u8]) {
    greeting(data);
    frames(data);
    if let Some(published) = Published::decode(data) {
        let again = Published::decode(published.encode().as_bytes());
        assert_eq!(again.as_ref(), Some(&published));
    }
    if let Some(error) = refusal(data) {
        assert!(error.to_string().contains("rank 0"), "{error}");
    }
    if let Ok(text) = std::str::from_utf8(data) {
        words(text);
    }
    plans(data);
}

fn greeting(data: &[u8]) {
    match Hello::read(&mut &*data) {
        Ok(hello) => {
            let mut bytes = Vec::new();
            hello.write(&mut bytes).expect("memory takes it");
            assert_eq!(
                Hello::read(&mut bytes.as_slice()).expect("what was written is read"),
                hello
            );
        }
        Err(e) => assert!(matches!(e.kind(), ErrorKind::Protocol | ErrorKind::Io), "{e}"),
    }
}

/// One after the other, as they come out of a connection.
fn frames(mut rest: &[u8]) {
    loop {
        match Frame::read(&mut rest) {
            Ok(Some(frame)) => {
                let told = frame.error();
                assert!(
                    told.to_string().contains(&format!("rank {}", frame.origin)),
                    "{told}"
                );
                let mut bytes = Vec::new();
                frame.write(&mut bytes).expect("memory takes it");
                let again = Frame::read(&mut bytes.as_slice()).expect("what was written is read");
                let again = again.expect("and whole");
                // What is not text grows when it is made text, and is cut where it is too long.
                assert!(
                    again.text.len() <= MAX_TEXT && frame.text.starts_with(&again.text),
                    "{frame:?}"
                );
                let fits = frame.text.len() <= MAX_TEXT;
                assert!(!fits || again == frame, "{frame:?}");
                assert_eq!(
                    (again.kind, again.origin, again.number),
                    (frame.kind, frame.origin, frame.number)
                );
            }
            Ok(None) => return,
            Err(e) => return assert!(matches!(e.kind(), ErrorKind::Protocol | ErrorKind::Io), "{e}"),
        }
    }
}

fn held(rank: u32, world: u32, how: How) -> Option<Holding> {
    let id = [7; TOKEN];
    Some(Holding { id, rank, world, how })
}

/// As ranks that hold something and ranks that do not hear them.
fn words(text: &str) {
    let own = [
        None,
        held(0, 2, How::Idle),
        held(2, 3, How::Revoked),
        held(5, 256, How::Revoked),
    ];
    for own in own {
        for (rank, world) in [(0, 1), (1, 2), (1, 3), (4, 255)] {
            if let Some(word) = Word::decode(text, own.as_ref(), rank, world) {
                let again = Word::decode(&word.encode(), own.as_ref(), rank, world);
                assert_eq!(again, Some(word), "'{text}'");
            }
        }
    }
}

/// The bytes as what up to sixteen ranks say that they hold: whatever rank 0 makes of it, everybody finds that it fits.
fn plans(data: &[u8]) {
    let holdings: Vec<Option<Holding>> = data
        .chunks_exact(3)
        .take(16)
        .map(|c| {
            let how = if c[0] & 2 == 0 { How::Idle } else { How::Revoked };
            let id = [c[0] >> 7; TOKEN];
            let (rank, world) = (u32::from(c[1]), u32::from(c[2]));
            (c[0] & 1 == 0).then_some(Holding { id, rank, world, how })
        })
        .collect();
    let world = holdings.len() as u32;
    for can_grow in [true, false] {
        let Plan::Reuse(plan) = Plan::of(&holdings, can_grow) else {
            continue;
        };
        for (rank, own) in (0..).zip(&holdings) {
            let heard = Reuse::decode(&plan.encode(), own.as_ref(), rank, world);
            assert_eq!(heard.as_ref(), Some(&plan), "{holdings:?}, rank {rank}");
        }
    }
}

/// Valid bytes: a greeting with and without a holding, a frame of each kind, records, words, and holdings that lead to each plan.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    let mut put = |write: &dyn Fn(&mut Vec<u8>) -> std::io::Result<()>| {
        let mut bytes = Vec::new();
        write(&mut bytes).expect("memory takes it");
        seeds.push(bytes);
    };
    for holding in [None, held(1, 2, How::Idle), held(2, 3, How::Revoked)] {
        let hello = Hello {
            token: [3; TOKEN],
            rank: 1,
            world: 2,
            epoch: 9,
            constants: 0x1234,
            holding,
        };
        put(&|to| hello.write(to));
    }
    let kinds = [
        Kind::Ready,
        Kind::Bye,
        Kind::Enter,
        Kind::Release,
        Kind::Plan,
        Kind::Tried,
    ];
    put(&|to| kinds.iter().try_for_each(|k| Frame::new(*k, 1, 2, "é").write(to)));
    let lost = Error::new(ErrorKind::PeerLost, "closed its connection");
    for kind in [Kind::Refused, Kind::Failed] {
        put(&|to| Frame::of_error(kind, 3, &lost, Some(7)).write(to));
    }
    let published = Published {
        token: [5; TOKEN],
        port: 4103,
        host: "boot-1".to_string(),
        address: std::net::Ipv4Addr::LOCALHOST.into(),
        id: Some([9; ID]),
    };
    let without = Published {
        id: None,
        ..published.clone()
    };
    let mut texts = vec![published.encode(), without.encode(), refused(&lost)];
    let words = [
        Word::Fresh([9; ID]),
        Word::Grow([9; ID]),
        Word::Stop,
        Word::Stands,
    ];
    texts.extend(words.iter().map(Word::encode));
    texts.extend(["fresh", "reuse 2 same", "reuse 2 split", "reuse 2 shrink:1"].map(str::to_string));
    seeds.extend(texts.into_iter().map(String::into_bytes));
    // Two of three that was revoked; both of two, in order, with a newcomer; both of two, turned.
    seeds.extend([
        vec![2, 0, 3, 2, 2, 3],
        vec![0, 0, 2, 0, 1, 2, 1, 0, 0],
        vec![0, 1, 2, 0, 0, 2],
    ]);
    seeds
}
