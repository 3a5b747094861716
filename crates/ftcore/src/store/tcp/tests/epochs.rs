//! The keys of epochs that are over, and what a server of ours says when it refuses.

use std::sync::Arc;

use super::super::epoch_prefix;
use super::*;
use crate::Epoch;
use crate::store::PrefixStore;

/// What the ranks of one epoch leave in the store.
fn rendezvous(store: &TcpStore, epoch: u64) {
    let names: Vec<String> = (0..4)
        .map(|rank| format!("{}/{epoch}/gloo/{rank}", epoch_prefix(Epoch(epoch), 0)))
        .collect();
    let pairs: Vec<(&str, &[u8])> = names.iter().map(|n| (n.as_str(), &b"card"[..])).collect();
    store.multi_set(&pairs, soon()).unwrap();
}

#[test]
fn ten_thousand_epochs_leave_the_keys_of_two() {
    let server = server();
    let store = client(&server);
    store.set("oxccl/other", b"v", soon()).unwrap();
    let mut most = 0;
    for step in 0..10_000 {
        // Ids are not consecutive, and change their number of digits.
        let epoch = 3 * step + step % 3;
        server.begin_epoch(Epoch(epoch));
        rendezvous(&store, epoch);
        most = most.max(server.num_keys());
    }
    assert_eq!((most, server.num_keys()), (9, 9));
    // All ranks of the owner say it, and the same epoch twice is nothing new.
    assert_eq!(server.begin_epoch(Epoch(3 * 9_999)), 0);
    assert_eq!(server.num_keys(), 9);
}

#[test]
fn a_slow_rank_of_the_previous_epoch_finds_its_keys_and_one_of_an_older_epoch_is_told() {
    let server = server();
    let store: Arc<dyn Store> = Arc::new(client(&server));
    let of = |epoch| PrefixStore::new(store.clone(), epoch_prefix(Epoch(epoch), 0));
    for epoch in [5, 7] {
        server.begin_epoch(Epoch(epoch));
        of(epoch).set("card", b"here", soon()).unwrap();
    }
    thread::scope(|scope| {
        let waiter = scope.spawn(|| of(5).get("never", soon()));
        let at_barrier = scope.spawn(|| of(5).barrier("barrier", 2, soon()));
        let previous = scope.spawn(|| of(7).get("late", soon()));
        until("they wait", || server.waiting() == 3);
        // Another replica is in the next epoch already.
        of(12).set("card", b"early", soon()).unwrap();
        server.begin_epoch(Epoch(9));
        for lost in [waiter.join().unwrap().map(drop), at_barrier.join().unwrap()] {
            let e = lost.unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
            assert!(e.message().contains("epoch 5"), "{e}");
        }
        assert_eq!(of(7).get("card", soon()).unwrap(), b"here");
        of(7).set("late", b"too", soon()).unwrap();
        assert_eq!(previous.join().unwrap().unwrap(), b"too");
    });
    assert_eq!(of(12).get("card", soon()).unwrap(), b"early");
    let old = of(5);
    for e in [
        old.get("card", soon()).unwrap_err(),
        old.wait(&["card"], soon()).unwrap_err(),
        old.set("card", b"", soon()).unwrap_err(),
        old.add("n", 1, soon()).unwrap_err(),
        old.append("card", b"", soon()).unwrap_err(),
        old.compare_set("card", b"", b"x", soon()).unwrap_err(),
        old.multi_set(&[("card", b"")], soon()).unwrap_err(),
        old.barrier("barrier", 1, soon()).unwrap_err(),
    ] {
        assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
    }
    // PyTorch's client takes this byte for an error.
    let mut raw = Raw::greeted(&server);
    raw.say(&format!("06 0100000000000000 {}", text("/torchft/5/0/card")));
    raw.hears("02");
    raw.say("07");
    raw.hears("0300000000000000");
}

#[test]
fn numbers_that_go_back_remove_nothing_that_is_in_use() {
    let server = server();
    let store = client(&server);
    for epoch in [1000, 1001, 1, 2, 3] {
        server.begin_epoch(Epoch(epoch));
        rendezvous(&store, epoch);
        assert!(
            store
                .check(
                    &[&format!("{}/{epoch}/gloo/3", epoch_prefix(Epoch(epoch), 0))],
                    soon()
                )
                .unwrap()
        );
    }
    // 1 is gone; the two from before the restart stay until numbers pass them.
    assert_eq!(server.num_keys(), 4 * 4);
}

#[test]
fn a_refusal_is_told_with_its_reason_and_the_connection_stays() {
    let server = server();
    let store = client(&server);
    store.set("word", b"abc", soon()).unwrap();
    store.set("top", i64::MAX.to_string().as_bytes(), soon()).unwrap();
    store.set("long", &vec![0; 8 << 20], soon()).unwrap();
    assert_eq!(server.connections(), 1);
    for (e, says) in [
        (store.add("word", 1, soon()).unwrap_err(), "decimal number"),
        (store.add("top", 1, soon()).unwrap_err(), "64 bits"),
        (store.append("long", b"x", soon()).unwrap_err(), "8388609 bytes"),
        (store.barrier("word", 2, soon()).unwrap_err(), "decimal number"),
    ] {
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        assert!(e.message().contains(says), "{e}");
    }
    assert_eq!(store.add("n", 7, soon()).unwrap(), 7);
    store.append("word", b"d", soon()).unwrap();
    assert_eq!(store.get("word", soon()).unwrap(), b"abcd");
    assert_eq!(server.opened(), 1, "the one connection has served all of this");
}

#[test]
fn pytorchs_client_gets_pytorchs_answers_beyond_the_limits() {
    let server = server();
    let store = client(&server);
    store.set("top", i64::MAX.to_string().as_bytes(), soon()).unwrap();
    store.set("long", &vec![0; 8 << 20], soon()).unwrap();
    let mut raw = Raw::greeted(&server);
    raw.say(&format!("04 {} 0100000000000000", text("/top")));
    raw.hears("0000000000000080");
    raw.say(&format!("03 {}", text("/top")));
    raw.hears(&text(&i64::MIN.to_string()));
    raw.say(&format!("09 {} {} 0d 05060708", text("/long"), text("x")));
    raw.hears("05060708");
    raw.say(&format!("03 {}", text("/long")));
    raw.hears("0100800000000000");
    let mut value = vec![1; (8 << 20) + 1];
    raw.0.read_exact(&mut value).unwrap();
    assert_eq!(value[8 << 20], b'x');
    // Our client refuses to read such a value, and says so.
    let e = store.get("long", soon()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
}
