//! Configuring: bounded, with names, and without waiting for those who cannot come.

use std::time::{Duration, Instant};

use oxccl_hccl::HcclGroup;
use oxccl_hccl::ftcore::{
    Configuration, Device, DeviceKind, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp,
};

use crate::ranks::{Outcome, Rank, Scenario, ensure, scenario, text, within};

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        // No id is made for ranks that do not come: the library waits for them as long as the process lives.
        scenario("l33_missing_ranks_are_named_with_the_phase", 4, missing).faults(&[(
            0,
            "FAIL",
            "hcclGetUniqueId#1=5",
        )]),
        scenario("a_hanging_init_ends_at_the_deadline", 2, init_hangs).faults(&[(
            0,
            "HANG",
            "hcclCommInitRank#1",
        )]),
        scenario("a_hanging_device_ends_at_the_deadline", 1, device_hangs).faults(&[(
            0,
            "HANG",
            "synDeviceAcquire#1",
        )]),
        scenario(
            "a_stream_that_is_never_made_ends_at_the_deadline",
            2,
            stream_hangs,
        )
        .faults(&[(0, "HANG", "synStreamCreateGeneric#1")]),
        scenario("l28_a_failed_init_is_told_to_the_others", 3, init_fails).faults(&[(
            2,
            "FAIL",
            "hcclCommInitRank#1=5",
        )]),
        scenario(
            "a_communicator_that_does_not_tell_its_size_is_ended",
            2,
            uncounted,
        )
        .faults(&[(0, "FAIL", "hcclCommCount#1=5"), (1, "FAIL", "hcclCommCount#1=5")]),
        scenario(
            "ranks_that_disagree_on_the_world_are_told_both_sides",
            2,
            other_world,
        ),
        scenario(
            "ranks_with_other_library_versions_are_told_both_sides",
            2,
            other_version,
        )
        .faults(&[(1, "VERSION", "2700")]),
        scenario("garbage_in_the_store_is_refused", 2, garbage),
        scenario("abort_ends_a_configure", 2, abort_while_configuring),
        scenario("healthy_groups_are_configured_again_and_again", 3, again),
        scenario("epochs_must_grow_and_ranks_must_exist", 2, wrong),
        scenario("l42_options_are_refused_by_name", 1, options),
        scenario("a_device_that_is_taken_is_a_typed_error", 1, taken).faults(&[(
            0,
            "FAIL",
            "synDeviceAcquire#1=20",
        )]),
    ]
}

fn missing(rank: &Rank) -> Outcome {
    if rank.rank == 1 || rank.rank == 3 {
        return rank.meet("given up");
    }
    let group = rank.unconfigured()?;
    let mut configuration = rank.configuration(1);
    configuration.deadline = within(500);
    let Err(e) = group.configure(configuration) else {
        return Err("configured without ranks 1 and 3".to_string());
    };
    ensure!(e.kind() == ErrorKind::Timeout, "{:?}: {e}", e.kind());
    for word in ["ranks 1, 3 of 4", "phase: control connections"] {
        ensure!(e.to_string().contains(word), "'{word}' is not in: {e}");
    }
    rank.meet("given up")?;
    ensure!(group.error().is_some(), "the failure is not kept");
    Ok(())
}

fn times_out(rank: &Rank, words: &[&str]) -> Outcome {
    let group = rank.unconfigured()?;
    let began = Instant::now();
    let mut configuration = rank.configuration(1);
    configuration.deadline = within(600);
    let Err(e) = group.configure(configuration) else {
        return Err("configured although a call hangs".to_string());
    };
    ensure!(e.kind() == ErrorKind::Timeout, "{:?}: {e}", e.kind());
    for word in words {
        ensure!(e.to_string().contains(word), "'{word}' is not in: {e}");
    }
    ensure!(
        began.elapsed() < Duration::from_secs(10),
        "it took {:?}",
        began.elapsed()
    );
    Ok(())
}

