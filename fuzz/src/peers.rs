//! The control connections between the ranks of a group: greetings, frames, and rank 0's record in the store.

#[allow(dead_code, unused_imports, reason = "included for its readers")]
#[path = "../../crates/ftcore/src/peers/record.rs"]
mod record;
#[allow(dead_code, unused_imports, reason = "included for its readers")]
#[path = "../../crates/ftcore/src/peers/wire.rs"]
mod wire;

use ftcore::{Error, ErrorKind};
use record::{Published, refusal, refused};
use wire::{Frame, Hello, Kind, MAX_TEXT, Setup, TOKEN};

/// As the reader of such a connection, or of the store, takes it: refused, or it means the same after it was written and read again.
pub fn control(data: &[u8]) {
    greeting(data);
    frames(data);
    if let Some(published) = Published::decode(data) {
        let again = Published::decode(published.encode().as_bytes());
        assert_eq!(again.as_ref(), Some(&published));
    }
    if let Some(error) = refusal(data, 1) {
        assert!(error.to_string().contains("rank 0"), "{error}");
    }
}

fn greeting(data: &[u8]) {
    let Some(bytes) = data.first_chunk() else {
        return;
    };
    match Hello::decode(bytes) {
        Ok(hello) => {
            let mut again = Vec::new();
            hello.write(&mut again).expect("memory takes it");
            assert_eq!(again, bytes);
        }
        Err(e) => assert_eq!(e.kind(), ErrorKind::Protocol, "{e}"),
    }
}

/// One after the other, as they come out of a connection.
fn frames(mut rest: &[u8]) {
    loop {
        match Frame::read(&mut rest) {
            Ok(Some(frame)) => {
                let told = frame.error(1);
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

/// Valid bytes: a greeting, a frame of each kind, and records.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    let mut put = |write: &dyn Fn(&mut Vec<u8>) -> std::io::Result<()>| {
        let mut bytes = Vec::new();
        write(&mut bytes).expect("memory takes it");
        seeds.push(bytes);
    };
    let hello = Hello {
        token: [3; TOKEN],
        rank: 1,
        world: 2,
        epoch: 9,
        process: 0x1234,
        setup: Setup::of("NCCL 2.30"),
    };
    put(&|to| hello.write(to));
    let kinds = [Kind::Ready, Kind::Bye, Kind::Enter, Kind::Release];
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
    };
    let texts = [published.encode(), refused(&lost)];
    seeds.extend(texts.into_iter().map(String::into_bytes));
    seeds
}
