//! A rank on a slow link: all-reduces over gloo's TCP, checks every result, prints how long each call took.
//!
//! usage: `link_rank RANK WORLD FIRST_ADDRESS OWN_ADDRESS BYTES CALLS`, one process on each host. Prints `TIME_US` for each
//! call, behind a barrier each, after two that do not count, and with `sent` behind how many bytes the last one sent. With `connections=K`
//! behind, large payloads go over that many; `links=measured` is the group's option.
//! With `raw` behind, each rank sends the bytes of a ring's round trip to the next one over a plain connection instead, two ranks over
//! one and the same: what the link can carry.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "test support: a failure here is a failed test"
)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Collective, Configuration, Epoch, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Result, Store,
    SubmitOptions, TcpStore, TcpStoreServer, Tensor, deadline_in,
};

const STORE_PORT: u16 = 29_500;
const RAW_PORT: u16 = 29_501;
const WARM_UP: usize = 2;
/// For everything: a link that does not carry at all must end the test.
const TIME_LIMIT: Duration = Duration::from_secs(150);

struct Setup {
    rank: u32,
    world: u32,
    first: String,
    own: String,
    bytes: usize,
    calls: usize,
    connections: String,
    links: String,
    sent: bool,
}

/// Whole numbers, so that sums are exact in any order.
fn value(rank: u32, i: usize) -> f32 {
    (i % 1013) as f32 + rank as f32
}

fn all_reduce(setup: &Setup) -> Result<()> {
    let deadline = deadline_in(TIME_LIMIT);
    let server = match setup.rank {
        0 => Some(TcpStoreServer::bind(&format!("{}:{STORE_PORT}", setup.own))?),
        _ => None,
    };
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(
        &format!("{}:{STORE_PORT}", setup.first),
        deadline,
    )?);
    let hints = [
        ("connections".to_string(), setup.connections.clone()),
        ("links".to_string(), setup.links.clone()),
    ];
    let options = GroupOptions {
        hints: hints.into(),
        net_name: Some(setup.own.clone()),
        timeout: TIME_LIMIT,
        ..Default::default()
    };
    let group = GlooGroup::new("link", options)?;
    group.configure(Configuration {
        store,
        prefix: "link".to_string(),
        name: "link".to_string(),
        epoch: Epoch(1),
        rank: setup.rank,
        world_size: setup.world,
        deadline,
        cancel: Default::default(),
    })?;
    let count = setup.bytes / 4;
    let mut sent = 0;
    let mut tensor = Tensor::from_vec(vec![0f32; count]);
    for call in 0..WARM_UP + setup.calls {
        let mut data = tensor.into_vec::<f32>().unwrap();
        for (i, x) in data.iter_mut().enumerate() {
            *x = value(setup.rank, i);
        }
        let op = Collective::AllReduce {
            tensors: vec![Tensor::from_vec(data)],
            op: ReduceOp::Sum,
        };
        group.barrier()?;
        sent = group.traffic().sent;
        let start = Instant::now();
        tensor = group
            .run(op, SubmitOptions::by(deadline))?
            .take()?
            .into_tensor()?;
        let time = start.elapsed();
        sent = group.traffic().sent - sent;
        let ranks = setup.world as f32;
        let others = ranks * (ranks - 1.0) / 2.0;
        let wrong = tensor
            .as_slice::<f32>()?
            .iter()
            .enumerate()
            .position(|(i, x)| *x != ranks * value(0, i) + others);
        assert_eq!(wrong, None, "call {call}: a wrong element");
        if call >= WARM_UP {
            println!("{}", time.as_micros());
        }
    }
    if setup.sent {
        println!("{sent}");
    }
    // Not through the store: it ends with rank 0, possibly before its last answer has arrived far away.
    group.barrier()?;
    group.shutdown(deadline)?;
    drop(server);
    Ok(())
}

/// A connection to an address with a listener soon.
fn reach(host: &str) -> std::io::Result<TcpStream> {
    let deadline = Instant::now() + TIME_LIMIT;
    loop {
        match TcpStream::connect((host, RAW_PORT)) {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() >= deadline => return Err(e),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Sends the bytes of an all-reduce over a ring to the next rank and receives them from the one before, at the same time.
fn raw(setup: &Setup) -> std::io::Result<()> {
    let next = (setup.rank + 1) % setup.world;
    // The hosts of a network are numbered from the first one's address on.
    let (subnet, first) = setup.first.rsplit_once('.').expect("an IPv4 address");
    let first: u32 = first.parse().expect("an IPv4 address");
    let address = format!("{subnet}.{}", first + next);
    let (to_next, mut from_previous) = if setup.world > 2 {
        let listener = TcpListener::bind((setup.own.as_str(), RAW_PORT))?;
        let to_next = reach(&address)?;
        (to_next, listener.accept()?.0)
    } else {
        let stream = match setup.rank {
            0 => TcpListener::bind((setup.own.as_str(), RAW_PORT))?.accept()?.0,
            _ => reach(&address)?,
        };
        (stream.try_clone()?, stream)
    };
    from_previous.set_read_timeout(Some(TIME_LIMIT))?;
    to_next.set_write_timeout(Some(TIME_LIMIT))?;
    let bytes = setup.bytes / setup.world as usize * (setup.world as usize - 1) * 2;
    // Written, so that no page is still missing.
    let (sent, mut received) = (Arc::new(vec![1; bytes]), vec![2; bytes]);
    for call in 0..WARM_UP + setup.calls {
        let (mut writer, data) = (to_next.try_clone()?, sent.clone());
        let start = Instant::now();
        let sender = std::thread::Builder::new()
            .name("ox-raw".to_string())
            .spawn(move || writer.write_all(&data))?;
        from_previous.read_exact(&mut received)?;
        sender.join().expect("the sender does not panic")?;
        if call >= WARM_UP {
            println!("{}", start.elapsed().as_micros());
        }
    }
    Ok(())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [rank, world, first, own, bytes, calls, rest @ ..] = arguments.as_slice() else {
        panic!(
            "usage: link_rank RANK WORLD FIRST_ADDRESS OWN_ADDRESS BYTES CALLS [raw | connections=K] [links=L] [sent]"
        );
    };
    let setup = Setup {
        rank: rank.parse().unwrap(),
        world: world.parse().unwrap(),
        first: first.clone(),
        own: own.clone(),
        bytes: bytes.parse().unwrap(),
        calls: calls.parse().unwrap(),
        connections: rest
            .iter()
            .find_map(|r| r.strip_prefix("connections="))
            .unwrap_or("1")
            .to_string(),
        links: rest
            .iter()
            .find_map(|r| r.strip_prefix("links="))
            .unwrap_or("even")
            .to_string(),
        sent: rest.iter().any(|r| r == "sent"),
    };
    if rest.first().is_some_and(|r| r == "raw") {
        raw(&setup).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
    } else {
        all_reduce(&setup).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
    }
}
