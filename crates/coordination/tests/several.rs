//! Clients that know several lighthouses: they find one that answers, and take its word for what it is.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::net::TcpListener;
use std::time::Duration;

use crate::rig::{Replica, lighthouse, manager_config, quorum, soon};
use ftcore::{ErrorKind, deadline_in};
use oxccl_coordination::{LighthouseClient, ManagerServer, Member};

/// An address at which nothing listens.
fn closed() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

fn member(id: &str) -> Member {
    Member {
        replica_id: id.into(),
        address: "http://127.0.0.1:1".into(),
        store_address: "127.0.0.1:1".into(),
        world_size: 1,
        ..Member::default()
    }
}

#[test]
fn of_several_addresses_the_one_that_answers_is_found_by_clients_and_manager_servers() {
    let lighthouse = lighthouse(1);
    let list = format!("{}, {},{}", closed(), closed(), lighthouse.address());
    let client = LighthouseClient::connect(&list, soon()).unwrap();
    assert_eq!(
        client.quorum(&member("a:1"), soon()).unwrap().participants.len(),
        1
    );
    assert!(client.status(soon()).unwrap().leads);
    client.leave("a:1", "test", soon()).unwrap();
    let mut replica = Replica::start("b:1", &list);
    quorum(&mut [&mut replica], 0);
}

#[test]
fn an_error_names_all_addresses_and_a_bad_one_is_refused() {
    let list = format!("{},{}", closed(), closed());
    let soon = || deadline_in(Duration::from_millis(300));
    let error = LighthouseClient::connect(&list, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(
        text.contains(&list) && text.contains("oxccl lighthouse"),
        "{text}"
    );
    let error = LighthouseClient::connect("http://127.0.0.1:9,lighthouse", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("'lighthouse'"), "{error}");
    let mut config = manager_config("a:1", &list, 1);
    config.connect_timeout = Duration::from_millis(300);
    let error = ManagerServer::start(config).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

#[test]
fn what_the_leading_lighthouse_refuses_is_not_asked_of_another_one() {
    let (first, second) = (lighthouse(2), lighthouse(2));
    let list = format!("{},{}", first.address(), second.address());
    let client = LighthouseClient::connect(&list, soon()).unwrap();
    let call = {
        let client = client.clone();
        std::thread::spawn(move || client.quorum(&member("a:1"), soon()))
    };
    let waits = || !client.status(soon()).unwrap().waiting.is_empty();
    let deadline = soon();
    while !waits() {
        assert!(std::time::Instant::now() < deadline, "the call does not wait");
        std::thread::park_timeout(Duration::from_millis(2));
    }
    client.failed("a:1", "its rank 1 died", soon()).unwrap();
    let refused = call.join().unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("its rank 1 died"), "{refused}");
}
