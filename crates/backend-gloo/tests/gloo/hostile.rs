//! Strangers on the listener's port: garbage, silence, half of a greeting (INV-10).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use backend_gloo::GlooGroup;
use ftcore::{
    DType, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions, Tensor,
    deadline_in,
};

use crate::ranks::{configuration, group, group_over, soon, store};

#[test]
fn garbage_and_silent_connections_never_hold_up_a_configuration() {
    let store = store();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let group = group();
            group.configure(configuration(&store, 1, 0, 2)).unwrap();
            let work = group
                .all_reduce(Tensor::zeros(DType::F32, 4), ReduceOp::Sum)
                .unwrap();
            work.wait(soon()).unwrap();
        });
        // Rank 0 has published its address and waits for rank 1. Strangers come first.
        let card = store.get("test/1/gloo/0", soon()).unwrap();
        let card = String::from_utf8(card).unwrap();
        let fields: Vec<&str> = card.split(' ').collect();
        let port = fields[3].parse::<SocketAddr>().unwrap().port();
        let dial = || TcpStream::connect(("127.0.0.1", port)).unwrap();
        let silent: Vec<TcpStream> = (0..20).map(|_| dial()).collect();
        let mut half = dial();
        half.write_all(b"HGXO\x01\0\0").unwrap();
        let mut http = dial();
        http.write_all(b"GET / HTTP/1.1\r\nHost: example\r\nAccept: everything there is\r\n\r\n")
            .unwrap();
        // The one that says enough to be judged is dropped: its connection ends.
        http.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut answer = Vec::new();
        match http.read_to_end(&mut answer) {
            Ok(n) => assert_eq!(n, 0, "a stranger gets no answer"),
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}"),
        }
        let second = group();
        second.configure(configuration(&store, 1, 1, 2)).unwrap();
        let work = second
            .all_reduce(Tensor::zeros(DType::F32, 4), ReduceOp::Sum)
            .unwrap();
        work.wait(soon()).unwrap();
        first.join().unwrap();
        drop((silent, half));
    });
}

#[test]
fn a_damaged_address_in_the_store_is_a_protocol_error_that_names_the_key() {
    let store = store();
    store.set("test/1/gloo/0", b"what is this", soon()).unwrap();
    let e = group().configure(configuration(&store, 1, 1, 2)).unwrap_err();
    assert_eq!(e.kind(), ftcore::ErrorKind::Protocol, "{e}");
    assert!(e.to_string().contains("test/1/gloo/0"), "{e}");
}

#[test]
fn ranks_that_disagree_about_the_world_fail_on_both_sides_naming_both() {
    let store = store();
    std::thread::scope(|scope| {
        for (rank, world) in [(0u32, 2u32), (1, 3)] {
            let store = &store;
            scope.spawn(move || {
                let e = group()
                    .configure(configuration(store, 1, rank, world))
                    .unwrap_err();
                assert_eq!(e.kind(), ftcore::ErrorKind::Mismatch, "{e}");
                let text = e.to_string();
                assert!(text.contains('2') && text.contains('3'), "{text}");
            });
        }
    });
}

#[test]
fn ranks_that_cannot_meet_over_the_transport_asked_for_fail_naming_each_other() {
    // (rank 0, rank 1): one insists on shared memory, the other has none.
    let stores = [store(), store()];
    std::thread::scope(|scope| {
        for (ranks, store) in [["shm", "tcp"], ["tcp", "shm"]].iter().zip(&stores) {
            for (rank, &transport) in (0u32..).zip(ranks) {
                scope.spawn(move || {
                    let mut c = configuration(store, 1, rank, 2);
                    c.deadline = deadline_in(Duration::from_secs(2));
                    let e = group_over(transport).configure(c).unwrap_err();
                    let text = e.to_string();
                    if transport == "shm" {
                        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
                        assert_eq!(e.context().peer, Some(1 - rank), "{e}");
                        assert!(text.contains("transport=shm"), "{text}");
                    } else {
                        let kinds = [ErrorKind::PeerLost, ErrorKind::Timeout];
                        assert!(kinds.contains(&e.kind()), "{e}");
                        assert!(text.contains(&format!("{}", 1 - rank)), "{text}");
                    }
                });
            }
        }
    });
}

#[test]
fn ranks_meet_over_ipv6_or_say_that_there_is_none() {
    let there = std::net::TcpListener::bind("[::1]:0").is_ok();
    let store = store();
    std::thread::scope(|scope| {
        for rank in 0..2u32 {
            let store = &store;
            scope.spawn(move || {
                let mut options = GroupOptions {
                    net_name: Some("::1".into()),
                    ..GroupOptions::default()
                };
                options.hints.insert("transport".into(), "tcp".into());
                let group = GlooGroup::new("six", options).unwrap();
                let met = group.configure(configuration(store, 1, rank, 2));
                if !there {
                    let e = met.unwrap_err();
                    assert!(e.to_string().contains("::1"), "{e}");
                    return;
                }
                met.unwrap();
                let key = format!("test/1/gloo/{rank}");
                let card = store.get(&key, soon()).unwrap();
                let card = String::from_utf8_lossy(&card).into_owned();
                assert!(card.contains("[::1]:"), "{card}");
                let data = Tensor::from_vec(vec![rank as i32 + 1; 100_000]);
                let sum = group.all_reduce(data, ReduceOp::Sum).unwrap();
                assert_eq!(
                    sum.take_tensor().unwrap().into_vec::<i32>().unwrap(),
                    [3; 100_000]
                );
            });
        }
    });
}

#[test]
fn a_rank_that_offers_no_shared_memory_is_met_over_tcp() {
    let store = store();
    std::thread::scope(|scope| {
        for (rank, transport) in [(0u32, "auto"), (1, "tcp"), (2, "auto")] {
            let store = &store;
            scope.spawn(move || {
                let group = group_over(transport);
                group.configure(configuration(store, 1, rank, 3)).unwrap();
                let expected = if rank == 1 { "tcp" } else { "shm and tcp" };
                assert_eq!(group.transport(), expected);
                let mut data = vec![rank as f32; 100_000];
                let by = SubmitOptions::by(soon());
                group.all_reduce_slice_with(&mut data, ReduceOp::Sum, by).unwrap();
                assert!(data.iter().all(|x| *x == 3.0));
            });
        }
    });
}