fn init_hangs(rank: &Rank) -> Outcome {
    times_out(rank, &["hcclCommInitRank", "has not returned", "phase: connect"])?;
    // Rank 0 hosts what rank 1 is waiting at.
    rank.meet("given up")
}

fn device_hangs(rank: &Rank) -> Outcome {
    times_out(rank, &["the device", "phase: acquire"])
}

/// Rank 0's own stream; rank 1, which has all it needs, hears of it.
fn stream_hangs(rank: &Rank) -> Outcome {
    if rank.rank == 0 {
        times_out(rank, &["stream", "has not returned", "phase: streams"])?;
        return rank.meet("heard");
    }
    let group = rank.unconfigured()?;
    // Its part may be done before rank 0 gives up.
    let until = rank.soon();
    let failed = group.configure(rank.configuration(1)).err();
    while failed.is_none() && group.error().is_none() {
        ensure!(Instant::now() < until, "rank 0's failure was not heard of");
        std::thread::sleep(Duration::from_millis(2));
    }
    let e = failed.or_else(|| group.error()).ok_or("nothing failed")?;
    ensure!(e.to_string().contains("phase: streams"), "{e}");
    rank.meet("heard")
}

fn init_fails(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    let began = Instant::now();
    let Err(e) = group.configure(rank.configuration(1)) else {
        return Err("configured although rank 2 cannot".to_string());
    };
    ensure!(e.kind() == ErrorKind::Backend, "{:?}: {e}", e.kind());
    ensure!(e.to_string().contains("hcclCommInitRank failed"), "{e}");
    if rank.rank == 2 {
        ensure!(e.code() == Some(5), "{:?}", e.code());
    } else {
        ensure!(e.to_string().contains("rank 2 reports"), "{e}");
    }
    ensure!(
        began.elapsed() < Duration::from_secs(10),
        "it took {:?}",
        began.elapsed()
    );
    // No rank ends before all have heard: rank 0 hosts what the others are waiting at.
    rank.meet("heard")
}

/// The stand-in has a thread that reads for a communicator until it ends.
fn uncounted(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    let Err(e) = group.configure(rank.configuration(1)) else {
        return Err("configured although the communicator does not tell its size".to_string());
    };
    ensure!(e.to_string().contains("hcclCommCount failed"), "{e}");
    let reads = || -> Result<bool, std::io::Error> {
        let mut names = std::fs::read_dir("/proc/self/task")?
            .map_while(Result::ok)
            .map(|task| {
                // A thread may end while it is looked at.
                std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()
            });
        Ok(names.any(|name| name.trim() == "standin-reader"))
    };
    let until = rank.soon();
    while reads().map_err(|e| e.to_string())? {
        ensure!(Instant::now() < until, "the communicator is still there");
        std::thread::sleep(Duration::from_millis(2));
    }
    rank.meet("ended")
}

fn disagree(group: &HcclGroup, configuration: Configuration, words: [&str; 2]) -> Outcome {
    let Err(e) = group.configure(configuration) else {
        return Err("ranks that disagree were configured".to_string());
    };
    ensure!(e.kind() == ErrorKind::Mismatch, "{:?}: {e}", e.kind());
    for word in words {
        ensure!(e.to_string().contains(word), "'{word}' is not in: {e}");
    }
    Ok(())
}

fn other_world(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    let mut configuration = rank.configuration(1);
    configuration.world_size = 2 + rank.rank;
    disagree(&group, configuration, ["a world of 2", "a world of 3"])
}

fn other_version(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    disagree(&group, rank.configuration(1), ["version 2604", "version 2700"])
}

/// The one that can write to the store may write anything (INV-10).
fn garbage(rank: &Rank) -> Outcome {
    if rank.rank == 0 {
        return rank.meet("done");
    }
    let group = rank.unconfigured()?;
    rank.store
        .set("test/1/hccl", &[9; 700], rank.soon())
        .map_err(text)?;
    let Err(e) = group.configure(rank.configuration(1)) else {
        return Err("garbage was taken for rank 0's address".to_string());
    };
    ensure!(
        e.kind() == ErrorKind::Protocol && e.to_string().contains("'test/1/hccl' is not rank 0's address"),
        "{e}"
    );
    rank.meet("done")
}

