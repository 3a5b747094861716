//! Times all-reduces of one rank of a group over gloo, quantised or not: start one process per rank, on one machine or several.
//!
//! `all_reduce RANK WORLD HOST:PORT MIB FORMAT[,FORMAT …] [INTERFACE]`; FORMAT is `f32` or a format of docs/quantisation.md. Rank 0 serves the store at
//! HOST:PORT. All formats run in the same processes over the same connections' network, one group each; rank 0 prints the median time of
//! the slowest rank, the time in relation to `f32` if that is among the formats, and the bytes that rank 0 sent per all-reduce.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Collective, Configuration, Epoch, Error, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Result,
    Store, SubmitOptions, TcpStore, TcpStoreServer, Tensor, deadline_in,
};
use oxccl_quant::{CodecChoice, QuantizedGroup};

const REPETITIONS: usize = 5;
const TIME_LIMIT: Duration = Duration::from_secs(300);

fn group(format: &str, options: GroupOptions) -> Result<Arc<dyn ProcessGroup>> {
    let gloo: Arc<dyn ProcessGroup> = Arc::new(GlooGroup::new(format, options)?);
    if format == "f32" {
        return Ok(gloo);
    }
    let codec: CodecChoice = format.parse()?;
    Ok(Arc::new(QuantizedGroup::new(gloo, codec, TIME_LIMIT)?))
}

/// (median seconds of the slowest rank, bytes sent per all-reduce).
fn measure(format: &str, count: usize, place: (u32, u32), store: &Arc<dyn Store>) -> Result<(f64, u64)> {
    let (rank, world_size) = place;
    let mut options = GroupOptions {
        timeout: TIME_LIMIT,
        ..GroupOptions::default()
    };
    // Which interface to use on machines with several.
    options.net_name = std::env::args().nth(6);
    let group = group(format, options)?;
    group.configure(Configuration {
        store: store.clone(),
        prefix: format!("all_reduce/{format}"),
        name: format.to_string(),
        epoch: Epoch(1),
        rank,
        world_size,
        deadline: deadline_in(TIME_LIMIT),
        cancel: Default::default(),
    })?;
    let mut tensor = Tensor::from_vec(
        (0..count)
            .map(|i| ((i * 37 % 1009) as f32 - 504.0) / 100.0)
            .collect(),
    );
    let mut times = Vec::new();
    let mut sent = 0;
    for repetition in 0..=REPETITIONS {
        store.barrier(
            &format!("all_reduce/{format}/{repetition}"),
            world_size,
            deadline_in(TIME_LIMIT),
        )?;
        let before = group.traffic().sent;
        let begun = Instant::now();
        let op = Collective::AllReduce {
            tensors: vec![tensor],
            op: ReduceOp::Avg,
        };
        let work = group
            .run(op, SubmitOptions::by(deadline_in(TIME_LIMIT)))
            .map_err(Error::from)?;
        tensor = work.take_tensor()?;
        let took = begun.elapsed().as_secs_f64();
        sent = group.traffic().sent - before;
        // The slowest counts; doubles go through the store as they are too few for anything else.
        let key = |rank: u32| format!("all_reduce/{format}/{repetition}/took/{rank}");
        store.set(&key(rank), &took.to_le_bytes(), deadline_in(TIME_LIMIT))?;
        let mut slowest = took;
        for peer in 0..world_size {
            let bytes = store.get(&key(peer), deadline_in(TIME_LIMIT))?;
            if let Some(bytes) = bytes.first_chunk() {
                slowest = slowest.max(f64::from_le_bytes(*bytes));
            }
        }
        // The first warms up.
        if repetition > 0 {
            times.push(slowest);
        }
    }
    group.shutdown(deadline_in(TIME_LIMIT))?;
    times.sort_by(f64::total_cmp);
    Ok((times.get(REPETITIONS / 2).copied().unwrap_or(f64::NAN), sent))
}

fn run(arguments: &[String]) -> Result<()> {
    let [rank, world, address, mib, formats, ..] = arguments else {
        return Err(Error::invalid(
            "usage: all_reduce RANK WORLD HOST:PORT MIB FORMAT[,FORMAT …] [INTERFACE]",
        ));
    };
    let number = |text: &String| {
        text.parse::<u32>()
            .map_err(|e| Error::invalid(format!("'{text}' is not a number")).with_source(e))
    };
    let place = (number(rank)?, number(world)?);
    let count = (number(mib)? as usize) << 18;
    let server = if place.0 == 0 {
        Some(TcpStoreServer::bind(address.as_str())?)
    } else {
        None
    };
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(address, deadline_in(TIME_LIMIT))?);
    let mut plain = None;
    if place.0 == 0 {
        println!(
            "all-reduce (avg) of {mib} MiB of f32, {world} ranks, slowest rank, median of {REPETITIONS}"
        );
        println!("| format | ms | times as fast as f32 | MB sent by rank 0 |");
        println!("|---|---|---|---|");
    }
    for format in formats.split(',') {
        let (seconds, sent) = measure(format, count, place, &store)?;
        if format == "f32" {
            plain = Some(seconds);
        }
        if place.0 == 0 {
            let ratio = plain.map_or_else(|| "-".to_string(), |p| format!("{:.2}", p / seconds));
            println!(
                "| {format} | {:.1} | {ratio} | {:.2} |",
                seconds * 1e3,
                sent as f64 / 1e6
            );
        }
    }
    // The server goes last.
    let done = |rank: u32| format!("all_reduce/done/{rank}");
    store.set(&done(place.0), b"", deadline_in(TIME_LIMIT))?;
    if let Some(server) = server {
        for rank in 0..place.1 {
            store.wait(&[&done(rank)], deadline_in(TIME_LIMIT))?;
        }
        drop(server);
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
