//! Groups that cannot be made or configured: the error says what is missing, failed or hangs, and the next try works where it can.

use std::sync::Arc;
use std::time::Duration;

use backend_nccl::{CudaAccelerator, NcclFactory};
use ftcore::registry::BackendFactory;
use ftcore::{Accelerator, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};

use super::kit::*;
use super::{ASYNC, FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);

/// The device has no memory at that moment: the error says so, and the next try works.
fn passing() -> Outcome {
    let e = group(0, GroupOptions::default())
        .err()
        .ok_or("a group was made")?;
    says(&e, ErrorKind::Backend, &["cuDevicePrimaryCtxRetain", "code 2"])?;
    alone_works(&group(0, GroupOptions::default())?, 1)
}

fn alone_works(group: &backend_nccl::NcclGroup, epoch: u64) -> Outcome {
    group.configure(by_itself(epoch, SOON))?;
    let sum = read(&submit(0, group, SOON)?.take_tensor()?)?;
    check(sum == [1.0; 1000], || format!("the sum is {:?}", sum.first()))
}

const CONFIGURATIONS: [(ErrorKind, &[&str]); 4] = [
    (
        ErrorKind::Backend,
        &["the communicator", "unhandled system error"],
    ),
    (ErrorKind::Timeout, &["phase: unique id"]),
    (ErrorKind::Timeout, &["timeout", "code 8"]),
    (ErrorKind::PeerLost, &["remote process exited", "code 6"]),
];

fn configuring<const CASE: usize>() -> Outcome {
    let (kind, words) = CONFIGURATIONS[CASE];
    let group = group(0, GroupOptions::default())?;
    let e = group
        .configure(by_itself(1, Duration::from_millis(800)))
        .err()
        .ok_or("configure succeeded")?;
    says(&e, kind, words)?;
    alone_works(&group, 2)
}

fn no_pools() -> Outcome {
    let e = group(0, GroupOptions::default())
        .err()
        .ok_or("a group was made")?;
    says(&e, ErrorKind::Unsupported, &["cuda:0", "no memory pools"])
}

fn no_devices() -> Outcome {
    let e = NcclFactory.probe().err().ok_or("the probe passed")?;
    says(&e, ErrorKind::Unsupported, &["sees no device"])?;
    check(CudaAccelerator.count() == 0, || "there are devices".into())
}

fn old_driver() -> Outcome {
    let e = NcclFactory.probe().err().ok_or("the probe passed")?;
    says(&e, ErrorKind::Unsupported, &["cuMemAllocAsync", "11.2"])?;
    let library = NcclFactory.library().ok_or("NCCL alone is not described")?;
    check(!library.contains("CUDA driver 12"), || library.clone())
}

fn unequal() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let store = &store;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = [None, Some("all")]
            .into_iter()
            .zip(0u32..)
            .map(|(hint, rank)| {
                scope.spawn(move || -> Outcome {
                    let mut options = GroupOptions::default();
                    options
                        .hints
                        .extend(hint.map(|h| ("contributors".to_string(), h.to_string())));
                    let group = group(rank, options)?;
                    let e = group
                        .configure(configuration(store, rank, 2, 1, SOON))
                        .err()
                        .ok_or("groups met that count and that do not")?;
                    says(
                        &e,
                        ErrorKind::Mismatch,
                        &[
                            "contributors all",
                            "contributors counted",
                            "the same on all ranks",
                        ],
                    )
                })
            })
            .collect();
        ranks
            .into_iter()
            .try_for_each(|t| t.join().map_err(|_| "a panic")?)
    })
}

fn odd_name() -> Outcome {
    let group = group(0, GroupOptions::default())?;
    let mut c = by_itself(1, SOON);
    c.name = "zero\0byte".to_string();
    let e = group.configure(c).err().ok_or("the name was accepted")?;
    says(&e, ErrorKind::InvalidArgument, &["zero byte"])?;
    alone_works(&group, 2)
}

fn cancelled() -> Outcome {
    // The call hangs; an abort from another thread ends the wait for it.
    let group = group(0, GroupOptions::default())?;
    let e = std::thread::scope(|scope| {
        let configuring = scope.spawn(|| group.configure(by_itself(1, TIME_LIMIT)));
        // Until `configure` is under way an abort finds nothing to end.
        let until = deadline_in(SOON);
        while !configuring.is_finished() && std::time::Instant::now() < until {
            group.abort("enough");
            std::thread::sleep(Duration::from_millis(5));
        }
        configuring.join().map_err(|_| "a panic")
    })?;
    says(
        &e.err().ok_or("configure succeeded")?,
        ErrorKind::Aborted,
        &["configure"],
    )
}

type Row = (&'static str, &'static str, &'static str, fn() -> Outcome);

pub(super) fn scenarios() -> Vec<Scenario> {
    let rows: Vec<Row> = vec![
        (
            "make_without_memory_for_a_context",
            FAIL,
            "cuDevicePrimaryCtxRetain:1:2",
            passing,
        ),
        (
            "make_without_memory_pools",
            "OXCCL_STANDIN_CUDA_POOLS",
            "0",
            no_pools,
        ),
        (
            "make_without_devices",
            "OXCCL_STANDIN_CUDA_DEVICES",
            "-1",
            no_devices,
        ),
        (
            "make_with_an_old_driver",
            "OXCCL_CUDA_PATH",
            "@driver",
            old_driver,
        ),
        (
            "configure_fails_later",
            ASYNC,
            "ncclCommInitRankConfig@0:1:2",
            configuring::<0>,
        ),
        (
            "configure_unique_id_hangs",
            HANG,
            "call:ncclGetUniqueId:1",
            configuring::<1>,
        ),
        (
            "configure_library_s_own_time_out",
            FAIL,
            "ncclCommInitRankConfig:1:8",
            configuring::<2>,
        ),
        (
            "configure_remote_error",
            FAIL,
            "ncclCommInitRankConfig:1:6",
            configuring::<3>,
        ),
        (
            "configure_hang_ends_with_an_abort",
            HANG,
            "call:ncclCommInitRankConfig:1",
            cancelled,
        ),
    ];
    let mut all: Vec<Scenario> = rows
        .into_iter()
        .map(|(name, variable, value, body)| scenario(name, &[(variable, value)], body))
        .collect();
    all.push(scenario(
        "configure_ranks_with_other_options_are_told",
        &[],
        unequal,
    ));
    all.push(scenario(
        "configure_a_name_that_c_cannot_hold_is_refused",
        &[],
        odd_name,
    ));
    all
}
