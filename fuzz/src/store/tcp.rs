//! PyTorch's TCPStore protocol.

#[allow(dead_code, unused_imports, reason = "included for its readers")]
#[path = "../../../crates/ftcore/src/store/tcp/wire.rs"]
mod wire;

use wire::{Budget, Request};

/// Reads `data` as requests one after the other, as a server does, and as each kind of reply, as a client does.
pub fn requests(data: &[u8]) {
    // Enough for whatever arrives, and no more: a length that only claims must not count.
    let budget = Budget::new(data.len() + 1024);
    let mut rest = data;
    while let Ok((request, held)) = Request::read(&mut rest, &budget) {
        // What a request holds is given back with it.
        drop(held);
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        let again = Request::read(&mut &bytes[..], &budget).map(|(again, _)| again);
        assert_eq!(again.ok(), Some(request));
    }
    // Whatever was given up has been given back.
    let mut set = Vec::new();
    Request::Set(vec![b'/'; 400], vec![1; 400]).encode(&mut set);
    assert!(Request::read(&mut &set[..], &budget).is_ok(), "the budget leaks");

    for mut reply in [data, data.get(1..).unwrap_or_default()] {
        let _ = wire::read_value(&mut reply);
    }
    let _ = wire::read_listing(&mut &data[..]);
    let _ = wire::read_refusal(&mut &data[..]);
}

/// Valid bytes.
pub fn seeds() -> Vec<Vec<u8>> {
    let key = || b"/key".to_vec();
    let requests = [
        Request::Validate(wire::MAGIC),
        Request::Set(key(), b"value".to_vec()),
        Request::CompareSet {
            key: key(),
            expected: Vec::new(),
            desired: b"new".to_vec(),
        },
        Request::Get(key()),
        Request::Add(key(), -1),
        Request::Check(vec![key(), b"/other".to_vec()]),
        Request::Wait(vec![key()]),
        Request::NumKeys,
        Request::Delete(key()),
        Request::Append(key(), b"more".to_vec()),
        Request::MultiGet(vec![key(), key()]),
        Request::MultiSet(vec![(key(), b"a".to_vec()), (b"/b".to_vec(), b"b".to_vec())]),
        Request::CancelWait,
        Request::Ping(7),
        Request::QueuePush(key(), b"x".to_vec()),
        Request::QueuePop(key()),
        Request::QueueLen(key()),
        Request::ListKeys,
        Request::Barrier {
            key: key(),
            world_size: 4,
        },
    ];
    let mut all = Vec::new();
    let mut seeds: Vec<Vec<u8>> = requests
        .iter()
        .map(|request| {
            request.encode(&mut all);
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            bytes
        })
        .collect();
    seeds.push(all);
    seeds
}
