//! Ranks that meet strangers, garbage, or nobody where rank 0 should be (INV-10).

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use ftcore::{ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};

use super::kit::*;
use super::{Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const KEY: &str = "errors/1/nccl";

/// Rank 0's record as it would stand in the store.
fn record(port: u16) -> String {
    format!("1 {} {port} nowhere 127.0.0.1 -", "07".repeat(16))
}

/// Rank 1 of 2 against whatever `zero` does at the port of the record.
fn against(zero: impl FnOnce(TcpListener) + Send, kind: ErrorKind, words: &[&str]) -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    store.set(KEY, record(port).as_bytes(), deadline_in(SOON))?;
    let group = group(1, GroupOptions::default())?;
    std::thread::scope(|scope| {
        scope.spawn(move || zero(listener));
        let e = group
            .configure(configuration(&store, 1, 2, 1, Duration::from_millis(600)))
            .err()
            .ok_or("configure succeeded")?;
        says(&e, kind, words)
    })
}

fn unreachable() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    store.set(KEY, record(port).as_bytes(), deadline_in(SOON))?;
    let e = group(1, GroupOptions::default())?
        .configure(configuration(&store, 1, 2, 1, Duration::from_millis(600)))
        .err()
        .ok_or("configure succeeded")?;
    says(&e, e.kind(), &["cannot be reached", "phase: control connections"])
}

fn closes() -> Outcome {
    let zero = |listener: TcpListener| {
        if let Ok((mut stream, _)) = listener.accept() {
            // The whole greeting: what is left unread would make a reset of the end.
            let _ = std::io::Read::read_exact(&mut stream, &mut [0; 52]);
        }
    };
    against(zero, ErrorKind::PeerLost, &["rank 0 closed"])
}

fn answers_garbage() -> Outcome {
    let zero = |listener: TcpListener| {
        if let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.write_all(&[0xEE; 64]);
            let _ = std::io::Read::read(&mut stream, &mut [0; 1024]);
            std::thread::sleep(Duration::from_millis(300));
        }
    };
    against(zero, ErrorKind::Protocol, &["kind 238"])
}

fn answers_something_else() -> Outcome {
    // A barrier's frame, where only "go on" or "refused" may stand.
    let zero = |listener: TcpListener| {
        if let Ok((mut stream, _)) = listener.accept() {
            let mut frame = vec![6u8];
            frame.extend([0; 16]);
            let _ = stream.write_all(&frame);
            let _ = std::io::Read::read(&mut stream, &mut [0; 1024]);
            std::thread::sleep(Duration::from_millis(300));
        }
    };
    against(zero, ErrorKind::Protocol, &["something else"])
}

fn says_nothing() -> Outcome {
    let zero = |listener: TcpListener| {
        let kept = listener.accept();
        std::thread::sleep(Duration::from_secs(3));
        drop(kept);
    };
    against(zero, ErrorKind::Timeout, &["has not let anybody go on"])
}

fn garbage_in_the_store() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    store.set(KEY, b"\xff\xfe nonsense", deadline_in(SOON))?;
    let e = group(1, GroupOptions::default())?
        .configure(configuration(&store, 1, 2, 1, SOON))
        .err()
        .ok_or("configure succeeded")?;
    says(&e, ErrorKind::Protocol, &[KEY, "is not rank 0's address"])
}

fn no_id() -> Outcome {
    // Everything is as it should be, but rank 0's record has no id.
    let zero = |listener: TcpListener| {
        if let Ok((mut stream, _)) = listener.accept() {
            let mut frame = vec![1u8];
            frame.extend([0; 16]);
            let _ = stream.write_all(&frame);
            let _ = std::io::Read::read(&mut stream, &mut [0; 1024]);
            std::thread::sleep(Duration::from_millis(300));
        }
    };
    against(zero, ErrorKind::Protocol, &["no unique id"])
}

fn wrong_host() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let e = group(0, GroupOptions::default())?
        .configure(configuration(&store, 0, 2, 1, SOON))
        .err()
        .ok_or("configure succeeded")?;
    says(
        &e,
        ErrorKind::InvalidArgument,
        &["OXCCL_NCCL_HOST", "not-an-address"],
    )
}

/// Strangers at rank 0's port hold nobody up: one that says nothing, one that says nonsense, one that goes at once.
fn strangers() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let store = &store;
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || -> Outcome {
            let group = group(0, GroupOptions::default())?;
            group.configure(configuration(store, 0, 2, 1, SOON))?;
            sum_works(0, &group)
        });
        let by = deadline_in(SOON);
        store.wait(&[KEY], by)?;
        let text = String::from_utf8_lossy(&store.get(KEY, by)?).into_owned();
        let port: u16 = text.split(' ').nth(2).ok_or("no port")?.parse()?;
        let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        drop(connect()?);
        connect()?.write_all(&[0x55; 200])?;
        let silent = connect()?;
        let group = group(1, GroupOptions::default())?;
        group.configure(configuration(store, 1, 2, 1, SOON))?;
        sum_works(1, &group)?;
        drop(silent);
        zero.join().map_err(|_| "a panic")?
    })
}

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("meet_nobody_at_rank_0_s_address", &[], unreachable),
        scenario("meet_a_rank_0_that_closes", &[], closes),
        scenario("meet_a_rank_0_that_answers_garbage", &[], answers_garbage),
        scenario(
            "meet_a_rank_0_that_answers_something_else",
            &[],
            answers_something_else,
        ),
        scenario("meet_a_rank_0_that_says_nothing", &[], says_nothing),
        scenario("meet_a_rank_0_without_an_id", &[], no_id),
        scenario("meet_garbage_in_the_store", &[], garbage_in_the_store),
        scenario("meet_strangers_at_rank_0_s_port", &[], strangers),
        scenario(
            "meet_an_address_that_is_none_is_refused",
            &[("OXCCL_NCCL_HOST", "not-an-address")],
            wrong_host,
        ),
    ]
}
