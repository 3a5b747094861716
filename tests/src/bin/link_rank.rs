//! A rank on a slow link: all-reduces over gloo's TCP, checks every result, prints how long each call took.
//!
//! usage: `link_rank RANK WORLD FIRST_ADDRESS OWN_ADDRESS BYTES CALLS`, one process on each host. Prints `TIME_US` for each
//! call, behind a barrier each, after two that do not count. With `raw` behind, ranks 0 and 1 send each other the same
//! bytes over one plain connection instead: what the link can carry.

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
const PATIENCE: Duration = Duration::from_secs(60);

struct Seat {
    rank: u32,
    world: u32,
    first: String,
    own: String,
    bytes: usize,
    calls: usize,
}

/// Whole numbers, so that sums are exact in any order.
fn value(rank: u32, i: usize) -> f32 {
    (i % 1013) as f32 + rank as f32
}

fn all_reduce(seat: &Seat) -> Result<()> {
    let deadline = deadline_in(PATIENCE);
    let server = match seat.rank {
        0 => Some(TcpStoreServer::bind(&format!("{}:{STORE_PORT}", seat.own))?),
        _ => None,
    };
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(
        &format!("{}:{STORE_PORT}", seat.first),
        deadline,
    )?);
    let options = GroupOptions {
        net_name: Some(seat.own.clone()),
        timeout: PATIENCE,
        ..Default::default()
    };
    let group = GlooGroup::new("link", options)?;
    group.configure(Configuration {
        store,
        prefix: "link".to_string(),
        name: "link".to_string(),
        epoch: Epoch(1),
        rank: seat.rank,
        world_size: seat.world,
        deadline,
    })?;
    let count = seat.bytes / 4;
    let mut tensor = Tensor::from_vec(vec![0f32; count]);
    for call in 0..WARM_UP + seat.calls {
        let mut data = tensor.into_vec::<f32>().unwrap();
        for (i, x) in data.iter_mut().enumerate() {
            *x = value(seat.rank, i);
        }
        let op = Collective::AllReduce {
            tensors: vec![Tensor::from_vec(data)],
            op: ReduceOp::Sum,
        };
        group.barrier()?;
        let start = Instant::now();
        tensor = group
            .run(op, SubmitOptions::by(deadline))?
            .take()?
            .into_tensor()?;
        let time = start.elapsed();
        let ranks = seat.world as f32;
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
    // Not through the store: it ends with rank 0, possibly before its last answer has arrived far away.
    group.barrier()?;
    group.shutdown(deadline)?;
    drop(server);
    Ok(())
}

/// Sends and receives `bytes` bytes at the same time on one connection.
fn raw(seat: &Seat) -> std::io::Result<()> {
    let mut stream = if seat.rank == 0 {
        TcpListener::bind((seat.own.as_str(), RAW_PORT))?.accept()?.0
    } else {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match TcpStream::connect((seat.first.as_str(), RAW_PORT)) {
                Ok(stream) => break stream,
                Err(e) if Instant::now() >= deadline => return Err(e),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    };
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // Written, so that no page is still missing.
    let (sent, mut received) = (Arc::new(vec![1; seat.bytes]), vec![2; seat.bytes]);
    for call in 0..WARM_UP + seat.calls {
        let (mut writer, data) = (stream.try_clone()?, sent.clone());
        let start = Instant::now();
        let sender = std::thread::Builder::new()
            .name("ox-raw".to_string())
            .spawn(move || writer.write_all(&data))?;
        stream.read_exact(&mut received)?;
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
        panic!("usage: link_rank RANK WORLD FIRST_ADDRESS OWN_ADDRESS BYTES CALLS [raw]");
    };
    let seat = Seat {
        rank: rank.parse().unwrap(),
        world: world.parse().unwrap(),
        first: first.clone(),
        own: own.clone(),
        bytes: bytes.parse().unwrap(),
        calls: calls.parse().unwrap(),
    };
    if rest.first().is_some_and(|r| r == "raw") {
        raw(&seat).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
    } else {
        all_reduce(&seat).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
    }
}
