//! Peers that break the rules, on either side: the worst they get is a closed connection or an error.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

#[test]
fn a_lying_server_cannot_make_the_client_allocate() {
    let huge = "ffffffffffffff7f";
    for reply in [huge.to_owned(), format!("0100000000000000 {huge}")] {
        let (address, thread) = scripted(vec![("11".into(), Some(reply))]);
        let store = TcpStore::connect(&address, soon()).unwrap();
        let e = store.list(soon()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
        drop(store);
        thread.join().unwrap();
    }
    let compare = format!("02 {} {} {}", text("/k"), text("a"), text("b"));
    let (address, thread) = scripted(vec![(compare, Some(huge.into()))]);
    let store = TcpStore::connect(&address, soon()).unwrap();
    assert_eq!(
        store.compare_set("k", b"a", b"b", soon()).unwrap_err().kind(),
        ErrorKind::Protocol
    );
    drop(store);
    thread.join().unwrap();
}

#[test]
fn strangers_and_violations_are_closed_and_change_nothing() {
    let server = server();
    let good = client(&server);
    good.set("k", b"v", soon()).unwrap();
    for strange in [
        "47 4554202f20485454502f312e310d0a0d0a",
        "00 ffffffff",
        "01 02000000000000002f6b 0100000000000000 78",
        "ff",
    ] {
        let mut raw = Raw::silent(&server);
        raw.say(strange);
        raw.ends_closed();
    }
    let huge = "ffffffffffffffff";
    for violation in [
        "13".to_owned(),
        "ff".to_owned(),
        "00 cef7853c".to_owned(),
        format!("03 {huge}"),
        format!("06 {huge}"),
        format!("0a {huge}"),
        format!("0b {huge}"),
        format!("01 02000000000000002f6b {huge}"),
        "01 02000000000000002f6b 0100800000000000".to_owned(),
        format!("04 {} 0100000000000000", text("/k")),
    ] {
        let mut raw = Raw::greeted(&server);
        raw.say(&violation);
        raw.ends_closed();
    }
    assert_eq!(good.get("k", soon()).unwrap(), b"v");
    assert_eq!(good.num_keys(soon()).unwrap(), 1);
    until("only the good client is connected", || server.connections() == 1);
}

#[test]
fn half_open_connections_disturb_nobody_and_are_closed_in_the_end() {
    let limits = Limits {
        handshake: Duration::from_millis(200),
        stall: Duration::from_millis(200),
        ..Limits::default()
    };
    let server = with_limits(limits).unwrap();
    let silent: Vec<_> = (0..20).map(|_| Raw::silent(&server)).collect();
    let half: Vec<_> = ["00 cef7", "00 cef7853c 0d 01"]
        .map(|start| {
            let mut raw = Raw::silent(&server);
            raw.say(start);
            raw
        })
        .into();
    let mut stalled = Raw::greeted(&server);
    stalled.say("01 02000000000000002f6b 0000100000000000 78");
    let good = client(&server);
    good.set("k", b"v", soon()).unwrap();
    for raw in silent.into_iter().chain(half) {
        raw.ends_closed();
    }
    stalled.ends_closed();
    // An idle client is not a stalled one.
    until("only the good client is connected", || server.connections() == 1);
    assert_eq!(good.get("k", soon()).unwrap(), b"v");
}

#[test]
fn connections_beyond_the_limit_are_closed_and_a_place_that_comes_free_is_used() {
    let server = with_limits(Limits {
        connections: 2,
        ..Limits::default()
    })
    .unwrap();
    let (first, mut second) = (Raw::greeted(&server), Raw::greeted(&server));
    let address = server.local_addr().to_string();
    assert_eq!(
        TcpStore::connect(&address, millis(200)).unwrap_err().kind(),
        ErrorKind::Unavailable
    );
    second.say("07");
    second.hears("0000000000000000");
    drop(first);
    TcpStore::connect(&address, soon())
        .unwrap()
        .set("k", b"v", soon())
        .unwrap();
}

#[test]
fn a_peer_that_takes_no_replies_is_given_up() {
    let limits = Limits {
        stall: Duration::from_millis(300),
        ..Limits::default()
    };
    let server = with_limits(limits).unwrap();
    client(&server).set("k", &vec![1; 8 << 20], soon()).unwrap();
    let mut greedy = Raw::greeted(&server);
    for _ in 0..16 {
        greedy.say(&format!("03 {}", text("/k")));
    }
    until("the greedy peer is gone", || server.connections() == 0);
}

/// WAIT for `n` keys of 100 bytes that are not set.
fn wait_for(n: usize, tag: u8) -> Vec<u8> {
    let mut bytes = vec![6];
    bytes.extend((n as u64).to_le_bytes());
    for i in 0..n {
        bytes.extend(100u64.to_le_bytes());
        bytes.extend(format!("/{tag}{i:0>98}").into_bytes());
    }
    bytes
}

#[test]
fn what_waits_hold_is_counted_and_who_goes_beyond_the_limit_is_closed() {
    let server = with_limits(Limits {
        held: 1 << 20,
        ..Limits::default()
    })
    .unwrap();
    let good = client(&server);
    // 228 bytes for each name and 16 for each wait: two of them fit.
    let mut waiters: Vec<Raw> = (1..=2)
        .map(|tag| {
            let mut raw = Raw::greeted(&server);
            raw.0.write_all(&wait_for(2000, tag)).unwrap();
            // A wait is pending a moment before what it holds is counted.
            until("the wait is counted", || {
                server.waiting() == usize::from(tag) && server.held() > usize::from(tag) * 2000 * 200
            });
            raw
        })
        .collect();
    let mut third = Raw::greeted(&server);
    let _ = third.0.write_all(&wait_for(2000, 3));
    third.ends_closed();
    // The names of the first are there already: to wait for the same costs little, as it does where all ranks wait for each other.
    let mut same = Raw::greeted(&server);
    same.0.write_all(&wait_for(500, 1)).unwrap();
    until("the same wait is pending", || server.waiting() == 3);
    good.set("k", b"v", soon()).unwrap();
    // Who goes gives it back.
    drop(waiters.pop());
    until("the second is gone", || {
        server.waiting() == 2 && server.held() < 2 * 2000 * 200
    });
    let mut fourth = Raw::greeted(&server);
    fourth.0.write_all(&wait_for(2000, 4)).unwrap();
    until("the fourth is pending", || server.waiting() == 3);
    drop((waiters, same, fourth));
    until("no client waits", || server.waiting() == 0);
    until("nothing is held", || server.held() == 0);
}

#[test]
fn replies_that_nobody_takes_are_counted_and_given_back() {
    let server = with_limits(Limits {
        held: 40 << 20,
        ..Limits::default()
    })
    .unwrap();
    let good = client(&server);
    good.set("k", &vec![1; 8 << 20], soon()).unwrap();
    let mut greedy: Vec<Raw> = (0..2)
        .map(|_| {
            let mut raw = Raw::greeted(&server);
            raw.say(&format!("03 {} 03 {0}", text("/k")));
            raw
        })
        .collect();
    until("both hold a reply", || server.held() >= 32 << 20);
    let mut third = Raw::greeted(&server);
    third.say(&format!("03 {}", text("/k")));
    third.ends_closed();
    // Replacing the value wakes no waiter.
    good.set("k", b"v", soon()).unwrap();
    greedy.clear();
    until("nothing is held", || server.held() == 0);
    assert_eq!(good.get("k", soon()).unwrap(), b"v");
}

#[test]
fn a_request_that_comes_byte_by_byte_for_ever_is_given_up() {
    let limits = Limits {
        stall: Duration::from_millis(300),
        ..Limits::default()
    };
    let server = with_limits(limits).unwrap();
    let mut slow = Raw::greeted(&server);
    slow.say("01 02000000000000002f6b 0000100000000000");
    let end = soon();
    while server.connections() > 0 {
        assert!(Instant::now() < end, "a byte now and then holds the connection");
        let _ = slow.0.write(&[0]);
        thread::sleep(Duration::from_millis(20));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64,
        rng_seed: proptest::test_runner::RngSeed::Fixed(7),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_bytes_neither_stop_the_server_nor_touch_what_it_holds(
        greet in any::<bool>(),
        opcode in 0u8..24,
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let server = server();
        let good = client(&server);
        good.set("kept", b"v", soon()).unwrap();
        let mut raw = if greet { Raw::greeted(&server) } else { Raw::silent(&server) };
        // The server may close while this is being written.
        let _ = raw.0.write_all(&[opcode]);
        let _ = raw.0.write_all(&bytes);
        drop(raw);
        until("the stranger is gone", || server.connections() == 1);
        prop_assert_eq!(server.waiting(), 0);
        prop_assert_eq!(good.get("kept", soon()).unwrap(), b"v");
    }
}