fn abort_while_configuring(rank: &Rank) -> Outcome {
    if rank.rank == 1 {
        return rank.meet("aborted");
    }
    let group = rank.unconfigured()?;
    let began = Instant::now();
    let failed = std::thread::scope(|scope| {
        let configuring = scope.spawn(|| group.configure(rank.configuration(1)));
        // Its address is there: it waits for rank 1 now, which never comes.
        let there = rank.store.wait(&["test/1/hccl"], rank.soon());
        group.abort("never mind");
        (there, configuring.join())
    });
    rank.meet("aborted")?;
    let (there, joined) = failed;
    there.map_err(text)?;
    let Ok(Err(e)) = joined else {
        return Err("configured without rank 1".to_string());
    };
    ensure!(e.kind() == ErrorKind::Aborted, "{:?}: {e}", e.kind());
    ensure!(
        began.elapsed() < Duration::from_secs(10),
        "it took {:?}",
        began.elapsed()
    );
    Ok(())
}

fn again(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    for epoch in 1..=8 {
        group.configure(rank.configuration(epoch)).map_err(text)?;
        let info = group.info();
        ensure!(
            (info.epoch.0, info.rank, info.world_size) == (epoch, rank.rank, 3),
            "after configure: {info:?}"
        );
        rank.sum_of_ones(&group)?;
    }
    group.shutdown(rank.soon()).map_err(text)?;
    group.shutdown(rank.soon()).map_err(text)
}

fn wrong(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    group.configure(rank.configuration(5)).map_err(text)?;
    for epoch in [5, 4, 0] {
        let Err(e) = group.configure(rank.configuration(epoch)) else {
            return Err(format!("epoch {epoch} after 5 was accepted"));
        };
        ensure!(e.kind() == ErrorKind::InvalidArgument, "epoch {epoch}: {e}");
    }
    let mut outside = rank.configuration(6);
    outside.rank = 2;
    let Err(e) = group.configure(outside) else {
        return Err("rank 2 of 2 was accepted".to_string());
    };
    ensure!(e.kind() == ErrorKind::InvalidArgument, "{e}");
    // Refused before anything was touched.
    rank.sum_of_ones(&group)?;
    let Err(e) = group.split(Some(0), 0, rank.soon()) else {
        return Err("split although it is not advertised".to_string());
    };
    ensure!(e.kind() == ErrorKind::Unsupported, "{e}");
    Ok(())
}

fn options(_: &Rank) -> Outcome {
    let mut options = GroupOptions {
        is_high_priority_stream: Some(true),
        ..Default::default()
    };
    options.hints.insert("rails".into(), "2".into());
    let Err(e) = HcclGroup::new("test", &Device::new(DeviceKind::Hpu, 0), &options) else {
        return Err("options were dropped in silence".to_string());
    };
    for word in ["is_high_priority_stream", "hint:rails"] {
        ensure!(e.to_string().contains(word), "'{word}' is not in: {e}");
    }
    options.lenient = true;
    HcclGroup::new("test", &Device::new(DeviceKind::Hpu, 0), &options)
        .map_err(text)
        .map(drop)
}

fn taken(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    let Err(e) = group.configure(rank.configuration(1)) else {
        return Err("configured without a device".to_string());
    };
    ensure!(
        e.kind() == ErrorKind::Backend && e.code() == Some(20),
        "{:?}: {e}",
        e.code()
    );
    let op = group.all_reduce(rank.any(oxccl_hccl::ftcore::DType::F32)?, ReduceOp::Sum);
    let Err(rejected) = op else {
        return Err("an unconfigured group accepted work".to_string());
    };
    ensure!(
        rejected.error.kind() == ErrorKind::InvalidState,
        "{}",
        rejected.error
    );
    let kept = group.error().ok_or("the failure is not kept")?;
    ensure!(kept.to_string().contains("synDeviceAcquire"), "{kept}");
    Ok(())
}
